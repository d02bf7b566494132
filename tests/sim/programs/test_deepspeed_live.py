"""How many parameters DeepSpeed's ZeRO-3 has gathered at once, by a walk over its own list of modules."""

from __future__ import annotations

from collections import deque

import pytest

from sim.inputs.scenario import parse_scenario
from sim.programs.data_parallel import make_data_parallel
from sim.programs.gathered_units import gathered_elements
from sim.programs.stages import stage_blocks
from sim.ranks.plan import make_plan

LIVE, AHEAD = 1_000_000_000, 50_000_000  # stage3_max_live_parameters, which is also the reuse distance; prefetch bucket


def most_live(tensors: list[int]) -> int:
    """Return the most elements that are gathered at once, of modules with one tensor each, run forwards and backwards.

    PartitionedParameterCoordinator of DeepSpeed 0.19.8: a module's own tensor is fetched whatever is there; then others
    in the list's order, as long as less than the limit is there and less than a bucket on its way
    (`_fetch_sub_module_impl`). Behind a module its tensor is freed, unless the list has it again within the reuse
    distance, or what was fetched ahead has passed over it (`__params_to_release`).
    """
    order = [*range(len(tensors)), *reversed(range(len(tensors)))]
    queue, here, fetched_for, live, most = deque(enumerate(order)), set[int](), [-1] * len(tensors), 0, 0
    for step, own in enumerate(order):
        live += 0 if own in here else tensors[own]
        here.add(own)
        if fetched_for[own] < step:
            fetched_for[own] = queue.popleft()[0]
        most, left, sent = max(most, live), min(LIVE - live, AHEAD), 0
        while queue and sent < left:
            use, tensor = queue.popleft()
            fetched_for[tensor] = use
            sent += 0 if tensor in here else tensors[tensor]
            here.add(tensor)
        live += sent
        most, passed = max(most, live), 0
        kept = fetched_for[own] > step + 1
        for tensor in order[step + 1 :]:
            if kept or passed >= LIVE:
                break
            kept, passed = tensor == own, passed + tensors[tensor]
        if not kept:
            here.discard(own)
            live -= tensors[own]
    return most


@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "llama3-70b", "qwen3-32b", "llama3.2-1b"])
def test_the_output_layer_is_gathered_on_top_of_the_limit(model: str) -> None:
    """Within 4 %: what is on its way when the limit is reached is not counted in whole tensors."""
    data = {"model": model, "cluster": "dgx-h100", "parallelism": {"dp": 8, "zero": 3}}
    plan = make_plan(
        parse_scenario(data | {"training": {"seq_len": 512, "global_batch_size": 8, "framework": "deepspeed"}})
    )
    blocks = stage_blocks(plan, plan.parts[0], 0)
    tensors = [n for b in blocks for n in b.tensors if n > 1_000_000]  # smaller ones stay on every rank
    assert gathered_elements(blocks, make_data_parallel(plan)) == pytest.approx(most_live(tensors), rel=0.04)
