"""A serving engine's command line as a scenario, with the requests of a benchmark's command in the same script.

Names, defaults and their sources: `flags.yaml` beside this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from sim.convert.scripts.command_line import SWITCHES, flags_of, words_of
from sim.convert.scripts.containers import SHELLS
from sim.convert.scripts.script_data import Script
from sim.convert.serving import pools as pools
from sim.convert.serving.adapters import adapters_of
from sim.convert.serving.checkpoints import described, prefixes_of, weights_of, with_prediction
from sim.convert.serving.drafts import drafts_of
from sim.convert.serving.experts import by_deepep, by_environment, of_replicas, sends_tokens, stages_of
from sim.convert.serving.graphs import cache_bytes, cache_tokens, graphs_of, json_object, with_objects
from sim.convert.serving.names import Server, names_of_flags
from sim.convert.serving.offline import BENCH, bench_limits, offline_tokens
from sim.convert.serving.options import most_tokens, of_limit, of_tensorrt_llm, options_of
from sim.convert.serving.requests import (
    RANDOM,
    assumed,
    of_dataset,
    of_defaults,
    requests_of,
    states_lengths,
    with_dataset,
)
from sim.convert.serving.sampling import sampling_of
from sim.convert.serving.tiers import GIB, tiers_of
from sim.convert.serving.waits import waits_of
from sim.convert.settings import Converted, Machine, Settings, lacking, without_none
from sim.core.dtypes import sixteen_bit
from sim.core.errors import InputError
from sim.inputs.hub import as_model
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model
from sim.variants.engines import ENGINES
from sim.variants.engines.defaults import MAX_PREFILL_TOKENS
from sim.variants.engines.names import engine_named

VERSIONED = re.compile(r"(?::|==)v?\d+\.\d")  # a container's tag, or a package's version
DATA, SHAREGPT = "dataset-path", "sharegpt"  # vLLM's benchmark_serving.py takes a file for one of ShareGPT
OPTIMIZATION = re.compile(r"^-O(?=\d$)")  # vLLM's -O0, its --optimization-level 0
TO_SHELL = (*SHELLS, "-c", "-lc")  # the last two behind `--entrypoint bash IMAGE`
V1, SINCE_V1 = "VLLM_USE_V1", (0, 8)  # whose releases have V1 by default
TENSORRT_LLM = "TensorRT-LLM"  # whose YAML has keys of its own
LISTED = (
    *("cudagraph-capture-sizes", "cuda-graph-sizes", "cuda-graph-bs", "cuda-graph-bs-decode"),
    *("lora-modules", "lora-paths"),
    *("batch-size", "batch", "input-len", "output-len"),
)


def is_serving(script: Script) -> bool:
    """Tell whether a script starts a serving engine or measures one."""
    words, names = script.started, names_of_flags()
    return any(start in words for one in (*names.servers.values(), *names.benchmarks.values()) for start in one.starts)


def convert_serving(file: Path, script: Script, machine: Machine) -> Converted:
    """The scenario that the server's and the benchmark's flags describe.

    Raises:
        InputError: without a server's command or a model, or for a value that a flag cannot have.
    """
    words = words_of(script)
    servers = _servers(file, script, words)
    product, s, with_roles = _main(file, servers)
    model = _model(s, machine)
    for _, one in servers:  # all serve one checkpoint
        one.values = {**{key: s.values[key] for key in ("quantization",) if key in s.values}, **one.values}
    engine = _engine(s, product, words, script)
    layout, settings = _replica(product, s, machine, model)
    inference: dict[str, Any] = {"engine": engine, **settings, **_router(product, s, layout)}
    if with_roles:
        by_role = [(pools.role_of(one) or pools.MAIN, *_replica(whose, one, machine, model)) for whose, one in servers]
        inference = {"engine": engine, **pools.disaggregated(s, by_role)}
    if inference.get("all2all_backend") == "naive" and "naive" not in ENGINES[engine].all2all:
        del inference["all2all_backend"]  # vLLM, config/parallel.py: falls back to allgather_reducescatter, the default
    if (mode := s.take("preempt")) == "swap" and ENGINES[engine].swaps:
        inference["preemption"] = "swap"
    elif mode == "swap":  # vLLM since V1 (engine/arg_utils.py)
        s.notes.append(f"{s.written_as('preempt')} swap: without effect, engine {engine} swaps no requests")
    if (count := s.whole("api_servers")) not in (None, layout.get("dp", 1)):
        s.notes.append(f"{s.written_as('api_servers')} {count}: one API server for each replica is simulated")
    if "speculative" in inference:
        s.notes.append("inference.speculative.acceptance: no flag says it, so the default is taken")
    if (limit := s.take("longest")) is not None and (most := most_tokens(str(limit))):
        inference["max_request_tokens"] = most
    for _, one in servers:
        one.taken |= {"model", "longest"}
    left = {flag for _, one in (servers if with_roles else [(product, s)]) for flag in one.left()}
    requests, left = _with_requests(s, machine, words, left, engine, inference.get("max_request_tokens"))
    inference |= requests
    if limit is not None and (beyond := of_limit(inference)):
        s.notes.append(f"{s.written_as('longest')} {limit}: {beyond}")
    served = with_prediction(model, inference, s)
    benchmark = _first(words, names_of_flags().benchmarks)
    if benchmark is not None and benchmark[0] == BENCH and _own_server(words):
        inference |= bench_limits(str(s.file), served, machine.cluster, layout, inference)
    sections = {"model": served, "inference": inference}
    sections |= {} if with_roles else {"parallelism": layout}
    return s.converted("serving", machine, sections, left=sorted(left))


def _main(file: Path, servers: list[tuple[str, Settings]]) -> tuple[str, Settings, bool]:
    """Whose server is read first, its settings, and whether others compute its prompts."""
    roles = {role for _, s in servers if (role := pools.role_of(s))}
    if roles and not roles >= {*pools.ROLES}:
        raise InputError(f"{file}: {pools.alone(roles)}")
    product, s = next((one for one in servers if not roles or pools.role_of(one[1]) == pools.MAIN), servers[0])
    if len(servers) > 1 and not roles:
        s.notes.append(f"the first of {len(servers)} commands that start an engine is read; delete what is not meant")
    return product, s, bool(roles)


def _model(s: Settings, machine: Machine) -> str:
    """The model that is served."""
    served = s.take("model")
    model = machine.model or served
    if not isinstance(model, str):
        raise InputError(f"{s.file}: names no model: give --model NAME")
    if not machine.model:
        found = described(s, model)
        if found == model and (advice := lacking(model)):
            raise InputError(f"{s.file}: {s.written_as('model')}: found {show(model)}{advice}; so does --model NAME")
        return found
    quantized = str(s.values.get("quantization")) in names_of_flags().weights
    if isinstance(served, str) and not quantized:
        s.notes.append(
            f"--model stands for {served.removeprefix('hf://')}; if its checkpoint is quantized, set "
            "inference.quantization"
        )
    return model


def _with_requests(
    s: Settings, machine: Machine, words: list[str], left: set[str], engine: str, limit: int | None
) -> tuple[dict[str, Any], set[str]]:
    """The benchmark's requests and what they ask for, and flags that neither it nor the servers (`left`) know. Lengths
    that the file does not state keep to the engine's limit."""
    names = names_of_flags()
    benchmark = _first(words, names.benchmarks)
    if benchmark is None:
        s.notes.append("no benchmark's command in the file: requests are the default ones of `vllm bench serve`")
        return {"requests": assumed(s, requests_of(Settings(s.file, {}), names.benchmarks["vLLM"]), limit)}, left
    which, of_benchmark = benchmark
    others = [flags for name, flags in _commands(words, names.benchmarks) if name == which and flags != of_benchmark]
    if others:
        both = (" ".join(_only(one, other)) for one, other in ((of_benchmark, others[0]), (others[0], of_benchmark)))
        raise InputError(
            f"{s.file}: {len(others) + 1} commands of the benchmark differ ({', '.join(both)}): keep the one that is "
            "meant, or give what differs by --var NAME=VALUE"
        )
    b = _settings(s.file, of_benchmark, names.benchmarks[which])
    if (dataset := _first(words, names.datasets)) is not None and which == dataset[0]:
        with_dataset(b, _settings(s.file, dataset[1], names.datasets[which]))
    usual = names.benchmarks[which].dataset
    if not b.values.keys() & {"dataset", "prompt", "output"} and (usual or DATA in b.values):
        b.values = {**b.values, "dataset": usual or SHAREGPT}
    said = (names.benchmarks[which].note, of_dataset(str(b.values.get("dataset", RANDOM))))
    s.notes += filter(None, said)
    sampling, stated = sampling_of(b, s, engine, names.benchmarks[which].temperature), states_lengths(b)
    found = requests_of(b, names.benchmarks[which], engine)
    s.notes += [*b.notes, *filter(None, [of_defaults(b, found) if stated else ""])]
    found = found if stated else assumed(s, found, limit)
    tokens = offline_tokens(s, machine, engine, which)
    requests = without_none({"max_batch_tokens": tokens, "sampling": sampling, "requests": found})
    server = _first(words, names.servers)
    if server is not None and server[1] == of_benchmark:  # one that starts the engine has its flags too
        return requests, left & {*b.left()}
    return requests, left | {*b.left()}


