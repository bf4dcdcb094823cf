"""The errors of the public API."""


class Failure(Exception):
    """An expected failure, whose message names the problem and its remedy."""

    exit_code = 1


class WrongUse(Failure):
    """A mistake of the user in the arguments, the settings, the data or the environment."""

    exit_code = 2


class StorageFailure(Failure):
    """A file or folder of a run that cannot be written or read."""

    exit_code = 4
