"""The reading of files that built-in tasks train on."""
