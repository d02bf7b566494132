"""Megatron-LM's arguments as a scenario: a launch script, a command line, or a file of flags.

Names and defaults: megatron/training/arguments.py of NVIDIA/Megatron-LM at 000c4ac (November 2025).
"""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from sim.convert.megatron.attention import attention_of, note_mask
from sim.convert.megatron.fp8 import in_8_bits, precision_of
from sim.convert.megatron.fusions import fusions
from sim.convert.megatron.graphs import graphs_of
from sim.convert.megatron.hybrid import SCRIPTS as HYBRID_SCRIPTS
from sim.convert.megatron.hybrid import take_sizes
from sim.convert.megatron.megatron_deepspeed import of_deepspeed
from sim.convert.megatron.model import DISPATCHER, model_of, note_other_sizes
from sim.convert.megatron.offload import activation_offload, optimizer_offload
from sim.convert.megatron.older import PLAIN_LINEAR, as_of_today
from sim.convert.megatron.optimizer import master_weights, moments
from sim.convert.megatron.refused import plain_name, require_described
from sim.convert.megatron.stages import pipeline_of
from sim.convert.scripts.command_line import (
    OF_ALL_NODES,
    SLURM,
    flags_of,
    require_one,
    slurm_flags,
    words_of,
    words_that,
)
from sim.convert.scripts.environment import backend_of, workspaces_of
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Converted, Machine, Settings, without_none
from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.inputs.trainer_names import MEGATRON_CP, MEGATRON_FSDP, MEGATRON_FUSIONS
from sim.variants.dispatchers import DISPATCHERS
from sim.variants.frameworks.megatron import MEGATRON, MEGATRON_BRIDGE, MEGATRON_ZERO
from sim.variants.frameworks.records import framework_at

CP_METHODS = {name: method for method, name in MEGATRON_CP.items()}
ZERO_STAGES = {name: zero for zero, name in MEGATRON_FSDP.items()}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
SGD_MOMENTUM = 0.9  # --sgd-momentum's default
DTYPES: dict[str, str | None] = {"bf16": "bf16", "fp32": "fp32"}
MPI = ("mpirun", "mpiexec")
SRUN = {"N": "nodes", "n": "np"}
MOST_OF_SRUN = 40  # words of its own
BACKEND, NCCL_EP = "moe-flex-dispatcher-backend", "ncclep"
MARKS = ("num-layers", "micro-batch-size")  # which one training has once
LISTED = (  # flags with several values
    *("recompute-modules", "offload-modules", "cuda-graph-scope", "cuda-graph-modules", "num-experts", "cp-comm-type"),
    "hierarchical-context-parallel-sizes",
)
# By framework; all are off by default.
FUSED_EXPERTS = ("moe-permute-fusion",)
SIMULATED_OF_EXPERTS = {
    "eager": ("moe-grouped-gemm",),
    MEGATRON.name: FUSED_EXPERTS,
    MEGATRON_BRIDGE.name: FUSED_EXPERTS,
}
# Arguments whose names are almost those of others, which they do not stand for.
OWN = {"moe-expert-rank-capacity-factor", "tp-comm-overlap-ag", "tp-comm-overlap-rs"}
FP8_RECIPE = "delayed"  # --fp8-recipe's default


def convert_megatron(file: Path, script: Script, machine: Machine) -> Converted:
    """The scenario that the flags describe.

    Raises:
        InputError: for a flag without its value, or sizes that are missing.
    """
    words = words_of(script)
    require_described(file, words, machine)
    for mark in MARKS:
        require_one(file, words, mark)
    own = words_that(words, lambda command: not flags_of(command).keys().isdisjoint(MARKS))
    given = {**_of_mpi(words), **_of_srun(words), **flags_of(own, listed=LISTED)}
    if any(plain_name(word) in HYBRID_SCRIPTS for word in words):
        given["is-hybrid-model"] = True
    notes: list[str] = []
    if "deepspeed" in given:
        given = of_deepspeed(file, script, given, notes)
    flags, written = as_of_today(given, notes)
    if (kernel := backend_of(script)) is not None and "attention-backend" not in flags:
        flags["attention-backend"] = kernel
        written["attention-backend"] = "NVTE_FLASH_ATTN and NVTE_FUSED_ATTN, read as --attention-backend"
    slurm = {
        name: number for name, number in slurm_flags(script.directives).items() if not str(flags.get(name)).isdigit()
    }
    s = Settings(file, flags | slurm, "--", written=written, notes=notes, text=script.text, environment=script.variable)
    sections = described(s, machine, _stated_gpus(s, machine))
    if machine.model is not None:
        note_other_sizes(s, machine.model)
    return s.converted("megatron", machine, sections)


