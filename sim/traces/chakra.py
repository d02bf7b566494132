"""Read and write Chakra execution traces: one `GlobalMetadata` and many `Node` messages, each after its length.

Schema: `ChakraProtoMsg` in schema/protobuf/et_def.proto of https://github.com/mlcommons/chakra; framing (lengths as
varints): its src/third_party/utils/protolib.py. Attributes that ASTRA-sim reads (src/feeder/et_feeder_node.cpp):
is_cpu_op, comm_type, comm_size, comm_src, comm_dst, comm_tag, pg_name, num_ops, tensor_size. Unknown fields of a node,
such as storage details, are kept as bytes and written back.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from sim.core.errors import InputError
from sim.core.json_values import is_integer
from sim.traces import protobuf as pb
from sim.traces.files import read_bytes

MAX_NODES = 5_000_000
SCHEMA_VERSION = "0.0.4"  # what ASTRA-sim's own generators write


class NodeType(IntEnum):
    """Number the types of nodes as the schema's `NodeType` does."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7
    STORAGE = 8
    BATCH = 9
    CHECKPOINT = 10


COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter",
    "barrier",
)

AttributeValue = bool | int | float | str | bytes


class Attribute(NamedTuple):
    """Hold an attribute. `number`: the field of the schema's oneof that holds the value, 3 double_val … 32 bytes_list.

    A value of a list type or of float_val stays as the file's bytes or bits.
    """

    name: str
    number: int
    value: AttributeValue
    doc: str = ""


class IOInfo(NamedTuple):
    """Hold values, shapes and types of inputs or outputs, as text."""

    values: str = ""
    shapes: str = ""
    types: str = ""


class ChakraNode(Struct, frozen=True):
    """Hold a node. `type`: a `NodeType`, or a number of a newer schema."""

    id: int
    name: str = ""
    type: int = 0
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_micros: int = 0
    duration_micros: int = 0
    inputs: IOInfo | None = None
    outputs: IOInfo | None = None
    attributes: tuple[Attribute, ...] = ()
    unknown: bytes = b""

    def get(self, name: str) -> AttributeValue | None:
        """Return the value of an attribute; None if the node does not have it."""
        return next((a.value for a in self.attributes if a.name == name), None)

    def whole(self, name: str, default: int = -1) -> int:
        """Return the value of an attribute if it is a whole number, else the default."""
        value = self.get(name)
        return value if is_integer(value) else default


class ChakraFile(NamedTuple):
    """Hold a whole file: version and attributes of the metadata, nodes in order."""

    version: str
    attributes: tuple[Attribute, ...]
    nodes: tuple[ChakraNode, ...]


# Field numbers of AttributeProto's oneof.
DOUBLE, INT32, INT64, UINT32, UINT64, BOOL, STRING, BYTES = 3, 7, 9, 11, 13, 27, 29, 31
_ZIGZAG = (15, 17)


def boolean(name: str, value: bool) -> Attribute:
    """Make a bool_val attribute."""
    return Attribute(name, BOOL, value)


def int64(name: str, value: int) -> Attribute:
    """Make an int64_val attribute."""
    return Attribute(name, INT64, value)


def string(name: str, value: str) -> Attribute:
    """Make a string_val attribute."""
    return Attribute(name, STRING, value)


# --- reading


def read_chakra(path: str | Path, data: bytes | None = None) -> ChakraFile:
    """Read a file, compressed with gzip or not.

    Raises:
        InputError: if the file is no Chakra trace; the text names the message that is wrong.
    """
    content = read_bytes(path) if data is None else data
    messages: list[bytes] = []
    at = 0
    try:
        while at < len(content):
            size, at = pb.read_varint(content, at)
            if size > len(content) - at:
                raise pb.WireError(f"ends within message {len(messages)}, which should have {size} bytes")
            messages.append(content[at : at + size])
            at += size
            if len(messages) > MAX_NODES:
                raise pb.WireError(f"holds more than {MAX_NODES} nodes")
        if not messages:
            raise pb.WireError("is empty")
        version, attributes = _metadata(messages[0])
        nodes = tuple(_numbered(number, m) for number, m in enumerate(messages[1:], 1))
    except pb.WireError as error:
        raise InputError(f"{path}: is no Chakra trace that can be read: {error}") from None
    return ChakraFile(version, attributes, nodes)


def _numbered(number: int, message: bytes) -> ChakraNode:
    try:
        return decode_node(message)
    except pb.WireError as error:
        raise pb.WireError(f"message {number} {error}") from None


