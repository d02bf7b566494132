"""The `rl` section, resolved and checked: defaults that follow from other sections, and rules between sections."""

from __future__ import annotations

from itertools import chain
from typing import Any

from sim.core.dtypes import sixteen_bit
from sim.core.errors import InputError
from sim.core.units import counted
from sim.inputs.engine_file import engine_of, found_engine
from sim.inputs.engine_server import server_of
from sim.inputs.input_source import Problems, Source, raise_first, show, validate
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import resolve_model, with_positions
from sim.inputs.parallelism import Parallelism, split_layers
from sim.inputs.rl_config import MAX_ANSWERS, Generation, Lengths, RewardModel, Rl
from sim.inputs.rules.ranks import check_rules
from sim.inputs.sections import Sections
from sim.inputs.serving_formats import cache_dtype, with_block_tokens
from sim.inputs.serving_keys import Sampling
from sim.inputs.serving_notes import unknown_length_note
from sim.inputs.training_config import Training
from sim.inputs.workloads import Inference, RequestPattern
from sim.inputs.yaml_input import KeyPath
from topology.spec import GpuSpec

PATH = ("rl",)
# What trainers ask their engines for: TRL, trl/trainer/grpo_config.py; verl, workers/config/rollout.py; OpenRLHF,
# cli/train_ppo_ray.py: temperature 1, top_p 1.
DRAWN = Sampling(temperature=1.0)
BESIDE = {
    "inference": "rl.generation describes the engine that writes the answers",
    "distillation": "an rl step is simulated without a teacher",
    "faults": "an rl step is simulated without faults",
    "processes": "an rl step is simulated without them",
}
TRAINING_BESIDE = {
    "packing": "rl.sequences says how answers are packed",
    "tokens": "one rl step is simulated, not a whole training run",
    "batch_schedule": "one rl step is simulated, not a whole training run",
    "preference": "rl learns from rewards of answers that the model writes itself",
    "optimizer_post_validation": "generation begins when all ranks have their new parameters",
}


def resolve_rl(
    data: dict[str, Any], model: ModelConfig, training: Training | None, parallelism: Parallelism, source: Source
) -> Rl:
    """The section of `data`, with a value in place of every null that stands for a default."""
    for key, why in BESIDE.items():
        if key in data:
            raise source.error((key,), f"cannot be combined with rl; {why}")
    if training is None:
        raise source.error(PATH, "needs the section training, which describes how the policy is trained")
    for key, why in TRAINING_BESIDE.items():
        if getattr(training, key):
            raise source.error(("training", key), f"cannot be combined with rl; {why}")
    if model.program is not None:
        why = "a captured program runs as it was captured"
        raise source.error(PATH, f"cannot be combined with model.program; {why}")
    given = data["rl"]
    if not isinstance(given, dict):
        raise source.error(PATH, f"found {show(given)}; must be a mapping")
    rl = validate(Rl, _with_reward_model(given, training, source), source, PATH)
    generation = _resolve_generation(rl.generation, model, training, parallelism, source)
    longest = training.seq_len // 2 if rl.prompt_len.sigma else training.seq_len - 1
    lengths = {"prompt_len": _cut(rl.prompt_len, max(1, longest))}
    lengths["output_len"] = _cut(rl.output_len, training.seq_len)
    rl = rl.model_copy(update={"generation": generation, **lengths})
    raise_first(chain(_of_lengths(rl, training), _of_turns(rl, parallelism, training.lora is not None)), source)
    return rl


def _with_reward_model(given: dict[str, Any], training: Training, source: Source) -> dict[str, Any]:
    """The section with its reward model resolved, so that the model's errors carry the model's keys."""
    reward = given.get("reward")
    if not isinstance(reward, dict) or reward.get("model") is None:
        return given
    found = resolve_model(reward["model"], source, (*PATH, "reward", "model"))
    if found.positions == "learned" and 0 < found.max_positions < training.seq_len:
        problem = f"found {found.max_positions}; learned positions must cover {training.seq_len} tokens"
        raise source.error((*PATH, "reward", "model", "max_positions"), problem)
    return {**given, "reward": {**reward, "model": with_positions(found, training.seq_len)}}


