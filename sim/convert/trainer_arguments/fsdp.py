"""FSDP by TrainingArguments' `fsdp` and `fsdp_config`, as a scenario's `parallelism`."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Machine, Settings
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source

OFF = ("no", "", False, None)
# Words of TrainingArguments' `fsdp` (training_args.py, _apply_legacy_fsdp_to_config); the hybrid ones shard in a node.
FSDP: dict[str, dict[str, Any]] = {
    "full_shard": {"zero": 3},
    "shard_grad_op": {"zero": 3, "reshard_after_forward": False},
    "hybrid_shard": {"zero": 3},
    "hybrid_shard_zero2": {"zero": 3, "reshard_after_forward": False},
    "no_shard": {"zero": 0},
}
OFFLOADS = ("cpu_offload", "offload_params")  # of Transformers' fsdp_config, of Accelerate's and Axolotl's
LATE = "no_prefetch"
FIRST = (
    "fsdp_config.backward_prefetch: torch's first FSDP alone has it and is simulated; Transformers since 2026 runs "
    "FSDP2 unless `version` is 1: set parallelism.fsdp_version=null"
)
UNLIMITED = (
    "fsdp_config.limit_all_gathers: false is not simulated; each layer is gathered one layer ahead, while without the "
    "limit a host that is far ahead of the GPU gathers more"
)
WHOLE_ON_HOST = (
    "fsdp: offload with no_shard: the optimizer runs on the host; parameters and gradients, which lie there too, stay "
    "on the GPU here"
)
SUMMED_WHOLE = (
    "gradient_accumulation_steps: whole gradients are summed on each GPU up to the last micro-batch, as with FSDP2 "
    "since Accelerate 1.11; before, each micro-batch was reduced: set parallelism.accumulate_unsharded=false"
)
REPLICAS_EACH = (
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch: without fsdp gradients are simulated as reduced "
    "in the last micro-batch alone"
)


def _first_fsdp(s: Settings, own: Settings) -> dict[str, Any]:
    """Return keys of torch's first FSDP, where the settings name it or say what it alone has (transformers/
    training_args.py: `_process_fsdp_args`, whose default of the prefetch is NO_PREFETCH)."""
    version, word = own.take("version"), own.take("backward_prefetch")
    if version is None and word is not None:
        s.notes.append(FIRST)
    elif str(version) != "1":
        return {}
    return {"fsdp_version": 1} | gathers_late(str(word or LATE))


def by_second_fsdp(s: Settings) -> bool:
    """Tell whether settings name FSDP2 themselves, by Accelerate's or Transformers' name."""
    own = s.values.get("fsdp_config")
    versions = [own.get(key) for key in ("version", "fsdp_version")] if isinstance(own, dict) else []
    return s.values.get("fsdp") not in OFF and "2" in map(str, versions)


def gathers_late(word: str) -> dict[str, Any]:
    """Return what a word of torch's `BackwardPrefetch` says. BACKWARD_POST sends a layer's gather before the reduction
    of the layer before, as BACKWARD_PRE does: torch issues both early, and one communicator runs them in turn."""
    return {"backward_prefetch": False} if word.lower() == LATE else {}


def _reduces_each(s: Settings) -> bool:
    """Whether all micro-batches reduce (accelerate/utils/dataclasses.py: GradientAccumulationPlugin)."""
    if not isinstance(s.values.get("accelerator_config"), dict):
        return False
    return s.section("accelerator_config").section("gradient_accumulation_kwargs").flag("sync_each_batch")


def of_fsdp(s: Settings, machine: Machine, sizes: dict[str, int], dp: int) -> tuple[dict[str, Any], bool]:
    """The layout of `fsdp`, and whether `fsdp_config` recomputes activations."""
    fsdp, own = s.take("fsdp"), s.section("fsdp_config")
    every = _reduces_each(s)
    own.values = {name.removeprefix("fsdp_"): value for name, value in own.values.items()}
    own.taken |= {"forward_prefetch"} if own.values.get("forward_prefetch") in OFF else set()  # as by default
    words = fsdp.split() if isinstance(fsdp, str) else [*map(str, fsdp)] if isinstance(fsdp, list) else ["full_shard"]
    if fsdp in OFF or not words:
        s.sections.remove(own)  # without `fsdp` nothing reads it
        if every:
            s.notes.append(REPLICAS_EACH)
        return {"zero": 0}, False
    reshards = own.take("reshard_after_forward")  # of version 1 such a word, too
    word = next((word for word in (str(reshards), *words) if word in FSDP), "full_shard")
    layout = dict(FSDP[word])
    offloads = [own.flag(name) for name in OFFLOADS]  # all are asked for, so that none is reported
    if "offload" in words or True in offloads:
        layout["offload"] = True
        s.notes += [] if layout["zero"] == 3 else [WHOLE_ON_HOST]
    if reshards is False:
        layout["reshard_after_forward"] = False
    first = _first_fsdp(s, own)
    layout |= first if layout["zero"] == 3 else {}
    if "limit_all_gathers" in own.values and not own.flag("limit_all_gathers") and first:
        s.notes.append(UNLIMITED)
    if word.startswith("hybrid"):
        each = resolve_cluster(machine.cluster, dp, Source(str(s.file), {})).gpus_per_node
        layout["shard_size"] = min(dp, each)
    # transformers/trainer.py: `no_sync` up to the last micro-batch, unless `sync_each_batch`
    if layout["zero"] and not every and sizes["global_batch_size"] > sizes["micro_batch_size"] * dp:
        layout["accumulate_unsharded"] = True
        s.notes += [] if "fsdp_version" in layout else [SUMMED_WHOLE]
    recomputes = own.flag("activation_checkpointing")
    if own.flag("activation_checkpointing_offload") and recomputes:  # accelerate/utils/fsdp_utils.py
        s.values = {**s.values, "activation_offloading": "true"}
    return layout, recomputes
