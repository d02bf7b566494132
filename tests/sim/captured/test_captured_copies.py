"""Copies between the host's memory and the GPU in a captured program that is a scenario's model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.executors import local_workers
from sim.core.program import Comm
from sim.inputs.input_source import Source
from sim.inputs.program_file import read_program
from sim.inputs.scenario import parse_scenario
from sim.models.captured.model import CapturedModel, captured_model
from sim.search.best_first import BestFirst
from sim.search.evaluation import evaluate, pack
from sim.search.space_of_scenario import make_space
from sim.simulation import Simulation, simulate
from tests.sim.search.search_spaces import legal
from topology.presets import CLUSTERS

FILE = Path(__file__).parents[1] / "data" / "stablelm.json.gz"  # 4 layers
BYTES = 4 * 2**28
LAYERS = 4
COPIES = {"aten.silu": ["device_to_host", 1, 1], "aten.silu_backward": ["host_to_device", 0, 0]}
OF_STEP = {"aten._foreach_norm": ["device_to_host", 1, 0], "aten._fused_adamw_": ["host_to_device", 1, 1]}


def program_of(folder: Path, copies: dict[str, Any]) -> Path:
    """The program with copies of 1 GiB in place of the operators of these names."""
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    tables, rows = data["tables"], data["operators"]
    tables["host_copies"], listed = list(copies.values()), list(copies)
    tables["tensors"].append(["fp32", [2**28], []])
    names = [tables["names"][n] for n in rows["name"]]
    rows["host_copy"] = [listed.index(name) if name in listed else -1 for name in names]
    for i, name in enumerate(names):
        if name in listed:
            rows["outputs"][i] = [len(tables["tensors"]) - 1]
    path = folder / "p.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


def run(file: Path, parallelism: dict[str, Any] | None = None, cluster: str = "dgx-h100") -> Simulation:
    data = {"name": "x", "model": {"program": str(file)}, "training": {"global_batch_size": 16}, "cluster": cluster}
    return simulate(parse_scenario({**data, "parallelism": parallelism or {}}))


def comms(model: CapturedModel) -> list[Comm]:
    items = [i for b in model.pieces for i in (*b.forward, *b.recompute, *b.backward)]
    return [i for i in (*items, *model.clip, *model.update) if isinstance(i, Comm)]


@pytest.mark.parametrize("cluster", ["dgx-h100", "gb200-nvl72"])
def test_a_step_takes_the_seconds_of_its_copies_over_the_host_s_link(tmp_path: Path, cluster: str) -> None:
    """One out and one in for each layer and each of 8 micro-batches; all else takes milliseconds."""
    path = program_of(tmp_path, COPIES)
    assert [(c.kind, c.group, c.bytes) for c in comms(captured_model(str(path)))] == [
        *[("offload", "host", BYTES), ("reload", "host", BYTES)] * LAYERS
    ]
    copied, plain = run(path, cluster=cluster), run(FILE, cluster=cluster)
    gpu = CLUSTERS[cluster].gpu
    expected_s = 8 * 2 * LAYERS * BYTES / gpu.host_bandwidth_bytes_per_s
    assert copied.step_time_s - plain.step_time_s == pytest.approx(expected_s, rel=0.01)
    sent = {c.kind: c.bytes for c in copied.outcome.communication if c.group == "host"}
    assert sent == {"offload": 8 * LAYERS * BYTES, "reload": 8 * LAYERS * BYTES}


def test_copies_of_the_optimizer_are_those_of_a_rank_s_parameters(tmp_path: Path) -> None:
    model = captured_model(str(program_of(tmp_path, OF_STEP)))
    end = model.step_items(model.trained // 4)
    assert [i.bytes for program in end for i in program if isinstance(i, Comm)] == pytest.approx(
        [BYTES / 4] * 2, rel=1e-3
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_stages_copy_what_their_own_layers_do(tmp_path: Path, schedule: str) -> None:
    """Each of two stages holds half of the layers, and so makes half of the copies."""
    path = program_of(tmp_path, COPIES)
    gpu = CLUSTERS["dgx-h100"].gpu
    own_s = 8 * LAYERS * BYTES / gpu.host_bandwidth_bytes_per_s
    step = run(path, {"pp": 2, "schedule": schedule})
    assert own_s < step.step_time_s < 2 * own_s


def test_a_search_with_copies_finds_what_all_its_layouts_have(tmp_path: Path) -> None:
    path = program_of(tmp_path, {**COPIES, **OF_STEP})
    data = {"model": {"program": str(path)}, "training": {"global_batch_size": 16}, "cluster": "dgx-h100"}
    space = make_space(Source("x", data), 4, "x")
    outcomes = sorted((o.step_time_s, o.layout) for o in (evaluate(pack(space), layout) for layout in legal(space)))
    with local_workers(1) as pool:
        found = BestFirst(space, 1e15, 5, False, pool).run()
    assert [(o.step_time_s, o.layout) for o in found.best] == outcomes[:5]


def test_memory_of_the_host_is_none_of_the_gpu(tmp_path: Path) -> None:
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    kinds, column = data["tables"]["kinds"], data["storages"]["kind"]
    kinds.append("host")
    saved = [i for i, kind in enumerate(column) if kinds[kind] == "activation"]
    for i in saved:
        column[i] = len(kinds) - 1
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert sum(read_program(path).storages[i].bytes for i in saved) > 0
    assert all(not b.saved for b in captured_model(str(path)).pieces)
    assert run(path).outcome.peak_memory_bytes < run(FILE).outcome.peak_memory_bytes
