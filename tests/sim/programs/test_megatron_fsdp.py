"""Megatron's FSDP: what it gathers when, what stays gathered, and which buckets of gradients wait."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.core.program import Block, Comm, Item, Phase
from sim.programs.data_parallel import DataParallel, make_data_parallel
from sim.programs.gathered_units import gathered_elements
from sim.programs.stages import Stage, stage_blocks
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.plan import make_plan
from sim.results.memory_changes import backward_peaks
from sim.simulation import simulate
from sim.variants.frameworks.zero import ZeroEngine
from tests.sim.cases import llama_like, scenario_with

BOTH = frozenset({Phase.INPUT_GRAD, Phase.WEIGHT_GRAD})
BATCH = {"seq_len": 64, "global_batch_size": 4}
LAYERS = 4
MODEL = llama_like(LAYERS, 256, 4, 8192)  # blocks: embedding, layers, norm, output


def stage(ahead: float = 1.0, **layout: Any) -> tuple[tuple[Block, ...], DataParallel]:
    """The blocks, and a data parallelism that gathers so many layers ahead."""
    training = {"seq_len": 64, "global_batch_size": 4, "framework": "megatron"}
    plan = make_plan(scenario_with(training, {"dp": 2, "zero": 3} | layout, model=MODEL))
    blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
    engine = dp.engine._replace(ahead_elements=int(ahead * blocks[1].params) if ahead else 0)
    return blocks, replace(dp, engine=engine)


def gathered(program: list[list[Item]]) -> list[list[str]]:
    """The names of what is gathered as each block begins."""
    found = ([i for i in part if isinstance(i, Comm) and i.kind == "all_gather"] for part in program)
    return [[i.name.removesuffix(" parameters") for i in part] for part in found]


def test_ends_are_gathered_once_a_step() -> None:
    blocks, dp = stage()
    assert gathered(weave_forward(blocks, dp, True))[0] == ["embedding", "layer 0"]
    first, later = ([n for part in gathered(weave_forward(blocks, dp, x)) for n in part] for x in (True, False))
    layers = [f"layer {i}" for i in range(LAYERS)]
    assert [n for n in first if n not in layers] == [b.name for b in blocks if "layer" not in b.name]
    assert later == layers


def test_a_backward_begins_with_a_run_of_layers_and_its_own_comes_last() -> None:
    blocks, dp = stage(ahead=1.5)  # two layers ahead
    assert gathered(weave_forward(blocks, dp, False))[:2] == [["layer 0", "layer 1"], ["layer 2"]]
    sent = gathered(weave_backward(blocks, dp, BOTH, True))
    assert [part for part in sent if part] == [["layer 1", "layer 2", "layer 3"], ["layer 0"]]
    assert sent.index(["layer 1", "layer 2", "layer 3"]) == [b.name for b in blocks[::-1]].index("layer 3")


@pytest.mark.parametrize(("ahead", "layers"), [(0.5, 2), (1.0, 2), (1.5, 3), (9.0, 4)])
def test_layers_ahead_lie_beside_the_ends(ahead: float, layers: int) -> None:
    blocks, dp = stage(ahead=ahead)
    ends = sum(b.params for b in blocks if "layer" not in b.name)
    assert gathered_elements(blocks, dp) == ends + layers * blocks[1].params


@pytest.mark.parametrize("waiting", [0.0, 1.0, 2.5, 100.0])
def test_buckets_stay_until_enough_wait_behind_them(waiting: float) -> None:
    blocks, dp = stage()
    engine = dp.engine._replace(queued_elements=max(1, int(waiting * blocks[1].params)))
    dp = replace(dp, engine=engine)
    made = Stage(blocks, dp, simulate(scenario_with({"seq_len": 64, "global_batch_size": 1})).stages[0][0].costs, (), 0)
    held = [peak - b.backward_peak_bytes for b, peak in zip(blocks[::-1], backward_peaks(made, Kind.B), strict=True)]
    queue, expected = list[int](), []
    for b in blocks[::-1]:
        expected.append((sum(queue) + b.params) * dp.gradient_bytes)
        while sum(queue) > engine.queued_elements:
            queue = queue[1:]
        queue.append(b.params)
    assert held == pytest.approx(expected)
    if waiting == 100.0:
        assert held[-1] == pytest.approx(sum(b.params for b in blocks) * dp.gradient_bytes)


def test_replicas_reduce_once_a_step() -> None:
    def once(**layout: Any) -> bool:
        training = {"seq_len": 64, "global_batch_size": 16, "framework": "megatron"}
        s = scenario_with(training, {"dp": 4, "zero": 3, "shard_size": 2} | layout, model=MODEL)
        return s.parallelism.holds_back_replicas

    assert [once(), once(zero=2), once(all_reduce_once=False), once(fsdp_version=2)] == [True, True, False, False]


def test_torch_s_fsdp2_can_take_its_place() -> None:
    blocks, dp = stage(0, fsdp_version=2)
    assert dp.engine == ZeroEngine()
    assert gathered(weave_backward(blocks, dp, BOTH, True))[0][0] == blocks[-1].name
    with pytest.raises(InputError, match="its own and torch's FSDP2, not the first"):
        stage(fsdp_version=1)


@pytest.mark.parametrize("zero", [2, 3])
def test_double_buffers_hold_two_layers(zero: int) -> None:
    """param_and_grad_buffer.py: `need_skip_prefetch` and `_enforce_double_buffer_limit` count two units."""
    blocks, dp = stage(ahead=0, zero=zero)
    plain = make_plan(scenario_with({"framework": "megatron"} | BATCH, {"dp": 2, "zero": zero}, model=MODEL))
    assert make_data_parallel(plain).engine.ahead_elements == 500_000_000
    doubled = {"dp": 2, "zero": zero, "fsdp_double_buffer": True}
    dp = make_data_parallel(make_plan(scenario_with({"framework": "megatron"} | BATCH, doubled, model=MODEL)))
    ends = sum(b.params for b in blocks if "layer" not in b.name)
    assert gathered_elements(blocks, dp) == ends + 2 * blocks[1].params
    assert [n for part in gathered(weave_forward(blocks, dp, False))[:2] for n in part] == (
        ["layer 0", "layer 1"] if zero == 3 else []
    )
    made = Stage(blocks, dp, simulate(scenario_with(BATCH)).stages[0][0].costs, (), 0)
    held = [peak - b.backward_peak_bytes for b, peak in zip(blocks[::-1], backward_peaks(made, Kind.B), strict=True)]
    layers = [h for h, b in zip(held, blocks[::-1], strict=True) if "layer" in b.name]
    assert layers[1:] == pytest.approx([2 * blocks[1].params * dp.gradient_bytes] * (LAYERS - 1))


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        ({"framework": "megatron"}, {"zero": 1}),
        ({"framework": "megatron"}, {"zero": 3, "fsdp_version": 2}),
        ({"framework": "compiled"}, {"zero": 3}),
    ],
)
def test_who_has_double_buffers(training: dict[str, Any], layout: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="fsdp_double_buffer: found true; needs zero 2 or 3 with framework megatron,"):
        scenario_with(training | BATCH, {"dp": 2, "fsdp_double_buffer": True} | layout, model=MODEL)
