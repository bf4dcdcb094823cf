"""The built-in tasks, one file each, loaded by name; they use only what a user's own task may
use.
"""
