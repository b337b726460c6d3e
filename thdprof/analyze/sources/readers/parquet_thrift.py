"""Structs of thrift's compact protocol, in which parquet writes its footer and page headers.

pyarrow gives the footer too, but aborts the process on some broken ones, and it never gives the page headers, from
which `parquet_pages` reads the lengths of lists. Reading them saves 0.8 s of a command of 1.4 s: `thdprof analyze` of
Megatron-Bridge's packed parquet with 40,000 rows of 4,096 tokens, 369 MB, as `benchmarks/analyze.py` writes it (1.1 s
of 1.9 s of processor time).
"""

from __future__ import annotations

from typing import Any

_DEEPEST = 12
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
Struct = dict[int, Any]
"""A field's id -> its number, bool, list or struct; None stands for texts and floating-point numbers."""


class CorruptThrift(Exception):
    """The bytes are no struct of thrift's compact protocol; the text says why."""


def read_struct(data: memoryview | bytes, position: int, depth: int = 0) -> tuple[Struct, int]:
    """Read the struct that begins at `position` of `data`; returns it and the position after it.

    Raises:
        CorruptThrift: the struct runs past the end of `data`, is nested too deeply, or has an unknown field.
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
    """Read an unsigned LEB128 number of at most 64 bits; returns it and the position after it.

    Raises:
        CorruptThrift: the number has more than 64 bits.
        IndexError: `data` ends before the number does.
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