def _of_mpi(words: list[str]) -> dict[str, str]:
    """The processes that `mpirun -np` starts."""
    behind = words[next((i for i, word in enumerate(words) if word.rpartition("/")[2] in MPI), len(words)) :]
    counts = (after for word, after in pairwise(behind) if word in ("-np", "--np", "-n"))
    return {"np": count} if (count := next(counts, "")).isdecimal() else {}


def _of_srun(words: list[str]) -> dict[str, str]:
    """Nodes and processes by the flags of one letter of the last `srun`, as its long ones say them."""
    last = max((i for i, word in enumerate(words) if word == "srun"), default=len(words))
    behind = " ".join(words[last + 1 : last + 1 + MOST_OF_SRUN])
    return {SRUN[letter]: number for letter, number in re.findall(r"(?:^| )-([Nn])[ =]?(\d+)(?= |$)", behind)}


def described(s: Settings, machine: Machine, gpus: int | None) -> dict[str, Any]:
    """The sections model, training and parallelism; `gpus`: how many the file says.

    Raises:
        InputError: for a flag without its value, or sizes that are missing.
    """
    if str(s.values.get("num-experts")) == "0":  # as if it were not given (`validate_args`)
        s.values = {name: value for name, value in s.values.items() if name != "num-experts"}
    s.unknown |= OWN & s.values.keys()
    take_sizes(s)
    p = _layout(s, machine, gpus)
    training = _training(s, p["dp"], machine)
    with suppress(InputError) if machine.model else nullcontext():
        model = model_of(s)
    if s.take("num-experts") is not None:
        _note_experts(s, p, training["framework"])
    s.choice("transformer-impl", {"transformer_engine": True}, "transformer_engine")
    s.choice("timing-log-level", {"0": True}, "0")  # above it, timers wait for the GPU and for other ranks
    return {"model": machine.model or model, "training": training, "parallelism": p}


def _stated_gpus(s: Settings, machine: Machine) -> int | None:
    """GPUs by torchrun's arguments, else by Slurm's; nobody asks where --gpus is given."""
    nodes, each, processes = s.take("nnodes"), s.take("nproc-per-node"), s.take("np")
    slurm_nodes, tasks, per_node = (s.take(name) for name in SLURM)
    of_all = [int(number) for name in OF_ALL_NODES if (number := str(s.take(name))).isdigit()]
    if machine.gpus is not None:
        return None
    if each is None and processes is not None:
        return s.size("np")
    if each is None:  # one process for each task that srun starts
        each = tasks if tasks not in (None, "1") else per_node
    if each is None:
        return next((number for number in of_all if number > 1), None)
    if not str(each).isdigit():
        return None
    return int(str(each)) * (s.integer("nodes" if nodes is None else "nnodes", 1) if nodes or slurm_nodes else 1)


def _note_experts(s: Settings, p: dict[str, Any], framework: str) -> None:
    """Say what is simulated otherwise than the flags say, or by default do."""
    if not s.choice("moe-token-dispatcher-type", {"alltoall": True, "flex": True}, DISPATCHER) and p["ep"] > 1:
        s.notes.append(
            f"--moe-token-dispatcher-type {DISPATCHER}, the default: an all-to-all is simulated in its place"
        )
    if absent := [f"--{name}" for name in SIMULATED_OF_EXPERTS[framework] if not s.flag(name)]:
        s.notes.append(f"simulated as with {' and '.join(absent)}")
    if p.get("ep_dispatcher"):  # the older name of what flex does by default
        s.flag("moe-enable-deepep")
    s.notes.append("experts are loaded evenly; model.moe.imbalance says otherwise")