def _metadata(message: bytes) -> tuple[str, tuple[Attribute, ...]]:
    version, attributes = "", []
    for number, _, value in pb.fields(message):
        if number == 1:
            version = _text(value)
        elif number == 2:
            attributes.append(_attribute(_bytes(value)))
    return version, tuple(attributes)


def decode_node(message: bytes) -> ChakraNode:
    """Decode a Node message.

    Raises:
        WireError: if the bytes are no such message.
    """
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    deps: dict[int, list[int]] = {4: [], 5: []}
    infos: dict[int, IOInfo] = {}
    name, attributes, unknown = "", [], b""
    for number, wire, value in pb.fields(message):
        if number in numbers and isinstance(value, int):
            numbers[number] = value
        elif number == 2:
            name = _text(value)
        elif number in deps:
            deps[number] += pb.unpacked(value)
        elif number in (8, 9):
            infos[number] = _io_info(_bytes(value))
        elif number == 10:
            attributes.append(_attribute(_bytes(value)))
        else:
            unknown += pb.field(number, wire, value)
    return ChakraNode(
        numbers[1],
        name,
        numbers[3],
        tuple(deps[4]),
        tuple(deps[5]),
        numbers[6],
        numbers[7],
        infos.get(8),
        infos.get(9),
        tuple(attributes),
        unknown,
    )


def _attribute(message: bytes) -> Attribute:
    name, doc, kind = "", "", 0
    value: AttributeValue = b""
    for number, _, raw in pb.fields(message):
        if number == 1:
            name = _text(raw)
        elif number == 2:
            doc = _text(raw)
        else:
            kind, value = number, _value(number, raw)
    return Attribute(name, kind, value, doc)


def _value(number: int, raw: pb.Value) -> AttributeValue:
    if isinstance(raw, bytes):
        return _text(raw) if number == STRING else raw
    if number == DOUBLE:
        return pb.bits_double(raw)
    if number in _ZIGZAG:
        return (raw >> 1) ^ -(raw & 1)
    if number == BOOL:
        return bool(raw)
    return pb.signed(raw) if number in (INT32, INT64) else raw


def _io_info(message: bytes) -> IOInfo:
    parts = {1: "", 2: "", 3: ""}
    for number, _, value in pb.fields(message):
        if number in parts:
            parts[number] = _text(value)
    return IOInfo(parts[1], parts[2], parts[3])


def _bytes(value: pb.Value) -> bytes:
    if not isinstance(value, bytes):
        raise pb.WireError("holds a number where a message belongs")
    return value


def _text(value: pb.Value) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError:
        raise pb.WireError("holds a string that is no UTF-8") from None


# --- writing


def encode_file(
    nodes: Iterable[ChakraNode], version: str = SCHEMA_VERSION, attributes: tuple[Attribute, ...] = ()
) -> bytes:
    """Return the bytes of a whole file."""
    metadata = pb.text(1, version) + b"".join(pb.field(2, pb.BYTES, _encode_attribute(a)) for a in attributes)
    messages = [metadata, *(encode_node(n) for n in nodes)]
    return b"".join(pb.varint(len(m)) + m for m in messages)


def encode_node(node: ChakraNode) -> bytes:
    """Encode a Node message, with fields in the order of their numbers."""
    out = [
        pb.whole(1, node.id),
        pb.text(2, node.name),
        pb.whole(3, node.type),
        pb.packed(4, node.ctrl_deps),
        pb.packed(5, node.data_deps),
        pb.whole(6, node.start_micros),
        pb.whole(7, node.duration_micros),
    ]
    for number, info in ((8, node.inputs), (9, node.outputs)):
        if info is not None:
            body = b"".join(pb.text(i, part) for i, part in enumerate(info, 1))
            out.append(pb.field(number, pb.BYTES, body))
    out += [pb.field(10, pb.BYTES, _encode_attribute(a)) for a in node.attributes]
    return b"".join(out) + node.unknown


def _encode_attribute(attribute: Attribute) -> bytes:
    head = pb.text(1, attribute.name) + pb.text(2, attribute.doc)
    number, value = attribute.number, attribute.value
    if not number:
        return head
    if isinstance(value, str):
        return head + pb.field(number, pb.BYTES, value.encode())
    if isinstance(value, bytes):
        return head + pb.field(number, pb.BYTES, value)
    if isinstance(value, float):
        return head + pb.field(number, pb.FIXED64, pb.double_bits(value))
    if number in _ZIGZAG:
        value = (int(value) << 1) ^ (int(value) >> 63)
    return head + pb.field(number, _WIRE.get(number, pb.VARINT), int(value))


_WIRE = {5: pb.FIXED32, 19: pb.FIXED32, 23: pb.FIXED32, 21: pb.FIXED64, 25: pb.FIXED64}
