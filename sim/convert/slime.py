"""slime's command of GRPO and its kin, `python3 train.py` with Megatron-LM's arguments and SGLang's, as a scenario with
`rl`.

Names and defaults: THUDM/slime, slime/utils/arguments.py and slime/backends/megatron_utils/arguments.py, 2026: ZeRO-1
and bf16 in any case; a KL term has a reference, whose weights are on the host between its turns; `--colocate` puts the
trainer's states there while the engines run. Engines get all weights anew, so they drop theirs (backends/sglang_utils:
`enable_memory_saver`, without `enable_weights_cpu_backup`). `train_async.py` generates one step ahead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.megatron.attention import MASKLESS
from sim.convert.megatron.older import as_of_today
from sim.convert.megatron.scenario import LISTED, described
from sim.convert.named_models import BY_NAME, known_by_name, with_prediction
from sim.convert.scripts.command_line import flags_of, words_behind, words_of
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Converted, Machine, Settings
from sim.convert.verl import LENGTHS
from sim.core.errors import InputError
from sim.inputs.input_source import Source, show
from sim.inputs.model_input import resolve_model

OF_ALL = {"use-distributed-optimizer": True, "moe-token-dispatcher-type": "alltoall", MASKLESS: True}
POST_NORMS = ("post-self-attn-layernorm", "post-mlp-layernorm")  # GLM-4's
SCRIPTS = ("train.py", "train_async.py")
MARKS = ("--rollout-batch-size", "--actor-num-gpus-per-node")
PROMPT, ANSWER, CONTEXT = (f"rollout-max-{what}-len" for what in ("prompt", "response", "context"))
ESTIMATOR = "advantage-estimator"
ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
ENGINE, CONCURRENCY = "sglang-0.5", 512  # of --sglang-server-concurrency: requests at once, of each engine
# Of data, rewards, losses on a few numbers a token, evaluation, checkpoints, logs and the router.
HARMLESS = re.compile(
    r"(hf-checkpoint|moe-token-dispatcher-type|ref-load|ref-ckpt|load|save|prompt-data|input|label|metadata|tool|"
    r"apply-chat|rollout-(shuffle|seed|stop|skip)|rm-|custom-rm|reward|num-rollout|num-epoch|eval|n-samples-per-eval|"
    r"wandb|use-(wandb|tensorboard|tis)|tis|kl-loss-(type|coef)|kl-coef|entropy|eps|balance-data|normalize|"
    r"disable-compute|sglang-(router|log|server-concurrency)|router|update-weight-buffer|num-gpus-per-node|actor-num|"
    r"model-name|megatron-to-hf)[\w-]*"
)
PACKS = (
    "micro-batches: slime packs {tokens:,} tokens (max_tokens_per_gpu · context_parallel_size); simulated are "
    "{packed:,}, so that whole sequences of training.seq_len divide the batch"
)


def is_slime(script: Script) -> bool:
    """Tell whether a script has slime's flags of engines and trainers."""
    return all(mark in script.started for mark in MARKS)


def convert_slime(file: Path, script: Script, machine: Machine, seq_len: int | None = None) -> Converted:
    """The scenario of the command's arguments.

    Raises:
        InputError: for fine-tuning, a critic, lengths that nothing says, and sizes that do not divide.
    """
    words = words_of(script)
    program = next((word for word in words if word.rpartition("/")[2] in SCRIPTS), SCRIPTS[0])
    given = flags_of(
        words_behind(file, words, program), listed=(*LISTED, "sglang-cuda-graph-bs", "rollout-stop-token-ids")
    )
    notes: list[str] = []
    flags, written = as_of_today({"bf16": "fp16" not in given, **OF_ALL, **given}, notes)
    s = Settings(file, flags, "--", written=written, notes=notes, text=script.text)
    _refuse_others(s)
    gpus = machine.gpus or s.size("actor-num-nodes", 1) * s.size("actor-num-gpus-per-node", 8)
    machine = replace(machine, gpus=gpus, model=machine.model or _named(s))
    s.values = {**s.values, **_sizes(s, gpus, seq_len)}
    sections = described(s, machine, gpus)
    if isinstance(named := sections["model"], str):
        sections["model"] = with_prediction(named, s.integer("mtp-num-layers", 0))
    elif {*POST_NORMS} <= s.values.keys():
        s.taken |= {*POST_NORMS}
        named["norm_position"] = "both"
    rl = _rl(s, gpus, at_once=program.endswith("train_async.py"))
    _split_experts(s, sections["model"], rl["generation"])
    s.missing.update(LENGTHS)
    s.taken.add(MASKLESS)  # its batches have lengths of texts
    s.unknown.add("sglang-dp-size")  # a flag of SGLang's, which has no key here: --sglang-pp-size is not meant
    left = [name for name in s.left() if not HARMLESS.fullmatch(name.lstrip("-"))]
    return s.converted("megatron", machine, {**sections, "rl": rl}, left=left)


def _refuse_others(s: Settings) -> None:
    """Raise for what is no step of reinforcement learning without a critic."""
    if s.values.get("loss-type", "policy_loss") != "policy_loss":
        found = show(s.values["loss-type"])
        raise InputError(f"{s.place('loss-type')}: found {found}; can be converted: policy_loss, the default")
    if (estimator := str(s.take(ESTIMATOR, ESTIMATORS[0]))) not in ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        raise InputError(f"{s.place(ESTIMATOR)}: found {show(estimator)}; can be converted: {known}")
    s.take("loss-type")


