"""Checks of the hardware: rules as data, a pure verdict, and the commands that use them."""
