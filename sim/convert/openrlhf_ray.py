"""OpenRLHF's command of PPO, GRPO and their kin with Ray, `openrlhf.cli.train_ppo_ray`, as a scenario with `rl`.

Names and defaults: openrlhf/cli/train_ppo_ray.py of OpenRLHF 0.11, and its names before dots came in (0.10 and older).
The estimator `gae` alone has a critic; a KL coefficient above 0 has a reference. train.batch_size counts answers, of
all replicas. vLLM sleeps at its level 1 and gets bf16 (trainer/ray/vllm_engine.py); weights go by CUDA IPC where all
models share their GPUs, else by a broadcast (trainer/ray/ppo_actor.py: `use_cuda_ipc`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.named_models import known_by_name, named_model, named_reward, with_prediction
from sim.convert.scripts.command_line import flags_of, words_behind, words_of
from sim.convert.scripts.script_data import Script
from sim.convert.settings import ONE_TURN, Converted, Machine, Settings
from sim.convert.trainer_arguments.openrlhf import openrlhf_settings
from sim.convert.trainer_arguments.scenario import FULL_LENGTH, convert_deepspeed
from sim.convert.verl import EAGER, LENGTHS
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

AGENT = "train.agent-func-path"
MODULE = "openrlhf.cli.train_ppo_ray"
# Today's names by former ones.
MODELS = ("ref", "reward", "critic", "actor")
FORMER = {
    **{f"{who}-num-nodes": f"{who}.num-nodes" for who in MODELS},
    **{f"{who}-num-gpus-per-node": f"{who}.num-gpus-per-node" for who in MODELS},
    **{f"vllm-{what}": f"vllm.{what}" for what in ("num-engines", "tensor-parallel-size", "gpu-memory-utilization")},
    **{f"colocate-{what}": f"train.colocate-{what}" for what in ("actor-ref", "critic-reward")},
    **{what: f"vllm.{what}" for what in ("enforce-eager", "enable-prefix-caching")},
    **{what: f"rollout.{what}" for what in ("n-samples-per-prompt", "temperature", "top-p")},
    **{what: f"ds.{what}" for what in ("zero-stage", "zpg", "overlap-comm", "adam-offload", "param-dtype")},
    **{what: f"ds.{what}" for what in ("grad-accum-dtype", "attn-implementation", "use-liger-kernel")},
    **{what: f"ds.{what}" for what in ("packing-samples", "ring-attn-size", "load-in-4bit", "deepcompile")},
    "ds-tensor-parallel-size": "ds.tensor-parallel-size",
    "colocate-all-models": "train.colocate-all",
    "vllm-enable-sleep": "vllm.enable-sleep",
    "vllm-sync-backend": "vllm.sync-backend",
    "deepspeed-enable-sleep": "ds.enable-sleep",
    "lora-rank": "ds.lora.rank",
    "lora-dropout": "ds.lora.dropout",
    "target-modules": "ds.lora.target-modules",
    "gradient-checkpointing": "actor.gradient-checkpointing-enable",
    "gradient-checkpointing-use-reentrant": "actor.gradient-checkpointing-reentrant",
    "pretrain": "actor.model-name-or-path",
    "reward-pretrain": "reward.model-name-or-path",
    "critic-pretrain": "critic.model-name-or-path",
    "remote-rm-url": "reward.remote-url",
    "agent-func-path": "train.agent-func-path",
    "async-train": "train.async-enable",
    "partial-rollout": "train.partial-rollout-enable",
    "use-dynamic-batch": "train.dynamic-batch-enable",
    "train-max-tokens-per-gpu": "train.max-tokens-per-gpu",
    "rollout-max-tokens-per-gpu": "rollout.max-tokens-per-gpu",
    "train-batch-size": "train.batch-size",
    "micro-train-batch-size": "train.micro-batch-size",
    "rollout-batch-size": "rollout.batch-size",
    "micro-rollout-batch-size": "rollout.micro-batch-size",
    "max-epochs": "train.max-epochs",
    "max-len": "data.max-len",
    "generate-max-len": "rollout.max-new-tokens",
    "advantage-estimator": "algo.advantage.estimator",
    "init-kl-coef": "algo.kl.init-coef",
    "use-kl-loss": "algo.kl.use-loss",
    "dynamic-filtering": "algo.dynamic-filtering-enable",
    "ref-reward-offload": "ref.offload",
}
PROMPT, ANSWER, WHOLE = "prompt-max-len", "rollout.max-new-tokens", "data.max-len"  # the first until 0.9
ESTIMATOR, WITH_CRITIC = "algo.advantage.estimator", "gae"
KL, ACTOR = "algo.kl.init-coef", "actor.model-name-or-path"
ALL, WITH_REFERENCE = "train.colocate-all", "train.colocate-actor-ref"
# Of data, evaluation, files, logs, schedules and of losses on a few numbers a token.
HARMLESS = re.compile(
    r"(data|eval|logger|ckpt|algo|reward\.(normalize|clip|overlong|stop)|(actor|critic)\.(adam|muon|lr|min-lr|eps|"
    r"dual|value|loss|policy|save))[\w.-]*|(actor|critic)-learning-rate|(lr|min-lr|save|load|logging|eval|wandb|input|"
    r"output|apply|label|max-samples|max-ckpt|prompt|disable|use-(wandb|tensorboard|ms|kl)|adam|l2|seed|num-episodes|"
    r"gamma|lambd|eps|value|ckpt|normalize|kl|reward-clip|lora-alpha|ds\.lora\.alpha|policy|entropy|enable-vllm-is|"
    r"vllm-is|dynamic-filtering|overlong|ds\.value-head|value-head|train\.(seed|num-episodes)|freezing|ptx|bf16|"
    r"flash-attn|(ref|reward|critic)\.num|ds\.ring-attn-head-stride|ring-head-stride|local-rank|dual|"
    r"reward\.remote|rollout\.micro|rollout\.max-tokens|vllm\.sync|critic-save|train\.max-samples)[\w.-]*"
)
APART = "has GPUs of its own, which is not simulated; with {} it can be converted"
OF_CRITIC = "the critic: has the policy's sizes, layout, micro-batches and optimizer"
PACKS = (
    "micro-batches: OpenRLHF packs {tokens:,} tokens (train.max_tokens_per_gpu · ring and tensor degrees); simulated "
    "are {packed:,}, so that whole sequences of training.seq_len divide the batch"
)


def is_openrlhf_ray(script: Script) -> bool:
    """Tell whether a script has this command."""
    return MODULE in script.started


def convert_openrlhf_ray(file: Path, script: Script, machine: Machine) -> Converted:
    """The scenario of the command's arguments.

    Raises:
        InputError: for a critic or reference on GPUs of its own, an unknown model, and sizes that do not divide.
    """
    words = words_of(script)
    flags = flags_of(words_behind(file, words, MODULE), listed=("ds.lora.target-modules",))
    values = {FORMER.get(name, name): value for name, value in flags.items()}
    written = {FORMER.get(name, name): f"--{name.replace('-', '_')}" for name in flags}
    s = Settings(file, values, prefix="--", written=written, text=script.text)
    gpus = s.size("actor.num-nodes", 1) * s.size("actor.num-gpus-per-node", 8)
    model = _model(s, machine)
    length, lengths = _lengths(s)
    batch = s.size("train.batch-size", 128)
    degrees = s.size("ds.ring-attn-size", 1) * s.size("ds.tensor-parallel-size", 1)
    micro = _micro_batch(s, length, batch, gpus // max(degrees, 1), degrees)
    sizes = {"train_micro_batch_size_per_gpu": micro, "train_batch_size": batch, "model_max_length": length}
    trainer = replace(machine, gpus=gpus, model=model)
    found = convert_deepspeed(file, openrlhf_settings(_of_deepspeed(s)) | sizes, trainer, length)
    rl = _rl(s, lengths, model, gpus)
    left = _left(s)
    notes = [*(note for note in found.notes if note != FULL_LENGTH), *s.notes, *left]
    scenario = {**found.scenario, "model": with_prediction(model, 0)}
    cluster = scenario.pop("cluster")
    return Converted({**scenario, "rl": rl, "cluster": cluster}, tuple(notes), LENGTHS)


def _left(s: Settings) -> list[str]:
    """A note of the flags that nothing took and that may matter."""
    names = sorted(name for name in set(s.values) - s.taken if not HARMLESS.fullmatch(name))
    return [f"not expressed here: {', '.join(map(s.written_as, names))}"] if names else []


def _model(s: Settings, machine: Machine) -> str:
    named = s.take(ACTOR)
    if machine.model is not None:
        return machine.model
    if named is None:
        raise InputError(f"{s.file}: {s.written_as(ACTOR)}: is required and missing")
    return named_model(s.file, s.place(ACTOR), str(named), s.notes)


def _lengths(s: Settings) -> tuple[int, dict[str, Any]]:
    """The longest sequence, and the section's keys of lengths; today a prompt and its answer share `data.max_len`."""
    if PROMPT in s.values or (ANSWER in s.values and WHOLE not in s.values):
        prompt, answer = s.size(PROMPT, 1024), s.size(ANSWER, 1024)
        return prompt + answer, {"prompt_len": {"max": prompt}, "output_len": {"max": answer}}
    most = s.whole(ANSWER)
    return s.size(WHOLE, 2048), {"prompt_len": {}, "output_len": {} if most is None else {"max": most}}


