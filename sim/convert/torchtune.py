"""torchtune's YAML as a scenario: full and LoRA fine-tuning on one GPU or with FSDP2, of texts, answers or a teacher.

Names and meaning: recipes/full_finetune_distributed.py, lora_finetune_distributed.py, full_dpo_distributed.py,
lora_dpo_distributed.py and knowledge_distillation_distributed.py of meta-pytorch/torchtune, release 0.6. Components are
named by their Python path; keys of sections are written behind a dot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sim.convert.settings import FSDP_ON_HOST, OF_A_PAIR, Converted, Machine, Settings, without_none
from sim.convert.teachers import taught_by
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import model_presets

COMPONENT = "_component_"
MODELS = ("model", "policy_model")  # the section that a recipe trains; the latter's is recipes/ppo_full_finetune_*.py
# Sections of recipes that are not converted: the one above.
OTHER_RECIPES = {
    "policy_model": "generates answers in each step, which a scenario with `rl` describes (docs/rl.md)",
}
TEACHER = "teacher_model"  # of recipes/knowledge_distillation_distributed.py and _single_device.py
OF_TEACHER = (
    "kd_loss: both models' logits are compared at once in the simulation, and a part of them at a time in torchtune"
)
TRAINS = "can be converted: training on next tokens, on pairs of answers (DPO), or with a teacher"
OPTIMIZER = "optimizer"  # which each recipe that trains needs (`cfg.optimizer`)
EVALUATES = "is missing, as in configs of torchtune's recipes that evaluate, generate or quantize"
LORA = re.compile(r"^(q?)lora_")
# Builders of torchtune/models beside those whose name is a shipped model's with `_` for `-` and `.`, and `BUILDERS`.
ENDINGS = re.compile(r"_(base|instruct)$")
BUILDERS = Path(__file__).parents[1] / "presets" / "torchtune.yaml"
SAME_SIZES = {"llama3-3-70b": "llama3.1-70b", "qwen3-moe-30b-a3b": "qwen3-30b-a3b"}
DTYPES = {"bf16": "bf16", "fp32": "fp32"}
ATTENTION = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"), "output_proj": "attention_out"}
PAIRS = ("DPOLoss", "RSOLoss")  # torchtune/rlhf/loss/dpo.py, of the same log-probabilities
OBJECTIVES = ("PPO", "GRPO", "KL", "JS", "SimPO", "Reward")  # in a loss's name: no next tokens alone
OF_TORCH = ("torch.optim.AdamW", "torch.optim.Adam")
CHUNKED = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")
KEEPS_ALL = (
    "loss in chunks: autograd keeps all chunks' logits for the backward, as is simulated; in the forward torchtune "
    "holds fp32 copies of one chunk at a time"
)
SHARDED_LAYERS = ("tok_embeddings", "output")
ROOT = (
    "custom_sharded_layers: {} not named, and so torchtune gathers it with the last norm as a step begins and frees it "
    "behind the backward; here it is gathered when it is used"
)
IN_BACKWARD = "optimizer_in_bwd: each gradient is used and freed at once there; here all are kept up to the optimizer"


def is_torchtune(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of torchtune."""
    return any(isinstance(model := data.get(name), dict) and COMPONENT in model for name in MODELS)


