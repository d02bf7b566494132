"""Chakra files: the wire format against protobuf itself, nodes round-trip, a simulated step keeps its times."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.traces.chakra import (
    BOOL,
    COLLECTIVES,
    DOUBLE,
    INT32,
    INT64,
    STRING,
    UINT64,
    Attribute,
    ChakraNode,
    IOInfo,
    NodeType,
    boolean,
    decode_node,
    encode_file,
    encode_node,
    int64,
    read_chakra,
)
from sim.traces.chakra_in import load, read_groups
from sim.traces.chakra_out import write_chakra
from sim.traces.changes import Change, network_of
from sim.traces.replay import replay
from tests.sim.cases import scenario_with

U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
ATTRIBUTES = st.one_of(
    st.builds(Attribute, TEXT, st.just(INT64), I64, TEXT),
    st.builds(Attribute, TEXT, st.just(INT32), st.integers(-(2**31), 2**31 - 1)),
    st.builds(Attribute, TEXT, st.just(UINT64), U64),
    st.builds(Attribute, TEXT, st.just(17), I64),  # sint64_val, zigzag
    st.builds(Attribute, TEXT, st.just(21), U64),  # fixed64_val
    st.builds(Attribute, TEXT, st.just(DOUBLE), st.floats(allow_nan=False)),
    st.builds(Attribute, TEXT, st.just(BOOL), st.booleans()),
    st.builds(Attribute, TEXT, st.just(STRING), TEXT),
    st.builds(Attribute, TEXT, st.just(31), st.binary(max_size=8)),
)
INFOS = st.none() | st.builds(IOInfo, TEXT, TEXT, TEXT)
NODES = st.builds(
    ChakraNode,
    U64,
    TEXT,
    st.integers(0, 10),
    st.lists(U64, max_size=4).map(tuple),
    st.lists(U64, max_size=4).map(tuple),
    U64,
    U64,
    INFOS,
    INFOS,
    st.lists(ATTRIBUTES, max_size=4).map(tuple),
    st.just(b""),
)


@settings(max_examples=200, deadline=None)
@given(NODES)
def test_nodes_round_trip(node: ChakraNode) -> None:
    data = encode_node(node)
    assert decode_node(data) == node
    assert encode_node(decode_node(data)) == data


def schema() -> Any:
    """Protobuf's own classes for the messages, from the field numbers of et_def.proto."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, bool, str]) -> None:
        m = file.message_type.add(name=name)
        for field, number, kind, many, sub in fields:
            label = types.LABEL_REPEATED if many else types.LABEL_OPTIONAL
            f = m.field.add(name=field, number=number, type=kind, label=label)
            if sub:
                f.type_name = f".t.{sub}"

    text, whole = types.TYPE_STRING, types.TYPE_UINT64
    values = (
        ("double_val", 3, types.TYPE_DOUBLE),
        ("int32_val", 7, types.TYPE_INT32),
        ("int64_val", 9, types.TYPE_INT64),
        ("uint64_val", 13, whole),
        ("sint64_val", 17, types.TYPE_SINT64),
        ("fixed64_val", 21, types.TYPE_FIXED64),
        ("bool_val", 27, types.TYPE_BOOL),
        ("string_val", 29, text),
        ("bytes_val", 31, types.TYPE_BYTES),
    )
    message("Attr", ("name", 1, text, False, ""), ("doc_string", 2, text, False, ""))
    attr = file.message_type[0]
    attr.oneof_decl.add(name="value")
    for name, number, kind in values:
        attr.field.add(name=name, number=number, type=kind, label=types.LABEL_OPTIONAL, oneof_index=0)
    message("IO", ("values", 1, text, False, ""), ("shapes", 2, text, False, ""), ("types", 3, text, False, ""))
    message(
        "Node",
        ("id", 1, whole, False, ""),
        ("name", 2, text, False, ""),
        ("type", 3, types.TYPE_INT32, False, ""),
        ("ctrl_deps", 4, whole, True, ""),
        ("data_deps", 5, whole, True, ""),
        ("start_time_micros", 6, whole, False, ""),
        ("duration_micros", 7, whole, False, ""),
        ("inputs", 8, types.TYPE_MESSAGE, False, "IO"),
        ("outputs", 9, types.TYPE_MESSAGE, False, "IO"),
        ("attr", 10, types.TYPE_MESSAGE, True, "Attr"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Node"))


def test_bytes_are_those_of_protobuf() -> None:
    make = schema()

    @settings(max_examples=100, deadline=None)
    @given(NODES)
    def check(node: ChakraNode) -> None:
        theirs = make()
        theirs.ParseFromString(encode_node(node))
        assert (theirs.id, theirs.name, theirs.type) == (node.id, node.name, node.type)
        assert (tuple(theirs.ctrl_deps), tuple(theirs.data_deps)) == (node.ctrl_deps, node.data_deps)
        assert (theirs.start_time_micros, theirs.duration_micros) == (node.start_micros, node.duration_micros)
        assert theirs.HasField("inputs") == (node.inputs is not None)
        for a, b in zip(theirs.attr, node.attributes, strict=True):
            assert (a.name, a.doc_string, getattr(a, a.WhichOneof("value"))) == (b.name, b.doc, b.value)
        assert decode_node(theirs.SerializeToString()) == node

    check()


def test_unpacked_dependencies_and_unknown_fields_survive() -> None:
    data = bytes([0x08, 7, 0x28, 3, 0x28, 0xAC, 0x02]) + bytes([0x5A, 2, 0x08, 1])  # data_deps 3 and 300; storage
    node = decode_node(data)
    assert (node.id, node.data_deps, node.unknown) == (7, (3, 300), bytes([0x5A, 2, 0x08, 1]))
    assert decode_node(encode_node(node)) == node


@pytest.mark.parametrize(
    "parallelism",
    [
        {"pp": 2, "dp": 2, "tp": 2, "zero": 1},
        {"pp": 4, "schedule": "zb_h1"},
        {"cp": 4, "dp": 2, "zero": 3},
        {"pp": 2, "schedule": "dualpipe_v"},
    ],
)
def test_a_simulated_step_keeps_its_times(parallelism: dict[str, Any], tmp_path: Path) -> None:
    scenario = scenario_with(
        {"seq_len": 512, "global_batch_size": 8},
        parallelism,
        model={"layers": 8, "hidden": 512, "heads": 8, "vocab": 1000},
    )
    simulation = simulate(scenario, expand=True)
    *files, groups = write_chakra(simulation, tmp_path / "step")
    assert len(files) == scenario.parallelism.ranks
    recording = load(files, [f.read_bytes() for f in files], read_groups(groups))
    assert recording.step_ns * 1e-9 == pytest.approx(simulation.step_time_s, rel=1e-4)  # whole ns each task
    assert replay(recording).step_time_s == pytest.approx(recording.step_ns * 1e-9, rel=1e-12)
    for file in files:  # written again, the same bytes
        content = read_chakra(file)
        assert encode_file(content.nodes, content.version, content.attributes) == file.read_bytes()


def coll(number: int, *deps: int, kind: int = 0) -> ChakraNode:
    """An all-reduce as ASTRA-sim's generator writes them: a size, no duration."""
    attributes = (boolean("is_cpu_op", False), int64("comm_type", kind), int64("comm_size", 1 << 26))
    return ChakraNode(number, "ar", NodeType.COMM_COLL, (), deps, 0, 0, None, None, attributes)


def test_an_all_gathers_size_is_what_each_rank_puts_in(tmp_path: Path) -> None:
    """As ASTRA-sim takes it: 64 MiB of each of two ranks are 128 MiB, a reduce-scatter's 64 MiB are all there is."""
    network = network_of("dgx-h100", 2)
    for name, whole in (("all_gather", 1 << 27), ("reduce_scatter", 1 << 26)):
        file = encode_file([coll(2, kind=COLLECTIVES.index(name))])
        priced = replay(load(["a.0.et", "a.1.et"], [file, file]), Change(network=network))
        assert priced.step_time_s == pytest.approx(network.collective(name, range(2), whole).seconds)
    scenario = scenario_with(
        {"seq_len": 512, "global_batch_size": 4},
        {"dp": 4, "zero": 3},
        model={"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024},
    )
    *files, groups = write_chakra(simulate(scenario, expand=True), tmp_path / "step")
    parameters = 12 * 512**2 + 13 * 512  # of a layer, in 16 bits
    sizes = [n.whole("comm_size") for n in read_chakra(files[0]).nodes if n.name == "layer 1 parameters"]
    assert set(sizes) == {2 * parameters / 4}
    read = load(files, [f.read_bytes() for f in files], read_groups(groups))
    assert {n.message.bytes for n in read.nodes if n.message and n.name == "layer 1 parameters"} == {2.0 * parameters}


def test_an_interrupted_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_with(
        {"seq_len": 512, "global_batch_size": 4},
        {"dp": 4},
        model={"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024},
    )
    simulation = simulate(scenario, expand=True)

    def interrupted(path: Path, text: str) -> None:
        assert len(list(tmp_path.iterdir())) == 4
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.traces.chakra_out.write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_chakra(simulation, tmp_path / "step")
    assert not list(tmp_path.iterdir())


def comp(number: int, micros: int, *deps: int) -> ChakraNode:
    attributes = (boolean("is_cpu_op", False),)
    return ChakraNode(number, "c", NodeType.COMP, (), deps, 0, micros, None, None, attributes)


def test_unpriced_collectives_take_the_clusters_seconds() -> None:
    files = [encode_file([comp(1, micros), coll(2, 1), comp(3, 50, 2)]) for micros in (100, 300)]
    recording = load(["a.0.et", "a.1.et"], files)
    assert "--cluster" in recording.warnings[0]
    assert replay(recording).step_time_s == pytest.approx(350e-6)
    network = network_of("dgx-h100", 2)
    cost = network.collective("all_reduce", range(2), 1 << 26).seconds
    assert replay(recording, Change(network=network)).step_time_s == pytest.approx(350e-6 + cost)


def test_one_computation_at_a_time_lowest_number_first() -> None:
    recording = load(["a.0.et"], [encode_file([comp(5, 10), comp(1, 20), comp(3, 40, 1)])])
    ends = {n.end_ns: n.name for n in recording.nodes}
    assert [n.start_ns for n in recording.nodes] == [60_000, 0, 20_000], ends


def test_messages_meet_by_tag() -> None:
    def end(type_: NodeType, source: int, target: int, micros: int) -> ChakraNode:
        places = (("comm_src", source), ("comm_dst", target), ("comm_tag", 4), ("comm_size", 1024))
        return ChakraNode(
            2, "m", type_, (), (1,), 0, micros, None, None, tuple(Attribute(n, INT32, v) for n, v in places)
        )

    files = [
        encode_file([comp(1, 500), end(NodeType.COMM_SEND, 0, 1, 10)]),
        encode_file([comp(1, 20), end(NodeType.COMM_RECV, 0, 1, 10), comp(3, 5, 2)]),
    ]
    assert replay(load(["a.0.et", "a.1.et"], files)).step_time_s == pytest.approx(515e-6)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([b""], "is empty"),
        ([b"\x05ab"], "ends within message 0"),
        ([b"\x00\x03\x08\xff\xff"], "message 1 ends within a number"),
        ([b"\x00" + b"\xff" * 11], "more than ten bytes"),
        ([b"\x00\x02\x0b\x00"], "unknown wire type 3"),
        ([b"\x00\x03\x12\x01\xff"], "no UTF-8"),
        ([encode_file([comp(1, 1), comp(1, 2)])], "node 1 occurs twice"),
        ([encode_file([comp(1, 1, 9)])], "waits for node 9, which is not in the file"),
        ([encode_file([comp(1, 1, 2), comp(2, 1, 1)])], "2 of 2 nodes never end"),
        ([encode_file([comp(1, 2**63)])], "more than 146 years"),
        ([encode_file([coll(1), coll(2, kind=6)]), encode_file([coll(1, kind=6), coll(2)])], "never end"),
    ],
)
def test_bad_files_get_one_message(files: list[bytes], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load([f"x.{i}.et" for i in range(len(files))], files)


def test_broken_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    good = encode_file([comp(1, 100), coll(2, 1), comp(3, 5, 1, 2)])
    draw = random.Random(1)
    for _ in range(500):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            replay(load(["x.0.et"], [bytes(data[: draw.randint(1, len(data))])]))
        except InputError:
            continue
    broken = tmp_path / "x.0.et"
    broken.write_bytes(gzip.compress(good)[:-9])
    with pytest.raises(InputError, match="gzip"):
        read_chakra(broken)
    broken.write_bytes(gzip.compress(good))
    assert len(read_chakra(broken).nodes) == 3


def test_groups_must_be_lists_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"1": [0, 1]}))
    assert read_groups(path) == {"1": (0, 1)}
    path.write_text(json.dumps({"1": ["a"]}))
    with pytest.raises(InputError, match="lists of ranks"):
        read_groups(path)


