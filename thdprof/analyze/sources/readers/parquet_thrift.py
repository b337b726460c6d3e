"""Structs of thrift's compact protocol, in which parquet writes its footer and page headers.

pyarrow offers the footer too, but aborts the process on some broken ones, and never the page headers.
"""

from __future__ import annotations

from typing import Any

_DEEPEST = 12
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
Struct = dict[int, Any]
"""Field id -> number, bool, list or struct; texts are left out."""


class CorruptThrift(Exception):
    """The bytes are no such struct; the text says why."""


def read_struct(data: memoryview | bytes, position: int, depth: int = 0) -> tuple[Struct, int]:
    """The struct in `data` from `position` on, and the position after it.

    Raises:
        CorruptThrift: it runs past its end, or is none.
    """
    if depth > _DEEPEST:
        raise CorruptThrift("is nested too deeply")
    fields: Struct = {}
    identifier = 0
    try:
        while head := data[position]:
            position += 1
            kind = head & 0x0F
            if head >> 4:
                identifier += head >> 4
            else:
                identifier, position = _zigzag(data, position)
            if kind in (_TRUE, _FALSE):
                fields[identifier] = kind == _TRUE
            else:
                fields[identifier], position = _read_value(data, position, kind, depth)
    except IndexError as error:
        raise CorruptThrift("runs past its end") from error
    return fields, position + 1


def read_varint(data: memoryview | bytes, position: int) -> tuple[int, int]:
    """An unsigned LEB128 number of at most 64 bits, and the position after it.

    Raises:
        CorruptThrift: it has more bits.
        IndexError: `data` ends before it does.
    """
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise CorruptThrift("has a number of more than 64 bits")


def _read_value(data: memoryview | bytes, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        return _zigzag(data, position)
    if kind == _BINARY:
        size, position = read_varint(data, position)
        return None, position + size
    if kind == _STRUCT:
        return read_struct(data, position, depth + 1)
    if kind in (_LIST, _SET):
        return _read_list(data, position, depth)
    if kind in (_BYTE, _TRUE, _FALSE):  # elements of a list
        return data[position], position + 1
    if kind == _DOUBLE:
        return None, position + 8
    raise CorruptThrift(f"has a field of unknown kind {kind}")


def _read_list(data: memoryview | bytes, position: int, depth: int) -> tuple[list[Any], int]:
    head = data[position]
    position += 1
    size, kind = head >> 4, head & 0x0F
    if size == 15:
        size, position = read_varint(data, position)
    if size > len(data) - position:
        raise CorruptThrift("has a list longer than itself")
    values = []
    for _ in range(size):
        value, position = _read_value(data, position, kind, depth)
        values.append(value)
    return values, position


def _zigzag(data: memoryview | bytes, position: int) -> tuple[int, int]:
    value, position = read_varint(data, position)
    return (value >> 1) ^ -(value & 1), position
