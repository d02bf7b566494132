"""Read and write the part of protobuf's wire format that Chakra's files need: varints, tags, fields.

Format: https://protobuf.dev/programming-guides/encoding. The protobuf package is not used: the schema is small and
fixed, and the package would bring generated code and version rules.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MASK64 = (1 << 64) - 1

Value = int | bytes  # a field's value: varints and fixed numbers as unsigned integers, others as bytes


class WireError(ValueError):
    """Report bytes that are no protobuf message."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned varint, and return it with the position after it."""
    result = shift = 0
    while True:
        if at >= len(data):
            raise WireError(f"ends within a number at byte {at}")
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _MASK64, at
        shift += 7
        if shift > 63:
            raise WireError(f"holds a number of more than ten bytes at byte {at}")


def fields(data: bytes) -> Iterator[tuple[int, int, Value]]:
    """Yield field number, wire type and value of each field of a message, in the order of the file.

    Raises:
        WireError: if the bytes are no message.
    """
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: Value
        if wire == VARINT:
            value, at = read_varint(data, at)
        elif wire in (FIXED64, FIXED32, BYTES):
            size = 8 if wire == FIXED64 else 4
            if wire == BYTES:
                size, at = read_varint(data, at)
            if size > len(data) - at:
                raise WireError(f"ends within a field at byte {at}")
            raw = data[at : at + size]
            at += size
            value = raw if wire == BYTES else int.from_bytes(raw, "little")
        else:
            raise WireError(f"holds a field of unknown wire type {wire} at byte {at}")
        if number == 0:
            raise WireError(f"holds a field numbered 0 at byte {at}")
        yield number, wire, value


def varint(value: int) -> bytes:
    """Encode an integer of 64 bits as a varint; negative ones in two's complement.

    >>> varint(300).hex(), varint(0).hex()
    ('ac02', '00')
    """
    value &= _MASK64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, wire: int, value: Value) -> bytes:
    """Encode one field of a message."""
    tag = varint(number << 3 | wire)
    if isinstance(value, bytes):
        return tag + varint(len(value)) + value
    if wire == VARINT:
        return tag + varint(value)
    return tag + value.to_bytes(8 if wire == FIXED64 else 4, "little")


def text(number: int, value: str) -> bytes:
    """Encode a string field; an empty string gives no bytes, as in proto3."""
    return field(number, BYTES, value.encode()) if value else b""


def whole(number: int, value: int) -> bytes:
    """Encode an integer field; 0 gives no bytes, as in proto3."""
    return field(number, VARINT, value) if value else b""


def packed(number: int, values: tuple[int, ...]) -> bytes:
    """Encode a repeated integer field in packed form."""
    return field(number, BYTES, b"".join(map(varint, values))) if values else b""


def unpacked(value: Value) -> Iterator[int]:
    """Yield the integers of a repeated field's entry: one, or many in packed form."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = read_varint(value, at)
        yield number


def signed(value: int) -> int:
    """Return an unsigned 64-bit number read as two's complement."""
    return value - (1 << 64) if value >> 63 else value


def double_bits(value: float) -> int:
    """Return the bits of a double as an unsigned integer."""
    return int.from_bytes(struct.pack("<d", value), "little")


def bits_double(value: int) -> float:
    """Return the double with these bits."""
    return float(struct.unpack("<d", value.to_bytes(8, "little"))[0])