def _only(words: list[str], others: list[str]) -> list[str]:
    """The flags of a command that the other does not have so."""
    own, theirs = flags_of(words), flags_of(others)
    return [f"--{name} {value}" for name, value in own.items() if theirs.get(name) != value][:2]


def _servers(file: Path, script: Script, words: list[str]) -> list[tuple[str, Settings]]:
    """Whose each server is, and its settings; one for all nodes of a server.

    Raises:
        InputError: where there is none.
    """
    names = names_of_flags()
    commands = [*_commands(words, names.servers)]
    # `docker pull IMAGE` starts nothing, and `IMAGE bash -c "…"` what the quotes say.
    started = [one for one in commands if one[1] and one[1][0].rpartition("/")[2] not in TO_SHELL] or commands
    found = [(name, _settings(file, command, names.servers[name])) for name, command in started]
    if not found:
        known = ", ".join([start for one in names.servers.values() for start in one.starts])
        alone = [start for one in names.benchmarks.values() for start in one.starts if start in " ".join(words)]
        if alone:
            why = f"{alone[0]} measures a server that it does not start; write the server's command into this file, too"
            raise InputError(f"{file}: {why}: {known}")
        raise InputError(f"{file}: starts no server that is known: {known}")
    found[0][1].values = {**_own_server(words), **found[0][1].values}
    for name, s in found:
        options = options_of(s, script)
        if name == TENSORRT_LLM:
            s.values = {**s.values, **of_tensorrt_llm(options, s)}
        else:
            values, _ = _by_setting(
                {key.replace("_", "-"): value for key, value in options.items()}, names.servers[name]
            )
            s.values = {**values, **by_environment(s, script, name), **s.values}
    pools.name_roles([s for _, s in found], words, script)
    first = [one for one in found if not pools.is_further_node(one[1])]
    return first or found