def _grad_dtype(s: Settings) -> str | None:
    """Return the dtype in which gradients add up and are reduced; None where parameters have fp32 (`validate_args`).

    Torch's FSDP2, which gets no policy of mixed precision, has them in the parameters' dtype (core/distributed,
    torch_fully_sharded_data_parallel.py).
    """
    if s.flag("use-torch-fsdp2"):
        s.taken |= {"accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "main-grads-dtype"}
        return "bf16" if s.flag("bf16") else "fp16" if s.flag("fp16") else None
    in_fp32 = s.flag("accumulate-allreduce-grads-in-fp32")
    if s.values.get("megatron-fsdp-main-grads-dtype") in DTYPES:
        s.flag("grad-reduce-in-bf16")
        return DTYPES[s.take("megatron-fsdp-main-grads-dtype")]
    if s.flag("bf16"):
        words = {"bf16": True, "torch.bfloat16": True, "fp32": False, "torch.float32": False}
        main = s.choice("main-grads-dtype", words, "fp32")
        return "bf16" if s.flag("grad-reduce-in-bf16") or main else "fp32"
    return ("fp32" if in_fp32 else "fp16") if s.flag("fp16") else None


def _training(s: Settings, dp: int, machine: Machine) -> dict[str, Any]:
    recipe = s.take("fp8-recipe")
    precision = precision_of(s, recipe)
    framework = _framework(s)
    attention = attention_of(s, machine)
    if attention["attention"] == "fused":
        s.take("no-masked-softmax-fusion")  # of the unfused softmax
    recipe = recipe or (FP8_RECIPE if framework == MEGATRON_BRIDGE.name else None)
    micro_batch, sequence = s.integer("micro-batch-size"), s.integer("seq-length")
    note_mask(s, sequence, micro_batch)
    optimizer = s.choice("optimizer", OPTIMIZERS, "adam")
    if optimizer == "sgd":
        optimizer = "sgd_momentum" if s.number("sgd-momentum", SGD_MOMENTUM) else "sgd"
    if optimizer is None:
        s.notes.append(f"{s.written_as('optimizer')} {s.take('optimizer')}: AdamW is simulated in its place")
    return without_none(
        {
            "seq_len": sequence,
            "micro_batch_size": micro_batch,
            "global_batch_size": s.integer("global-batch-size", micro_batch * dp),
            "precision": precision,
            "fp8_recipe": recipe if precision in ("fp8", "mxfp8") else None,
            "grad_dtype": _grad_dtype(s),
            "grad_reduce_dtype": s.choice("megatron-fsdp-grad-comm-dtype", DTYPES | {"auto": None}, "auto"),
            "optimizer": optimizer,
            "optimizer_dtype": moments(s),
            "master_weights": master_weights(s, precision, recipe),
            "optimizer_offload": optimizer_offload(s),
            "activation_offload": activation_offload(s, machine),
            "gradient_clipping": (s.number("clip-grad", 1.0) or 0.0) > 0,
            **attention,
            **fusions(s, framework),
            "cublas_workspace_config": workspaces_of(s.environment),
            "framework": framework,
            "zero_grad": _zero_grad(s, framework),
            "recompute": _recompute(s),
            **in_8_bits(s, precision),
            **graphs_of(s, framework),
            "optimizer_post_validation": s.flag("enable-optimizer-post-validation") or None,
        }
    )


def _framework(s: Settings) -> str:
    """The framework whose kernels the flags choose: without any of Megatron's fusions torch's own."""
    unfused = {f"no-{name}-fusion" for name in MEGATRON_FUSIONS}
    if unfused <= s.values.keys():  # with only some off, no framework is so: the flags are left to the notes
        s.taken |= unfused
        return "eager"
    return MEGATRON_BRIDGE.name if _as_recipes_run(s) else MEGATRON.name


def _as_recipes_run(s: Settings) -> bool:
    """Whether the flags are what NVIDIA's recipes set, which is a framework of its own; they are taken then."""
    wanted = {"no-check-for-nan-in-loss-and-grad", "ddp-average-in-collective"}
    wanted |= {"moe-router-fusion"} if "num-experts" in s.values else set()
    if s.values.get("multi-latent-attention"):
        s.taken.add("enable-experimental")  # since Megatron-Core 0.16 its rope is fused without this flag
    found = all(s.values.get(name) is True for name in wanted)
    s.taken |= wanted if found else set()
    return found


def _zero_grad(s: Settings, framework: str) -> str | None:
    """Return whether gradients are kept or freed between steps; None where the framework's record says so already.

    Megatron-LM keeps its gradient buffers (core/distributed: ParamAndGradBuffer), whatever it fuses. Torch's FSDP2 and
    DeepSpeed have gradients of their own, which are freed, but for those of ZeRO-3 of DeepSpeed.
    """
    frees = s.flag("use-torch-fsdp2") or (s.flag("deepspeed") and s.take("zero-stage") != "3")
    if frees == (0 not in framework_at(framework, None).keeps_gradients_at):
        return None
    return "set_to_none" if frees else "keep"


def _recompute(s: Settings) -> Any:
    granularity = s.take("recompute-granularity")
    granularity = "selective" if s.flag("recompute-activations") or s.flag("moe-layer-recompute") else granularity
    if granularity == "full" and s.take("recompute-method") == "block":
        return {"mode": "full", "layers": s.integer("recompute-num-layers", 1)}
    s.choice("recompute-num-layers", {"1": True}, "1")  # units of several layers are not simulated
    given = s.take("recompute-modules")
    named = str(given or "").replace(",", " ").split()
    if given == "" and granularity == "selective" and not s.flag("moe-layer-recompute"):
        return None  # an empty list stays empty; the core of attention is the default of none at all
    if s.flag("moe-layer-recompute"):  # added to what is named or to the default (core/transformer_config.py)
        named = list(dict.fromkeys([*(named or ["core_attn"]), "moe"]))
    return {"mode": "selective", "modules": named} if granularity == "selective" and named else granularity


def _dispatcher(s: Settings) -> str | None:
    """The library that `flex` calls (transformer/moe/token_dispatcher.py, `MoEFlexTokenDispatcher`); None: no `flex`.

    NCCL EP's kernels for many tokens are HybridEP's (Megatron-Core 0.19 names NCCL's `nccl_ep/device/
    hybridep_adapter.cu`). A library that is not simulated is reported, and DeepEP taken in its place.
    """
    if s.values.get("moe-token-dispatcher-type") != "flex":
        return None
    backends = {name: name for name in DISPATCHERS if name != "all_to_all"} | {NCCL_EP: "hybridep"}
    if s.values.get(BACKEND) == NCCL_EP:
        s.notes.append(f"{s.written_as(BACKEND)} {NCCL_EP}: simulated as hybridep, whose kernels it has")
    return s.choice(BACKEND, backends, "deepep") or "deepep"


def _layout(s: Settings, machine: Machine, gpus: int | None) -> dict[str, Any]:
    tp, pp, cp = (s.size(f"{what}-parallel-size", 1) for what in ("tensor-model", "pipeline-model", "context"))
    dp = s.ranks(gpus, machine, tp * pp * cp, "tp · pp · cp")
    overlap, fsdp2 = s.flag("overlap-grad-reduce"), s.flag("use-torch-fsdp2")  # which overlaps by itself
    experts = s.take("num-experts") is not None
    ep, expert_tp = _expert_degrees(s, tp, tp * cp * dp) if experts else (None, None)
    p: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "sp": s.flag("sequence-parallel") and tp > 1,
        "ep": ep,
        "expert_tp": expert_tp,
        "ep_overlap": (paired := s.flag("overlap-moe-expert-parallel-comm")) or None,
        "delay_wgrad_compute": s.flag("delay-wgrad-compute") if paired else None,
        "ep_dispatcher": _dispatcher(s) if experts else None,
        **_context(s, cp),
        "tp_overlap": _tp_overlap(s, tp),
        "tp_overlap_except": _waiting_layers(s, tp),
        "dp_sync": None if fsdp2 else "bucketed" if overlap else "after_backward",
        "rank_order": "tp-cp-pp-dp" if s.flag("use-tp-pp-dp-mapping") else None,
        **_zero(s, dp * cp),
        **pipeline_of(s, pp),
    }
    if overlap and not fsdp2:
        element_bytes = dtype_bytes(_grad_dtype(s) or "fp32")
        elements = s.integer("ddp-bucket-size", MEGATRON_ZERO.bucket_bytes_of(dp, 1))
        p["bucket_bytes"] = int(elements * element_bytes)
    return without_none(p)


