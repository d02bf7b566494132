"""Readers of the sections that most training steps lack: inference, distillation, rl, faults and processes.

Their thirty classes take longer to make than those of all other sections, a twentieth of a short command's time. So
each reader loads what it reads, and returns None where the section is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.core.dtypes import dtype_bytes
from sim.inputs.input_source import Source, found_file, show, validate
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import resolve_model, with_positions
from sim.inputs.parallelism import Parallelism
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from topology.spec import GpuSpec

if TYPE_CHECKING:
    from sim.inputs.distillation_config import Distillation
    from sim.inputs.faults_config import Faults
    from sim.inputs.processes_input import Processes
    from sim.inputs.rl_config import Rl
    from sim.inputs.workloads import Inference, PoolSize
    from sim.variants.engines.defaults import Defaults, ServerPool


def read_inference(data: dict[str, Any], source: Source) -> Inference | None:
    """The section, with files found and the draft model's positions."""
    if "inference" not in data:
        return None
    from sim.inputs.engine_file import found_engine
    from sim.inputs.workloads import Inference, RequestTrace

    inference = validate(Inference, _with_draft(data["inference"], source), source, ("inference",))
    changes: dict[str, Any] = {}
    if "engine" in inference.model_fields_set:
        changes["engine"] = found_engine(inference.engine, source, ("inference", "engine"))
    if isinstance(inference.requests, RequestTrace):
        path = ("inference", "requests", "trace")
        found = found_file(inference.requests.trace, source, path)
        changes["requests"] = inference.requests.model_copy(update={"trace": found})
    if inference.speculative is not None and inference.speculative.draft is not None:
        draft = with_positions(inference.speculative.draft, sequence_length(None, inference))
        changes["speculative"] = inference.speculative.model_copy(update={"draft": draft})
    return inference.model_copy(update=changes)


def with_engine_split(parallelism: Parallelism, inference: Inference, model: ModelConfig) -> Parallelism:
    """The layout with every expert split over the tp ranks, where `ep` distributes none and the engine does so."""
    from sim.inputs.engine_file import engine_of

    said = parallelism.ep > 1 or "expert_tp" in parallelism.model_fields_set
    if said or model.moe is None or model.moe.ffn % parallelism.tp or not engine_of(inference.engine).splits_experts:
        return parallelism
    return parallelism.model_copy(update={"expert_tp": parallelism.tp})


def with_engine_defaults(inference: Inference, model: ModelConfig, parallelism: Parallelism, gpu: GpuSpec) -> Inference:
    """The section with what its engine sets by itself on these GPUs where a key was left out."""
    from sim.inputs.engine_file import engine_of
    from sim.inputs.engine_server import server_of
    from sim.inputs.serving_formats import cache_dtype, with_block_tokens

    pools = inference.disaggregated
    size: Parallelism | PoolSize = parallelism if pools is None else pools.decode
    engine = engine_of(inference.engine)
    said = "quantization" in inference.model_fields_set or dtype_bytes(inference.precision) < 2
    if engine.reads_checkpoint and not said:
        inference = inference.model_copy(update={"quantization": model.checkpoint_quantization})
    longest, whole = inference.longest(model), _asks_for_whole_prompts(inference)

    def defaults_of(size: Parallelism | PoolSize, pool: ServerPool) -> Defaults:
        server = server_of(gpu, model, inference, size, parallelism.pp, pool)
        return engine.defaults_on(gpu.kernel_architecture, server, longest, whole)

    own = defaults_of(size, "all" if pools is None else "decode")
    if pools is not None:
        prefill = defaults_of(pools.prefill, "prefill")
        own = own._replace(max_batch_tokens=prefill.max_batch_tokens)  # which the other pool does not fill
        if pools.prefill.memory_fraction is None and not _says_memory(inference):
            sized = pools.prefill.model_copy(update={"memory_fraction": prefill.memory_fraction})
            inference = inference.model_copy(update={"disaggregated": pools.model_copy(update={"prefill": sized})})
    own = with_block_tokens(own, inference, model, gpu)
    if inference.batching != "static":
        stated = inference.max_batch_tokens if "max_batch_tokens" in inference.model_fields_set else None
        own = engine.within_budget(own, stated)
    if model.state_space is not None and not engine.overlaps_states and not _says_of_states(inference):
        inference = inference.model_copy(update={"async_scheduling": False})
    prefixes = model.state_space is None and inference.kv_cache.layout == "paged" and inference.fills_hashes
    return inference.with_defaults(own, prefixes, cache_dtype(inference, gpu, model))


