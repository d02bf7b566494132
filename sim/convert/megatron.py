"""Megatron-LM's arguments as a scenario: a launch script, a command line, or a file of flags.

Names and defaults: megatron/training/arguments.py of NVIDIA/Megatron-LM at 000c4ac (November 2025).
"""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from sim.convert.command_line import SLURM, flags_of, slurm_flags, words_of
from sim.convert.settings import Converted, Machine, Settings, without_none
from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.inputs.hub import config_of
from sim.inputs.input_source import show
from sim.inputs.model_config import MAX_LAYERS
from sim.inputs.model_input import load_model
from sim.inputs.trainer_names import MEGATRON_CP, MEGATRON_FSDP, MEGATRON_FUSIONS

CP_METHODS = {name: method for method, name in MEGATRON_CP.items()}
ZERO_STAGES = {name: zero for zero, name in MEGATRON_FSDP.items()}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
LISTED = ("recompute-modules", "cuda-graph-scope", "cuda-graph-modules")  # flags with several values
# By --cuda-graph-impl (core/transformer/transformer_config.py).
GRAPHS: dict[str, str | None] = {
    "none": None,
    "local": "layers",
    "transformer_engine": "layers",
    "full_iteration": "step",
}
DISPATCHER = "allgather"  # where no flag names one
# By framework; all are off by default.
SIMULATED_OF_EXPERTS = {"eager": ("moe-grouped-gemm",), "megatron": ("moe-grouped-gemm", "moe-permute-fusion")}


def convert_megatron(file: Path, text: str, machine: Machine) -> Converted:
    """The scenario that the flags describe.

    Raises:
        InputError: for a flag without its value, or sizes that are missing.
    """
    s = Settings(file, {**slurm_flags(text), **flags_of(words_of(file, text, ends=True), listed=LISTED)}, "--")
    return s.converted("megatron", machine, described(s, machine, _stated_gpus(s, machine)))


def described(s: Settings, machine: Machine, gpus: int | None) -> dict[str, Any]:
    """The sections model, training and parallelism; `gpus`: how many the file says.

    Raises:
        InputError: for a flag without its value, or sizes that are missing.
    """
    p = _layout(s, machine, gpus)
    training = _training(s, p["dp"])
    with suppress(InputError) if machine.model else nullcontext():
        model = _model(s)
    if s.take("num-experts") is not None:
        _note_experts(s, p, training["framework"])
    s.choice("transformer-impl", {"transformer_engine": True}, "transformer_engine")
    return {"model": machine.model or model, "training": training, "parallelism": p}


def _stated_gpus(s: Settings, machine: Machine) -> int | None:
    """GPUs by torchrun's arguments, else by Slurm's; nobody asks where --gpus is given."""
    nodes, each = s.take("nnodes"), s.take("nproc-per-node")
    slurm_nodes, tasks, per_node = (s.take(name) for name in SLURM)
    if machine.gpus is not None:
        return None
    if each is None:  # one process for each task that srun starts
        each = tasks if tasks not in (None, "1") else per_node
    if not str(each).isdigit():
        return None
    return int(str(each)) * (s.integer("nodes" if nodes is None else "nnodes", 1) if nodes or slurm_nodes else 1)


