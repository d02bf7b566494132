"""FSDP by TrainingArguments' `fsdp` and `fsdp_config`, as a scenario's `parallelism`."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import FSDP_ON_HOST, Machine, Settings
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
LATE_GATHERS = ("no_prefetch", "backward_post")
GATHERS_AHEAD = (
    "a layer's gather is simulated beside the backward before it, as FSDP2 and BACKWARD_PRE have it; here it begins "
    "later, so the backward may wait longer"
)

REPLICAS_EACH = (
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch: without fsdp gradients are simulated as reduced "
    "in the last micro-batch alone"
)


def _note_prefetch(s: Settings, own: Settings) -> None:
    """Say where torch's first FSDP gathers a layer later than is simulated (transformers/training_args.py:
    `_process_fsdp_args`, whose default for it is NO_PREFETCH)."""
    version = own.take("version")
    word = str(own.take("backward_prefetch", "no_prefetch" if version == 1 else ""))
    if version != 2:
        note_prefetch(s, own.written_as("backward_prefetch"), word)


def note_prefetch(s: Settings, name: str, word: str) -> None:
    """Say that gathers are simulated ahead, where this word of torch's `BackwardPrefetch` says otherwise."""
    if word.lower() in LATE_GATHERS:
        s.notes.append(f"{name} {word.lower()}: {GATHERS_AHEAD}")


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
        s.notes.append(FSDP_ON_HOST)
        layout["offload"] = True
    if reshards is False:
        layout["reshard_after_forward"] = False
    _note_prefetch(s, own)
    if word.startswith("hybrid"):
        each = resolve_cluster(machine.cluster, dp, Source(str(s.file), {})).gpus_per_node
        layout["shard_size"] = min(dp, each)
    # transformers/trainer.py: `no_sync` up to the last micro-batch, unless `sync_each_batch`
    if layout["zero"] and not every and sizes["global_batch_size"] > sizes["micro_batch_size"] * dp:
        layout["accumulate_unsharded"] = True
    return layout, own.flag("activation_checkpointing")