def convert_torchtune(file: Path, data: Mapping[str, Any], machine: Machine, seq_len: int | None) -> Converted:
    """A scenario from a recipe's config.

    Raises:
        InputError: for a model that is not shipped, another objective than next tokens, and where the sequence length
            or the number of GPUs is missing.
    """
    if other := next((section for section in OTHER_RECIPES if section in data), None):
        raise InputError(f"{file}: {other}: {OTHER_RECIPES[other]}; {TRAINS}")
    if OPTIMIZER not in data:
        raise InputError(f"{file}: {OPTIMIZER}: {EVALUATES}; {TRAINS}")
    values = {key: value for key, value in data.items() if not isinstance(value, dict)}
    for name, section in data.items():
        if isinstance(section, dict):
            values |= {f"{name}.{key}": value for key, value in section.items()}
    s = Settings(file, {key: value for key, value in values.items() if value is not None})
    builder = _component(s, "model")
    model = machine.model or _model(s, LORA.sub("", builder))
    length = [seq_len, s.whole("tokenizer.max_seq_len")][not seq_len]
    if length is None:
        raise InputError(f"{file}: tokenizer.max_seq_len: is required and missing: give --seq-len N")
    layout = _layout(s, machine)
    pairs = _component(s, "loss") in PAIRS
    micro = s.size("batch_size") * (2 if pairs else 1)
    training = {
        "seq_len": length,
        "micro_batch_size": micro,
        "global_batch_size": micro * s.size("gradient_accumulation_steps", 1) * layout["dp"],
        **_numbers(s),
        "gradient_clipping": s.take("clip_grad_norm") is not None,
        **_compiled(s, pairs),
        "recompute": _recompute(s),
        "activation_offload": s.flag("enable_activation_offloading") or None,
        **_optimizer(s, layout["zero"] == 3),
        "lora": _lora(s, builder),
    }
    if s.flag("dataset.packed"):
        s.notes.append("packed: a sequence is simulated as one text; training.packing describes several shorter ones")
    sections = {"model": model, "training": without_none(training), "parallelism": without_none(layout)}
    sections |= _taught(s, layout["dp"]) if TEACHER in data else {}
    return s.converted("torchtune", machine, sections)


def _component(s: Settings, section: str) -> str:
    return str(s.take(f"{section}.{COMPONENT}", "")).rpartition(".")[2]


def _model(s: Settings, name: str, section: str = "model") -> Any:
    """The shipped model that a builder makes, or the sizes that it has."""
    plain = ENDINGS.sub("", name).replace("_", "-")
    of_builders = yaml.safe_load(BUILDERS.read_text(encoding="utf-8"))
    shipped = {preset.replace(".", "-"): preset for preset in model_presets()} | SAME_SIZES | of_builders
    if plain not in shipped:
        raise InputError(f"{s.file}: {section}.{COMPONENT}: found {show(name)}; is no shipped model: give --model")
    return shipped[plain]


def _layout(s: Settings, machine: Machine) -> dict[str, Any]:
    tp, replicas = s.size("tensor_parallel_dim", 1), s.size("data_parallel_replicate_dim", 1)
    dp = s.ranks(None, machine, tp * replicas, "tensor_parallel_dim · data_parallel_replicate_dim") * replicas
    s.take("data_parallel_shard_dim")
    sharded = dp // replicas > 1
    if apart := sharded and [name for name in SHARDED_LAYERS if name not in s.listed("custom_sharded_layers")]:
        s.notes.append(ROOT.format(" and ".join(apart)))  # training/_distributed.py: shard_model
    return {
        "dp": dp,
        "tp": tp,
        "sp": False if tp > 1 else None,
        "zero": 3 if sharded else 0,
        "shard_size": dp // replicas if sharded and replicas > 1 else None,
        "reshard_after_forward": False if sharded and not s.flag("fsdp_reshard_after_forward", True) else None,
    }


def _taught(s: Settings, dp: int) -> dict[str, Any]:
    """The section `distillation`: the teacher's logits are the student's second target."""
    s.taken |= {f"kd_loss.{COMPONENT}", "kd_loss.num_output_chunks", "kd_ratio"}
    s.taken |= {name for name in s.values if name.startswith("teacher_checkpointer.")}
    s.notes.append(OF_TEACHER)
    return taught_by(_model(s, _component(s, TEACHER), TEACHER), dp, s.notes)