def _model(s: Settings) -> dict[str, Any]:
    heads = s.integer("num-attention-heads")
    swiglu = s.flag("swiglu")
    vocab, tokenizer = s.whole("vocab-size"), s.take("tokenizer-type")
    if vocab is None and (preset := config_of(str(s.take("tokenizer-model")))):
        vocab = load_model(str(preset)).vocab
        s.notes.append(f"model.vocab: that of the model whose tokenizer --tokenizer-model names, {vocab:,}")
    if vocab is None:
        s.missing["model.vocab"] = f"{s.prefix}vocab-size, which the tokenizer would say"
    positions = s.take("position-embedding-type", "learned_absolute")
    if s.take("use-rotary-position-embeddings"):
        positions = "rope"
    groups = s.integer("num-query-groups", 1) if s.flag("group-query-attention") else None
    model: dict[str, Any] = {
        "layers": s.integer("num-layers"),
        "hidden": s.integer("hidden-size"),
        "heads": heads,
        "kv_heads": groups,
        "ffn": s.integer("ffn-hidden-size", _default_ffn(s, swiglu)),
        # NullTokenizer adds one for the end of a document
        "vocab": None if vocab is None else vocab + (tokenizer == "NullTokenizer"),
        "mlp": "swiglu" if swiglu else "relu2" if s.flag("squared-relu") else "gelu",
        "norm": "rmsnorm" if str(s.take("normalization", "LayerNorm")).lower() == "rmsnorm" else "layernorm",
        "bias": not s.flag("disable-bias-linear"),
        "qkv_bias": s.flag("add-qkv-bias"),
        "qk_norm": s.flag("qk-layernorm"),
        "dropout": max(s.number(f"{where}-dropout", 0.1) or 0.0 for where in ("attention", "hidden")),
        "tied_embeddings": not s.flag("untie-embeddings-and-output-weights"),
        "positions": {"learned_absolute": "learned"}.get(str(positions), positions),
        "max_positions": s.integer("max-position-embeddings", s.integer("seq-length")),
        "mtp_layers": s.integer("mtp-num-layers", 0),
    }
    if s.flag("multi-latent-attention"):
        model["mla"] = {
            "q_lora_rank": s.whole("q-lora-rank"),
            "kv_lora_rank": s.integer("kv-lora-rank", 32),
            "qk_nope_head_dim": s.integer("qk-head-dim", 128),
            "qk_rope_head_dim": s.integer("qk-pos-emb-head-dim", 64),
            "v_head_dim": s.integer("v-head-dim", 128),
        }
    else:
        model["head_dim"] = s.whole("kv-channels")
    if s.take("num-experts") is not None:
        model["moe"] = _experts(s, model)
        routed = _routed_layers(s, model["layers"])
        dense = routed.index(1) if 1 in routed else len(routed)
        if 0 in routed[dense:]:
            model["mlp_pattern"] = ["experts" if one else "dense" for one in routed]
        elif dense:
            model["moe"]["dense_layers"] = dense
    return without_none(model)


def _default_ffn(s: Settings, swiglu: bool) -> int:
    """Four times the hidden size; of SwiGLU two thirds of that, up to a multiple of 64 (`validate_args`)."""
    hidden = s.integer("hidden-size")
    return int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden


def _experts(s: Settings, model: dict[str, Any]) -> dict[str, Any]:
    ffn = s.size("moe-ffn-hidden-size", model["ffn"])
    shared = s.whole("moe-shared-expert-intermediate-size")
    return without_none(
        {
            "experts": s.integer("num-experts"),
            "top_k": s.integer("moe-router-topk", 2),
            "ffn": ffn,
            "shared_experts": None if shared is None else max(1, round(shared / ffn)),
            "capacity_factor": s.number("moe-expert-capacity-factor"),
            "pad_to_capacity": s.flag("moe-pad-expert-input-to-capacity") or None,
            "router_fp32": s.choice("moe-router-dtype", {"fp32": True}, ""),
            **_groups(s),
        }
    )


