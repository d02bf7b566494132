"""Copies of [batch, seq, hidden] around messages of sequence parallelism, which cut it along seq."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import GPT, LLAMA, make

from sim.core.program import Comm, Compute, Program
from sim.models.dims import Shard, dims
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block, layer_parts
from sim.models.output.head import head_block

SBH = 512 * 2 * 1024 * 2  # bytes of one [s, b, h] in 16 bits


def around(program: Program) -> list[tuple[str, bool, bool]]:
    """Each message of tp: its kind, and whether a copy of its bytes stands before it and behind it."""
    found = []
    for before, item, behind in zip((None, *program[:-1]), program, (*program[1:], None), strict=True):
        if isinstance(item, Comm) and item.group == "tp" and item.kind != "all_reduce":
            copies = [
                isinstance(x, Compute) and x.kind == "copy" and x.bytes == 2 * item.bytes for x in (before, behind)
            ]
            found.append((item.kind, *copies))
    return found


GATHER, SCATTER, SUM = ("all_gather", False, True), ("reduce_scatter", True, False), ("reduce_scatter", False, False)


def test_a_compiled_graph_orders_what_is_gathered_and_what_is_scattered() -> None:
    """torch 2.14 under Inductor, recorded on a CPU: a kernel of torch.cat behind the gather and before the scatter of a
    matmul's result; the sum of three matmuls' gradients is written in order."""
    scenario = make(LLAMA, {"framework": "compiled"}, tp=4, sp=True)
    block = layer_block(scenario, 0)
    assert around(block.forward) == [GATHER, SCATTER] * 2
    assert around(block.backward) == [GATHER, SUM] * 2
    assert around(embedding_block(scenario).forward) == [SCATTER]
    assert around(embedding_block(scenario).backward) == around(head_block(scenario).forward) == [GATHER]


def test_the_gradient_of_a_lone_matmul_is_ordered() -> None:
    backward = layer_block(make(GPT, {"framework": "compiled"}, tp=4, sp=True), 0).backward
    assert around(backward) == [GATHER, SCATTER] * 2  # GPT's MLP has one matrix before its activation, attention one


@pytest.mark.parametrize(
    ("training", "gather"),
    [({}, (*GATHER[:2], False)), ({"software_date": "2025-06"}, GATHER)],
)
def test_one_sequence_is_gathered_in_order_since_torch_2_11(training: dict[str, Any], gather: tuple[Any, ...]) -> None:
    t = {"framework": "compiled", "micro_batch_size": 1, **training}
    assert around(layer_block(make(LLAMA, t, tp=4, sp=True), 0).forward) == [gather, SCATTER] * 2


def test_others_copy_nothing() -> None:
    """Megatron-Core's tensors are [seq, batch, hidden]; all-reduces cut nothing; chunks come and go in order."""
    of_megatron = layer_block(make(LLAMA, {"framework": "megatron"}, tp=4, sp=True), 0)
    assert around(of_megatron.forward) == [(*GATHER[:2], False), (*SCATTER[:1], False, False)] * 2
    whole = layer_block(make(LLAMA, {"framework": "compiled"}, tp=4), 0).forward
    assert not [i for i in whole if isinstance(i, Compute) and i.kind == "copy"]
    chunked = layer_block(make(LLAMA, {"framework": "compiled"}, tp=4, sp=True, tp_overlap="full"), 0).forward
    copies = [i.bytes for i in chunked if isinstance(i, Compute) and i.kind == "copy"]
    assert copies == [4 * SBH / 4] * 2  # of a rank's own rows


def test_what_is_ordered_lies_beside_what_arrived() -> None:
    held = []
    for n in (1, 2):
        scenario = make(LLAMA, {"framework": "compiled", "micro_batch_size": n}, tp=4, sp=True)
        parts = {o.name: o for o in layer_parts(scenario, dims(scenario), 0, Shard())}
        held.append(parts["mlp_up"].forward_bytes)
    assert held[1] - 2 * held[0] == SBH
