"""torchtitan's FSDP units: what is gathered together, and what stays gathered between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Block, BlockKind, Comm, Compute, Item, Phase
from sim.inputs.scenario import parse_scenario
from sim.programs.data_parallel import DataParallel, make_data_parallel
from sim.programs.gathered_units import gathered_elements
from sim.programs.stages import stage_blocks
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.plan import make_plan
from sim.simulation import Simulation, simulate
from tests.sim.cases import llama_like, scenario_with

LAYERS = 4
BOTH = frozenset((Phase.INPUT_GRAD, Phase.WEIGHT_GRAD))
ROOT = "2025-07"  # torchtitan's units before pull request 1094


def stage(date: str | None, framework: str = "compiled") -> tuple[tuple[Block, ...], DataParallel]:
    training = {"seq_len": 64, "global_batch_size": 2, "framework": framework, "software_date": date}
    plan = make_plan(scenario_with(training, {"dp": 2, "zero": 3}, model=llama_like(LAYERS, 256, 4, 8192)))
    return stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)


def sent(items: list[list[Item]], kind: str) -> list[list[float]]:
    """Elements of the messages of a kind in each block's part of a program."""
    return [[i.bytes / 2 for i in part if isinstance(i, Comm) and i.kind == kind] for part in items]


def test_the_output_stays_gathered_for_the_backward() -> None:
    blocks, dp = stage(None)
    *_, layer, head = [b.params for b in blocks]
    embedding = blocks[0].params
    assert sent(weave_forward(blocks, dp, True), "all_gather") == [[embedding, layer], *[[layer]] * 3, [head], []]
    again = sent(weave_backward(blocks, dp, BOTH, True), "all_gather")
    assert again == [[layer], [layer], [layer], [layer], [embedding], []]
    eager = sent(weave_backward(*stage(None, "eager"), BOTH, True), "all_gather")
    assert eager == [[head, layer], [layer], [layer], [layer], [embedding], []]


def test_the_root_of_older_releases_holds_embedding_and_output() -> None:
    """They come with the first message, stay until the backward has ended, and are reduced then; so do the
    last layer's parameters stay."""
    blocks, dp = stage(ROOT)
    root, layer = blocks[0].params + blocks[-1].params, blocks[1].params
    assert sent(weave_forward(blocks, dp, True), "all_gather") == [[root, layer], *[[layer]] * 3, [], []]
    program = weave_backward(blocks, dp, BOTH, True)
    assert sent(program, "all_gather") == [[], [layer], [layer], [layer], [], []]
    reduced = [[2 * n / dp.gradient_bytes for n in part] for part in sent(program, "reduce_scatter")]
    assert reduced == [[], *[[layer]] * 4, [root]]


def first_fsdp(prefetches: bool, framework: str = "transformers") -> tuple[tuple[Block, ...], DataParallel]:
    training = {"seq_len": 64, "global_batch_size": 2, "framework": framework}
    layout = {"dp": 2, "zero": 3, "fsdp_version": 1, "backward_prefetch": prefetches}
    plan = make_plan(scenario_with(training, layout, model=llama_like(LAYERS, 256, 4, 8192)))
    return stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)


def test_the_first_fsdp_keeps_its_root_and_may_gather_late() -> None:
    """A layer's gather comes before the reduction of the layer before it, or behind it, as its own backward begins."""
    for framework in ("eager", "compiled", "transformers"):
        blocks, dp = first_fsdp(True, framework)
        assert sent(weave_backward(blocks, dp, BOTH, True), "all_gather") == [*[[blocks[1].params]] * 4, [], []]
        assert dp.engine == stage(None, framework)[1].engine.as_first_fsdp
    kinds = {}
    for prefetches in (True, False):
        program = weave_backward(*first_fsdp(prefetches), BOTH, True)
        kinds[prefetches] = [[i.kind for i in part if isinstance(i, Comm)] for part in program]
    ahead, late = ["all_gather", "reduce_scatter"], ["reduce_scatter"]
    assert kinds[True] == [ahead[:1], ahead, ahead, ahead, late, late]
    assert kinds[False] == [[], ahead, ahead, ahead, ahead, late]


