"""The built-in tasks, one file each, which import only the public API and the packages here."""