def _resolve_generation(
    given: Generation, model: ModelConfig, training: Training, parallelism: Parallelism, source: Source
) -> Generation:
    each = given.tp * given.pp
    replicas = given.replicas or parallelism.ranks // each
    if replicas == 0:
        why = f"one replica needs {each} GPUs (tp·pp), more than parallelism has ({parallelism.ranks}); give replicas"
        raise source.error((*PATH, "generation", "replicas"), f"found null; {why}")
    contiguous = given.kv_cache is not None and given.kv_cache.layout == "contiguous"
    alone = model.state_space is not None or contiguous  # neither a state nor such a cache is shared
    return given.model_copy(
        update={
            "replicas": replicas,
            "engine": found_engine(given.engine, source, (*PATH, "generation", "engine")),
            "precision": given.precision or sixteen_bit(training.precision),
            "prefix_cache": given.prefix_cache or ("none" if alone else "gpu"),
        }
    )


def inference_of(generation: Generation, requests: RequestPattern, model: ModelConfig, gpu: GpuSpec) -> Inference:
    """The engine as a serving workload of these requests, with what it sets by itself on these GPUs."""
    given = generation.model_dump(include=set(Inference.model_fields), exclude_none=True, exclude={"kv_cache"})
    given["router"] = "round_robin"  # the trainer divides the prompts among the replicas, all of them at once
    if generation.kv_cache is not None:
        given["kv_cache"] = generation.kv_cache.model_dump(exclude_unset=True, exclude_none=True)
    engine = engine_of(generation.engine)
    if generation.sampling is None and engine.sampler.filters is not None:
        given["sampling"] = DRAWN.model_dump()
    inference = Inference.model_validate({**given, "requests": requests}, strict=True)
    server = server_of(gpu, model, inference, layout_of(generation, model), generation.pp)
    own = engine.defaults_on(gpu.kernel_architecture, server, model.longest)
    own = engine.within_budget(with_block_tokens(own, inference, model, gpu), generation.max_batch_tokens)
    return inference.with_defaults(own, False, cache_dtype(inference, gpu, model))


def layout_of(generation: Generation, model: ModelConfig) -> Parallelism:
    """The engine's layout: a data-parallel rank for each replica."""
    g = generation
    sizes = {"dp": g.replicas or 1, "tp": g.tp, "pp": g.pp, "ep": g.ep, "expert_tp": g.expert_tp}
    layers = split_layers(model.layers, g.pp)
    dispatch = sixteen_bit(g.precision or "bf16")
    return Parallelism.model_validate({**sizes, "layers_per_stage": layers, "ep_dispatch_dtype": dispatch}, strict=True)


def _cut(lengths: Lengths, most: int) -> Lengths:
    return lengths if lengths.max is not None else lengths.model_copy(update={"max": most})


def _of_lengths(rl: Rl, training: Training) -> Problems:
    """The longest prompt leaves room for an answer."""
    p = rl.prompt_len
    most = p.max if p.sigma > 0 else round(p.mean)
    if most is not None and most >= training.seq_len:
        why = f"a prompt and its answer must fit in training.seq_len ({training.seq_len:,})"
        yield ("rl", "prompt_len"), f"found prompts of up to {most:,} tokens; {why}"
    for key, lengths in (("prompt_len", rl.prompt_len), ("output_len", rl.output_len)):
        if lengths.max is not None and lengths.mean > lengths.max:
            found = f"found a mean of {lengths.mean:g}"
            usual = "half of training.seq_len" if key == "prompt_len" and lengths.sigma else "training.seq_len"
            longest = f"the longest length, {lengths.max:,} (rl.{key}.max, by default {usual})"
            yield ("rl", key), f"{found}; must be at most {longest}"
    if rl.answers > MAX_ANSWERS:
        found = f"prompts_per_step·generations_per_prompt = {rl.answers:,}"
        yield ("rl", "prompts_per_step"), f"{found}; at most {MAX_ANSWERS:,} answers are simulated in a step"
    if rl.answers % training.global_batch_size:
        found = f"found {training.global_batch_size}; must divide {counted(rl.answers, 'answer')} of a step"
        why = "(rl.prompts_per_step·rl.generations_per_prompt); the policy is updated once for each batch"
        yield ("training", "global_batch_size"), f"{found} {why}"


