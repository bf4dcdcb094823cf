"""Does: trains a task on the devices that it was given, and leaves a run directory behind."""
