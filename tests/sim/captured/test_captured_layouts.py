"""A captured program as a scenario's model: its blocks, and what layouts make of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.core.errors import InputError
from sim.core.executors import local_workers
from sim.core.program import Compute
from sim.inputs.input_source import Source
from sim.inputs.program_blocks import pieces_of
from sim.inputs.program_file import CapturedProgram, Storage, read_program
from sim.inputs.scenario import parse_scenario
from sim.models.captured.memory import rounded
from sim.models.captured.model import captured_model
from sim.models.captured.operators import compute_of
from sim.search.best_first import BestFirst
from sim.search.evaluation import evaluate, pack
from sim.search.space_of_scenario import make_space
from sim.simulation import Simulation, simulate
from tests.sim.search.search_spaces import legal

FILE = Path(__file__).parents[1] / "data" / "stablelm.json.gz"  # 4 layers of 64, 2 sequences of 64, autocast bf16
WORKSPACES = 2 * 32 * 2**20
PROGRAM = read_program(FILE)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")


def run(parallelism: dict[str, Any] | None = None, batch: int = 16, file: Path = FILE, **training: Any) -> Simulation:
    training = {"global_batch_size": batch, **training}
    data = {"name": "x", "model": {"program": str(file)}, "training": training, "cluster": "dgx-h100"}
    return simulate(parse_scenario({**data, "parallelism": parallelism or {}}))


def alive(storages: list[Storage], rows: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    changes = np.zeros(rows + 1)
    for s in storages:
        changes[min(s.born, rows)] += rounded(s.bytes)
        if s.died is not None:
            changes[min(s.died, rows)] -= rounded(s.bytes)
    return np.cumsum(changes)[:rows]


def peak_by_lives(program: CapturedProgram, again: bool) -> float:
    """The most alive at once; `again`: in a second micro-batch too, where a gradient lives until it is added."""
    rows = len(program.operators) + 1
    gradients = [s for s in program.storages if s.kind == "gradient"]
    plain = alive([s for s in program.storages if s.kind != "gradient"], rows)
    peak = float((plain + alive(gradients, rows)).max())
    if again:
        last = sum(o.phase not in ("clip", "optimizer") for o in program.operators)
        fleeting = alive([s._replace(died=s.born + 1) for s in gradients], rows)
        peak = max(peak, float((plain + fleeting)[:last].max()) + sum(rounded(s.bytes) for s in gradients))
    return peak


def test_blocks_are_the_modules_that_repeat() -> None:
    pieces = pieces_of(PROGRAM)
    assert pieces.blocks == 4
    of = {}
    for piece, op in zip(pieces.of_operator, PROGRAM.operators, strict=True):
        of.setdefault(op.module, set()).add(piece)
    assert of["model.layers.2.self_attn.q_proj"] == {3}
    assert of["lm_head"] == {5}
    assert of["model.embed_tokens"] <= {0, 1}  # autograd adds its gradients up where the last block's arrive
    assert len(set(captured_model(str(FILE)).kinds[1:])) == 1


def test_no_operator_is_lost() -> None:
    model = captured_model(str(FILE))
    kept = [i for b in model.pieces for i in (*b.forward, *b.recompute, *b.backward)] + [*model.clip, *model.update]
    assert all(isinstance(i, Compute) for i in kept)
    whole = [compute_of(o) for o in PROGRAM.operators if o.launches]
    assert len(kept) == len(whole)
    assert sum(c.flops for c in kept if isinstance(c, Compute)) == sum(c.flops for c in whole)
    assert sum(b.params for b in model.pieces) == sum(p.elements for p in PROGRAM.parameters)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_memory_on_one_gpu_is_that_of_the_storages(micro_batches: int) -> None:
    peak = run(batch=2 * micro_batches).outcome.peak_memory_bytes
    assert peak - WORKSPACES == peak_by_lives(PROGRAM, micro_batches > 1)


def test_expanded_memory_has_the_same_peak() -> None:
    scenario = run({"pp": 4}).scenario
    peaks = [[float(c.total.max()) for c in simulate(scenario, expand=e).memory] for e in (False, True)]
    assert peaks[0] == pytest.approx(peaks[1])


def test_what_passes_between_blocks_is_the_residual_stream() -> None:
    stream = 2 * 64 * 64 * 4.0  # fp32 under autocast
    assert captured_model(str(FILE)).input_bytes == (stream,) * 5
    rows = run({"pp": 4}).result["communication"]
    assert {m["bytes"] for m in rows if m["kind"] != "send"} == {4.0}  # the norm of all stages' gradients
    sent = {m["rank"]: m["bytes"] / stream for m in rows if m["kind"] == "send"}  # forwards, and gradients back
    assert sent == {0: sent[3], 1: 2 * sent[3], 2: 2 * sent[3], 3: sent[3]}


def test_data_parallelism_reduces_the_programs_gradients() -> None:
    elements = sum(p.elements for p in PROGRAM.parameters)
    plain, sharded = run({"dp": 8}), run({"dp": 8, "zero": 3})
    assert {c.kind: c.bytes for c in plain.outcome.communication} == {"all_reduce": 4 * elements}
    gathered = {c.kind: c.bytes for c in sharded.outcome.communication if c.group == "shard"}
    assert gathered["all_gather"] == 2 * gathered["reduce_scatter"] == 8 * elements  # forward and backward, in fp32
    memory = [
        [getattr(m, k) for k in ("parameters", "gradients", "optimizer")]
        for m in (plain.outcome.memory[0], sharded.outcome.memory[0])
    ]
    assert memory[1] == pytest.approx([x / 8 for x in memory[0]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_it(schedule: str) -> None:
    step = run({"pp": 2, "schedule": schedule})
    assert 0 < step.outcome.mean_rank.bubble_fraction < 1
    stages = [m.parameters for m in step.outcome.memory]
    copies = 2 if schedule == "dualpipe" else 1
    assert sum(stages) == pytest.approx(copies * run().outcome.memory[0].parameters)
    gradients = [m.gradients for m in step.outcome.memory]
    assert sum(gradients) == pytest.approx(copies * run().outcome.memory[0].gradients)


def test_other_features_compose() -> None:
    assert run(activation_offload=True).outcome.peak_memory_bytes < run().outcome.peak_memory_bytes
    slow = simulate(run({"dp": 4}).scenario.unchecked_copy(update={"faults": _straggler()}))
    assert slow.step_time_s > 1.1 * run({"dp": 4}).step_time_s


def _straggler() -> Any:
    data = {
        "name": "x",
        "model": {"program": str(FILE)},
        "training": {"global_batch_size": 16},
        "cluster": "dgx-h100",
        "parallelism": {"dp": 4},
        "faults": {"stragglers": [{"rank": 1, "compute_scale": 50.0}]},
    }
    return parse_scenario(data).faults


def test_graphs_leave_out_the_hosts_time() -> None:
    """The kernels are those of the program; this one's step waits for its host."""

    def step_s(graphs: str) -> float:
        training = {"global_batch_size": 2, "cuda_graphs": graphs}
        data = {"name": "x", "model": {"program": str(FILE)}, "training": training, "cluster": "dgx-h100"}
        return simulate(parse_scenario(data)).step_time_s

    assert 0 < step_s("step") < 0.7 * step_s("none")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"parallelism": {"tp": 2}}, r"parallelism\.tp: found 2; .*calibrate\.capture --script"),
        ({"parallelism": {"cp": 2}}, r"parallelism\.cp: found 2"),
        ({"training": {"seq_len": 128}}, r"training\.seq_len: found 128; .* was captured with 64"),
        ({"training": {"recompute": "full"}}, r"training\.recompute: found 'full'; .* was captured with 'none'"),
        ({"training": {"precision": "fp16"}}, r"training\.precision: found 'fp16'; .* was captured with 'bf16'"),
        ({"training": {"attention": "unfused"}}, r"training\.attention: found 'unfused'; .* with 'fused'"),
        ({"model": {"layers": 3}}, r"model\.layers: found 3; model\.program says 4"),
        ({"model": {"wings": 3}}, r"model\.wings: unknown key beside program"),
        ({"model": {"program": "nowhere.json.gz"}}, r"model\.program: found 'nowhere\.json\.gz'; no such file"),
        ({"model": {"program": 3}}, r"model\.program: found 3; must be a file"),
        ({"distillation": {"teacher": "gpt2"}}, r"distillation: cannot be given with model\.program"),
    ],
)
def test_what_contradicts_the_program_is_refused(section: dict[str, Any], said: str) -> None:
    data: dict[str, Any] = {"model": {"program": str(FILE)}, "training": {"global_batch_size": 16}}
    for key, value in section.items():
        data[key] = {**data.get(key, {}), **value}
    with pytest.raises(InputError, match=said):
        parse_scenario({"name": "x", "cluster": "dgx-h100", **data})