def _named(s: Settings) -> str | None:
    """A model that is known by the checkpoint's name; of another the flags have the sizes."""
    path = str(s.values.get("hf-checkpoint", ""))
    if (found := known_by_name(path)) is not None:
        s.notes.append(BY_NAME.format(path, found.removeprefix("hf://")))
    return found


def _sizes(s: Settings, gpus: int, seq_len: int | None) -> dict[str, str]:
    """Megatron-LM's flags of lengths and batches."""
    length = seq_len or _longest(s)
    batch = s.size("rollout-batch-size") * s.size("n-samples-per-prompt", 1)
    if (steps := s.whole("num-steps-per-rollout")) is not None:
        batch //= max(steps, 1)
    batch = s.integer("global-batch-size", batch)
    micro = s.size("micro-batch-size", 1)
    if s.flag("use-dynamic-batch-size"):
        micro = _packed(s, length, batch, gpus)
    sizes = {"seq-length": length, "micro-batch-size": micro, "global-batch-size": batch}
    return {name: str(size) for name, size in sizes.items()}


def _longest(s: Settings) -> int:
    """Tokens of the longest sequence."""
    if (whole := s.whole(CONTEXT)) is not None:
        return whole
    if s.values.get(PROMPT) is None or s.values.get(ANSWER) is None:
        missing = next(name for name in (PROMPT, ANSWER) if s.values.get(name) is None)
        raise InputError(f"{s.file}: --{missing}: is missing, so the longest sequence is not known; give --seq-len N")
    return s.size(PROMPT) + s.size(ANSWER)


def _packed(s: Settings, length: int, batch: int, gpus: int) -> int:
    """Sequences of full length that a micro-batch has room for, so many that they divide the batch."""
    degrees = [s.size(f"{what}-parallel-size", 1) for what in ("tensor-model", "pipeline-model", "context")]
    tokens = s.size("max-tokens-per-gpu") * degrees[2]
    replicas = max(gpus // (degrees[0] * degrees[1] * degrees[2]), 1)
    found = next((n for n in range(max(tokens // length, 1), 1, -1) if batch % (n * replicas) == 0), 1)
    s.notes.append(PACKS.format(tokens=tokens, packed=found * length))
    return found


def _rl(s: Settings, gpus: int, at_once: bool) -> dict[str, Any]:
    """The section `rl`."""
    shares = s.flag("colocate")
    prompt, answer = s.whole(PROMPT), s.whole(ANSWER)
    at_engine = s.flag("use-rollout-logprobs") and not s.flag("get-mismatch-metrics")  # actor.py: `train_actor`
    uses_reference = s.flag("use-kl-loss") or bool(s.number("kl-coef", 0.0))
    return {
        "prompts_per_step": s.size("rollout-batch-size"),
        "generations_per_prompt": s.size("n-samples-per-prompt", 1),
        "prompt_len": {} if prompt is None else {"max": prompt},
        "output_len": {} if answer is None else {"max": answer},
        "colocated": shares,
        **({"steps_off": 1} if at_once else {}),
        "reference": "host" if uses_reference else "none",
        **({"log_probs": "engine"} if at_engine else {}),
        "sequences": "packed" if s.flag("use-dynamic-batch-size") else "mean",
        **({"sleep_level": 2, "offload_training": s.flag("offload-train", True)} if shares else {}),
        "generation": _generation(s, gpus if shares else None),
    }


def _generation(s: Settings, shared: int | None) -> dict[str, Any]:
    """The engines' keys; `shared`: the trainer's GPUs where the engines run on them."""
    each, pp = s.size("rollout-num-gpus-per-engine", 1), s.size("sglang-pp-size", 1)
    of_engines = s.integer("rollout-num-gpus", shared)
    if each % pp or of_engines % each or of_engines < 1:
        problem = (
            f"found {each}; must be a multiple of --sglang-pp-size ({pp}) that divides {of_engines} GPUs of engines"
        )
        raise InputError(f"{s.place('rollout-num-gpus-per-engine')}: {problem}")
    drawn: dict[str, Any] = {"temperature": s.number("rollout-temperature", 1.0)}
    drawn |= {"top_p": s.number("rollout-top-p", 1.0)}
    top_k = s.integer("rollout-top-k", -1)
    fraction = s.number("sglang-mem-fraction-static")
    usual = drawn == {"temperature": 1.0, "top_p": 1.0} and top_k <= 0
    return {
        "engine": ENGINE,
        "replicas": of_engines // each,
        "tp": each // pp,
        "pp": pp,
        "max_running_requests": s.integer(
            "sglang-max-running-requests", s.size("sglang-server-concurrency", CONCURRENCY)
        ),
        **({} if fraction is None else {"kv_cache": {"memory_fraction": fraction}}),
        "prefix_cache": "none" if s.flag("sglang-disable-radix-cache") else "gpu",
        **({} if usual else {"sampling": drawn | ({"top_k": top_k} if top_k > 0 else {})}),
    }


def _split_experts(s: Settings, model: str | dict[str, Any], generation: dict[str, Any]) -> None:
    """How engines split a model's experts, and whether they keep prefixes of its cache."""
    found = resolve_model(model, Source(str(s.file), {}), ("model",))
    ep, tp = s.size("sglang-ep-size", 1), generation["tp"]
    if found.moe is not None and tp > 1:
        generation |= {"ep": ep, "expert_tp": max(tp // ep, 1)}
    if found.state_space is not None:
        generation["prefix_cache"] = "none"
