"""The errors that end a command, each with its exit code."""


class ThdprofError(Exception):
    """Something that the user can mend; its text says what is wrong, where, and what to do."""

    exit_code = 1


class DataError(ThdprofError):
    """A dataset, plan or cost table that cannot be read or does not hold what it must."""


class UsageError(ThdprofError):
    """Settings that cannot be, alone or together."""

    exit_code = 2


class GateError(ThdprofError):
    """A gate (`check`, `compare`) did not hold."""

    exit_code = 3
