"""A YAML of options that a server's command names: written by the script (`cat > options.yml <<EOF`), or beside it.

vLLM's and SGLang's `--config` has flags by their names, which the command's own overrule. TensorRT-LLM's
`--extra_llm_api_options`, which Dynamo calls `--extra-engine-args`, has keys of its own, which overrule the command's
flags (tensorrt_llm/llmapi/llm_args.py).
"""

from __future__ import annotations

from typing import Any

from sim.convert.named_files import named_mapping
from sim.convert.settings import Settings

FLAGS = ("extra-llm-api-options", "extra-engine-args", "config")
SETTINGS = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "moe_expert_parallel_size": "ep",
    "max_batch_size": "running",
    "max_num_tokens": "tokens",
    "max_seq_len": "longest",
    "enable_chunked_prefill": "chunked",
    "enable_attention_dp": "attention_dp",
    "kv_cache_config.dtype": "cache",
    "kv_cache_config.free_gpu_memory_fraction": "free",
    "kv_cache_config.tokens_per_block": "block",
    "speculative_config.num_nextn_predict_layers": "drafted",
    "speculative_config.max_draft_len": "drafted",
    "speculative_config.speculative_model": "draft",
    "speculative_config.speculative_model_dir": "draft",
}
WITHOUT_EFFECT = (
    *("backend", "print_iter_log", "stream_interval", "num_postprocess_workers", "trust_remote_code"),
    *("cuda_graph_config.", "speculative_config.decoding_type", "enable_iter_perf_stats", "enable_autotuner"),
)


def options_of(s: Settings, text: str) -> dict[str, Any]:
    """The keys of the YAML that the command names, those of sections with a dot; a note where it is nowhere.

    Raises:
        InputError: for a YAML that is no mapping.
    """
    name = next((str(s.values[flag]) for flag in FLAGS if flag in s.values), None)
    if name is None:
        return {}
    s.taken.update(FLAGS)
    options = named_mapping(s.file, text, name)
    if options is None:
        s.notes.append(f"{name}, which has further options, is neither in the script nor beside it: defaults are taken")
    return _flat(options or {})


def of_tensorrt_llm(options: dict[str, Any]) -> dict[str, Any]:
    """Its options by our names of settings; others by their own, which are reported."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key == "cuda_graph_config" and value is None:
            found["eager"] = True
        elif key == "kv_cache_config.enable_block_reuse":
            found["prefixes" if value else "no_prefixes"] = True
        elif key in SETTINGS:
            found[SETTINGS[key]] = value
        elif not key.startswith(WITHOUT_EFFECT):
            found[key] = value
    return found


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of sections among them, as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        inner = value if isinstance(value, dict) else None
        flat |= {f"{key}.{k}": v for k, v in inner.items()} if inner else {str(key): value}
    return flat
