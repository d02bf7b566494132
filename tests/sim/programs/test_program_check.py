"""The form of programs: every shipped training scenario has it, and what breaks it is named."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.program import BLOCK_END, Comm, Compute, Item, Phase, Program, Wait
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.models.balance import with_balanced_stages
from sim.prices.operator_prices import Costs
from sim.prices.profile import HOST_COPIES
from sim.prices.profiles import load_profile
from sim.programs.stages import Stage
from sim.programs.step_end import epilogue
from sim.programs.streams import streams_of_groups
from sim.ranks.plan import Plan
from sim.simulation import Prepared, prepare
from tests.sim.program_check import check

ROOT = Path(__file__).parents[3]
SCENARIOS = sorted(p for p in (ROOT / "scenarios").rglob("*.yaml") if "\ntraining:" in p.read_text())


def work(name: str = "x", phase: Phase = Phase.FORWARD, flops: float = 1.0) -> Compute:
    return Compute(name, "gemm", (1, 1, 1, 1), "bf16", flops, 1.0, phase)


def talk(handle: str = "", after: str = "") -> Comm:
    return Comm("message", "all_reduce", "dp", 8.0, Phase.FORWARD, not handle, handle, after=after)


def of_stage(stage: Stage, split: bool) -> list[Program]:
    """What a stage runs in a step of two micro-batches."""
    kinds = (Kind.I, Kind.W) if split else (Kind.B,)
    forwards = [stage.forward(first, True) for first in (True, False)]
    return [stage.prologue(), *forwards, *(stage.backward(k, last, True) for last in (False, True) for k in kinds)]


def check_streams(program: Program, plan: Plan) -> None:
    """Each message between ranks queues where `shared_links` expects the messages of its group."""
    streams = streams_of_groups(plan)
    for item in program:
        if isinstance(item, Comm) and item.kind not in HOST_COPIES and plan.group_size(item.group) > 1:
            assert streams[item.group] == (item.stream or item.group), item


def check_step(ready: Prepared) -> None:
    for held in ready.stages:
        for split in (False, True):
            for stage in held.values():
                left: frozenset[str] = frozenset()
                for program in of_stage(stage, split):
                    left = check(program, left)
                    check_streams(program, ready.plan)
        check(epilogue(tuple(held.values()), ready.plan, True))


@pytest.mark.slow
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_shipped_scenario_has_programs_of_this_form(path: Path) -> None:
    scenario = with_balanced_stages(load_scenario(path))
    check_step(prepare(scenario, Costs(load_profile(scenario.calibration), scenario.cluster.gpu)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("framework", ["deepspeed", "gpt_neox", "megatron", "eager"])
@pytest.mark.parametrize("experts", [False, True])
def test_messages_of_every_stage_of_zero_queue_where_links_expect_them(
    framework: str, zero: int, experts: bool
) -> None:
    """DeepSpeed's first two stages all-reduce whole gradients, which no shipped scenario has."""
    model: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024}
    model |= {"moe": {"experts": 8, "top_k": 2, "ffn": 512}} if experts else {}
    data = {
        "model": model,
        "training": {"seq_len": 512, "global_batch_size": 64, "framework": framework},
        "parallelism": {"dp": 16, "zero": zero, "ep": 4 if experts else 1},
        "cluster": {"preset": "dgx-h100", "nodes": 2},
    }
    scenario = parse_scenario(data)
    check_step(prepare(scenario, Costs(load_profile(scenario.calibration), scenario.cluster.gpu)))


@pytest.mark.parametrize(
    ("framework", "layout"),
    [
        *itertools.product(["deepspeed", "eager"], [{}, {"shard_size": 8}, {"dp_sync": "after_backward"}]),
        ("transformers", {"fsdp_version": 1}),
        ("composer", {"shard_size": 8}),
    ],
)
def test_copies_of_parameters_on_the_host(framework: str, layout: dict[str, Any]) -> None:
    data = {
        "model": {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024, "moe": {"experts": 8, "top_k": 2, "ffn": 512}},
        "training": {
            "seq_len": 512,
            "global_batch_size": 64,
            "framework": framework,
            "optimizer_offload": "cpu",
            "parameter_offload": True,
        },
        "parallelism": {"dp": 16, "zero": 3, "ep": 4, **layout},
        "cluster": {"preset": "dgx-h100", "nodes": 2},
    }
    scenario = parse_scenario(data)
    check_step(prepare(scenario, Costs(load_profile(scenario.calibration), scenario.cluster.gpu)))


def test_what_is_left_is_returned() -> None:
    assert check((work(), talk("a"), BLOCK_END, talk("b"), Wait("a", Phase.FORWARD))) == {"b"}
    assert check((Wait("b", Phase.FORWARD), work()), {"b"}) == set()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ((work("bad", flops=-1.0),), "name='bad'.*found -1.0"),
        ((work("bad", flops=float("nan")),), "name='bad'.*found nan"),
        ((replace(talk(), bytes=-2.0),), "found -2.0"),
        ((work(phase=Phase.INPUT_GRAD), work("late")), "name='late'.*forward after input_grad"),
        ((Wait("h", Phase.FORWARD),), "nothing of this handle"),
        ((talk("h"), Wait("h", Phase.FORWARD), Wait("h", Phase.FORWARD)), "item 2.*nothing of this handle"),
        ((talk("h"), talk("h")), "not waited for yet"),
        ((talk("h", after="g"),), "comes after 'g'"),
        ((replace(talk(), handle="h"),), "a blocking one has none"),
    ],
)
def test_what_breaks_the_form_is_named(program: tuple[Item, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(program)