def _micro_batch(s: Settings, length: int, batch: int, replicas: int, degrees: int) -> int:
    """Sequences of full length that a micro-batch has room for; of a batch by tokens so many that they divide it."""
    given = s.size("train.micro-batch-size", 1)
    if not s.flag("train.dynamic-batch-enable"):
        return given
    tokens = s.size("train.max-tokens-per-gpu", 16192) * degrees
    most = max(tokens // length, 1)
    found = next((n for n in range(most, 1, -1) if batch % (n * replicas) == 0), 1)
    if found * length != tokens:
        s.notes.append(PACKS.format(tokens=tokens, packed=found * length))
    return found


def _of_deepspeed(s: Settings) -> dict[str, Any]:
    """The flags that the trainer of next tokens has, too; packed texts are `rl.sequences` here."""
    names = [name for name in s.values if name.startswith(("ds.", "actor.gradient-checkpointing"))]
    given = {name.replace("actor.", "model."): s.values[name] for name in names}
    s.taken |= {name for name in names if name not in ("ds.deepcompile", "ds.moe-implementation")}
    own = ("ds.packing-samples", "ds.enable-sleep", "ds.deepcompile")
    old = {name: s.values[name] for name in ("bf16", "flash-attn") if name in s.values}
    return old | {name: value for name, value in given.items() if name not in own}


def _rl(s: Settings, lengths: dict[str, Any], model: str, gpus: int) -> dict[str, Any]:
    at_once = s.flag("train.async-enable")
    if s.take(AGENT):
        s.notes.append(ONE_TURN.format(s.written_as(AGENT)))
    shares = s.flag(ALL) and not at_once
    tp, engines = s.size("vllm.tensor-parallel-size", 1), s.integer("vllm.num-engines", 0)
    epochs = s.size("train.max-epochs", 1)
    if engines < 1:
        raise InputError(
            f"{s.file}: {s.written_as('vllm.num-engines')}: must be at least 1; generation without vLLM is not read"
        )
    if shares and engines * tp != gpus:
        problem = f"{engines} engines of {tp} GPUs; all models share their GPUs, of which the policy has {gpus}"
        raise InputError(f"{s.place('vllm.num-engines')}: {problem}")
    if s.flag("vllm.enforce-eager"):
        s.notes.append(EAGER.format(s.written_as("vllm.enforce-eager")))
    sequences = "packed" if s.flag("train.dynamic-batch-enable") else "mean" if _joined(s) else "padded"
    return {
        "prompts_per_step": s.size("rollout.batch-size", 1024),
        "generations_per_prompt": s.size("rollout.n-samples-per-prompt", 1),
        **lengths,
        "colocated": shares,
        **({"steps_off": 1} if at_once else {}),
        **({"epochs": epochs} if epochs > 1 else {}),
        "reference": _reference(s),
        "critic": _critic(s, model),
        **_reward(s),
        "sequences": sequences,
        **({"sleep_level": 1 if s.flag("vllm.enable-sleep") else 0} if shares else {}),
        **({"offload_training": s.flag("ds.enable-sleep")} if shares else {}),
        "generation": _generation(s, tp, engines),
    }


def _joined(s: Settings) -> bool:
    return s.flag("ds.packing-samples") or s.size("ds.ring-attn-size", 1) > 1


def _reference(s: Settings) -> str:
    """Where the reference is; a coefficient of 0 has none."""
    if not (s.number(KL, 0.01) or 0.0) > 0:
        return "none"
    with_policy = s.flag(WITH_REFERENCE)
    if not (s.flag(ALL) or with_policy):
        problem = APART.format(f"{s.written_as(WITH_REFERENCE)} or {s.written_as(KL)} 0")
        raise InputError(f"{s.file}: the reference {problem}")
    return "host" if s.flag("ref.offload") else "gpu"


def _critic(s: Settings, model: str) -> str:
    """Where the critic of `gae` is between its turns: its states go to the host as the policy's do."""
    if str(s.take(ESTIMATOR, WITH_CRITIC)) != WITH_CRITIC:
        s.take("critic.model-name-or-path")
        return "none"
    if not s.flag(ALL):
        raise InputError(f"{s.file}: the critic of {WITH_CRITIC} {APART.format(s.written_as(ALL))}")
    named = s.take("critic.model-name-or-path", s.values.get("reward.model-name-or-path"))
    known = None if named is None else known_by_name(str(named).split(",")[0])
    if known is not None and _sizes(known) != _sizes(model):
        raise InputError(f"{s.file}: the critic is {show(named)}; one is simulated with the policy's sizes, {model}")
    s.notes.append(OF_CRITIC)
    return "host" if s.flag("ds.enable-sleep") else "gpu"


def _sizes(model: str) -> tuple[int, int, int]:
    found = load_model(model)
    return found.layers, found.hidden, found.ffn


def _reward(s: Settings) -> dict[str, Any]:
    """A reward model's key, where no URL and no agent gives the rewards."""
    elsewhere = [s.take("reward.remote-url"), s.take(AGENT)]
    named = s.take("reward.model-name-or-path")
    if any(elsewhere) or named is None:
        return {}
    return named_reward(str(named).split(",")[0], s.notes)


def _generation(s: Settings, tp: int, engines: int) -> dict[str, Any]:
    drawn = {"temperature": s.number("rollout.temperature", 1.0), "top_p": s.number("rollout.top-p", 1.0)}
    return {
        "engine": "vllm-v1",
        "replicas": engines,
        "tp": tp,
        "kv_cache": {"memory_fraction": s.number("vllm.gpu-memory-utilization", 0.95)},
        "prefix_cache": "gpu" if s.flag("vllm.enable-prefix-caching") else "none",
        **({} if drawn == {"temperature": 1.0, "top_p": 1.0} else {"sampling": drawn}),
    }