@pytest.mark.parametrize(
    ("framework", "layout", "problem"),
    [
        ("megatron", {"fsdp_version": 1}, "framework megatron has its own and torch's FSDP2, not the first"),
        ("nanotron", {"fsdp_version": 1}, "framework nanotron has a sharding of its own, not torch's FSDP"),
        ("composer", {"fsdp_version": 2}, "framework composer has torch's first FSDP alone"),
        ("transformers", {"backward_prefetch": False}, "needs torch's first FSDP: parallelism.fsdp_version 1"),
    ],
)
def test_an_fsdp_that_a_framework_lacks_is_refused(framework: str, layout: dict[str, Any], problem: str) -> None:
    training = {"seq_len": 64, "global_batch_size": 2, "framework": framework}
    with pytest.raises(InputError, match=problem):
        scenario_with(training, {"dp": 2, "zero": 3, **layout}, model=llama_like(LAYERS, 256, 4, 8192))


def test_without_prefetching_neither_message_is_hidden() -> None:
    training = {"seq_len": 2048, "global_batch_size": 8, "framework": "transformers"}
    steps = []
    for layout in ({}, {"backward_prefetch": False}):
        keys = {"dp": 8, "zero": 3, "fsdp_version": 1, **layout}
        steps.append(simulate(scenario_with(training, keys, model="llama3-8b"), engine="static").outcome.step_time_s)
    assert steps[1] > 1.05 * steps[0]


def test_gradients_of_norms_are_summed_over_tensor_parallel_ranks() -> None:
    """A tensor each, in 16 bits, behind each unit's backward and before its reduction; never with whole sequences."""
    for sp, dp_size, expected in (
        (True, 2, [[256], *[[256, 256]] * LAYERS, []]),
        (False, 2, [[]] * 6),
        (True, 1, [[]] * 6),
    ):
        training = {"seq_len": 64, "global_batch_size": 2, "framework": "compiled"}
        layout = {"dp": dp_size, "tp": 2, "sp": sp, "zero": 3}
        plan = make_plan(scenario_with(training, layout, model=llama_like(LAYERS, 256, 4, 8192)))
        blocks = stage_blocks(plan, plan.parts[0], 0)
        program = weave_backward(blocks, make_data_parallel(plan), BOTH, True)
        summed = [[i for i in part if isinstance(i, Comm) and "shared" in i.name] for part in program]
        assert [[i.bytes / 2 for i in part] for part in summed] == expected
        assert {(i.kind, i.group, i.blocking) for part in summed for i in part} <= {("all_reduce", "tp", True)}


@pytest.mark.parametrize("date", [None, ROOT])
def test_two_neighbours_are_gathered_at_once_beside_the_root(date: str | None) -> None:
    blocks, dp = stage(date)
    embedding, layer, head = (b.params for b in (blocks[0], blocks[1], blocks[-1]))
    assert [b.kind for b in (blocks[0], blocks[-1])] == [BlockKind.EMBEDDING, BlockKind.HEAD]
    most = embedding + head + 2 * layer if date else max(embedding, head) + layer
    assert gathered_elements(blocks, dp) == most


def accelerated(micro_batches: int, **training: Any) -> Simulation:
    data = {
        "model": {"preset": "llama3-8b", "layers": 4},
        "training": {
            "seq_len": 4096,
            "global_batch_size": 8 * micro_batches,
            "framework": "transformers",
            "param_dtype": "fp32",
            **training,
        },
        "parallelism": {"dp": 8, "zero": 3, "accumulate_unsharded": True},
        "cluster": "dgx-h100",
    }
    return simulate(parse_scenario(data))


