"""Reads pickles of lists, dicts, numbers and NumPy arrays as data: nothing is imported, called or instantiated.

Not an unpickler but an interpreter of the few opcodes that NumPy's `save` makes of packed rows. Runs of numbers are
found by a regular expression and kept as a place and a count, so that millions of tokens cost no object each, and
memory stays a small multiple of the file's size whatever the file says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_RUN = 1000
"""Numbers of a full run: Python's pickler appends lists in batches of 1000."""
_NUMBER = rb"(?s:[K].|M..|J....|[\x88\x89]|G.{8})"
_ONE = re.compile(_NUMBER)
_FULL_RUN = re.compile(_NUMBER + rb"{1000}+")
_SHORT_RUN = re.compile(_NUMBER + rb"{1,999}+")
_DEEPEST = 32
_BYTES_AN_OBJECT = 4
"""Bytes of pickle that a container takes at least, on average; rows of two tokens take six."""
_FREE_OBJECTS = 1000
_LONGEST_STRUCTURE = 64
_GLOBALS = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("numpy.core.multiarray", "_reconstruct"): "_reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "_reconstruct",
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy._core.multiarray", "scalar"): "scalar",
    ("numpy.core.numeric", "_frombuffer"): "_frombuffer",
    ("numpy._core.numeric", "_frombuffer"): "_frombuffer",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "bytes",
    ("builtins", "bytes"): "bytes",
}
_DTYPE = re.compile(r"O8?|b1|[iu][1248]|f[248]")


class PickleRefused(Exception):
    """The pickle holds something else than plain data, or is broken; the text says what."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive numbers of a list, still pickled."""

    start: int
    stop: int
    count: int


class Items:
    """A pickled list or tuple."""

    __slots__ = ("length", "parts")

    def __init__(self, parts: Iterable[Any] = ()) -> None:
        self.parts: list[Any] = []
        self.length = 0
        self.extend(parts)

    def extend(self, parts: Iterable[Any]) -> None:
        """Add values and runs."""
        for part in parts:
            self.parts.append(part)
            self.length += part.count if isinstance(part, Run) else 1


@dataclass(slots=True)
class Type:
    """A NumPy dtype of numbers or objects."""

    text: str
    order: Literal["<", ">", "|", "="] = "="

    def numpy(self) -> np.dtype[Any]:
        """The dtype itself."""
        return np.dtype(self.text).newbyteorder(self.order)


