"""Is the hardware fit to train on: rules as data, a pure verdict, and the commands that ask."""
