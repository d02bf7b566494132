"""Axolotl's YAML as Transformers' `TrainingArguments` and keys of their kind.

Names and meaning: src/axolotl of axolotl-ai-cloud/axolotl, release 0.21: utils/schemas, utils/config (`resolve_dtype`,
`normalize_config`), core/builders/base.py, integrations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.core.errors import InputError

if TYPE_CHECKING:
    from sim.convert.settings import Settings

MARK = "base_model"  # which all its files have
NAMES = {
    MARK: "model_name_or_path",
    "sequence_len": "cutoff_len",
    "micro_batch_size": "per_device_train_batch_size",
    "sequence_parallel_degree": "context_parallel_size",  # its former name
}
# Switches that mean the same as their absence where they are off.
SWITCHES = ("load_in_8bit", "load_in_4bit", "liger_fused_linear_cross_entropy", "cut_cross_entropy")
CUT_LOSS = "CutCrossEntropyPlugin"  # which is on unless `cut_cross_entropy: false`
EXPERT_PLUGIN = "ExpertParallelPlugin"
PLUGINS = (CUT_LOSS, "LigerPlugin", EXPERT_PLUGIN)  # of which other keys say what they do
# By `expert_parallel_backend`; auto is DeepEP where it is installed, else torch's.
DISPATCHERS: dict[str, str | None] = {"auto": None, "torch": "all_to_all", "deep_ep": "deepep"}
OF_LORA = "lora_"
CLASSES = {"model_type", "tokenizer_type", "processor_type"}  # of Transformers, which the checkpoint names as well
VERSIONS = ("version", "fsdp_version")
OF_FIRST = {"sharding_strategy", "forward_prefetch"}  # utils/schemas/validation.py: FSDP1_ONLY_REJECTED_KEYS
SECOND = (
    "fsdp_version: 2, as Axolotl has it since release 0.20 (September 2026); before, 1: set parallelism.fsdp_version=1"
)
# What keeps torch's newer checkpoint, where a file gives no arguments of it (utils/config: `normalize_config`).
NOT_REENTRANT = ("gradient_checkpointing_kwargs", "unfrozen_parameters", "rl")
OFFLOADING = "activation_offloading"
SHARDING, FULL = ("sharding_strategy", "fsdp_sharding_strategy"), "FULL_SHARD"  # of `fsdp_config`, whose default it is


def plain_names(data: dict[str, Any]) -> dict[str, Any]:
    """The mapping with what Axolotl names otherwise or leaves unsaid, where it is Axolotl's."""
    if MARK not in data:
        return data
    given = {key: value for key, value in data.items() if value is not None}
    if CUT_LOSS in str(given.get("plugins")):
        given = {"cut_cross_entropy": True} | given
    off = {key for key in SWITCHES if given.get(key) is False} | {"fsdp_version"} | CLASSES
    if isinstance(sharded := given.get("fsdp_config"), dict):
        said = {key for key, value in sharded.items() if key in SHARDING and str(value).upper() == FULL}
        given["fsdp_config"] = {key: value for key, value in sharded.items() if key not in said}
        given |= {"fsdp": given.get("fsdp") or True} if said else {}
    if (plugins := given.get("plugins")) and all(str(name).rpartition(".")[2] in PLUGINS for name in plugins):
        off.add("plugins")
    if not given.get("adapter"):
        off |= {key for key in given if key == "adapter" or key.startswith(OF_LORA)}
    found = {NAMES.get(key, key): value for key, value in given.items() if key not in off}
    if found.get("bf16", "" if "bf16" in data or found.get("fp16") else "auto") == "auto":  # the default
        found["bf16"] = True  # on where the GPU has it
    if found.get("fsdp_config") and not found.get("fsdp"):
        found["fsdp"] = True
    return found | _loaded(found) | _versioned(given, found) | _checkpoint(given)


