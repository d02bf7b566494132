"""Captured programs of ranks as recordings: overlap, waits and messages against closed forms."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.commands.replay import main
from sim.core.errors import InputError
from sim.inputs.program_file import CapturedOperator, HostCopy, Tensor
from sim.inputs.script_program import Collective, Entry, RankProgram, What, read_rank_program
from sim.models.captured.kernels import moved_bytes
from sim.prices.coefficients import Coefficients
from sim.prices.profiles import load_profile
from sim.traces.program_in import program_recording
from sim.traces.program_prices import ProgramPrices
from sim.traces.reading import load_programs
from sim.traces.replay import rank_times, replay
from tests.processes import invoked
from topology.network import Network
from topology.presets import CLUSTERS

MM, TRANSFER = 4e-3, 10e-3
WHATS = list(What)
NONE: Mapping[int, Any] = {}
COPY, COPY_BYTES = 3e-3, 2 * 4096**2
LATER, PAGEABLE, AT_ONCE = ["host_to_device", 1, 1], ["host_to_device", 0, 1], ["device_to_host", 1, 0]


def file_of(
    path: Path, operators: int, script: dict[str, Any] | None, copies: Mapping[int, Any] = NONE, **changes: Any
) -> Path:
    """A program of equal matmuls, all alike but for the streams and entries of `script`.

    `copies`: what is in the place of some, copies of 32 MiB between the host's memory and the GPU's, all alike.
    """
    tensor = ["bf16", [4096, 4096], []]
    columns = {
        "name": [0] * operators,
        "phase": [0] * operators,
        "module": [0] * operators,
        "inputs": [[0, 0]] * operators,
        "input_storages": [[0, 0]] * operators,
        "outputs": [[0]] * operators,
        "output_storages": [[0]] * operators,
        "launches": [1] * operators,
        "causal": [0] * operators,
    }
    if copies:
        columns["host_copy"] = [0 if i in copies else -1 for i in range(operators)]
    storages = {"bytes": [1], "kind": [0], "born": [0], "died": [-1], "module": [0]}
    tables = {"phases": ["forward"], "names": ["aten.mm"], "modules": [""], "kinds": ["temporary"], "tensors": [tensor]}
    tables |= {"host_copies": list(copies.values())[:1]} if copies else {}
    data: dict[str, Any] = {
        "format": "program/1",
        "seq_len": 1,
        "micro_batch_size": 1,
        "autocast": "",
        "clip_grad_norm": None,
        "optimizer": "sgd",
        "facts": {},
        "parameters": [],
        "operators": columns,
        "storages": storages,
        "tables": tables,
    }
    if script is not None:
        data["script"] = script | changes
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode()))
    return path


def script_of(
    operators: int, collectives: list[Collective], entries: list[Entry], rank: int = 0, world: int = 16
) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": world,
        "device": "cuda",
        "streams": [0] * operators,
        "groups": [{"name": c.group, "ranks": list(c.ranks)} for c in collectives],
        "collectives": {
            "kind": [c.kind for c in collectives],
            "group": list(range(len(collectives))),
            "bytes": [c.bytes for c in collectives],
        },
        "entries": {
            "before": [e.before for e in entries],
            "what": [WHATS.index(e.what) for e in entries],
            "stream": [e.stream for e in entries],
            "value": [e.value for e in entries],
        },
        "whats": [str(w) for w in WHATS],
    }


class Prices:
    """A matmul takes 4 ms, a copy between host and GPU 3 ms, a transfer 10 ms, the host nothing."""

    name, collective_host_s = "test", 0.0
    slowdowns = (1.0, 1.0)
    skew = 0.0
    host_work_s: Mapping[str, float] = {}

    def __init__(self, on_host: bool = False) -> None:
        self.on_host = on_host
        self.unknown: dict[str, int] = {}
        self.unmeasured: Counter[str] = Counter()

    def rank_skew_s(self, computed_s: float) -> float:
        return self.skew * computed_s

    def operator(self, _: CapturedOperator) -> tuple[float, float]:
        return MM, 0.0

    def host_copy(self, _: CapturedOperator, __: HostCopy, ___: int) -> tuple[float, float]:
        return COPY, 0.0

    def collective(self, _: Collective) -> float:
        return TRANSFER

    def host_work(self, kind: str) -> float:
        return self.host_work_s.get(kind, 0.0)


STATED = {"dtensor_conversion": 50e-6}
ALL_REDUCE = Collective("all_reduce", "0", tuple(range(16)), 1 << 20)


def step_s(tmp_path: Path, operators: int, entries: list[Entry], on_host: bool = False) -> float:
    path = file_of(tmp_path / "p.rank0.json.gz", operators, script_of(operators, [ALL_REDUCE], entries))
    prices = Prices(on_host)
    return replay(program_recording([read_rank_program(path)], prices)).step_time_s  # type: ignore[arg-type]


@pytest.mark.parametrize("on_host", [False, True])
def test_a_collective_hides_under_what_does_not_wait_for_it(tmp_path: Path, on_host: bool) -> None:
    """Started after the first of five matmuls, waited for before the last: 3 of them, or the transfer, lie between."""
    entries = [Entry(1, What.START, 0, 0), Entry(4, What.WAIT, 0, 0)]
    assert step_s(tmp_path, 5, entries, on_host) == pytest.approx(2 * MM + max(3 * MM, TRANSFER))


def test_a_collective_on_the_cores_that_compute_slows_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 12.5 ms in place of 10. Meanwhile matmuls run at half speed, so 6.25 ms of the 12 are left."""
    monkeypatch.setattr(Prices, "slowdowns", (2.0, 1.25))
    entries = [Entry(1, What.START, 0, 0), Entry(4, What.WAIT, 0, 0)]
    assert step_s(tmp_path, 5, entries, on_host=True) == pytest.approx(2 * MM + 12.5e-3 + (3 * MM - 6.25e-3))