@dataclass(slots=True)
class Array:
    """A NumPy array: its shape, and its elements as bytes, or as Items for objects."""

    shape: tuple[int, ...] = (0,)
    type: Type | None = None
    data: bytes | Items = b""

    @property
    def length(self) -> int:
        """Elements along the first axis."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Global:
    """One of the names in `_GLOBALS`."""

    name: str


def load(data: bytes | mmap, position: int = 0) -> Any:
    """The one value pickled in `data` from `position` on: dict, Items, Array, str, bytes or number.

    Raises:
        PickleRefused: broken, or anything but plain data.
    """
    machine = _Machine(data, position)
    try:
        return machine.run()
    except (IndexError, KeyError, ValueError, TypeError, OverflowError) as error:
        reason = "ends early" if machine.position >= len(data) else f"is broken near byte {machine.position}"
        raise PickleRefused(f"the pickle {reason}") from error


def length_of(value: Any) -> int:
    """Elements of a pickled list, tuple or one-dimensional array.

    Raises:
        PickleRefused: it is none of these.
    """
    if isinstance(value, Items) or (isinstance(value, Array) and len(value.shape) == 1):
        return value.length
    raise PickleRefused(f"is a {_kind(value)}, not a list")


def integers_of(value: Any, data: bytes | mmap) -> NDArray[np.int64]:
    """A pickled list, tuple or one-dimensional array of integers, int64, shape [n].

    Raises:
        PickleRefused: it is none of these.
    """
    length_of(value)
    if isinstance(value, Array) and isinstance(value.data, bytes):
        dtype = value.type.numpy() if value.type else np.dtype("O")
        if dtype.kind not in "iu":
            raise PickleRefused(f"is an array of {dtype.name}, not of integers")
        return np.frombuffer(value.data, dtype=dtype).astype(np.int64)
    numbers = _expand(value.data if isinstance(value, Array) else value, data)
    odd = next((n for n in numbers if type(n) is not int), None)
    if odd is not None:
        raise PickleRefused(f"holds a {_kind(odd)} among its integers")
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError as error:
        raise PickleRefused("holds an integer over 2**63 - 1") from error


def _kind(value: Any) -> str:
    if isinstance(value, Array):
        return f"{len(value.shape)}-dimensional array"
    return {Items: "list", Global: "type", Type: "dtype", type(None): "None"}.get(type(value), type(value).__name__)


def _expand(items: Items | Any, data: bytes | mmap) -> list[Any]:
    """The values of `items`, its runs unpickled."""
    values = []
    for part in items.parts:
        if isinstance(part, Run):
            values += [_number(m[0]) for m in _ONE.finditer(data, part.start, part.stop)]
        else:
            values.append(part)
    return values


def _number(code: bytes) -> int | float | bool:
    """The number that one opcode with its argument pushes."""
    match code[:1]:
        case b"K" | b"M":
            return int.from_bytes(code[1:], "little")
        case b"J":
            return int.from_bytes(code[1:], "little", signed=True)
        case b"G":
            return float(np.frombuffer(code, dtype=">f8", offset=1)[0])
        case truth:
            return truth == b"\x88"


class _Machine:
    """The pickle machine: a stack of values, cut by marks, and a memo."""

    def __init__(self, data: bytes | mmap, position: int) -> None:
        self.data = data
        self.position = position
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []
        self.objects_left = _FREE_OBJECTS + len(data) // _BYTES_AN_OBJECT
        self.encodable_bytes = len(data)

    def run(self) -> Any:
        """Interpret up to STOP."""
        if self.data[self.position] != 0x80:
            raise PickleRefused("the pickle is of protocol 0 or 1; protocols 2 to 5 are read")
        while True:
            code = self.data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                break
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise PickleRefused(f"the pickle has opcode {bytes([code])!r}, which plain data does not need")
            operation(self)
        if self.below or len(self.stack) != 1:
            raise PickleRefused("the pickle leaves its stack untidy")
        return self.stack[0]

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise PickleRefused("the pickle ends early")
        return self.data[start : self.position]

    def unsigned(self, size: int) -> int:
        """The next `size` bytes as a number."""
        return int.from_bytes(self.take(size), "little")

    def count_object(self) -> None:
        """Account for an object that took hardly a byte of pickle."""
        self.objects_left -= 1
        if self.objects_left < 0:
            raise PickleRefused("the pickle has more containers than packed rows of its size")

    def protocol(self) -> None:
        version = self.unsigned(1)
        if not 2 <= version <= 5:
            raise PickleRefused(f"the pickle is of protocol {version}; protocols 2 to 5 are read")

    def mark(self) -> None:
        """MARK, and the numbers of a list right behind it."""
        in_list = bool(self.stack) and isinstance(self.stack[-1], Items)
        self.below.append(self.stack)
        self.stack = []
        if len(self.below) > _DEEPEST:
            raise PickleRefused("the pickle is nested too deeply")
        while in_list and (found := self.numbers()):
            self.stack.append(found)

    def numbers(self) -> Run | None:
        if found := _FULL_RUN.match(self.data, self.position):
            count = _RUN
        elif found := _SHORT_RUN.match(self.data, self.position):
            count = len(_ONE.findall(self.data, found.start(), found.end()))
        else:
            return None
        self.position = found.end()
        return Run(found.start(), found.end(), count)

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def number(self) -> None:
        self.position -= 1
        found = _ONE.match(self.data, self.position)
        if not found:
            raise PickleRefused("the pickle ends early")
        self.position = found.end()
        self.stack.append(_number(found[0]))

    def long(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.unsigned(1)), "little", signed=True))

    def text(self, size: int) -> None:
        self.stack.append(self.take(self.unsigned(size)).decode("utf-8", "surrogatepass"))

    def raw(self, size: int) -> None:
        self.stack.append(self.take(self.unsigned(size)))

    def python2_text(self, size: int) -> None:
        self.stack.append(self.take(self.unsigned(size)).decode("latin1"))

    def remember(self, index: int) -> None:
        if index > len(self.memo):  # picklers number in order; a table up to any index would take any memory
            raise PickleRefused(f"the pickle remembers number {index} after {len(self.memo)}")
        self.memo[index : index + 1] = self.stack[-1:]

    def push_items(self, values: list[Any]) -> None:
        self.count_object()
        self.stack.append(Items(values))

    def push_dict(self) -> None:
        self.count_object()
        self.stack.append({})

    def tuple_of(self, count: int) -> None:
        values = self.stack[-count:]
        if len(values) < count:
            raise PickleRefused("the pickle takes more than its stack holds")
        del self.stack[-count:]
        self.push_items(values)

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, Items):
            raise PickleRefused(f"the pickle appends to a {_kind(target)}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise PickleRefused(f"the pickle sets keys of a {_kind(target)}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise PickleRefused(f"a dict has a {_kind(key)} for a key; rows have names")
            target[key] = value

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def new_dict(self) -> None:
        values = self.since_mark()
        self.push_dict()
        self.set_items(values)

    def global_by_lines(self) -> None:
        names = []
        for _ in range(2):
            end = self.data.find(b"\n", self.position, self.position + 256)
            if end < 0:
                raise PickleRefused("the pickle has a global without a name")
            names.append(self.data[self.position : end].decode("utf-8"))
            self.position = end + 1
        self.push_global(*names)

    def global_by_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_global(module, name)

    def push_global(self, module: Any, name: Any) -> None:
        known = _GLOBALS.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if known is None:
            asked = f"{module}.{name}"[:80].encode("unicode_escape").decode()
            raise PickleRefused(f"the pickle asks for {asked}; only NumPy arrays are read")
        self.stack.append(Global(known))

    def structure(self, value: Any) -> list[Any]:
        """The values of a short tuple."""
        if not isinstance(value, Items) or value.length > _LONGEST_STRUCTURE:
            raise PickleRefused("the pickle builds a NumPy object from something else than NumPy's tuples")
        return _expand(value, self.data)

    def shape(self, value: Any) -> tuple[int, ...]:
        shape = tuple(self.structure(value))
        if not all(type(n) is int and n >= 0 for n in shape):
            raise PickleRefused("an array has an impossible shape")
        return shape

    def reduce(self) -> None:
        arguments, target = self.structure(self.stack.pop()), self.stack.pop()
        if not isinstance(target, Global):
            raise PickleRefused(f"the pickle calls a {_kind(target)}")
        self.count_object()
        match target.name, arguments:
            case "_reconstruct", [Global(name="ndarray"), Items(), bytes()]:
                self.stack.append(Array())
            case "dtype", [str(text), *_] if _DTYPE.fullmatch(text):
                self.stack.append(Type(text))
            case "scalar", [Type() as kind, bytes(content)]:
                dtype = kind.numpy()
                if dtype.kind not in "iufb" or len(content) != dtype.itemsize:
                    raise PickleRefused("a NumPy number has another size than its type")
                self.stack.append(np.frombuffer(content, dtype=dtype)[0].item())
            case "_frombuffer", [bytes(content), Type() as kind, Items() as shape, str()]:
                self.stack.append(self.array(self.shape(shape), kind, content))
            case "encode", [str(text), "latin1"]:
                self.encodable_bytes -= len(text)  # one remembered text can be encoded many times
                if self.encodable_bytes < 0:
                    raise PickleRefused("the pickle encodes more bytes than it holds")
                self.stack.append(text.encode("latin1"))
            case "bytes", []:
                self.stack.append(b"")
            case name, _:
                raise PickleRefused(f"the pickle calls {name} with arguments that plain arrays do not need")

    def build(self) -> None:
        state, target = self.structure(self.stack.pop()), self.stack[-1]
        match target, state:
            case Type(), [_, ("<" | ">" | "|" | "=") as order, *_]:
                target.order = order
            case Array(), [1, Items() as shape, Type() as kind, _, bytes() | Items() as content]:
                built = self.array(self.shape(shape), kind, content)
                target.shape, target.type, target.data = built.shape, built.type, built.data
            case _:
                raise PickleRefused(f"the pickle sets the state of a {_kind(target)}")

    def array(self, shape: tuple[int, ...], kind: Type, content: bytes | Items) -> Array:
        """An array whose content has just the size that its shape needs."""
        dtype, elements = kind.numpy(), 1
        for n in shape:
            elements *= n
        held = content.length if isinstance(content, Items) else len(content)
        size = 1 if dtype.kind == "O" else dtype.itemsize
        if (dtype.kind == "O") != isinstance(content, Items) or held != elements * size:
            raise PickleRefused(f"an array of shape {shape} and type {dtype.name} holds something else")
        return Array(shape, kind, content)


_OPERATIONS = {
    0x80: _Machine.protocol,
    0x95: lambda m: m.take(8),  # FRAME: how much to read ahead
    ord("("): _Machine.mark,
    ord("]"): lambda m: m.push_items([]),
    ord(")"): lambda m: m.push_items([]),
    ord("}"): _Machine.push_dict,
    ord("l"): lambda m: m.push_items(m.since_mark()),
    ord("t"): lambda m: m.push_items(m.since_mark()),
    ord("d"): _Machine.new_dict,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("N"): lambda m: m.stack.append(None),
    ord("K"): _Machine.number,
    ord("M"): _Machine.number,
    ord("J"): _Machine.number,
    ord("G"): _Machine.number,
    0x88: _Machine.number,
    0x89: _Machine.number,
    0x8A: _Machine.long,
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("C"): lambda m: m.raw(1),
    ord("B"): lambda m: m.raw(4),
    0x8E: lambda m: m.raw(8),
    0x96: lambda m: m.raw(8),
    ord("U"): lambda m: m.python2_text(1),
    ord("T"): lambda m: m.python2_text(4),
    ord("q"): lambda m: m.remember(m.unsigned(1)),
    ord("r"): lambda m: m.remember(m.unsigned(4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.stack.append(m.memo[m.unsigned(1)]),
    ord("j"): lambda m: m.stack.append(m.memo[m.unsigned(4)]),
    ord("c"): _Machine.global_by_lines,
    0x93: _Machine.global_by_stack,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
}
