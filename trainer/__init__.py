"""The trainer, which trains a task on the given devices and writes the folder of the run."""