def _of_turns(rl: Rl, parallelism: Parallelism, lora: bool) -> Problems:
    """No keys that contradict where the engine runs: on the trainer's GPUs or on its own."""
    if rl.colocated and rl.steps_off:
        why = "colocated generation and training take turns on the same GPUs; needs colocated false"
        yield ("rl", "steps_off"), f"found {rl.steps_off}; {why}"
    if not rl.colocated and rl.transfer == "ipc":
        why = "two processes can share memory only on the same GPU; with colocated false weights are broadcast"
        yield ("rl", "transfer"), f"found 'ipc'; {why}"
    if rl.colocated and rl.generation.ranks > parallelism.ranks:
        each = counted(rl.generation.tp * rl.generation.pp, "GPU")
        found = f"found {rl.generation.replicas} replicas of {each}"
        why = f"with colocated true they must fit on {counted(parallelism.ranks, 'training rank')}"
        yield ("rl", "generation", "replicas"), f"{found}; {why}"
    if rl.critic != "none" and lora:
        yield ("rl", "critic"), f"found '{rl.critic}'; a critic beside adapters (training.lora) is not simulated"
    if isinstance(rl.reward, RewardModel):
        tp = rl.reward.tp
        for what, size in (("heads", rl.reward.model.heads), ("ffn", rl.reward.model.ffn)):
            if size % tp:
                yield ("rl", "reward", "tp"), f"found {tp}; must divide the model's {what} ({size})"
        if parallelism.ranks % tp:
            why = f"must divide the number of training ranks ({parallelism.ranks})"
            yield ("rl", "reward", "tp"), f"found {tp}; {why}"


def with_engine(rl: Rl, sections: Sections, source: Source) -> tuple[Rl, tuple[str, ...]]:
    """The section with what its engine sets by itself on these GPUs where a key was left out, and warnings.

    Raises:
        InputError: for the first rule that the engine's layout breaks; the same rules as a serving workload's.
    """
    model, cluster, training = sections.model, sections.cluster, sections.training
    assert training is not None  # `resolve_rl` has refused else
    engine = inference_of(rl.generation, RequestPattern(prompt_len=1, output_len=1), model, cluster.gpu)
    limits = {key: getattr(engine, key) for key in ("max_running_requests", "max_batch_tokens", "kv_cache", "sampling")}
    rl = rl.model_copy(update={"generation": rl.generation.model_copy(update=limits)})
    if len(cluster.gpus) > 1:
        raise source.error(("cluster",), "has GPUs of several kinds; an rl step is simulated on GPUs of one kind")
    renamed = _EngineSource(source.label, source.data, source.origins, source.folder)
    layout = layout_of(rl.generation, model)
    inference = inference_of(rl.generation, RequestPattern(prompt_len=1, output_len=1), model, cluster.gpu)
    check_rules(Sections(model, None, layout, cluster, inference, None, None, training.seq_len), renamed)
    return rl, _notes(rl, inference, model)


def _notes(rl: Rl, engine: Inference, model: ModelConfig) -> tuple[str, ...]:
    """Warnings for keys that have no effect with this section, and of an engine that goes by an unknown length."""
    given = {key for key in Generation.model_fields if getattr(rl.generation, key) is not None}
    found = unknown_length_note(engine, given, model)
    if rl.colocated:
        return tuple(found)
    usual = Rl.model_fields
    changed = [key for key in ("sleep_level", "offload_training") if getattr(rl, key) != usual[key].default]
    why = "has no effect with colocated false, where engine and trainer have GPUs of their own"
    return (*found, *(f"rl.{key}: {why}" for key in changed))


class _EngineSource(Source, frozen=True):
    """Errors of the engine's sections under the keys of `rl.generation`."""

    def error(self, path: KeyPath, problem: str) -> InputError:
        if not path or path[0] not in ("parallelism", "inference"):
            return super().error(path, problem)
        keys: KeyPath = ("replicas",) if path[1:] == ("dp",) else path[1:]
        return super().error((*PATH, "generation", *keys), problem)