def _checkpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    """Recomputation: by torch's reentrant checkpoint unless the file says otherwise (utils/config: `normalize_config`),
    and none beside adapters whose activations go to the host (loaders/model.py: `_apply_activation_checkpointing`,
    core/builders/base.py: `_configure_gradient_checkpointing`)."""
    if not given.get("gradient_checkpointing"):
        return {}
    kinds = str(given.get(OFFLOADING, False)).lower()
    if kinds not in ("false", "hidden_states"):
        return {"gradient_checkpointing": False} if given.get("adapter") else {}
    if kinds == "hidden_states" or any(given.get(key) is not None for key in NOT_REENTRANT):
        return {}
    return {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


def _versioned(given: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """FSDP's settings with their version: 2 unless it is said (utils/schemas/validation.py of release 0.20, which has
    taken the first out: `check_fsdp_version`), or the file has what older releases alone read."""
    own = found.get("fsdp_config") or {}
    if not found.get("fsdp") or not isinstance(own, dict):
        return {}
    said = next(filter(None, [given.get("fsdp_version"), *(own.get(key) for key in VERSIONS)]), None)
    rest = {key: value for key, value in own.items() if key not in VERSIONS}
    older = is_of_first_fsdp(given)
    return {"fsdp_config": rest | {"version": said or (1 if older else 2)}}


def is_of_first_fsdp(given: Mapping[str, Any]) -> bool:
    """Tell whether a file has a list `fsdp`, or keys of its first FSDP that releases since 0.20 refuse."""
    own = given.get("fsdp_config")
    names = {key.removeprefix("fsdp_") for key in own} if isinstance(own, dict) else set[str]()
    return bool(given.get("fsdp")) or bool(names & OF_FIRST)


def version_notes(data: Mapping[str, Any]) -> list[str]:
    """Say which version is taken where Axolotl's file leaves it out."""
    own = data.get("fsdp_config")
    if MARK not in data or not (isinstance(own, dict) and own) or data.get("fsdp_version"):
        return []
    return [] if is_of_first_fsdp(data) or any(own.get(key) for key in VERSIONS) else [SECOND]


def _loaded(found: dict[str, Any]) -> dict[str, str]:
    """The dtype that all parameters are loaded in where all are trained: that of the matmuls."""
    if found.get("adapter"):
        return {}
    dtype = "bfloat16" if found.get("bf16") else "float16" if found.get("fp16") else ""
    return {"torch_dtype": dtype} if dtype else {}


def degrees(s: Settings) -> dict[str, Any]:
    """Tensor and context parallelism: `tp`, `cp` and what goes with them; empty where there is neither.

    Each rank has one piece of a sequence (utils/ctx_managers/sequence_parallel.py). Packed ones are attended to as
    Llama 3 does, keys and values gathered, others in a ring (utils/schemas/validation.py: `validate_ring_attn_func`).
    """
    tp, cp = (s.size(f"{what}_parallel_size", 1) for what in ("tensor", "context"))
    auto = s.values.get("tensor_parallel")
    if isinstance(auto, dict) and type(size := auto.get("autotp_size")) is int:  # DeepSpeed's (runtime/tensor_parallel)
        s.take("tensor_parallel")
        tp = max(tp, size)
    found: dict[str, Any] = {"tp": tp, "sp": False} if tp > 1 else {}
    found |= _experts(s)
    if ulysses := s.whole("sequence_parallel_size"):  # ms-swift's
        return found | ({"cp": ulysses, "cp_method": "all_to_all"} if ulysses > 1 else {})
    if cp == 1:
        return found
    if (words := s.take("cp_comm_strategy")) is not None:  # Accelerate's, of torch's context parallelism
        return found | {"cp": cp, "cp_method": "ring" if words == "alltoall" else "all_gather"}
    packed = "varlen_llama3" if s.flag("sample_packing") else "batch_ring"
    method = s.choice("ring_attn_func", {"varlen_llama3": "all_gather", "batch_ring": "ring"}, packed)
    return found | {"cp": cp, "cp_method": method or "all_gather", "cp_split": "contiguous"}


def _experts(s: Settings) -> dict[str, Any]:
    """Expert parallelism within the replicas, which read batches of their own and share all other parameters
    (monkeypatch/accelerate/parallelism_config.py)."""
    ep = s.size("expert_parallel_size", 1)
    if ep == 1:
        return {}
    backend = s.choice("expert_parallel_backend", DISPATCHERS, "auto")
    if backend is None:
        s.notes.append(
            "expert_parallel_backend auto: simulated as torch's all-to-all; Axolotl uses DeepEP where it is installed"
        )
    return {"ep": ep, **({"ep_dispatcher": backend} if backend else {})}


def require_ranks(s: Settings, ep: int, dp: int) -> None:
    """Refuse degrees of data and expert parallelism that do not make the replicas (`_validate_accelerator` of
    accelerate/parallelism_config.py, which passes over DeepSpeed's; integrations/expert_parallel/plugin.py).

    Raises:
        InputError: naming the product that is wanted.
    """
    size, copies = (s.whole(f"dp_{what}_size") or 1 for what in ("shard", "replicate"))
    if (ep > 1 or size > 1) and ep * size * copies != dp and "sequence_parallel_size" not in s.values:
        name, found = ("expert_parallel_size", ep) if ep > 1 else ("dp_shard_size", size)
        others = "the other degrees of data parallelism" if copies > 1 or ep > 1 else "dp_replicate_size, 1"
        problem = f"found {found}; its product with {others}, {ep * size * copies}, must be the {dp} ranks"
        raise InputError(f"{s.file}: {name}: {problem} that tensor and context parallelism leave")


def shards(s: Settings, layout: dict[str, Any], cp: int) -> dict[str, int]:
    """The ranks that FSDP shards over, where these are not all."""
    size, replicas = (s.whole(f"dp_{what}_size") or 1 for what in ("shard", "replicate"))
    return {"shard_size": size * cp} if layout.get("zero") == 3 and replicas > 1 and size > 1 else {}