def test_a_collective_that_is_waited_for_at_once_is_exposed(tmp_path: Path) -> None:
    entries = [Entry(1, What.START, 0, 0), Entry(1, What.WAIT, 0, 0)]
    assert step_s(tmp_path, 3, entries) == pytest.approx(3 * MM + TRANSFER)


def test_python_is_the_rank_s_own_time_on_a_cpu_and_delays_launches_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU runs the first two matmuls, of 4 ms each, meanwhile; the third is issued after 5 or 11 ms of Python."""
    entries = [Entry(2, What.HOST_WORK, 0, 0), Entry(2, What.HOST_WORK, 0, 1)]
    script = {**script_of(3, [], entries), "host_work": ["fsdp2_group", "fsdp2_parameter"]}
    program = read_rank_program(file_of(tmp_path / "p.rank0.json.gz", 3, script))

    def seconds(on_host: bool, group_s: float) -> float:
        monkeypatch.setattr(Prices, "host_work_s", {"fsdp2_group": group_s, "fsdp2_parameter": 1e-3})
        return replay(program_recording([program], Prices(on_host))).step_time_s  # type: ignore[arg-type]

    assert seconds(True, 4e-3) == pytest.approx(3 * MM + 5e-3)
    assert seconds(False, 4e-3) == pytest.approx(3 * MM)
    assert seconds(False, 10e-3) == pytest.approx(11e-3 + MM)


def test_ranks_wait_for_the_last_by_what_they_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transfers, after 2 and after 1 matmul, each longer by a tenth of that."""
    monkeypatch.setattr(Prices, "skew", 0.1)
    entries = [Entry(at, what, 0, 0) for at in (2, 3) for what in (What.START, What.WAIT)]
    assert step_s(tmp_path, 3, entries, on_host=True) == pytest.approx(3.3 * MM + 2 * TRANSFER)


