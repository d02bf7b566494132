"""Megatron-LM's arguments as a scenario: a launch script, a command line, or a file of flags.

Names and defaults: megatron/training/arguments.py of NVIDIA/Megatron-LM at 000c4ac (November 2025).
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.convert.command_line import flags_of, words_of
from sim.convert.settings import Converted, Machine, Settings, without_none
from sim.core.errors import InputError
from sim.inputs.trainer_names import MEGATRON_CP, MEGATRON_FSDP, MEGATRON_FUSIONS

CP_METHODS = {name: method for method, name in MEGATRON_CP.items()}
ZERO_STAGES = {name: zero for zero, name in MEGATRON_FSDP.items()}
WITHOUT_EFFECT = files("sim.convert") / "megatron_without_effect.txt"  # on what a step takes and keeps


def convert_megatron(file: Path, text: str, machine: Machine) -> Converted:
    """The scenario that the flags describe.

    Raises:
        InputError: for a flag without its value, or sizes that are missing.
    """
    s = Settings(file, _flags(file, text))
    p = _layout(s, machine)
    training = _training(s)
    model = machine.model or _model(s)
    without_effect = WITHOUT_EFFECT.read_text("utf-8").split()
    left = [f"--{name}" for name in s.left() if name not in without_effect]
    notes = [f"not expressed here: {', '.join(left)}"] if left else []
    if "moe" in model and isinstance(model, dict):
        notes.append("experts are loaded evenly; model.moe.imbalance says otherwise")
    scenario = {"version": 1, "name": file.stem, "model": model, "training": training, "parallelism": p}
    return Converted({**scenario, "cluster": machine.cluster}, tuple(notes))


def _flags(file: Path, text: str) -> dict[str, Any]:
    """Values by flag; a layout of stages has brackets of its own."""
    return flags_of(words_of(file, text, arrays="--pipeline-model-parallel-layout" not in text))


def _model(s: Settings) -> dict[str, Any]:
    heads = s.integer("num-attention-heads")
    swiglu = s.flag("swiglu")
    vocab = s.take("vocab-size")
    tokenizer = s.take("tokenizer-type")
    if vocab is None:
        raise InputError(f"{s.file}: --vocab-size: is missing (the tokenizer would say it): give --set model.vocab=N")
    dropout = max(float(s.take("attention-dropout", 0.1)), float(s.take("hidden-dropout", 0.1)))
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
        "vocab": s.integer("vocab-size") + (tokenizer == "NullTokenizer"),  # it adds one for the end of a document
        "mlp": "swiglu" if swiglu else "relu2" if s.flag("squared-relu") else "gelu",
        "norm": "rmsnorm" if str(s.take("normalization", "LayerNorm")).lower() == "rmsnorm" else "layernorm",
        "bias": not s.flag("disable-bias-linear"),
        "qkv_bias": s.flag("add-qkv-bias"),
        "qk_norm": s.flag("qk-layernorm"),
        "dropout": dropout,
        "tied_embeddings": not s.flag("untie-embeddings-and-output-weights"),
        "positions": {"learned_absolute": "learned"}.get(str(positions), positions),
        "max_positions": s.integer("max-position-embeddings", s.integer("seq-length")),
        "mtp_layers": s.integer("mtp-num-layers", 0),
    }
    if s.flag("multi-latent-attention"):
        q_rank = s.take("q-lora-rank")
        model["mla"] = {
            "q_lora_rank": None if q_rank is None else int(q_rank),
            "kv_lora_rank": s.integer("kv-lora-rank", 32),
            "qk_nope_head_dim": s.integer("qk-head-dim", 128),
            "qk_rope_head_dim": s.integer("qk-pos-emb-head-dim", 64),
            "v_head_dim": s.integer("v-head-dim", 128),
        }
    elif s.take("kv-channels") is not None:
        model["head_dim"] = s.integer("kv-channels")
    if s.take("num-experts") is not None:
        model["moe"] = _experts(s, model)
    return without_none(model)


def _default_ffn(s: Settings, swiglu: bool) -> int:
    """Four times the hidden size; of SwiGLU two thirds of that, up to a multiple of 64 (`validate_args`)."""
    hidden = s.integer("hidden-size")
    return int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden


def _experts(s: Settings, model: dict[str, Any]) -> dict[str, Any]:
    ffn = s.integer("moe-ffn-hidden-size", model["ffn"])
    shared, capacity = s.take("moe-shared-expert-intermediate-size"), s.take("moe-expert-capacity-factor")
    frequency = str(s.take("moe-layer-freq", "1")).strip("\"' ")
    dense = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", frequency.replace(" ", ""))
    return without_none(
        {
            "experts": s.integer("num-experts"),
            "top_k": s.integer("moe-router-topk", 2),
            "ffn": ffn,
            "shared_experts": None if shared is None else max(1, round(int(shared) / ffn)),
            "dense_layers": int(dense[1]) if dense else None,
            "every": int(frequency) if frequency.isdigit() and frequency != "1" else None,
            "capacity_factor": None if capacity is None else float(capacity),
            "pad_to_capacity": s.flag("moe-pad-expert-input-to-capacity") or None,
            "router_fp32": _fp32_router(s),
            **_groups(s),
        }
    )


def _fp32_router(s: Settings) -> bool | None:
    """Tell whether the router multiplies in fp32. Any other dtype is left, and so named as not expressed."""
    if str(s.values.get("moe-router-dtype")).strip("\"' ") != "fp32":
        return None
    return bool(s.take("moe-router-dtype"))


def _groups(s: Settings) -> dict[str, Any]:
    """A choice limited to groups. DeepEP and HybridEP (`flex`) send a token once to each of their nodes."""
    if s.take("moe-router-group-topk") is None:
        return {}
    top = s.integer("moe-router-group-topk")
    if str(s.take("moe-token-dispatcher-type", "allgather")).strip("\"' ") == "flex":
        s.take("moe-router-num-groups")
        return {"max_nodes_per_token": top}
    return {"groups": s.integer("moe-router-num-groups"), "top_groups": top}


def _training(s: Settings) -> dict[str, Any]:
    precision = "bf16" if s.flag("bf16") else "fp16" if s.flag("fp16") else "fp32"
    recipe = s.take("fp8-recipe")
    if s.take("fp8-format") is not None:
        precision = "mxfp8" if recipe == "mxfp8" else "fp8"
    if s.take("fp4-format") is not None:
        precision = "nvfp4"
    grads = "bf16" if s.flag("grad-reduce-in-bf16") else "fp32"
    s.take("accumulate-allreduce-grads-in-fp32")
    fused = sum(s.flag(f"no-{name}-fusion") for name in MEGATRON_FUSIONS) < len(MEGATRON_FUSIONS)
    return without_none(
        {
            "seq_len": s.integer("seq-length"),
            "micro_batch_size": s.integer("micro-batch-size"),
            "global_batch_size": s.integer("global-batch-size"),
            "precision": precision,
            "fp8_recipe": recipe if precision in ("fp8", "mxfp8") else None,
            "grad_dtype": None if precision == "fp32" else grads,
            "optimizer": "sgd" if s.take("optimizer", "adam") == "sgd" else "adamw",
            "gradient_clipping": float(s.take("clip-grad", 1.0)) > 0,
            "attention": "unfused" if s.take("attention-backend") == "unfused" else "fused",
            "cross_entropy": "fused" if s.flag("cross-entropy-loss-fusion") else "unfused",
            "framework": "megatron" if fused else "eager",
            "recompute": _recompute(s),
        }
    )


def _recompute(s: Settings) -> Any:
    granularity = "selective" if s.flag("recompute-activations") else s.take("recompute-granularity")
    method, layers = s.take("recompute-method"), s.take("recompute-num-layers")
    if granularity == "full" and method == "block":
        return {"mode": "full", "layers": int(layers or 1)}
    named = s.take("recompute-modules")
    if granularity == "selective" and named:
        return {"mode": "selective", "modules": str(named).replace(",", " ").split()}
    return granularity


def _layout(s: Settings, machine: Machine) -> dict[str, Any]:
    tp, pp = s.integer("tensor-model-parallel-size", 1), s.integer("pipeline-model-parallel-size", 1)
    cp, nodes, each = s.integer("context-parallel-size", 1), s.take("nnodes", 1), s.take("nproc-per-node")
    stated = s.integer("nnodes", 1) * s.integer("nproc-per-node") if str(each).isdigit() and nodes else None
    dp = s.ranks(stated, machine, tp * pp * cp, "tp · pp · cp")
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
        "cp_method": CP_METHODS.get(str(s.take("cp-comm-type", "p2p"))),
        "tp_overlap": "full" if s.flag("tp-comm-overlap") else "wgrad" if tp > 1 else None,
        "dp_sync": "bucketed" if overlap else "after_backward",
        "rank_order": "tp-cp-pp-dp" if s.flag("use-tp-pp-dp-mapping") else None,
        **_zero(s, dp * cp),
        **_pipeline(s, pp),
    }
    bucket = s.take("ddp-bucket-size")
    if overlap and bucket is not None:
        p["bucket_bytes"] = int(bucket) * (2 if s.flag("grad-reduce-in-bf16") else 4)
    return without_none(p)


def _zero(s: Settings, members: int) -> dict[str, Any]:
    """The distributed optimizer shards optimizer states; its FSDP by `data-parallel-sharding-strategy`."""
    instances = s.integer("num-distributed-optimizer-instances", 1)
    gather = s.flag("overlap-param-gather")
    strategy = s.take("data-parallel-sharding-strategy")
    if s.flag("use-megatron-fsdp") or s.flag("use-custom-fsdp") or s.flag("use-torch-fsdp2"):
        s.take("use-distributed-optimizer")
        return {"zero": ZERO_STAGES.get(strategy, 3)}
    if not s.flag("use-distributed-optimizer"):
        return {"zero": 0}
    shard = members // instances if instances > 1 else None
    return {"zero": 1, "shard_size": shard, "param_gather_overlap": gather}


def _pipeline(s: Settings, pp: int) -> dict[str, Any]:
    if pp == 1:
        return {}
    layout = s.take("pipeline-model-parallel-layout")
    virtual = s.take("num-virtual-stages-per-pipeline-rank")
    per_virtual = s.take("num-layers-per-virtual-pipeline-stage")
    out: dict[str, Any] = {}
    stages = pp
    if isinstance(layout, str):
        counts = [_layers_of(part) for part in layout.strip("\"'").split("|")]
        stages, out["layers_per_stage"] = len(counts), counts
    elif virtual is not None:
        stages = pp * s.integer("num-virtual-stages-per-pipeline-rank")
    elif per_virtual is not None:
        stages = s.integer("num-layers") // s.integer("num-layers-per-virtual-pipeline-stage")
    if stages > pp:
        group = s.take("microbatch-group-size-per-virtual-pipeline-stage")
        blocking = s.flag("no-overlap-p2p-communication")
        out |= {"schedule": "interleaved_1f1b", "virtual_stages": stages // pp, "p2p_overlap": not blocking}
        out["micro_batch_group"] = None if group is None else int(group)
    return out


def _layers_of(stage: str) -> int:
    """Layers of a stage in a layout's text: `t`, or `t*3`, or `(tt)*2`; E, m and L are no layers."""
    expanded = re.sub(r"\((\w+)\)\*(\d+)", lambda m: m[1] * int(m[2][:4]), stage)
    return re.sub(r"(\w)\*(\d+)", lambda m: m[1] * int(m[2][:4]), expanded).count("t")