def _own_server(words: list[str]) -> dict[str, Any]:
    """Settings of the engine that the first benchmark starts itself; empty for one of another server."""
    measured, started = _first(words, names_of_flags().benchmarks), _first(words, names_of_flags().servers)
    if measured is None or started is None or measured[1] != started[1]:
        return {}
    return names_of_flags().benchmarks[measured[0]].own_server


def _replica(product: str, s: Settings, machine: Machine, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A server's layout and its other settings. vLLM's data-parallel ranks are of one server, which splits each expert
    over all of them (model_executor/layers/fused_moe/config.py: flatten_tp_across_dp)."""
    replicas = s.size("dp", 1)
    inference, layout = _inference(s, product, machine.model or as_model(model)), _layout(s, machine)
    if s.flag("dp_attention"):  # SGLang's limits are of all replicas (managers/tp_worker.py, server_args.py)
        limits = {"max_running_requests", "max_batch_tokens"} & {*inference}
        inference |= {key: max(1, inference[key] // layout["dp"]) for key in limits}
    elif "ep" in layout and not _has_experts(machine.model or as_model(model)):
        s.notes.append("expert parallelism: without effect, the model has no experts")
        layout = {key: value for key, value in layout.items() if key not in ("ep", "expert_tp")}
    elif product == "vLLM" and "ep" not in layout and replicas > 1 and _has_experts(machine.model or as_model(model)):
        layout |= {"ep": 1, "expert_tp": layout["tp"] * layout.get("cp", 1) * replicas}
    if not sends_tokens(layout) and inference.pop("two_batch_overlap", None):
        s.notes.append(f"{s.written_as('two_batches')}: is simulated only where replicas share experts")
    return layout, inference | of_replicas(s, layout, names_of_flags().all2all) | waits_of(s, layout)


def _router(product: str, s: Settings, layout: Mapping[str, Any]) -> dict[str, str]:
    """vLLM's data-parallel ranks get requests from their server, where fewest wait and run (v1/engine/core_client.py,
    DPLBAsyncMPClient), unless somebody else stands before them, who is taken to send them in turn; TensorRT-LLM's from
    one queue (_torch/pyexecutor/executor_request_queue.py); SGLang's in turn
    (srt/managers/data_parallel_controller.py)."""
    if product == "vLLM" and s.size("dp", 1) > 1:
        others = {"data-parallel-external-lb", "data-parallel-hybrid-lb"} & {*s.values}
        return {"router": "round_robin" if others else "least_loaded"}
    ranks = product == TENSORRT_LLM and layout["dp"] > 1 and "ep" in layout
    return {"router": "one_queue"} if ranks else {}


def _has_experts(model: str) -> bool:
    try:
        return load_model(model).moe is not None
    except InputError:  # which the scenario's own check says
        return True


T = TypeVar("T", bound=Server)


def _first(words: list[str], known: Mapping[str, T]) -> tuple[str, list[str]] | None:
    """The first command that is known: whose it is, and its words after the start."""
    return next(iter(_commands(words, known)), None)


def _commands(words: list[str], known: Mapping[str, T]) -> Iterator[tuple[str, list[str]]]:
    """All commands that are known, in order."""
    starts = {start: name for name, one in known.items() for start in one.starts}
    for i, word in enumerate(words):
        for n in (3, 2, 1):
            name = word.rpartition("/")[2].partition(":")[0]  # without a folder, and without a container's tag
            in_folder = "/".join(word.split("/")[-2:])  # a fork's script may be told by its folder
            head = in_folder if n == 1 and in_folder in starts else " ".join([name, *words[i + 1 : i + n]])
            if head in starts:
                rest = words[i + n :]
                ends = [k for k, w in enumerate(rest) if w in ("&", "&&", ";", "|")]
                command = rest[: min(ends, default=len(rest))]
                if not {*known[starts[head]].unless} & {*command}:
                    yield starts[head], command
                break


def _settings(file: Path, words: list[str], names: Server) -> Settings:
    """A command's values by setting; of flags that are no setting by their own names."""
    words = words[1:] if words[:1] == ["serve"] else words
    words, stated = _apart([OPTIMIZATION.sub("-O=", word) for word in words], names)
    values, written = _by_setting(flags_of(words, short=True, listed=LISTED), names)
    if stated:
        values.setdefault("model", stated[0])
    return Settings(file, values, written=written)


