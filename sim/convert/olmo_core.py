"""OLMo-core's config.json, which its trainer writes beside a run, as a scenario: dense models.

Names, defaults and meaning: ai2-olmo-core 3.0: config.py (`as_config_dict`: nulls are left out, `_CLASS_` names a
mapping's class, which nothing loads here), nn/transformer (config.py; model.py: `apply_fsdp`, `apply_compile`),
nn/attention, train/train_module/transformer (config.py; train_module.py: `_train_microbatch_context`) and
distributed/parallel. Sizes of batches are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.settings import ALL_IN_BF16, Converted, Machine, Settings, flat, without_none
from sim.core.errors import InputError
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source, show
from sim.inputs.model_config import MAX_LAYERS

MARKS = ("model", "train_module", "data_loader")
TRAIN, DATA, BLOCK = "train_module", "data_loader", "model.block"
DP, TP, CP, AC = (f"{TRAIN}.{kind}_config" for kind in ("dp", "tp", "cp", "ac"))
MIXERS = ("sequence_mixer", "attention")  # the second in releases before 3
KINDS = {"default": None, "reordered_norm": "post", "peri_norm": "both"}
NORMS = {"default": "layernorm", **dict.fromkeys(("rms", "qwen_rms", "cute_rms", "fused_rms"), "rmsnorm")}
MLPS = {"silu": "swiglu", "gelu_tanh": "geglu"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
REFUSED = {"pp": "pipeline parallelism", "ep": "expert parallelism"}
# What is not converted of a model, and of its attention.
OTHERS = ("block_pattern", "block_overrides", "embedding_norm", "embed_scale", "freeze_params")
UNUSUAL = ("gate", "clip_qkv", "attention_sinks", "scalable_softmax")
OPTIMIZERS = {
    "AdamWConfig": "adamw",
    "SkipStepAdamWConfig": "adamw",
    "LionConfig": "lion",
    "SkipStepLionConfig": "lion",
}
FLOAT8, RECIPES = f"{TRAIN}.float8_config", ("tensorwise", "rowwise")
IGNORED = f"{FLOAT8}.modules_to_ignore: simulated in fp8 like the other matmuls of layers"
BUCKET_BYTES = 100 * 2**20  # of DDP
HARMLESS = ("trainer.", "launch.", "dataset.", "data_loader.", f"{TRAIN}.scheduler.", f"{TRAIN}.optim.", "model.init")


def is_olmo_core(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of OLMo-core."""
    return all(isinstance(data.get(mark), dict) for mark in MARKS)


