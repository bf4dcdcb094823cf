"""The internal variables, which one process of Trainbox sets for another."""

import enum


class Internal(enum.StrEnum):
    """The name of each internal variable. A test finds a name that is missing here."""

    AGENT = "TRAINBOX_AGENT"  # the process that starts the ranks of a machine
    FINISHED = "TRAINBOX_FINISHED"  # the file that the trainer creates when it has finished
    HEALTH_EVENTS = "TRAINBOX_HEALTH_EVENTS"  # the file with the events of the launch's GPUs
    LAUNCH = "TRAINBOX_LAUNCH"  # what the trainer needs of the launch plan: launch_facts.py
    MESSAGES = "TRAINBOX_MESSAGES"  # the folder for the last message of each rank
    PIPES = "TRAINBOX_PIPES"  # the folder of the pipes that take the output of a script's ranks
    PYTHONPATH = "TRAINBOX_PYTHONPATH"  # the user's PYTHONPATH, in our own processes
    STORE = "TRAINBOX_STORE"  # the file through which a machine's ranks connect
