"""LitGPT's YAML, and its command `litgpt pretrain|finetune_full|finetune_lora`, as a scenario.

Names and defaults: litgpt/pretrain.py, finetune/full.py, finetune/lora.py, args.py and config.py of Lightning-AI/litgpt
0.5.13. Sharding and casts: lightning/fabric of release 2.6, strategies/fsdp.py, strategies/model_parallel.py and
plugins/precision/fsdp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from sim.convert.named_models import named_model
from sim.convert.scripts.command_line import ENDS, words_of
from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.settings import ALL_IN_BF16, Converted, Machine, Settings, without_none
from sim.convert.trainer_arguments.launched import typed
from sim.core.errors import InputError
from sim.inputs.input_source import show

PROGRAM, PRETRAIN, FULL, LORA = "litgpt", "pretrain", "finetune_full", "finetune_lora"
COMMANDS = {PRETRAIN: PRETRAIN, FULL: FULL, LORA: LORA, "finetune": LORA}
OTHERS = ("finetune_adapter", "finetune_adapter_v2")
CAN = f"can be converted: {PRETRAIN}, {FULL}, {LORA}"
SIZES = ("global_batch_size", "micro_batch_size", "max_seq_length", "max_tokens", "lr_warmup_steps")  # of `train`
NAMED = {PRETRAIN: "model_name", FULL: "checkpoint_dir", LORA: "checkpoint_dir"}
BATCHES = {PRETRAIN: (512, 4), FULL: (16, 1), LORA: (16, 1)}  # global and micro-batch, where the file has none
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-true": {"precision": "bf16"} | ALL_IN_BF16 | {"grad_reduce_dtype": "bf16"},
    "bf16-mixed": {"precision": "bf16", "param_dtype": "fp32", "grad_reduce_dtype": "bf16"},
    "16-mixed": {"precision": "fp16", "param_dtype": "fp32", "grad_reduce_dtype": "fp16"},
    "32-true": {"precision": "fp32", "param_dtype": "fp32"},
}
USUAL = "bf16-mixed"  # utils.py: `get_default_supported_precision`
GATHERS_FP32 = "precision {}: litgpt gathers parameters in fp32 beside adapters; simulated in 16 bits"
NF4 = ("bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq")
WITHOUT_GPUS = "quantize: litgpt refuses it on several GPUs; with devices: 1 it can be converted"
CHUNKS = "loss in chunks of 128 tokens: autograd keeps the logits of all chunks for the backward, which is simulated"
ROUNDED = "train.global_batch_size: found {:,}; litgpt takes {:,}, whole micro-batches on each GPU"
LENGTH = "is required and missing (litgpt takes the longest text of the data): give --seq-len N"
MLPS = {"GptNeoxMLP": "gelu", "LLaMAMLP": "swiglu", "GemmaMLP": "geglu"}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Keys of `litgpt.Config` with which a model differs in more than its sizes; a shipped model may have them.
NOT_READ = ("n_expert", "latent_attention", "sliding_window_size", "norm_qk", "post_attention_norm", "post_mlp_norm")


def is_litgpt(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of LitGPT."""
    train = data.get("train")
    named = any(key in data for key in ("checkpoint_dir", "model_name", "model_config"))
    return named and isinstance(train, dict) and any(size in train for size in SIZES)


def runs_litgpt(script: Script) -> bool:
    """Tell whether a script has a command of LitGPT that trains."""
    return _command(words_of(script)) is not None


def _command(words: list[str]) -> int | None:
    """Where the word behind the program stands."""
    known = (*COMMANDS, *OTHERS)
    pairs = enumerate(pairwise(words), 1)
    return next((at for at, (one, after) in pairs if one.rpartition("/")[2] == PROGRAM and after in known), None)


def convert_litgpt_command(file: Path, script: Script, machine: Machine, seq_len: int | None) -> Converted:
    """The scenario of a command's arguments, and of the config that it names (`--config`).

    Raises:
        InputError: for a config that is not there, and as `convert_litgpt`.
    """
    words = words_of(script)
    if (at := _command(words)) is None:
        raise InputError(f"{file}: has no command `{PROGRAM} {PRETRAIN}` or of its kin that could be read")
    if _command(words[at:]) is not None:
        raise InputError(f"{file}: several commands of {PROGRAM} train: keep the one that runs in the file")
    kind, behind = words[at], list(takewhile(lambda word: word not in ENDS, words[at + 1 :]))
    if kind in OTHERS:
        raise InputError(f"{file}: {PROGRAM} {kind}: trains prompts in front of each layer; {CAN}")
    data: dict[str, Any] = {}
    if behind and not behind[0].startswith("-"):
        data[NAMED[COMMANDS[kind]]] = behind[0]
    for name, value in _arguments(behind):
        if name == "config":
            named = named_mapping(file, script, str(value))
            if named is None:
                raise InputError(f"{file}: --config: found {show(value)}; no such file, here or beside {file.name}")
            data = named | data
        else:
            _put(data, name.split("."), value)
    return convert_litgpt(file, data, machine, seq_len, COMMANDS[kind])