def _routed_layers(s: Settings, layers: int) -> list[int]:
    """1 for each layer with experts, 0 for the others: in each so-many-th one from the first on, or as a list says.

    Raises:
        InputError: for what is neither, such as `([0]*3+[1]*58)`.
    """
    given = str(s.take("moe-layer-freq", 1)).strip("\"' ")
    if given.isdigit() and given != "0":
        return [int(layer % int(given) == 0) for layer in range(layers)]
    try:
        found = _evaluated(ast.parse(given, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list) or len(found) != layers or not {*found} <= {0, 1}:
        allowed = f"a whole number, or a list of 0 and 1 for {layers} layers, such as [0]*1+[1]*{layers - 1}"
        raise InputError(f"{s.file}: --moe-layer-freq: found {show(given)}; must be {allowed}")
    return found


def _evaluated(node: ast.expr) -> Any:
    """The value of lists of whole numbers, their sums and multiples; ValueError for all else, or for long ones."""
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List(elts=items):
            return [_evaluated(item) for item in items]
        case ast.BinOp(left, ast.Add(), right):
            one, other = _evaluated(left), _evaluated(right)
            if isinstance(one, list) and isinstance(other, list):
                return one + other
        case ast.BinOp(left, ast.Mult(), right):
            one, times = _evaluated(left), _evaluated(right)
            if isinstance(one, list) and isinstance(times, int) and len(one) * times <= MAX_LAYERS:
                return one * times
    raise ValueError


def _note_experts(s: Settings, p: dict[str, Any], framework: str) -> None:
    """Say what is simulated otherwise than the flags say, or by default do."""
    if not s.choice("moe-token-dispatcher-type", {"alltoall": True, "flex": True}, DISPATCHER) and p["ep"] > 1:
        s.notes.append(
            f"--moe-token-dispatcher-type {DISPATCHER}, the default: an all-to-all is simulated in its place"
        )
    if absent := [f"--{name}" for name in SIMULATED_OF_EXPERTS[framework] if not s.flag(name)]:
        s.notes.append(f"simulated as with {' and '.join(absent)}")
    s.notes.append("experts are loaded evenly; model.moe.imbalance says otherwise")


def _groups(s: Settings) -> dict[str, Any]:
    """A choice limited to groups. DeepEP and HybridEP (`flex`) send a token once to each of their nodes."""
    if s.take("moe-router-group-topk") is None:
        return {}
    top = s.integer("moe-router-group-topk")
    if s.choice("moe-token-dispatcher-type", {"flex": True}, DISPATCHER):
        s.take("moe-router-num-groups")
        return {"max_nodes_per_token": top}
    return {"groups": s.integer("moe-router-num-groups"), "top_groups": top}


def _grad_dtype(s: Settings) -> str | None:
    """What gradients are summed up and reduced in; None where parameters are in fp32 (`validate_args`)."""
    in_fp32 = s.flag("accumulate-allreduce-grads-in-fp32")
    if s.flag("bf16"):
        return "bf16" if s.flag("grad-reduce-in-bf16") or s.choice("main-grads-dtype", {"bf16": True}, "") else "fp32"
    return ("fp32" if in_fp32 else "fp16") if s.flag("fp16") else None


def _training(s: Settings, dp: int) -> dict[str, Any]:
    precision = "bf16" if s.flag("bf16") else "fp16" if s.flag("fp16") else "fp32"
    recipe = s.take("fp8-recipe")
    if s.take("fp8-format") is not None:
        precision = "mxfp8" if recipe == "mxfp8" else "fp8"
    if s.take("fp4-format") is not None:
        precision = "nvfp4"
    unfused = {f"no-{name}-fusion" for name in MEGATRON_FUSIONS}
    if fused := not unfused <= s.values.keys():
        unfused = set()  # some of them: no framework is so
    s.taken |= unfused
    attention = "unfused" if s.take("attention-backend") == "unfused" else "fused"
    if attention == "fused":
        s.take("no-masked-softmax-fusion")  # of the unfused softmax
    micro_batch = s.integer("micro-batch-size")
    return without_none(
        {
            "seq_len": s.integer("seq-length"),
            "micro_batch_size": micro_batch,
            "global_batch_size": s.integer("global-batch-size", micro_batch * dp),
            "precision": precision,
            "fp8_recipe": recipe if precision in ("fp8", "mxfp8") else None,
            "grad_dtype": _grad_dtype(s),
            "optimizer": s.choice("optimizer", OPTIMIZERS, "adam"),
            "gradient_clipping": (s.number("clip-grad", 1.0) or 0.0) > 0,
            "attention": attention,
            "cross_entropy": "fused" if s.flag("cross-entropy-loss-fusion") else "unfused",
            "framework": "megatron" if fused else "eager",
            "recompute": _recompute(s),
            "cuda_graphs": _graphs(s),
        }
    )


def _graphs(s: Settings) -> str | None:
    """What runs as CUDA graphs: layers, of which a scope may name parts, or the whole iteration."""
    graphs = s.choice("cuda-graph-impl", GRAPHS, "none")
    if graphs is None:
        return None
    scope = " ".join(str(s.take(name, "")) for name in ("cuda-graph-scope", "cuda-graph-modules")).strip()
    if "full_iteration" in scope:
        return "step"
    if graphs == "layers" and scope not in ("", "full"):
        s.notes.append(f"CUDA graphs of {scope}: simulated as graphs of whole layers")
    return graphs


def _recompute(s: Settings) -> Any:
    granularity = "selective" if s.flag("recompute-activations") else s.take("recompute-granularity")
    if granularity == "full" and s.take("recompute-method") == "block":
        return {"mode": "full", "layers": s.integer("recompute-num-layers", 1)}
    s.choice("recompute-num-layers", {"1": True}, "1")  # units of several layers are not simulated
    named = s.take("recompute-modules")
    if granularity == "selective" and named:
        return {"mode": "selective", "modules": str(named).replace(",", " ").split()}
    return granularity


def _layout(s: Settings, machine: Machine, gpus: int | None) -> dict[str, Any]:
    tp, pp, cp = (s.size(f"{what}-parallel-size", 1) for what in ("tensor-model", "pipeline-model", "context"))
    dp = s.ranks(gpus, machine, tp * pp * cp, "tp · pp · cp")
    overlap = s.flag("overlap-grad-reduce")
    experts = s.take("num-experts") is not None
    p: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "sp": s.flag("sequence-parallel") and tp > 1,
        "ep": s.integer("expert-model-parallel-size", 1) if experts else None,
        "expert_tp": s.integer("expert-tensor-parallel-size", tp) if experts else None,
        "ep_overlap": s.flag("overlap-moe-expert-parallel-comm") or None,
        "cp_method": s.choice("cp-comm-type", CP_METHODS, "p2p"),
        "tp_overlap": "full" if s.flag("tp-comm-overlap") else "wgrad" if tp > 1 else None,
        "dp_sync": "bucketed" if overlap else "after_backward",
        "rank_order": "tp-cp-pp-dp" if s.flag("use-tp-pp-dp-mapping") else None,
        **_zero(s, dp * cp),
        **_pipeline(s, pp),
    }
    if overlap:
        elements = s.integer("ddp-bucket-size", max(40_000_000, 1_000_000 * dp))  # core/distributed
        p["bucket_bytes"] = int(elements * dtype_bytes(_grad_dtype(s) or "fp32"))
    return without_none(p)