def convert_olmo_core(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """A scenario from the config of a run.

    Raises:
        InputError: for pipeline or expert parallelism, a model that no key describes, and sizes that do not divide.
    """
    s = Settings(file, flat(data))
    for kind, words in REFUSED.items():
        if any(name.startswith(f"{TRAIN}.{kind}_config.") for name in s.values):
            raise InputError(f"{file}: {TRAIN}.{kind}_config: {words} of OLMo-core is not converted")
    model = machine.model or _model(s)
    layout = _layout(s, machine)
    training = _training(s, layout)
    gathers_8_bits = s.flag(f"{FLOAT8}.ao.enable_fsdp_float8_all_gather")
    if layout["zero"] == 3 and training.get("fp8_recipe") == RECIPES[0] and not gathers_8_bits:
        layout["param_gather_dtype"] = "bf16"
    sections = {"model": model, "training": without_none(training), "parallelism": without_none(layout)}
    own = ("model.",) if machine.model else ()
    left = [name for name in s.left() if not name.startswith((*HARMLESS, *own)) and "_CLASS_" not in name]
    name = data.get("run_name")
    return s.converted("olmo_core", machine, sections, name=name if isinstance(name, str) else "", left=left)


def _model(s: Settings) -> dict[str, Any]:
    mixer = next((f"{BLOCK}.{name}" for name in MIXERS if f"{BLOCK}.{name}.n_heads" in s.values), "")
    _require_plain(s, mixer)
    layers, heads = s.size("model.n_layers"), s.size(f"{mixer}.n_heads")
    norm = s.choice(f"{BLOCK}.layer_norm.name", NORMS, "default") or "rmsnorm"
    position = KINDS[str(s.take(f"{BLOCK}.name", "default"))]
    by_norms = any(name.startswith(f"{mixer}.qk_norm.") for name in s.values)
    s.taken |= {name for name in s.values if name.startswith((f"{mixer}.rope.", f"{mixer}.qk_norm.", "model.lm_head."))}
    s.taken |= {"model.name", "model.dtype", *(f"{mixer}.{key}" for key in ("type", "name", "dtype", "backend"))}
    s.taken |= {f"{mixer}.{key}" for key in UNUSUAL}
    share = s.number(f"{mixer}.rope.partial_rotary_factor", 1.0)
    s.taken |= {f"{BLOCK}.layer_norm.{key}" for key in ("eps", "dtype", "full_precision", "bias")}
    s.taken |= {f"{BLOCK}.feed_forward.{key}" for key in ("name", "dtype")}
    return without_none(
        {
            "layers": layers,
            "hidden": s.size("model.d_model"),
            "heads": heads,
            "kv_heads": s.size(f"{mixer}.n_kv_heads", heads),
            "head_dim": s.whole(f"{mixer}.head_dim"),
            "ffn": s.size(f"{BLOCK}.feed_forward.hidden_size"),
            "vocab": s.size("model.vocab_size"),
            "mlp": s.choice(f"{BLOCK}.feed_forward.activation", MLPS, "silu") or "swiglu",
            "norm": norm,
            "norm_position": position,
            "norm_bias": s.flag(f"{BLOCK}.layer_norm.bias", default=True) if norm == "layernorm" else None,
            "norm_weights": None if s.flag(f"{BLOCK}.layer_norm.elementwise_affine", default=True) else False,
            "qk_norm": True if by_norms else None,
            "qk_norm_over": "all_heads" if by_norms and not s.flag(f"{mixer}.use_head_qk_norm") else None,
            "bias": any([s.flag(f"{mixer}.bias", default=True), s.flag(f"{BLOCK}.feed_forward.bias", default=True)]),
            "tied_embeddings": s.flag("model.tie_word_embeddings"),
            "positions": "rope",
            "rope_share": share if share != 1.0 else None,
            **_windows(s, f"{mixer}.sliding_window", layers),
        }
    )


def _require_plain(s: Settings, mixer: str) -> None:
    """Raise for a model that the keys of `_model` do not describe."""
    kind = str(s.values.get(f"{BLOCK}.name", "default"))
    own = [name for name in OTHERS if any(f"{each}.".startswith(f"model.{name}.") for each in s.values)]
    own += [name for name in UNUSUAL if _has(s, f"{mixer}.{name}")]
    own += [f"name {name}" for name in [s.values.get("model.name", "default")] if name != "default"]
    problem = f"block {kind}" if kind not in KINDS else f"has {own[0]}" if own else ""
    if not mixer or f"{BLOCK}.feed_forward.hidden_size" not in s.values:
        problem = problem or "has blocks without attention or a dense MLP"
    if problem:
        raise InputError(f"{s.file}: model: {problem}, which is not converted: give --model")


def _has(s: Settings, name: str) -> bool:
    return any(value is not False for each, value in s.values.items() if f"{each}.".startswith(f"{name}."))


def _windows(s: Settings, place: str, layers: int) -> dict[str, Any]:
    """Windows and which layers have them: the pattern repeats, behind a first layer that sees everything
    (nn/attention: `SlidingWindowAttentionConfig._get_window_size`)."""
    pattern = s.listed(f"{place}.pattern", of=int)
    first, last = (s.flag(f"{place}.force_full_attention_on_{end}_layer", default=True) for end in ("first", "last"))
    sizes = {size for size in pattern if size > 0}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise InputError(f"{s.place(f'{place}.pattern')}: found {show(pattern)}; windows of one size can be converted")
    if layers > MAX_LAYERS:
        raise InputError(f"{s.place('model.n_layers')}: found {layers}; must be at most {MAX_LAYERS}")
    kinds = ["sliding" if pattern[(i - first) % len(pattern)] > 0 else "full" for i in range(layers)]
    kinds[0], kinds[-1] = "full" if first else kinds[0], "full" if last else kinds[-1]
    return {"window": sizes.pop(), "attention_pattern": kinds}


def _layout(s: Settings, machine: Machine) -> dict[str, Any]:
    """Degrees; FSDP2 reduces in each micro-batch, of HSDP the replicas in the last alone, as DDP."""
    tp, cp = s.size(f"{TP}.degree", 1), s.size(f"{CP}.degree", 1)
    s.taken.add(f"{TP}.enable_async")
    dp = s.ranks(None, machine, tp * cp, "tp · cp")
    kind = str(s.take(f"{DP}.name", "ddp"))
    if kind not in ("fsdp", "hsdp", "ddp"):
        raise InputError(f"{s.place(f'{DP}.name')}: found {show(kind)}; can be converted: fsdp, hsdp, ddp")
    balancer = str(s.take(f"{CP}.ring.load_balancer", "zig_zag"))
    gathers = balancer == "llama3"
    by_heads = any(name.startswith(f"{CP}.uly") for name in s.values)
    s.taken |= {f"{CP}.ring.head_stride", f"{DP}.wrapping_strategy", f"{DP}.prefetch_factor"}
    return {
        "dp": dp,
        "tp": tp if tp > 1 else None,
        "sp": True if tp > 1 else None,
        "cp": cp if cp > 1 else None,
        "cp_method": None if cp == 1 else "all_to_all" if by_heads else "all_gather" if gathers else "ring",
        "cp_split": "contiguous" if cp > 1 and gathers else None,
        "zero": 0 if kind == "ddp" else 3,
        "fsdp_version": None if kind == "ddp" else 2,
        "bucket_bytes": BUCKET_BYTES if kind == "ddp" else None,
        **(_shards(s, machine, dp, cp) if kind == "hsdp" else {}),
    }


def _shards(s: Settings, machine: Machine, dp: int, cp: int) -> dict[str, Any]:
    """Ranks of one copy: those of a node where neither number is given (`get_replicate_and_shard_degree`)."""
    shards, copies = s.whole(f"{DP}.shard_degree"), s.whole(f"{DP}.num_replicas")
    each = resolve_cluster(machine.cluster, dp * cp, Source(str(s.file), {})).gpus_per_node
    found = shards or (dp // copies if copies else min(dp, each))
    return {"shard_size": found * cp, "all_reduce_once": True} if found < dp else {}


def _training(s: Settings, layout: Mapping[str, Any]) -> dict[str, Any]:
    longest = s.size(f"{TRAIN}.max_sequence_length")
    length = s.size("dataset.sequence_length", longest)
    tokens = {name: s.size(name) for name in (f"{TRAIN}.rank_microbatch_size", f"{DATA}.global_batch_size")}
    for name, size in tokens.items():
        if size % length:
            raise InputError(f"{s.place(name)}: found {size}; must be a multiple of the {length} tokens of a sequence")
    micro, whole = (size // length for size in tokens.values())
    cast, autocast = (DTYPES.get(str(s.take(name))) for name in (f"{DP}.param_dtype", f"{TRAIN}.autocast_precision"))
    precision = cast or autocast or "fp32"
    all_cast = not layout["zero"] and cast == "bf16"  # of DDP the parameters themselves (`apply_ddp`)
    reduced = s.choice(f"{DP}.reduce_dtype", DTYPES, "float32")
    low, compiled = precision != "fp32", s.flag(f"{TRAIN}.compile_model")
    return {
        "seq_len": length,
        "micro_batch_size": micro,
        "global_batch_size": whole,
        "precision": precision,
        "param_dtype": "fp32" if low else None,
        "grad_reduce_dtype": reduced if low and layout["zero"] else None,
        "gradient_clipping": (s.number(f"{TRAIN}.max_grad_norm") or 0.0) > 0,
        "attention": "fused",
        "framework": _framework(s) if compiled else "eager",
        "recompute": _recompute(s),
        "cross_entropy": _loss(s, layout, compiled),
        **(ALL_IN_BF16 if all_cast else {}),
        **_in_8_bits(s, precision),
        **_optimizer(s, all_cast),
    }


def _in_8_bits(s: Settings, precision: str) -> dict[str, str]:
    """torchao's matmuls in fp8, by default with a scale for each tensor (float8)."""
    named = {name for name in s.values if name.startswith(f"{FLOAT8}.")}
    if not named or not s.flag(f"{FLOAT8}.enabled", default=True):
        s.taken |= named
        return {}
    recipe = str(s.values.get(f"{FLOAT8}.ao_recipe", RECIPES[0]))
    if precision != "bf16" or recipe not in RECIPES or _has(s, f"{FLOAT8}.ao_mx"):
        s.notes.append(f"{FLOAT8}: matmuls are simulated in {precision}")
        return {}
    s.taken |= {f"{FLOAT8}.ao_recipe"}
    s.notes += [IGNORED] if s.take(f"{FLOAT8}.modules_to_ignore") else []
    return {"precision": "fp8", "fp8_recipe": recipe}


def _framework(s: Settings) -> str:
    """Return whose compiled layers these are like, by what rope multiplies (nn/rope.py: RoPEType)."""
    named = (s.values.get(f"{BLOCK}.{mixer}.rope.name") for mixer in MIXERS)
    return "compiled" if "complex" in named else "compiled_real_rope"


def _loss(s: Settings, layout: Mapping[str, Any], compiled: bool) -> str | None:
    """Liger's loss, where the file names it (nn/lm_head.py); else a compiled model has its loss in the same graph as
    the output layer (nn/transformer/model.py: apply_compile), and the gradient is written over the logits."""
    usual = "fused" if compiled else None
    if s.take("model.lm_head.loss_implementation") != "fused_linear":
        return usual
    if layout["tp"]:
        s.notes.append("fused_linear: with tp the loss is simulated with all logits at once")
    return usual if layout["tp"] else "chunked"


def _recompute(s: Settings) -> Any:
    """Recomputed blocks; a note names the modes that have no key."""
    mode = s.take(f"{AC}.mode", "full") if any(name.startswith(f"{AC}.") for name in s.values) else "none"
    every = s.whole(f"{AC}.block_interval")
    s.taken.add(f"{AC}.determinism_check")
    if mode == "selected_blocks" and every is not None and every > 1:
        return {"mode": "full", "every": every}
    if mode not in ("none", "full", "selected_blocks"):
        s.notes.append(f"{AC}.mode {mode}: nothing is simulated as recomputed; training.recompute says more")
        return "none"
    return "none" if mode == "none" else "full"


def _optimizer(s: Settings, all_cast: bool) -> dict[str, Any]:
    """AdamW and Lion by the class's name; torch's kernels where AdamW is torch's own (optim/adamw.py)."""
    name = str(s.take(f"{TRAIN}.optim._CLASS_", "AdamWConfig")).rpartition(".")[2]
    if (found := OPTIMIZERS.get(name)) is None:
        s.notes.append(f"optimizer {name}: is simulated as AdamW")
    fused = s.flag(f"{TRAIN}.optim.fused")
    states = DTYPES.get(str(s.take(f"{TRAIN}.optim.dtype")))
    return {
        "optimizer": found or "adamw",
        "adamw_kernels": None if found == "lion" else "fused" if fused else "foreach",
        "optimizer_dtype": states if states in ("bf16", "fp16") else "bf16" if all_cast else None,
    }
