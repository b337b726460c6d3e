"""Reads a shell script's words without running it: assignments, arrays, and expansions that the text settles.

Nothing is executed and the environment is not consulted. A part that the text does not settle (a variable set
elsewhere, a command's output, a value assigned under a condition) stays in its word as an `Unknown` piece with the
reason, so that whoever needs the word can say why it is not known.
"""

from thdprof.analyze.settings.shell.reader import ShellText, read_shell, resplit
from thdprof.analyze.settings.shell.syntax import UnclosedQuoteError
from thdprof.analyze.settings.shell.values import Known, Unknown, Value, Word

__all__ = ["Known", "ShellText", "UnclosedQuoteError", "Unknown", "Value", "Word", "read_shell", "resplit"]