def _context(s: Settings, cp: int) -> dict[str, Any]:
    """The way of context parallelism that all layers have, or that of each (`TransformerConfig.cp_comm_type`), and the
    degrees of a2a+p2p; a way that is not known is reported."""
    words = str(s.values.get("cp-comm-type", "p2p")).replace(",", " ").split()
    if cp == 1 or any(word not in CP_METHODS for word in words):
        s.values = {**s.values, "cp-comm-type": " ".join(dict.fromkeys(words))}
        return {"cp_method": s.choice("cp-comm-type", CP_METHODS, "p2p")}
    s.take("cp-comm-type")
    methods = [CP_METHODS[word] for word in words]
    alike = len({*methods}) == 1
    sizes = str(s.take("hierarchical-context-parallel-sizes") or "").strip("[]").replace(",", " ").split()
    rings = "all_to_all_ring" in methods and all(size.isdigit() for size in sizes)
    return {
        "cp_method": methods[0] if alike else None,
        "cp_method_by_layer": None if alike else methods,
        "hierarchical_context_parallel_sizes": [int(size) for size in sizes] if rings else None,
    }


def _tp_overlap(s: Settings, tp: int) -> str | None:
    waits = "no-async-tensor-model-parallel-allreduce"
    full, apart = s.flag("tp-comm-overlap"), s.flag(waits)
    of_engine = s.flag("deepspeed") and not s.flag("sequence-parallel")  # Megatron-DeepSpeed, `validate_args`
    if s.flag(PLAIN_LINEAR) or of_engine:
        return "none" if tp > 1 else None
    if apart and tp > 1 and not s.flag("sequence-parallel"):
        s.notes.append(
            f"{s.written_as(waits)}: Megatron-LM ignores it since core 0.9 (training/arguments.py: DEPRECATED). For an "
            "older release, in which backward waits for this message, set parallelism.tp_overlap: none"
        )
    return "full" if full else "wgrad" if tp > 1 else None