def test_accelerate_adds_up_and_reduces_in_16_bits() -> None:
    """accelerate/utils/dataclasses.py: `set_mixed_precision` gives FSDP one dtype for parameters and reductions.
    torch's FSDP2 then adds whole gradients up as they come, and casts the shard that is left to fp32."""
    whole, wide = accelerated(4), accelerated(4, grad_reduce_dtype="fp32")
    assert whole.plan.scenario.for_training.grad_reduce_dtype == "bf16"
    assert 2 * whole.result["memory"][0]["gradients"] == wide.result["memory"][0]["gradients"]
    shard, kept = accelerated(1), accelerated(1, grad_reduce_dtype="fp32")
    assert shard.result["memory"][0]["gradients"] == kept.result["memory"][0]["gradients"]  # in fp32


@pytest.mark.parametrize(("reduced", "moved"), [("bf16", 2 + 2 + (2 + 4) / 8), ("fp32", 2 + 4)])
def test_what_fsdp2_reduces_is_copied_into_one_buffer(reduced: str, moved: float) -> None:
    blocks = accelerated(1, grad_reduce_dtype=reduced).stages[0][0].blocks
    sums = [i for i in blocks[1].backward if isinstance(i, Compute) and i.name.endswith("_accumulate")]
    assert sum(i.bytes for i in sums) == pytest.approx(moved * sum(m.elements for m in blocks[1].matrices))


def test_accelerate_gathered_its_root_twice_and_has_torchtitans_units_today() -> None:
    """accelerate/utils/fsdp_utils.py: fsdp2_prepare_model, before and behind pull request 4015."""
    blocks, dp = stage("2026-05", "transformers")
    root, layer = blocks[0].params + blocks[-1].params, blocks[1].params
    assert sent(weave_forward(blocks, dp, True), "all_gather") == [[root, layer], *[[layer]] * 3, [], []]
    again = sent(weave_backward(blocks, dp, BOTH, True), "all_gather")
    assert again == [[root, layer], *[[layer]] * 3, [], []]
    programs = [weave_backward(*stage(None, name), BOTH, True) for name in ("transformers", "compiled")]
    assert sent(programs[0], "all_gather") == sent(programs[1], "all_gather")


def test_the_root_of_torchs_first_fsdp_stays() -> None:
    """torch/distributed/fsdp/_runtime_utils.py: `_post_forward_reshard`; the last layer is freed."""
    blocks, dp = stage("2023-06", "composer")
    root, layer = blocks[0].params + blocks[-1].params, blocks[1].params
    assert sent(weave_forward(blocks, dp, True), "all_gather") == [[root, layer], *[[layer]] * 3, [], []]
    assert sent(weave_backward(blocks, dp, BOTH, True), "all_gather") == [[layer], *[[layer]] * 3, [], []]


@pytest.mark.parametrize("layout", [{}, {"fsdp_version": 1}])
def test_llm_foundrys_tied_matrix_is_a_unit_since_its_release_0_2(layout: dict[str, Any]) -> None:
    """models/mpt/modeling_mpt.py: `child._fsdp_wrap = True` of embedding and norm. The embedding and the output gather
    the matrix, the backward gathers it for the output and keeps it; a step without resharding gathers it once."""
    gpt = {"layers": LAYERS, "hidden": 256, "heads": 4, "vocab": 8192, "tied_embeddings": True}
    training = {"seq_len": 64, "global_batch_size": 2, "framework": "composer"}

    def programs(**more: Any) -> tuple[DataParallel, list[list[float]], list[list[float]], tuple[Block, ...]]:
        plan = make_plan(scenario_with(training, {"dp": 2, "zero": 3, **layout, **more}, model=gpt))
        blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
        forward, backward = weave_forward(blocks, dp, True), weave_backward(blocks, dp, BOTH, True)
        return dp, sent(forward, "all_gather"), sent(backward, "all_gather"), blocks

    dp, forward, backward, blocks = programs()
    matrix, layer, norm = 8192 * 256, blocks[1].params, blocks[-1].params
    assert blocks[0].params == matrix
    output = matrix + norm
    assert forward == [[matrix, layer], *[[layer]] * 2, [layer], [output], []]
    assert backward == [[output, layer], *[[layer]] * 3, [], []]
    assert gathered_elements(blocks, dp) == matrix + 2 * layer
    assert programs(reshard_after_forward=False)[1] == [[matrix, layer], *[[layer]] * 2, [layer], [norm], []]
