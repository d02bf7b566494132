"""torchtitan's FSDP units: what is gathered together, and what stays gathered between forward and backward."""

from __future__ import annotations

import pytest

from sim.core.program import Block, BlockKind, Comm, Item, Phase
from sim.programs.data_parallel import DataParallel, make_data_parallel
from sim.programs.gathered_units import gathered_elements
from sim.programs.stages import stage_blocks
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.plan import make_plan
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


@pytest.mark.parametrize("date", [None, ROOT])
def test_two_neighbours_are_gathered_at_once_beside_the_root(date: str | None) -> None:
    blocks, dp = stage(date)
    embedding, layer, head = (b.params for b in (blocks[0], blocks[1], blocks[-1]))
    assert [b.kind for b in (blocks[0], blocks[-1])] == [BlockKind.EMBEDDING, BlockKind.HEAD]
    most = embedding + head + 2 * layer if date else max(embedding, head) + layer
    assert gathered_elements(blocks, dp) == most