def _waiting_layers(s: Settings, tp: int) -> list[str] | None:
    """Column layers that do not overlap their input's gather, keys of `TransformerConfig`."""
    off = [name for name in ("qkv", "fc1") if s.flag(f"tp-comm-overlap-disable-{name}")]
    return off if off and tp > 1 and s.flag("sequence-parallel") and s.flag("tp-comm-overlap") else None


def _expert_degrees(s: Settings, tp: int, ranks: int) -> tuple[int, int]:
    """The degrees ep and expert_tp, whose product divides a stage's ranks."""
    of_experts, of_tensors = "expert-model-parallel-size", "expert-tensor-parallel-size"
    ep, expert_tp = s.size(of_experts, 1), s.size(of_tensors, tp)
    if s.flag("moe-expert-model-parallelism"):  # MegaBlocks: over the replicas
        ep = min(ranks // tp, s.integer("num-experts"))
    if ranks % (ep * expert_tp):
        taken = f"{s.written_as(of_tensors)} {expert_tp}"
        if s.take(of_tensors) is None:
            whose = s.written_as("tensor-model-parallel-size")
            taken = f"{s.written_as(of_tensors)} is not given, so Megatron takes {whose} ({tp})"
        ends = f"{ep}·{expert_tp} does not divide the {ranks} ranks of tp · cp · dp"
        raise InputError(f"{s.place(of_experts)}: found {ep}; {taken}; {ends}")
    return ep, expert_tp


def _zero(s: Settings, members: int) -> dict[str, Any]:
    """The distributed optimizer shards optimizer states; its FSDP by `data-parallel-sharding-strategy`."""
    instances = s.integer("num-distributed-optimizer-instances", 1)
    gather = s.flag("overlap-param-gather")
    if s.flag("use-torch-fsdp2"):
        kept = s.flag("torch-fsdp2-no-reshard-after-forward")
        return {"zero": 3, "fsdp_version": 2, "reshard_after_forward": False if kept else None}
    if s.flag("use-megatron-fsdp") or s.flag("use-custom-fsdp"):
        s.take("use-distributed-optimizer")
        stage = s.choice("data-parallel-sharding-strategy", ZERO_STAGES, "no_shard")
        strategies = {"no_shard": None, **({"optim": "optim"} if stage == 3 and instances > 1 else {})}
        outer = s.choice("outer-dp-sharding-strategy", strategies, "no_shard")
        shard = members // instances if instances > 1 and stage else None
        overlaps: dict[str, Any] = {"param_gather_overlap": gather} if stage in (1, 2) else {}
        # What is sharded is sent beside computations, with or without the flags (core/distributed/fsdp/src/
        # megatron_fsdp/megatron_fsdp.py: MegatronFSDP.__init__).
        overlaps |= {"dp_sync": "bucketed"} if stage in (2, 3) else {}
        # With NCCL's user buffers, too (param_and_grad_buffer.py; megatron_fsdp.py: `fsdp_double_buffer or nccl_ub`).
        doubles = [s.flag("fsdp-double-buffer"), str(s.values.get("nccl-ub", False)).lower() != "false"]
        overlaps |= {"fsdp_double_buffer": True} if stage in (2, 3) and True in doubles else {}
        return {"zero": stage, "shard_size": shard, "outer_dp_sharding_strategy": outer, **overlaps}
    if s.flag("deepspeed"):
        stage = s.integer("zero-stage")
        return {"zero": stage, "param_gather_overlap": False if stage in (1, 2) else None}  # `DEEPSPEED_ZERO`
    # Megatron-LM, training/arguments.py: the older name sets the flag, by which whole matrices are dealt out
    by_layers = s.flag("use-layer-wise-distributed-optimizer") or s.values.get("optimizer") == "dist_muon"
    if not (s.flag("use-distributed-optimizer") or by_layers):
        return {"zero": 0}
    shard = members // instances if instances > 1 else None
    return {"zero": 1, "shard_size": shard, "param_gather_overlap": gather}
