"""The child process that unpickles a packed `.npy`: a program of its own that imports nothing but Python's library.

    python -I -S unpickler.py POSITION MEMORY_BYTES CPU_SECONDS [SHAPE...] <a.npy

`npy` starts it. The pickle begins at byte POSITION of stdin and must hold an object array of SHAPE whose
elements are packed rows. Stdout gets the rows' numbers, or the reason why the file is refused, as `main` describes.

The pickle runs in Python's own unpickler, which may look up the names of `Unpickler.allowed` alone. They stand for
functions of this module, not for NumPy's: no array is allocated for a shape that a file claims, and no dtype is made
of text that a file holds. A file that asks for too much memory or time ends this process, not its caller.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import struct
import sys
from array import array
from math import prod

TYPE_CHECKING = False  # typing itself takes as long to import as the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO, NoReturn

KEYS = ("input_ids", "seq_start_id", "loss_mask")
"""Keys of a packed row, a dict: tokens, first token of each document, one number for each token."""
_DTYPE = re.compile(r"O8?|b1|[iu][1248]|f[248]")
_CODES = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
          "f2": "e", "f4": "f", "f8": "d"}  # fmt: skip
"""Codes of `struct` for the dtypes of numbers."""
_NAMES = {"b": "bool", "i": "int", "u": "uint", "f": "float"}


class PickleRefused(Exception):
    """The pickle is broken or holds more than packed rows; the text says how."""


class StandIn:
    """An object that a pickle is given instead of one of NumPy's. A pickle can set its state in `__setstate__` only."""

    __slots__ = ()
    kind = "NumPy function"
    """Word for it in messages."""

    def __setstate__(self, state: Any) -> None:
        """Take the state that a BUILD opcode hands over."""
        raise PickleRefused(f"the pickle sets the state of a {self.kind}")


class Function(StandIn):
    """A callable name, of which a pickle sees nothing but the call."""

    __slots__ = ("_call", "_name")

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self._name, self._call = name, call

    def __call__(self, *arguments: Any) -> Any:
        """The call's result; refused where the function takes other arguments."""
        try:
            return self._call(*arguments)
        except TypeError as error:
            raise PickleRefused(
                f"the pickle calls {self._name} with arguments that plain arrays do not need"
            ) from error


class Dtype(StandIn):
    """A dtype of numbers or objects; its state says the byte order."""

    __slots__ = ("order", "text")
    kind = "dtype"

    def __init__(self, text: Any, *_: Any) -> None:
        if not isinstance(text, str) or not _DTYPE.fullmatch(text):
            raise TypeError
        self.text, self.order = text[:2], "="

    def __setstate__(self, state: Any) -> None:
        """NumPy's state of a dtype: version, byte order, and for plain numbers nothing more."""
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise PickleRefused("the pickle sets an impossible state of a dtype")
        self.order = "=" if state[1] == "|" else state[1]

    @property
    def name(self) -> str:
        """The name that NumPy gives the dtype."""
        if self.text[0] == "O":
            return "object"
        return "bool" if self.text == "b1" else f"{_NAMES[self.text[0]]}{8 * int(self.text[1])}"

    def numbers(self, content: bytes | bytearray) -> tuple[Any, ...]:
        """The numbers in `content`, which has a whole number of elements."""
        code = _CODES[self.text]
        return struct.unpack(f"{self.order}{len(content) // struct.calcsize('=' + code)}{code}", content)


class Array(StandIn):
    """An array: shape, dtype, and content as bytes or, for objects, as a list. Empty until its state is set."""

    __slots__ = ("content", "dtype", "shape")
    kind = "array"

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.dtype = Dtype("O")
        self.content: bytes | bytearray | list[Any] = []

    def __setstate__(self, state: Any) -> None:
        """NumPy's state of an array: version, shape, dtype, whether in Fortran's order, content.

        Raises:
            PickleRefused: the content is not of the size that shape and dtype make.
        """
        if not isinstance(state, tuple) or len(state) != 5:
            raise PickleRefused("the pickle sets an impossible state of an array")
        _, shape, dtype, _, content = state
        if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
            raise PickleRefused("an array has an impossible shape")
        if not isinstance(dtype, Dtype):
            raise PickleRefused("an array has no dtype")
        objects = dtype.text[0] == "O"
        size = 1 if objects else int(dtype.text[1])
        if not isinstance(content, list if objects else (bytes, bytearray)) or len(content) != prod(shape) * size:
            raise PickleRefused(f"an array of shape {shape} and type {dtype.name} holds something else"[:200])
        self.shape, self.dtype, self.content = shape, dtype, content


