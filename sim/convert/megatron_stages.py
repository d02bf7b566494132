"""Megatron-LM's arguments of pipeline parallelism as keys of a scenario's `parallelism`."""

from __future__ import annotations

import re
from typing import Any

from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.core.units import counted


def pipeline_of(s: Settings, pp: int) -> dict[str, Any]:
    """Schedule, stages and their layers; nothing for one stage."""
    if pp == 1:
        return {}
    layout = s.take("pipeline-model-parallel-layout")
    virtual = s.whole("num-virtual-stages-per-pipeline-rank")
    per_virtual = s.take("num-layers-per-virtual-pipeline-stage")
    out: dict[str, Any] = {}
    stages = pp
    if isinstance(layout, str):
        parts = _unrolled(layout).split("|")
        stages, out["layers_per_stage"] = len(parts), [part.count("t") for part in parts]
        if any("m" in part for part in parts[:-1]):
            s.notes.append(
                f"{s.written_as('pipeline-model-parallel-layout')}: m is simulated in the last stage, with L"
            )
    else:
        extra = [s.flag(f"account-for-{what}-in-pipeline-split") for what in ("embedding", "loss")]
        ends = [s.whole(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
        if virtual is None and per_virtual is not None:
            each = (s.integer("num-layers") + sum(extra)) // pp
            virtual = max(1, each // s.size("num-layers-per-virtual-pipeline-stage"))
        stages = pp * (virtual or 1)
        if any(extra) or ends != [None, None]:
            out["layers_per_stage"] = _uneven(s, pp, stages // pp, extra, ends)
    if stages > pp:
        blocking = s.flag("no-overlap-p2p-communication")
        out |= {"schedule": "interleaved_1f1b", "virtual_stages": stages // pp, "p2p_overlap": not blocking}
        out["micro_batch_group"] = s.whole("microbatch-group-size-per-virtual-pipeline-stage")
        return out
    s.take("no-overlap-p2p-communication")  # 1F1B has nothing to overlap (core/pipeline_parallel/schedules.py)
    return {**out, **_zero_bubble(s, pp)}


def _zero_bubble(s: Settings, pp: int) -> dict[str, Any]:
    """The schedule of sail-sg/zero-bubble-pipeline-parallelism (its README, "Zero Bubble Command Line Arguments")."""
    in_v, enabled = s.flag("zero-bubble-v-schedule"), s.flag("enable-zero-bubble")
    if not (in_v or enabled):
        return {}
    pending = "zero-bubble-max-pending-backward"
    if in_v:
        s.take(pending)
        return {"schedule": "zb_v"}
    if s.take(pending, "auto") == "auto":
        s.notes.append(f"--{pending} auto: simulated as {2 * pp}, with room for as many activations as help")
        return {"schedule": "zb_h2"}
    allowed = s.size(pending)
    known = {pp: "zb_h1", 2 * pp: "zb_h2"}
    return (
        {"schedule": known[allowed]} if allowed in known else {"schedule": "zb_search", "schedule_memory": allowed / pp}
    )


def _uneven(s: Settings, pp: int, virtual: int, extra: list[bool], ends: list[int | None]) -> list[int]:
    """Layers of each stage, in the model's order: ranks at the ends have their own number, or embedding and loss count
    as layers (`get_num_layers_to_build`, core/transformer/transformer_block.py).

    Raises:
        InputError: for numbers that do not divide.
    """
    layers, given = s.integer("num-layers"), [end for end in ends if end is not None]
    others = pp - len(given)
    rest = layers + sum(extra) - sum(given)
    each = rest // others if others else 0
    of_ranks = [each] * pp
    for rank, end in zip((0, -1), ends, strict=True):
        of_ranks[rank] = each if end is None else end
    if rest != each * others or any(number % virtual for number in of_ranks):
        ranks = f"{counted(others, 'pipeline rank')} with {counted(virtual, 'stage')} each"
        raise InputError(f"{s.place('num-layers')}: found {layers}; {counted(rest, 'layer')} for {ranks} do not divide")
    counts = [number // virtual for _ in range(virtual) for number in of_ranks]
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return counts


def _unrolled(layout: str) -> str:
    """A layout's text without `t*3` and `(tt|)*2` (core/transformer/pipeline_parallel_layer_layout.py).

    A layer is `t`; E, m and L are none.
    """
    for times in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(times, lambda found: found[1] * int(found[2][:4]), layout)
    return layout