def _numbers(s: Settings) -> dict[str, Any]:
    """All of a dtype: parameters, gradients and the optimizer's states (`training.set_default_dtype`)."""
    dtype = s.choice("dtype", DTYPES, "bf16") or "bf16"
    if s.flag("enable_fp8_training"):
        recipe = s.take("fp8_recipe_name")
        found = {"precision": "fp8", "fp8_recipe": recipe}
    else:
        found = {"precision": dtype}
    if dtype == "fp32":
        return found | {"param_dtype": "fp32"}
    return found | {"param_dtype": "bf16", "master_weights": False, "grad_dtype": "bf16", "grad_reduce_dtype": "bf16"}


def _compiled(s: Settings, pairs: bool) -> dict[str, Any]:
    """Return `framework` and `cross_entropy` by what is compiled; a compiled loss is one kernel. The log-probabilities
    of `pairs` are computed outside it, of all logits (rlhf/sequence_processing.py: `get_batch_log_probs`)."""
    given = s.values.get("compile")
    parts = [part for part in ("model", "loss") if s.flag(f"compile.{part}", True)]
    if not any(key.startswith("compile.") for key in s.values):
        s.take("compile")
        parts = parts if given else []
    loss = _component(s, "loss")
    s.take("loss.num_output_chunks")
    if any(word in loss for word in OBJECTIVES):
        raise InputError(f"{s.file}: loss.{COMPONENT}: found {loss}; {TRAINS}")
    if loss in CHUNKED:
        s.notes.append(KEEPS_ALL)
    framework = "compiled_real_rope" if "model" in parts else "eager"
    if pairs:
        s.taken |= {"loss.beta", "loss.label_smoothing", "loss.gamma"}
        s.notes.append(OF_A_PAIR)
        return {"framework": framework, "cross_entropy": "unfused", "preference": {"loss": "dpo"}}
    return {"framework": framework, "cross_entropy": "fused" if "loss" in parts else "unfused"}


def _recompute(s: Settings) -> Any:
    """`apply_selective_activation_checkpointing` of training/activations.py, else every layer."""
    mode, option, whole = s.take("ac_mode"), s.take("ac_option"), s.flag("enable_activation_checkpointing")
    if mode == "selective":
        return "selective_op" if option == "op" else {"mode": "full", "every": s.size("ac_option", 1)}
    return "full" if whole or mode == "full" else "none"


def _optimizer(s: Settings, sharded: bool) -> dict[str, Any]:
    name = _component(s, "optimizer")
    if s.flag("optimizer_in_bwd"):
        s.notes.append(IN_BACKWARD)
    known = "sgd" if "sgd" in name.lower() else "adamw"
    if "adam" not in name.lower() and known != "sgd":
        s.notes.append(f"optimizer {name}: is simulated as AdamW")
    eight = "8bit" in name.lower()
    dtype = "int8" if eight else "bf16" if s.values.get("dtype", "bf16") == "bf16" else "fp32"
    found = {"optimizer": known, "optimizer_dtype": dtype}
    foreach = not s.flag("optimizer.fused") and s.values.get(f"optimizer.{COMPONENT}") in OF_TORCH
    if not (s.flag("fsdp_cpu_offload") and sharded):
        return found | ({"adamw_kernels": "foreach"} if foreach else {})
    return found | FSDP_ON_HOST


def _lora(s: Settings, builder: str) -> dict[str, Any] | None:
    """Adapters, where the model's builder has them; the base in 4 bits by its name or `quantize_base`."""
    found = LORA.match(builder)
    if found is None:
        return None
    targets = [ATTENTION.get(str(name), "") for name in s.listed("model.lora_attn_modules")]
    targets += ["mlp_up", "mlp_down"] if s.flag("model.apply_lora_to_mlp") else []
    if s.flag("model.apply_lora_to_output"):
        s.notes.append("model.apply_lora_to_output: without adapters of the output matrix")
    lora: dict[str, Any] = {"rank": s.size("model.lora_rank", 8), "targets": [t for t in dict.fromkeys(targets) if t]}
    lora |= {"dropout": dropout} if (dropout := s.number("model.lora_dropout", 0.0)) else {}
    return lora | ({"weights": "nf4"} if found[1] or s.flag("model.quantize_base") else {})
