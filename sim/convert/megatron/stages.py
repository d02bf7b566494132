"""Megatron-LM's arguments of pipeline parallelism as keys of a scenario's `parallelism`."""

from __future__ import annotations

import re
from typing import Any

from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.core.units import counted
from sim.inputs.input_source import show

BLOCKING = "no-overlap-p2p-communication"
DEFERS = "defer-embedding-wgrad-compute"
WITHOUT_DEFERRAL = (
    *("no-gradient-accumulation-fusion", "mtp-num-layers", "overlap-moe-expert-parallel-comm", "fp8-output-proj"),
    *("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph", "use-megatron-fsdp"),
)
EARLY = "overlap-param-gather-with-optimizer-step"
LAYERS_EACH = "num-layers-per-virtual-pipeline-stage"
WITH_OVERLAP = (
    "interleaved stages in groups of more micro-batches than pp are simulated with messages beside computations; "
    "without this overlap Megatron-LM's ranks wait for each (core/pipeline_parallel/schedules.py), so its step takes "
    "longer"
)


def pipeline_of(s: Settings, pp: int) -> dict[str, Any]:
    """Schedule, stages and their layers; nothing for one stage."""
    if pp == 1:
        return {}
    stages, layers, mtp_stage = _given_layout(s) or (*_counted_stages(s, pp), None)
    out: dict[str, Any] = {} if layers is None else {"layers_per_stage": layers}
    out |= {} if mtp_stage is None else {"mtp_stage": mtp_stage}
    out |= _deferral(s)
    if stages > pp:
        out |= _early_gather(s)
        group = s.whole("microbatch-group-size-per-virtual-pipeline-stage")
        blocks = s.flag(BLOCKING)
        if blocks and group not in (None, pp):
            s.notes.append(f"{s.written_as(BLOCKING)}: {WITH_OVERLAP}")
            blocks = False
        out |= {"schedule": "interleaved_1f1b", "virtual_stages": stages // pp, "p2p_overlap": not blocks}
        out["micro_batch_group"] = None if group == pp else group  # pp is the default, which a saved config has
        return out
    s.take(BLOCKING)  # 1F1B has nothing to overlap (core/pipeline_parallel/schedules.py)
    return {**out, **_zero_bubble(s, pp)}


def _deferral(s: Settings) -> dict[str, Any]:
    """The output matrix's weight gradients that the last stage puts off; left to the notes where that is not
    simulated."""
    others = (s.values.get(name) for name in WITHOUT_DEFERRAL)
    if any(str(value) not in ("None", "0", "False") for value in others) or not s.values.get(DEFERS):
        return {}
    return {"wgrad_deferral_limit": s.integer("wgrad-deferral-limit", 0)} if s.flag(DEFERS) else {}


def _early_gather(s: Settings) -> dict[str, Any]:
    """A first stage's parameters gathered beside the optimizer, where the other flags that it needs are given."""
    needed = ("use-distributed-optimizer", "overlap-param-gather")
    others = ("use-megatron-fsdp", "use-custom-fsdp", "use-layer-wise-distributed-optimizer", "optimizer-cpu-offload")
    simulated = all(s.values.get(name) for name in needed) and not any(s.values.get(name) for name in others)
    if not simulated or s.values.get("optimizer", "adam") not in ("adam", "sgd") or not s.values.get(EARLY):
        return {}
    return {"overlap_param_gather_with_optimizer_step": True} if s.flag(EARLY) else {}


def _given_layout(s: Settings) -> tuple[int, list[int], int | None] | None:
    """The number of stages that `--pipeline-model-parallel-layout` draws, each one's layers, and the stage of the
    prediction modules where it is not the last; None without it.

    Raises:
        InputError: for other letters, and for prediction modules on several stages, which Megatron-LM refuses.
    """
    key = "pipeline-model-parallel-layout"
    layout = s.take(key)
    if not isinstance(layout, str):
        return None
    s.take("num-virtual-stages-per-pipeline-rank")
    s.take(LAYERS_EACH)
    parts = _unrolled(layout.replace("\\", "")).split("|")  # which a script that is evaluated again escapes
    if not {*"".join(parts)} <= {*"EtmL,"}:
        raise InputError(
            f"{s.place(key)}: found {show(layout)}; a stage has letters of E, t, m, L, as in Ett|(tt|)*2mL"
        )
    predicts = [i for i, part in enumerate(parts) if "m" in part]
    if len(predicts) > 1:
        raise InputError(f"{s.place(key)}: found {show(layout)}; all m must be in one stage")
    apart = next((i for i in predicts if i < len(parts) - 1), None)
    return len(parts), [part.count("t") for part in parts], apart


def _counted_stages(s: Settings, pp: int) -> tuple[int, list[int] | None]:
    """The number of stages that the other flags mean, and each one's layers where these are not equally many."""
    extra = [s.flag(f"account-for-{what}-in-pipeline-split") for what in ("embedding", "loss")]
    ends = [s.whole(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    virtual = s.whole("num-virtual-stages-per-pipeline-rank")
    if s.take(LAYERS_EACH) is not None and virtual is None:
        virtual = _stages_per_rank(s, (s.integer("num-layers") + sum(extra)) / pp)
    virtual = virtual or 1
    if any(extra) or ends != [None, None]:
        return pp * virtual, _uneven(s, pp, virtual, extra, ends)
    layers = s.whole("num-layers")
    if layers is not None and layers % (pp * virtual):
        raise _not_divided(s, layers, layers, pp, virtual)
    return pp * virtual, None


def _stages_per_rank(s: Settings, layers: float) -> int:
    """The stages of a pipeline rank with so many layers, of which a flag gives each stage's.

    Raises:
        InputError: for a number that does not divide them, which Megatron-LM refuses (training/arguments.py).
    """
    each = s.size(LAYERS_EACH)
    if layers % each:
        raise InputError(f"{s.place(LAYERS_EACH)}: found {each}; must divide a pipeline rank's layers ({layers:g})")
    return int(layers) // each


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
        raise _not_divided(s, layers, rest, others, virtual)
    counts = [number // virtual for _ in range(virtual) for number in of_ranks]
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return counts


def _not_divided(s: Settings, layers: int, shared: int, ranks: int, virtual: int) -> InputError:
    """The refusal of a model's layers of which so many do not divide among pipeline ranks and their stages."""
    among = f"{counted(ranks, 'pipeline rank')} with {counted(virtual, 'stage')} each"
    return InputError(f"{s.place('num-layers')}: found {layers}; {counted(shared, 'layer')} for {among} do not divide")


def _unrolled(layout: str) -> str:
    """A layout's text without `t*3` and `(tt|)*2` (core/transformer/pipeline_parallel_layer_layout.py).

    A layer is `t`; E, m and L are none.
    """
    for times in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(times, lambda found: found[1] * int(found[2][:4]), layout)
    return layout