def _arguments(words: list[str]) -> list[tuple[str, Any]]:
    """Flags and their values in order; jsonargparse takes `--name value` and `--name=value`."""
    found = []
    for word, after in pairwise([*words, "--"]):
        name, separator, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            found.append((name, typed(value if separator else after)))
    return found


def _put(data: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        inner = data.get(name)
        data[name] = dict(inner) if isinstance(inner, dict) else {}
        data = data[name]
    data[names[-1]] = value


def convert_litgpt(
    file: Path, data: Mapping[str, Any], machine: Machine, seq_len: int | None, command: str | None = None
) -> Converted:
    """A scenario from a config. `command`: which of LitGPT's; None: as the file's keys say.

    Raises:
        InputError: for an unknown model, and where the sequence length or the number of GPUs is missing.
    """
    s = Settings(file, {key: value for key, value in data.items() if value is not None})
    kind = command or _kind(data)
    train = s.section("train")
    model, longest = _model(s, machine, kind)
    gpus, devices = _gpus(s, machine, kind)
    dp = s.ranks(gpus, machine, 1, "1")
    length = seq_len or train.whole("max_seq_length") or longest
    if length is None:
        raise InputError(f"{file}: train.max_seq_length: {LENGTH}")
    whole, micro = (
        train.size(name, usual)
        for name, usual in zip(("global_batch_size", "micro_batch_size"), BATCHES[kind], strict=True)
    )
    steps = max(whole // dp // micro, 1)  # args.py: `gradient_accumulation_iters`
    if steps * micro * dp != whole:
        s.notes.append(ROUNDED.format(whole, steps * micro * dp))
    numbers = _numbers(s)
    training = {
        "seq_len": length,
        "micro_batch_size": micro,
        "global_batch_size": steps * micro * dp,
        **numbers,
        "gradient_clipping": kind == PRETRAIN and train.take("max_norm", 1.0) is not None,
        "framework": "compiled_real_rope" if kind == PRETRAIN else "eager",
        "recompute": "full" if kind != PRETRAIN and dp > 1 else "none",
        **_optimizer(s, kind, str(numbers["param_dtype"])),
        "lora": _lora(s, dp) if kind == LORA else None,
    }
    s.notes.append(CHUNKS)
    sharded = _sharded(kind, dp, devices) if dp > 1 else {"zero": 0}
    if kind == LORA and dp > 1 and (named := str(s.values.get("precision", USUAL))).endswith("mixed"):
        s.notes.append(GATHERS_FP32.format(named))
    sections = {"model": model, "training": without_none(training), "parallelism": {"dp": dp, **sharded}}
    return s.converted("litgpt", machine, sections)


def _kind(data: Mapping[str, Any]) -> str:
    if any(str(key).startswith("lora_") for key in data):
        return LORA
    return FULL if "checkpoint_dir" in data else PRETRAIN


def _gpus(s: Settings, machine: Machine, kind: str) -> tuple[int | None, int | None]:
    """GPUs of all nodes and of one, where the file or the user gives them."""
    nodes = s.size("num_nodes", 1)
    devices = s.take("devices", None if kind == PRETRAIN else 1)
    each = None if devices in (None, "auto", -1, "-1") else s.size("devices", 1)
    given = machine.gpus
    return (each * nodes if each else None), each or (given // nodes if given and given % nodes == 0 else None)


def _sharded(kind: str, dp: int, devices: int | None) -> dict[str, Any]:
    """FSDP: pretraining shards over the GPUs of one node and copies over nodes (HYBRID_SHARD), adapters are sharded by
    `fully_shard`. Gradients of all but the last micro-batch stay where they are (`fabric.no_backward_sync`)."""
    found: dict[str, Any] = {"zero": 3, "fsdp_version": 2 if kind == LORA else 1, "accumulate_unsharded": True}
    if kind == PRETRAIN and devices is not None and devices < dp:
        found["shard_size"] = devices
    return found


def _numbers(s: Settings) -> dict[str, Any]:
    word = str(s.values.get("precision", USUAL))
    s.taken.add("precision")
    if word not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise InputError(f"{s.place('precision')}: found {show(word)}; can be converted: {known}")
    return dict(PRECISIONS[word])


def _optimizer(s: Settings, kind: str, param_dtype: str) -> dict[str, Any]:
    """The optimizer by its class, the kernels fused in pretraining alone (`extra_kwargs` of pretrain.py)."""
    given = s.take("optimizer", "AdamW")
    named = str(given.get("class_path", "AdamW") if isinstance(given, dict) else given).rpartition(".")[2]
    sgd = named.lower() == "sgd"
    eight = "8bit" in named.lower()
    if "adam" not in named.lower() and not sgd:
        s.notes.append(f"optimizer {named}: is simulated as AdamW")
    found = {"optimizer": "sgd" if sgd else "adamw", "optimizer_dtype": "int8" if eight else param_dtype}
    of_torch = named in ("AdamW", "Adam")
    return found | ({"adamw_kernels": "fused" if kind == PRETRAIN else "foreach"} if of_torch else {})


def _lora(s: Settings, dp: int) -> dict[str, Any]:
    s.take("lora_alpha")
    into = [s.flag(f"lora_{part}", part != "key") for part in ("query", "key", "value")]
    targets = ["qkv"] if any(into) else []
    targets += ["attention_out"] if s.flag("lora_projection") else []
    targets += ["mlp_up", "mlp_down"] if s.flag("lora_mlp") else []
    if s.flag("lora_head"):
        s.notes.append("lora_head: adapters of the output matrix are not simulated")
    found: dict[str, Any] = {"rank": s.size("lora_r", 8), "targets": targets}
    found |= {"dropout": dropout} if (dropout := s.number("lora_dropout", 0.05)) else {}
    quantize = s.values.get("quantize")
    if quantize is not None and dp > 1:
        raise InputError(f"{s.file}: {WITHOUT_GPUS}")
    if quantize in NF4:
        s.take("quantize")
        found["weights"] = "nf4"
        if "nf4" not in str(quantize):
            s.notes.append(f"quantize {quantize}: simulated as bnb.nf4, which has as many bits")
    return found


def _model(s: Settings, machine: Machine, kind: str) -> tuple[Any, int | None]:
    """The model, and the length of its texts where the file describes it (`block_size`)."""
    described, name = s.take("model_config"), NAMED[kind]
    named = s.take(name)
    if machine.model is not None:
        return machine.model, None
    if kind == PRETRAIN and isinstance(described, dict):
        return _described(s, described)
    if named is None:
        raise InputError(f"{s.file}: {name}: is required and missing")
    return named_model(s.file, s.place(name), str(named), s.notes), None


def _described(s: Settings, config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A `litgpt.Config` in the file, with its defaults."""
    c = Settings(s.file, {key: value for key, value in config.items() if value is not None}, "model_config.")
    s.sections.append(c)
    if odd := next((key for key in NOT_READ if c.values.get(key)), None):
        raise InputError(f"{c.place(odd)}: is not read; describe the model yourself: --model FOLDER/config.json")
    hidden, heads = c.size("n_embd", 4096), c.size("n_head", 32)
    words, multiple = c.size("vocab_size", 50254), c.size("padding_multiple", 512)
    parallel, share = c.flag("parallel_residual", True), c.number("rotary_percentage", 0.25) or 0.0
    for harmless in ("name", "hf_config", "norm_eps", "rope_base", "rope_condense_ratio", "gelu_approximate"):
        c.take(harmless)
    model = {
        "layers": c.size("n_layer", 16),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": c.size("n_query_groups", heads),
        "head_dim": c.whole("head_size"),
        "ffn": c.size("intermediate_size", 4 * hidden),
        "vocab": c.size("padded_vocab_size", -(-words // multiple) * multiple),
        "mlp": c.choice("mlp_class_name", MLPS, "GptNeoxMLP") or "gelu",
        "norm": c.choice("norm_class_name", NORMS, "LayerNorm") or "layernorm",
        **_biases(c),
        "head_bias": c.flag("lm_head_bias") or None,
        "parallel_block": _parallel(c) if parallel else None,
        "tied_embeddings": bool((s.values.get("train") or {}).get("tie_embeddings")),
        "positions": "rope" if share else "none",
        "rope_share": share if 0 < share < 1 else None,
    }
    return without_none(model), c.size("block_size", 4096)


def _biases(c: Settings) -> dict[str, bool]:
    """Of linear layers, of queries, keys and values alone, and torch's own of layer norms (model.py)."""
    own, of_qkv = c.flag("bias", True), c.flag("attn_bias")
    layer_norm = c.values.get("norm_class_name", "LayerNorm") == "LayerNorm"
    return {"bias": own, **({} if own else {"qkv_bias": of_qkv, **({"norm_bias": True} if layer_norm else {})})}


def _parallel(c: Settings) -> bool | str:
    return True if c.flag("shared_attention_norm") else "two_norms"