def with_engine_dispatch(parallelism: Parallelism, inference: Inference, gpu: GpuSpec) -> Parallelism:
    """The layout with the dtype in which tokens go to experts, where it is left out."""
    from sim.inputs.serving_formats import dispatch_dtype

    if parallelism.ep_dispatch_dtype is not None:
        return parallelism
    own = dispatch_dtype(inference, gpu.peak_flops_per_s)
    return parallelism.model_copy(update={"ep_dispatch_dtype": own})


def _asks_for_whole_prompts(inference: Inference) -> bool:
    return "chunked_prefill" in inference.model_fields_set and not inference.chunked_prefill


def _says_of_states(inference: Inference) -> bool:
    """Whether somebody says what decides if an engine works beside the GPU with layers that keep a state."""
    return inference.speculative is not None or bool({"prefix_cache", "async_scheduling"} & inference.model_fields_set)


def _says_memory(inference: Inference) -> bool:
    return "memory_fraction" in inference.kv_cache.model_fields_set


def _with_draft(given: Any, source: Source) -> Any:
    """The section with its draft model resolved, so that the draft's errors carry the draft's keys."""
    speculative = given.get("speculative") if isinstance(given, dict) else None
    if not isinstance(speculative, dict) or speculative.get("draft") is None:
        return given
    path = ("inference", "speculative", "draft")
    return {**given, "speculative": {**speculative, "draft": resolve_model(speculative["draft"], source, path)}}


def read_processes(
    data: dict[str, Any], training: Training | None, parallelism: Parallelism, source: Source
) -> Processes | None:
    """The section, whose ranks are the step's."""
    if "processes" not in data:
        return None
    if "inference" in data:
        raise source.error(("processes",), "cannot be given with inference; processes act on a training step")
    if training is not None and training.optimizer_post_validation:
        why = "processes act on one step, and there it runs beside the next"
        raise source.error(("processes",), f"cannot be combined with training.optimizer_post_validation; {why}")
    from sim.inputs.processes_input import Processes, check_processes

    processes = validate(Processes, data["processes"], source, ("processes",))
    check_processes(processes, parallelism.ranks, source)
    return processes


def read_rl(
    data: dict[str, Any], model: ModelConfig, training: Training | None, parallelism: Parallelism, source: Source
) -> Rl | None:
    """The section, with a value in place of every null that stands for a default."""
    if "rl" not in data:
        return None
    from sim.inputs.rules.rl import resolve_rl

    return resolve_rl(data, model, training, parallelism, source)


def with_rl_engine(rl: Rl, sections: Sections, source: Source) -> tuple[Rl, tuple[str, ...]]:
    """Fill in the generation engine of an rl step: `rules.rl.with_engine`, loaded when needed."""
    from sim.inputs.rules.rl import with_engine

    return with_engine(rl, sections, source)


def read_faults(data: dict[str, Any], source: Source) -> Faults | None:
    """The section, with the factors of a measured run that it names."""
    if "faults" not in data:
        return None
    from sim.inputs.faults_config import Faults

    faults = validate(Faults, data["faults"], source, ("faults",))
    if faults.jitter is None or faults.jitter.measured is None or faults.jitter.factors:
        return faults
    from sim.inputs.measured_run import factors, load_measured

    file = found_file(faults.jitter.measured, source, ("faults", "jitter", "measured"))
    found = factors(load_measured(file), file)
    return faults.model_copy(update={"jitter": faults.jitter.model_copy(update={"factors": found})})


def sequence_length(training: Training | None, inference: Inference | None) -> int:
    """Tokens of the longest sequence that is known beforehand; 1 for requests from a trace."""
    if training is not None:
        return training.seq_len
    from sim.inputs.workloads import RequestPattern

    assert inference is not None
    requests = inference.requests
    if not isinstance(requests, RequestPattern):
        return 1
    return sum([requests.lengths(n)[1] for n in (requests.prompt_len, requests.output_len)])


def read_distillation(data: dict[str, Any], source: Source, seq_len: int) -> Distillation | None:
    """The section with its teacher resolved first, so that the teacher's errors carry the teacher's keys."""
    if "distillation" not in data:
        return None
    from sim.inputs.distillation_config import Distillation

    path = ("distillation",)
    given = data["distillation"]
    if not isinstance(given, dict):
        raise source.error(path, f"found {show(given)}; must be a mapping")
    if given.get("teacher") is not None:
        teacher = resolve_model(given["teacher"], source, (*path, "teacher"))
        given = {**given, "teacher": with_positions(teacher, seq_len)}
    return validate(Distillation, given, source, path)
