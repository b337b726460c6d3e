"""The errors that end a command, each with its exit code."""


class ThdprofError(Exception):
    """An error that the user can fix. Its text says what is wrong, where, and what to do."""

    exit_code = 1


class DataError(ThdprofError):
    """A dataset, plan or cost table cannot be read, or lacks something that it must hold."""


class MachineError(ThdprofError):
    """The machine lacks what the command needs, such as a GPU."""


class UsageError(ThdprofError):
    """A setting has an impossible value, or settings contradict each other."""

    exit_code = 2


class GateError(ThdprofError):
    """A gate (`check`, `compare`) did not hold."""

    exit_code = 3