def test_a_ring_sends_to_the_next_rank_and_receives_from_the_one_before(tmp_path: Path) -> None:
    ring = ["parallelism={cp: 4}", "model.layers=1", "training.seq_len=4096", "training.global_batch_size=1"]
    write_chakra(simulate(load_scenario("scenarios/cp_ring_131k.yaml", ring), expand=True), tmp_path / "step")
    found = {
        (node.type, node.whole("comm_src"), node.whole("comm_dst"))
        for node in read_chakra(tmp_path / "step.1.et").nodes
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV)
    }
    assert found == {(NodeType.COMM_SEND, 1, 2), (NodeType.COMM_RECV, 0, 1)}


def test_gradients_of_experts_are_reduced_over_other_ranks_than_the_others(tmp_path: Path) -> None:
    scenario = scenario_with(
        {"seq_len": 512, "global_batch_size": 4},
        {"dp": 4, "ep": 2, "zero": 1},
        model={"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024, "moe": {"experts": 4, "top_k": 2, "ffn": 1024}},
    )
    simulation = simulate(scenario, expand=True)
    *files, groups = write_chakra(simulation, tmp_path / "step")
    members = read_groups(groups)
    found = {members[n.get("pg_name")] for n in read_chakra(files[0]).nodes if n.type == NodeType.COMM_COLL}
    assert found == {(0, 1), (0, 2), (0, 1, 2, 3)}  # exchange of tokens, shards of experts, shards of the rest
    read = load(files, [f.read_bytes() for f in files], members)
    assert replay(read, Change()).step_time_s == pytest.approx(simulation.times.end_s.max(), rel=1e-6)


@pytest.mark.parametrize(
    ("scenario", "override", "message"),
    [
        ("zb_h1_pp8", "training.optimizer_post_validation=true", "found true; no node of a Chakra trace can start"),
        ("tp8", "engine.collectives=messages", "found messages; must be closed_form: a Chakra trace holds whole"),
    ],
)
def test_steps_that_chakra_has_no_nodes_for_are_refused_by_key(
    scenario: str, override: str, message: str, tmp_path: Path
) -> None:
    step = simulate(load_scenario(f"scenarios/{scenario}.yaml", [override]), expand=True)
    with pytest.raises(InputError, match=rf"{override.partition('=')[0]}: {message}"):
        write_chakra(step, tmp_path / "step")