def _apart(words: list[str], names: Server) -> tuple[list[str], list[str]]:
    """The flags with their values, and words that are no flag's, wherever they stand (argparse, "positional")."""
    flags: list[str] = []
    stated: list[str] = []
    takes = several = switch = False
    for word in words:
        if re.match("--?[A-Za-z]", word):
            name = word.lstrip("-").replace("_", "-")
            name = names.short.get(name, name)
            flags.append(word)
            takes, several = "=" not in word, name in LISTED
            switch = any(fnmatchcase(name, one) for one in names.switches.split())
        elif takes and not (switch and word.lower() not in SWITCHES):
            flags.append(word)
            takes = several
        else:
            stated.append(word)
            takes = False
    return flags, stated


def _by_setting(flags: Mapping[str, Any], names: Server) -> tuple[dict[str, Any], dict[str, str]]:
    """The flags by our names of settings, and how the command writes each."""
    ours = {flag: name for name, flags in names.flags.items() for flag in flags.split()}
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for flag, value in with_objects(flags).items():
        full = names.short.get(flag, flag)
        begun = {name for one, name in ours.items() if one.startswith(full)}
        name = ours.get(full) or (begun.pop() if len(begun) == 1 else full)
        if name in values and full in names.flags.get(name, "").split()[1:]:
            continue  # `--model NAME --model_path FOLDER`: the flag that stands first in the record says it
        values[name], written[name] = value, f"-{flag}" if flag in names.short or len(flag) == 1 else f"--{flag}"
    return values, written