@pytest.mark.parametrize(
    ("cluster", "computed_s", "wait_s"),
    [("cpu-host", 0.0, 0.0), ("cpu-host", 1e-3, 0.0), ("cpu-host", 9e-3, 1e-3), ("dgx-h100", 9e-3, 0.0)],
)
def test_the_wait_for_the_last_rank_grows_as_the_square_root(
    cluster: str, computed_s: float, wait_s: float, tmp_path: Path
) -> None:
    """Measured collectives hold the wait after 1 ms, 0.5 ms; three times it are due after 9 ms."""
    profile = replace(load_profile("roofline"), name="here", coefficients=Coefficients(rank_skew_s=0.5e-3))
    profile.save(tmp_path / "here.json")
    prices = ProgramPrices(CLUSTERS[cluster], str(tmp_path / "here.json"))
    assert prices.rank_skew_s(computed_s) == pytest.approx(wait_s)


def test_a_profile_without_the_times_of_python_warns_and_charges_nothing(tmp_path: Path) -> None:
    """With a profile that has them, the step is longer by their sum."""
    script = {**script_of(1, [], [Entry(1, What.HOST_WORK, 0, 0)] * 3), "host_work": ["dtensor_conversion"]}
    path = file_of(tmp_path / "p.rank0.json.gz", 1, script)
    old = file_of(tmp_path / "old.rank0.json.gz", 1, script_of(1, [], []))
    without, before = (load_programs([p], "cpu-host") for p in (path, old))
    assert "dtensor_conversion (3)" in " ".join(without.warnings)
    assert "Python" not in " ".join(before.warnings)
    assert without.step_ns == before.step_ns
    profile = replace(load_profile("roofline"), name="here", coefficients=Coefficients(host_work_s=STATED))
    profile.save(tmp_path / "here.json")
    stated, plain = (load_programs([p], "cpu-host", str(tmp_path / "here.json")) for p in (path, old))
    assert stated.step_ns - plain.step_ns == pytest.approx(3 * STATED["dtensor_conversion"] * 1e9)
    assert "Python" not in " ".join(stated.warnings)


def test_another_stream_starts_without_the_first_ones_work(tmp_path: Path) -> None:
    """Issued on a stream of its own, which waits for an event at the start: it runs under all matmuls but the last."""
    entries = [
        Entry(0, What.RECORD, 0, 0),
        Entry(3, What.WAIT_EVENT, 1, 0),
        Entry(3, What.START, 1, 0),
        Entry(3, What.WAIT, 1, 0),
        Entry(3, What.RECORD, 1, 1),
        Entry(4, What.WAIT_EVENT, 0, 1),
    ]
    assert step_s(tmp_path, 5, entries) == pytest.approx(max(4 * MM, TRANSFER) + MM)
    assert step_s(tmp_path, 5, entries, on_host=True) == pytest.approx(5 * MM + TRANSFER)  # a CPU has one stream


def test_the_host_waits(tmp_path: Path) -> None:
    """A collective on another stream, for which the host waits: what it issues afterwards starts later."""
    entries = [Entry(0, What.START, 1, 0), Entry(0, What.WAIT, 1, 0), Entry(0, What.RECORD, 1, 0)]
    assert step_s(tmp_path, 1, entries) == pytest.approx(TRANSFER)
    waits = [*entries, Entry(0, What.HOST_WAIT, 1, 0)]
    assert step_s(tmp_path, 1, waits) == pytest.approx(TRANSFER + MM)


def with_copies(tmp_path: Path, kind: list[Any], **script: Any) -> RankProgram:
    """A copy between two matmuls."""
    said = {**script_of(3, [], []), **script}
    return read_rank_program(file_of(tmp_path / "p.rank0.json.gz", 3, said, {1: kind}))


@pytest.mark.parametrize("kind", [LATER, PAGEABLE, AT_ONCE])
def test_a_copy_between_host_and_gpu_lies_in_the_order_of_its_stream(tmp_path: Path, kind: list[Any]) -> None:
    recording = program_recording([with_copies(tmp_path, kind)], Prices())  # type: ignore[arg-type]
    assert replay(recording).step_time_s == pytest.approx(2 * MM + COPY)
    times = rank_times(replay(recording))[0]
    assert times.compute_s == pytest.approx(2 * MM)
    assert times.exposed_comm_s == pytest.approx(COPY)
    assert [n.kind for n in recording.nodes if n.stream == "compute"] == ["F", "RELOAD" if kind[2] else "OFFLOAD", "F"]