class Unpickler(pickle.Unpickler):
    """Python's unpickler of a file of `size` bytes, with the few names that a pickled array of numbers needs."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file)
        self._encodable = size
        reconstruct = Function("_reconstruct", lambda kind, shape, code: Array())
        scalar, frombuffer = Function("scalar", _scalar), Function("_frombuffer", _frombuffer)
        no_bytes = Function("bytes", lambda: b"")
        self.allowed = {
            ("numpy", "ndarray"): StandIn(),
            ("numpy", "dtype"): Function("dtype", Dtype),
            ("_codecs", "encode"): Function("encode", self._encode),
            ("__builtin__", "bytes"): no_bytes,
            ("builtins", "bytes"): no_bytes,
        }
        for core in ("numpy.core", "numpy._core"):  # before and since NumPy 2
            self.allowed[core + ".multiarray", "_reconstruct"] = reconstruct
            self.allowed[core + ".multiarray", "scalar"] = scalar
            self.allowed[core + ".numeric", "_frombuffer"] = frombuffer

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name of `allowed`; every other name is refused, and nothing is imported."""
        try:
            return self.allowed[module, name]
        except KeyError:
            asked = f"{module}.{name}"[:80].encode("unicode_escape").decode()
            raise PickleRefused(f"the pickle asks for {asked}; only NumPy arrays are read") from None

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse: a persistent object lies outside the file."""
        raise PickleRefused("the pickle asks for a persistent object; only NumPy arrays are read")

    def _encode(self, text: str, encoding: str) -> bytes:
        """The bytes of an array as protocol 2 has them: text in Latin-1."""
        if not isinstance(text, str) or encoding != "latin1":
            raise TypeError
        self._encodable -= len(text)  # one remembered text can be encoded many times
        if self._encodable < 0:
            raise PickleRefused("the pickle encodes more bytes than it holds")
        return text.encode("latin1")


def _scalar(dtype: Dtype, content: bytes) -> int | float | bool:
    if not isinstance(dtype, Dtype) or not isinstance(content, bytes) or dtype.text[0] == "O":
        raise TypeError
    if len(content) != int(dtype.text[1]):
        raise PickleRefused("a NumPy number has another size than its type")
    number: int | float | bool = dtype.numbers(content)[0]
    return number


def _frombuffer(content: bytes, dtype: Dtype, shape: tuple[int, ...], order: str) -> Array:
    built = Array()
    built.__setstate__((1, shape, dtype, False, content))
    return built


def load(file: BinaryIO, size: int) -> Any:
    """The value pickled in `file`, from its position on, with `Array` for arrays; `size` is the pickle's, in bytes.

    Raises:
        PickleRefused: the pickle is broken, of protocol 0 or 1, or asks for a name that is not allowed.
        MemoryError: it asks for more memory than the process may have.
    """
    start = file.read(2)
    file.seek(-len(start), 1)
    if start and start[0] != 0x80:
        raise PickleRefused("refused: the pickle is of protocol 0 or 1; protocols 2 to 5 are read")
    if len(start) == 2 and not 2 <= start[1] <= 5:
        raise PickleRefused(f"refused: the pickle is of protocol {start[1]}; protocols 2 to 5 are read")
    try:
        return Unpickler(file, size).load()
    except PickleRefused as error:
        raise PickleRefused(f"refused: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # an unpickler raises any of a dozen types
        reason = " ".join(str(error).split())[:120]
        early = isinstance(error, EOFError) or "truncated" in reason or "exhausted" in reason
        raise PickleRefused(f"refused: the pickle {'ends early' if early else f'is broken: {reason}'}") from error


def rows(value: Any, shape: tuple[int, ...], size: int) -> tuple[array[int], array[int], array[int]]:
    """Document starts [documents], documents of each row [rows] and tokens of each row [rows] of a pickled array.

    Args:
        size: bytes of the file. More documents than that are refused: one remembered row can be repeated in two bytes.

    Raises:
        PickleRefused: it is no array of packed rows; the text names the row and the key.
    """
    if not isinstance(value, Array) or not isinstance(value.content, list):
        raise PickleRefused("its pickle holds no array of objects")
    if value.shape != shape:
        raise PickleRefused(f"corrupt: shape {shape} in the header, {value.shape} in the pickle")
    starts, documents, tokens = array("q"), array("q"), array("q")
    for number, row in enumerate(value.content):
        try:
            first, length = _row(row, size - len(starts))
            starts.extend(first)
        except PickleRefused as error:
            raise PickleRefused(f"row {number}: {error}") from error
        except OverflowError as error:
            raise PickleRefused(f"row {number}: seq_start_id holds an integer over 2**63 - 1") from error
        documents.append(len(first))
        tokens.append(length)
    return starts, documents, tokens


def _row(row: Any, most_documents: int) -> tuple[array[int], int]:
    if type(row) is not dict:
        described = "a number" if type(row) in (int, float, bool) else "no dict"
        raise PickleRefused(f"is {described}; rows are dicts with {', '.join(KEYS)}")
    for key in KEYS:
        if key not in row:
            names = ", ".join(repr(name)[:40] for name in list(row)[:10] if isinstance(name, str))
            raise PickleRefused(f"{key} is missing; it has {names}")
    tokens, documents, mask = (_length(row[key], key) for key in KEYS)
    if tokens != mask:
        raise PickleRefused(f"{tokens} input_ids, but {mask} values of loss_mask")
    if documents > most_documents:
        raise PickleRefused("more documents than the file has bytes; refused as hostile")
    return _integers(row["seq_start_id"]), tokens


def _length(value: Any, key: str) -> int:
    if isinstance(value, Array):
        if len(value.shape) == 1:
            return value.shape[0]
        raise PickleRefused(f"{key} is a {len(value.shape)}-dimensional array, not a list")
    if type(value) in (list, tuple):
        return len(value)
    raise PickleRefused(f"{key} is a {_kind(value)}, not a list")


def _integers(value: Any) -> array[int]:
    numbers = value
    if isinstance(value, Array):
        numbers = value.content
        if not isinstance(numbers, list):
            if value.dtype.text[0] not in "iu":
                raise PickleRefused(f"seq_start_id is an array of {value.dtype.name}, not of integers")
            return array("q", value.dtype.numbers(numbers))
    for number in numbers:
        if type(number) is not int:
            raise PickleRefused(f"seq_start_id holds a {_kind(number)} among its integers")
    return array("q", numbers)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return value.kind if isinstance(value, StandIn) else type(value).__name__


def main(position: int, memory_bytes: int, cpu_seconds: int, *shape: int) -> None:
    """Read stdin under the limits and write the answer to stdout.

    Its first line is `unlimited REASON` where the limits cannot be set and nothing is read, `refused REASON`, or
    `rows DOCUMENTS ROWS`, two counts. After the last come three arrays of native int64, as `rows` returns them.
    """
    try:
        import resource  # not at the top: some systems lack it

        limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_CORE: 0}
        for kind, limit in limits.items():
            hard = resource.getrlimit(kind)[1]  # of the processor time, the soft limit sends a signal of its own
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    except (ImportError, AttributeError, OSError, ValueError) as error:
        print("unlimited", *f"{type(error).__name__}: {error}".split(), flush=True)
        return
    gc.disable()  # millions of containers are made, and none is freed before the end
    content: tuple[array[int], ...] = ()
    try:
        with open(0, "rb", buffering=2**20, closefd=False) as file:
            size = os.fstat(0).st_size
            file.seek(position)
            content = rows(load(file, size - position), shape, size)
        answer = f"rows {len(content[0])} {len(content[1])}"
    except PickleRefused as error:
        answer = f"refused {error}"
    except MemoryError:
        answer = f"refused refused: the pickle needs more than {memory_bytes >> 20:,} MiB, too much for its size"
    sys.stdout.buffer.write(answer.encode("utf-8", "backslashreplace") + b"\n")
    for numbers in content:
        sys.stdout.buffer.write(numbers)
    sys.stdout.buffer.flush()
    os._exit(0)  # freeing millions of objects one by one would take longer than reading them


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