def _engine(s: Settings, product: str, words: list[str], script: Script) -> str:
    """The engine's record, by the version of a container (`vllm-openai:v0.11.0`) or package (`vllm==0.11.0`), or the
    newest of those before vLLM's V1, where a variable says so (vllm/envs.py of 0.8 to 0.10)."""
    tags = tuple(word for word in words if VERSIONED.search(word) and product.lower() in word.lower())
    engine = engine_named((product, *tags))
    assert engine is not None  # each server of the file has a record
    why = f"by the version in {tags[0]}" if tags else "the newest of its product"
    if product == "vLLM" and script.variable(V1) == "0" and engine.since >= SINCE_V1:
        engine = [one for one in ENGINES.values() if one.product == product and one.since < SINCE_V1][-1]
        why = f"{V1}=0 chooses the engine before V1, which releases from 0.11 on do not have"
    s.notes.append(f"engine {engine.name}: {why}; for another version write inference.engine")
    return engine.name


def _layout(s: Settings, machine: Machine) -> dict[str, Any]:
    tp, pp, dp, cp = (s.size(name, 1) for name in ("tp", "pp", "dp", "cp"))
    # Prompts in two pieces a rank, keys and values gathered (vLLM, v1/worker: PCPManager, DualChunkSwap)
    split: dict[str, Any] = {"cp": cp, "cp_method": "all_gather"} if cp > 1 else {}
    split |= without_none({"layers_per_stage": stages_of(s, pp)})
    if s.flag("experts_on_all"):
        return {"tp": tp, "pp": pp, "dp": dp, "ep": tp * cp * dp, **split}
    ep = None if s.take("ep") is None else s.size("ep")
    if s.flag("ep_moe") or by_deepep(s):
        ep = tp  # srt/server_args.py, _handle_deepep_moe
    if s.flag("attention_dp"):  # TensorRT-LLM: a replica of the attention on each rank, whose limits are its own
        return {"tp": 1, "pp": pp, "dp": tp, "ep": ep or 1, "expert_tp": max(1, tp // (ep or 1)), **split}
    if s.flag("dp_attention"):  # dp replicas of the attention within the tp ranks, which share the experts
        own = max(1, tp // dp)
        return {"tp": own, "pp": pp, "dp": dp, "ep": ep or 1, "expert_tp": max(1, tp // (ep or 1)), **split}
    if machine.gpus and dp == 1:
        dp = s.ranks(None, machine, tp * cp * pp, "tp · cp · pp")
    experts = {"ep": ep, "expert_tp": max(1, tp // ep) if ep else None}
    return without_none({"tp": tp, "pp": pp, "dp": dp, **experts, **split})


def _told(s: Settings, name: str) -> bool | None:
    """What a switch, or the one that turns it off, says; None where neither is given."""
    return True if s.flag(name) else False if s.flag(f"not_{name}") else None


def _inference(s: Settings, product: str, model: str) -> dict[str, Any]:
    tokens, offload, chunked = _tokens(s), s.number("offload_gib"), _told(s, "chunked")
    if tokens is not None and tokens < 0:
        tokens, chunked = _without_chunks(s), False
    dtype, mode = (str(s.take(name, "auto")) for name in ("dtype", "deepep_mode"))
    # vLLM, config/compilation.py or platforms/cuda.py; SGLang, _handle_deepep_moe
    without_graphs = s.values.get("all2all") == "deepep_high_throughput" or (by_deepep(s) and mode == "normal")
    names, block = names_of_flags(), s.whole("block")
    kept = {
        "dtype": s.choice("cache", names.caches, "auto") or None,
        "block_tokens": block,
        "memory_bytes": cache_bytes(s),
        "max_tokens": cache_tokens(s, model, block),
        "memory_fraction": s.number("memory"),
        "free_fraction": s.number("free"),
        "tiers": tiers_of(s),
    }
    return without_none(
        {
            "precision": None if dtype == "auto" else sixteen_bit(dtype),
            "quantization": weights_of(s, model),
            "max_running_requests": s.whole("running"),
            "max_batch_tokens": tokens,
            "max_prompt_tokens": s.whole("prompt_tokens") or None,  # 0: no limit
            "chunked_prefill": chunked,
            "async_scheduling": _told(s, "async"),
            "schedule_conservativeness": s.number("conservativeness"),
            "capacity_policy": s.choice("policy", names.policies, "GUARANTEED_NO_EVICT") or None,
            "stream_interval": s.whole("interval"),
            "two_batch_overlap": True if s.flag("two_batches") else None,
            "eplb": _eplb(s),
            **graphs_of(s, without_graphs),
            "prefix_cache": prefixes_of(s, model),
            "kv_cache": without_none(kept) or None,
            # vLLM counts --cpu-offload-gb in GiB, and its kernels read them from host memory (UVAOffloadConfig).
            "weight_offload": {"cpu_bytes": round(offload * GIB), "prefetch": False} if offload else None,
            "speculative": drafts_of(s, product, model),
            "lora": adapters_of(s, product),
        }
    )


def _tokens(s: Settings) -> int | None:
    """Tokens of an iteration; vLLM's may end in a letter for thousands (engine/arg_utils.py, human_readable_int)."""
    given = most_tokens(str(s.values.get("tokens")))
    return s.whole("tokens") if given is None else given if s.take("tokens") else None


def _without_chunks(s: Settings) -> int:
    """Tokens of an iteration of SGLang's that computes prompts whole: max_prefill_tokens, which every replica has of
    its own (managers/schedule_policy.py, PrefillAdder: rem_chunk_tokens None)."""
    most = s.whole("prefill_tokens") or MAX_PREFILL_TOKENS
    s.notes.append(f"prompts are computed whole, up to {most:,} tokens in an iteration; longer prompts are cut there")
    replicas = s.size("dp", 1) if s.flag("dp_attention") else 1
    if replicas > 1 and "memory" not in s.values:
        s.notes.append(
            f"SGLang keeps memory free for {most:,} tokens of an iteration, here for those of all replicas together; "
            "inference.kv_cache.memory_fraction says its share"
        )
    return most * replicas


def _eplb(s: Settings) -> dict[str, Any] | None:
    """Experts placed by popularity: vLLM's number of copies may also be in a JSON object."""
    config = json_object(s, "eplb_config", "eplb-config")
    copies = Settings(s.file, {"redundant": config.get("num_redundant_experts", s.take("redundant"))})
    return {"redundant_experts": copies.whole("redundant") or 0} if s.flag("eplb") else None