def test_a_copy_on_a_stream_of_its_own_runs_under_matmuls(tmp_path: Path) -> None:
    program = with_copies(tmp_path, LATER, streams=[0, 1, 0])
    assert replay(program_recording([program], Prices())).step_time_s == pytest.approx(2 * MM)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "waits"), [(LATER, False), (PAGEABLE, True), (AT_ONCE, True)])
def test_the_host_waits_for_a_copy_unless_it_is_pinned_and_non_blocking(
    tmp_path: Path, kind: list[Any], waits: bool
) -> None:
    """The copy is on a second stream, a matmul on a third: it is issued after the copy, or starts at once."""
    program = with_copies(tmp_path, kind, streams=[0, 1, 2])
    seconds = replay(program_recording([program], Prices())).step_time_s  # type: ignore[arg-type]
    assert seconds == pytest.approx(COPY + MM if waits else MM)


@pytest.mark.parametrize("cluster", ["dgx-h100", "gb200-nvl72"])
def test_a_copy_takes_its_bytes_over_the_host_s_link(tmp_path: Path, cluster: str) -> None:
    """PCIe or C2C; a program of one process is one rank without a script."""
    script = script_of(3, [], [])
    path = file_of(tmp_path / "p.rank0.json.gz", 3, script, {1: LATER})
    node = next(n for n in load_programs([path], cluster).nodes if n.kind == "RELOAD")
    gpu = CLUSTERS[cluster].gpu
    expected_s = gpu.launch_overhead_s + COPY_BYTES / gpu.host_bandwidth_bytes_per_s
    assert node.end_ns - node.start_ns == pytest.approx(expected_s * 1e9, abs=1)
    assert not node.compute


def test_a_cluster_of_cpus_has_one_memory(tmp_path: Path) -> None:
    path = file_of(tmp_path / "p.rank0.json.gz", 3, script_of(3, [], []), {1: AT_ONCE})
    assert {n.kind for n in load_programs([path], "cpu-host").nodes} == {"F"}


def test_a_message_waits_for_its_other_end(tmp_path: Path) -> None:
    send, recv = (Collective(kind, "0", (0, 1), 1024) for kind in ("send", "recv"))
    first = script_of(3, [send], [Entry(3, What.START, 0, 0)], 0, 2)
    second = script_of(1, [recv], [Entry(0, What.START, 0, 0), Entry(0, What.WAIT, 0, 0)], 1, 2)
    paths = [file_of(tmp_path / "a.json.gz", 3, first), file_of(tmp_path / "b.json.gz", 1, second)]
    both = program_recording([read_rank_program(p) for p in paths], Prices())  # type: ignore[arg-type]
    assert replay(both).step_time_s == pytest.approx(3 * MM + TRANSFER + MM)
    alone = program_recording([read_rank_program(paths[1])], Prices())  # type: ignore[arg-type]
    assert replay(alone).step_time_s == pytest.approx(TRANSFER + MM)
    assert "--ranks 0,1" in " ".join(alone.warnings)


def test_a_cluster_prices_collectives_for_their_ranks_and_bytes(tmp_path: Path) -> None:
    entries = [Entry(1, What.START, 0, 0), Entry(1, What.WAIT, 0, 0)]
    path = file_of(tmp_path / "p.rank0.json.gz", 2, script_of(2, [ALL_REDUCE], entries))
    recording = load_programs([path], "dgx-h100")
    node = next(n for n in recording.nodes if n.message)
    network = Network(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 2}))
    expected = network.collective("all_reduce", range(16), 1 << 20).seconds
    assert node.end_ns - node.start_ns == pytest.approx(expected * 1e9, rel=1e-3)