def _zero(s: Settings, members: int) -> dict[str, Any]:
    """The distributed optimizer shards optimizer states; its FSDP by `data-parallel-sharding-strategy`."""
    instances = s.integer("num-distributed-optimizer-instances", 1)
    gather = s.flag("overlap-param-gather")
    if s.flag("use-torch-fsdp2"):
        kept = s.flag("torch-fsdp2-no-reshard-after-forward")
        return {"zero": 3, "reshard_after_forward": False if kept else None}
    if s.flag("use-megatron-fsdp") or s.flag("use-custom-fsdp"):
        s.take("use-distributed-optimizer")
        return {"zero": s.choice("data-parallel-sharding-strategy", ZERO_STAGES, "no_shard")}
    if not s.flag("use-distributed-optimizer"):
        return {"zero": 0}
    shard = members // instances if instances > 1 else None
    return {"zero": 1, "shard_size": shard, "param_gather_overlap": gather}


def _pipeline(s: Settings, pp: int) -> dict[str, Any]:
    if pp == 1:
        return {}
    layout = s.take("pipeline-model-parallel-layout")
    virtual = s.whole("num-virtual-stages-per-pipeline-rank")
    per_virtual = s.take("num-layers-per-virtual-pipeline-stage")
    out: dict[str, Any] = {}
    stages = pp
    if isinstance(layout, str):
        counts = [stage.count("t") for stage in _unrolled(layout).split("|")]
        stages, out["layers_per_stage"] = len(counts), counts
    elif virtual is not None:
        stages = pp * virtual
    elif per_virtual is not None:
        stages = s.integer("num-layers") // s.size("num-layers-per-virtual-pipeline-stage")
    if stages > pp:
        blocking = s.flag("no-overlap-p2p-communication")
        out |= {"schedule": "interleaved_1f1b", "virtual_stages": stages // pp, "p2p_overlap": not blocking}
        out["micro_batch_group"] = s.whole("microbatch-group-size-per-virtual-pipeline-stage")
    return out


def _unrolled(layout: str) -> str:
    """A layout's text without `t*3` and `(tt|)*2` (core/transformer/pipeline_parallel_layer_layout.py).

    A layer is `t`; E, m and L are none.
    """
    for times in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(times, lambda found: found[1] * int(found[2][:4]), layout)
    return layout
