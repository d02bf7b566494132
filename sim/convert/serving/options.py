"""A YAML of options that a server's command names: written by the script (`cat > options.yml <<EOF`), or beside it.

vLLM's and SGLang's `--config` has flags by their names, which the command's own overrule. TensorRT-LLM's
`--extra_llm_api_options`, which Dynamo calls `--extra-engine-args`, has keys of its own, which overrule the command's
flags (tensorrt_llm/llmapi/llm_args.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Settings

HUMAN_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")
FLAGS = ("extra-llm-api-options", "extra-engine-args", "config")
SETTINGS = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "moe_expert_parallel_size": "ep",
    "max_batch_size": "running",
    "max_num_tokens": "tokens",
    "max_seq_len": "longest",
    "stream_interval": "interval",
    "enable_chunked_prefill": "chunked",
    "enable_attention_dp": "attention_dp",
    "disable_overlap_scheduler": "not_async",
    "scheduler_config.capacity_scheduler_policy": "policy",
    "batch_wait_timeout_iters": "wait_iterations",
    "batch_wait_max_tokens_ratio": "wait_ratio",
    "attention_dp_config.enable_balance": "balanced",
    "attention_dp_config.timeout_iters": "balance_timeout",
    "attention_dp_config.batching_wait_iters": "balance_wait",
    "kv_cache_config.dtype": "cache",
    "kv_cache_config.free_gpu_memory_fraction": "free",
    "kv_cache_config.tokens_per_block": "block",
    "kv_cache_config.max_tokens": "cache_tokens",
    "kv_cache_config.host_cache_size": "host_bytes",
    "quant_config.quant_algo": "quantization",
    "cuda_graph_config.max_batch_size": "graphs_to",
    "cuda_graph_config.batch_sizes": "graph_sizes",
    "speculative_config.decoding_type": "algorithm",
    "speculative_config.num_nextn_predict_layers": "drafted",
    "speculative_config.max_draft_len": "drafted",
    "speculative_config.speculative_model": "draft",
    "speculative_config.speculative_model_dir": "draft",
}
OF_THEMSELVES = {  # defaults that configurations state
    "scheduler_config.context_chunking_policy": "FIRST_COME_FIRST_SERVED",  # py_executor_creator.py
    "allreduce_strategy": "AUTO",
    "moe_config.backend": "AUTO",
}
OWN_GRAPHS = 128  # max_batch_size of TensorRT-LLM's cuda_graph_config
EACH_SIZE = 32  # its graphs without padding are of every size to this one, then of powers of 2
GRAPHS = "cuda_graph_config"  # null: no graphs; empty: its own
WITHOUT_EFFECT = (
    *("backend", "print_iter_log", "trust_remote_code"),
    *("enable_iter_perf_stats", "enable_autotuner"),
)


def options_of(s: Settings, script: Script) -> dict[str, Any]:
    """The keys of the YAML that the command names, those of sections with a dot; a note where it is nowhere.

    Raises:
        InputError: for a YAML that is no mapping.
    """
    name = next((str(s.values[flag]) for flag in FLAGS if flag in s.values), None)
    if name is None:
        return {}
    s.taken.update(FLAGS)
    options = named_mapping(s.file, script, name)
    if options is None:
        s.notes.append(f"{name}, which has further options, is neither in the script nor beside it: defaults are taken")
    return _flat(options or {})


def of_tensorrt_llm(options: dict[str, Any], s: Settings) -> dict[str, Any]:
    """Its options by our names of settings; others by their own, which are reported. Graphs of padded batches of up to
    as many requests as run at once are what is simulated (llmapi/llm_args.py, CudaGraphConfig)."""
    most = options.get("max_batch_size", s.values.get("running"))
    found = _graphs(options, s, most)
    graphs = {"cuda_graph_config.enable_padding": True, "cuda_graph_config.max_batch_size": most}
    for key, value in options.items():
        if key == GRAPHS and not value:
            found |= {"eager": True} if value is None else {}
        elif key == "kv_cache_config.enable_block_reuse":
            found["prefixes" if value else "no_prefixes"] = True
        elif (key in graphs and _at_least(value, graphs[key])) or OF_THEMSELVES.get(key) == value:
            continue
        elif key == "num_postprocess_workers":  # executor/postproc_worker.py: texts and pieces are made there
            more = f"{key} {value}: one process of trtllm-serve makes all pieces here, so tokens reach clients later"
            s.notes += [more] if value else []
        elif key in SETTINGS:
            found[SETTINGS[key]] = value
        elif not key.startswith(WITHOUT_EFFECT):
            found[key] = value
    return found


def _graphs(options: dict[str, Any], s: Settings, most: Any) -> dict[str, Any]:
    """What a server has where its `cuda_graph_config` leaves sizes out: graphs to 128, and none between these sizes
    unless it says so (CudaGraphConfig: validate_cuda_graph_config, enable_padding). trtllm-bench says both."""
    said = {*options}
    if s.flag("padded") or options.get(GRAPHS, {}) is None:
        return {}
    if not options.get("cuda_graph_config.enable_padding") and (most is None or _at_least(most, EACH_SIZE + 1)):
        s.notes.append(
            "cuda_graph_config.enable_padding is false: TensorRT-LLM runs batches of a size that has no graph (33 to "
            "63, say) without one; here they are padded"
        )
    sizes = {"cuda_graph_config.max_batch_size", "cuda_graph_config.batch_sizes"}
    more = most is None or _at_least(most, OWN_GRAPHS + 1)
    return {"graphs_to": OWN_GRAPHS} if more and not sizes & said else {}


def _at_least(value: Any, least: Any) -> bool:
    try:
        return float(value) >= float(least)
    except (TypeError, ValueError):
        return False


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of sections among them, as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        inner = value if isinstance(value, dict) else None
        flat |= {f"{key}.{k}": v for k, v in inner.items()} if inner else {str(key): value}
    return flat


def most_tokens(limit: str) -> int | None:
    """The tokens that an engine's limit on a request allows; None for `auto`, which goes by the memory.

    vLLM's numbers may end in k, m and g for thousands, and in K, M and G for powers of 1,024
    (engine/arg_utils.py, human_readable_int).

    >>> [most_tokens(text) for text in ("4096", "32k", "1.5K", "auto", "-1")]
    [4096, 32000, 1536, None, None]
    """
    found = HUMAN_READABLE.fullmatch(limit)
    if found is None:
        return None
    number, suffix = found.groups()
    base, power = (1024.0 if suffix.isupper() else 1000.0), " kmg".index(suffix.lower() or " ")
    return round(float(number) * math.pow(base, power))


def within(requests: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Assumed requests, of which no prompt and answer together are longer than the engine's limit.

    >>> within({"prompt_len": 1024, "output_len": 128}, 512)
    {'prompt_len': 384, 'output_len': 128}
    """
    output = max(1, min(requests["output_len"], limit // 2))
    return {**requests, "prompt_len": max(1, min(requests["prompt_len"], limit - output)), "output_len": output}


def of_limit(inference: Mapping[str, Any]) -> str:
    """What to say of the limit; the simulation says how many requests it refuses."""
    limit, requests = inference.get("max_request_tokens"), inference["requests"]
    if limit is None:
        return "the engine takes as many as its cache has room for; inference.max_request_tokens is left out"
    ratio: float = 1 + requests.get("range_ratio", 0.0)
    most = round(ratio * requests["prompt_len"]) + round(ratio * requests["output_len"])
    return f"requests have up to {most:,} tokens; the engine refuses longer ones" if most > limit else ""