def test_what_ifs_change_the_priced_step(tmp_path: Path) -> None:
    entries = [Entry(1, What.START, 0, 0), Entry(1, What.WAIT, 0, 0)]
    path = file_of(tmp_path / "p.rank0.json.gz", 2, script_of(2, [ALL_REDUCE], entries))

    def result(*words: str) -> dict[str, Any]:
        done = invoked(main, str(path), "--cluster", "dgx-h100", "--json", "-", *words)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    base = result()
    assert base["format"] == "sim-replay/1"
    assert base["step_time_s"] == base["replayed_step_s"] == base["recorded_step_s"] > 0
    assert base["world_size"] == 16
    assert result("--network-scale", "0.1")["step_time_s"] > base["step_time_s"]
    assert result("--dp", "64")["step_time_s"] > base["step_time_s"]
    assert result("--straggler", "0=3")["step_time_s"] > base["step_time_s"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 16}, "script.rank: found 16; allowed: a whole number from 0 to 15"),
        ({"device": "abacus"}, "script.device: found 'abacus'; allowed: cpu, cuda"),
        ({"streams": [0]}, "script.streams: found 1; allowed: 2, one for each operator"),
        ({"whats": ["jump"]}, "script.whats: found 'jump'"),
        ({"host_work": ["juggling"]}, "script.host_work: found 'juggling'; allowed: dtensor_operator"),
        ({"copies": {1: ["sideways", 1, 0]}}, "tables.host_copies[0]: found 'sideways'; allowed: host_to_device"),
        ({"copies": {1: ["device_to_host", 1]}}, "tables.host_copies[0]: found ['device_to_host', 1]"),
        ({"groups": [{"name": "0", "ranks": []}]}, "script.groups[0].ranks: found none"),
        ({"entries": {"before": [9], "what": [0], "stream": [0], "value": [0]}}, "script.entries[0].before: found 9"),
        (
            {"collectives": {"kind": ["gossip"], "group": [0], "bytes": [1]}},
            "script.collectives[0].kind: found 'gossip'",
        ),
    ],
)
def test_a_damaged_file_is_one_message(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = file_of(tmp_path / "p.json.gz", 2, script_of(2, [ALL_REDUCE], []), **changes)
    with pytest.raises(InputError) as error:
        read_rank_program(path)
    assert said in str(error.value)


def test_a_program_of_one_process_runs_alone(tmp_path: Path) -> None:
    program = read_rank_program(file_of(tmp_path / "p.json.gz", 3, None))
    assert isinstance(program, RankProgram)
    assert replay(program_recording([program], Prices())).step_time_s == pytest.approx(3 * MM)  # type: ignore[arg-type]


def test_a_program_needs_a_cluster(tmp_path: Path) -> None:
    path = file_of(tmp_path / "p.json.gz", 1, None)
    with pytest.raises(InputError, match="--cluster: is missing"):
        load_programs([path], None)


def test_a_scenario_takes_no_rank_of_a_script(tmp_path: Path) -> None:
    """Its layout is fixed: no other can be put over it."""
    from sim.inputs.scenario import parse_scenario

    path = file_of(tmp_path / "p.json.gz", 1, script_of(1, [], []))
    data = json.loads(gzip.decompress(path.read_bytes())) | {"seq_len": 0, "micro_batch_size": 0}
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode()))
    scenario = {
        "model": {"program": str(path)},
        "training": {"seq_len": 8, "global_batch_size": 1},
        "cluster": "dgx-h100",
    }
    with pytest.raises(InputError, match=r"sim\.replay plays it"):
        parse_scenario(scenario)


@pytest.mark.parametrize("name", ["aten.copy_", "aten._foreach_copy_"])
def test_a_copy_reads_its_source_and_writes_its_target(name: str) -> None:
    target, source = Tensor("bf16", (1024,), ()), Tensor("fp32", (1024,), ())
    op = CapturedOperator(name, "forward", "", (target, source), (target,), 1, False)
    assert moved_bytes(op) == 2048 + 4096