def test_a_resolved_scenario_parses_to_itself() -> None:
    scenario = run({"pp": 2}).scenario
    assert scenario.for_training.precision == "bf16"
    assert scenario.for_training.param_dtype == "fp32"
    assert parse_scenario(scenario.model_dump(mode="json")) == scenario


def test_an_unknown_operator_is_priced_by_its_bytes_and_said(tmp_path: Path) -> None:
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    names = data["tables"]["names"]
    names[names.index("aten.silu")] = "mine.swish"
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    before, after = run(), run(file=path)
    assert after.outcome.provenance.priced_by_bytes == {"mine.swish": 4}
    assert before.outcome.provenance.priced_by_bytes == {}
    assert any("mine.swish (4 launches a micro-batch) is not known" in w for w in after.outcome.warnings)
    assert after.step_time_s == pytest.approx(before.step_time_s, rel=0.01)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_search_finds_what_all_its_layouts_have(share: float) -> None:
    data = {"model": {"program": str(FILE)}, "training": {"global_batch_size": 16}, "cluster": "dgx-h100"}
    space = make_space(Source("x", data), 4, "x")
    packed = pack(space)
    outcomes = [evaluate(packed, layout) for layout in legal(space)]
    assert {(o.layout.tp, o.layout.micro_batch_size, o.layout.recompute) for o in outcomes} == {(1, 2, "none")}
    limit = share * sorted(o.peak_memory_bytes for o in outcomes)[len(outcomes) // 2]
    fitting = sorted((o.step_time_s, o.layout) for o in outcomes if o.peak_memory_bytes <= limit)
    with local_workers(1) as pool:
        found = BestFirst(space, limit, 5, False, pool).run()
    assert [(o.step_time_s, o.layout) for o in found.best] == fitting[:5]
