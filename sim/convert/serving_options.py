"""A YAML of options that a server's command names.

vLLM's and SGLang's `--config` has flags by their names, which the command's own overrule. TensorRT-LLM's
`--extra_llm_api_options` has keys of its own, which overrule the command's flags (tensorrt_llm/llmapi/llm_args.py).
Scripts write it themselves (`cat > options.yml <<EOF`), or it stands beside them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sim.convert.command_line import ASSIGNMENT, with_values
from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show
from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

FLAGS = ("extra-llm-api-options", "config")
HEREDOC = re.compile(r"(?ms)^([^\n]*)<<-?\s*(['\"]?)(\w+)\2([^\n]*)\n(.*?)\n?^\s*\3\s*$")
TARGET = re.compile(r"(?:>{1,2}\s*|\btee\s+(?:-a\s+)?)[\"']?([^\s\"']+)")
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
    options = _options(s.file, text, name)
    if options is None:
        s.notes.append(f"{name}, which has further options, is neither in the script nor beside it: defaults are taken")
    return options or {}


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


def _options(file: Path, text: str, name: str) -> dict[str, Any] | None:
    """The YAML's keys, of sections with a dot; None where it is nowhere."""
    variables = {variable: value.strip("\"'") for variable, _, value in ASSIGNMENT.findall(text)}
    parts = [
        found[5]
        for found in HEREDOC.finditer(with_values(with_values(text, variables), variables))
        if (target := TARGET.search(found[1] + found[4])) and Path(target[1]).name == Path(name).name
    ]
    beside = next((path for path in (file.parent / name, Path(name)) if path.is_file()), None)
    if not parts and beside is None:
        return None
    written = "\n".join(parts) if parts else read_text(beside or file, MAX_BYTES)
    data: Any = parse_yaml(written, name)[0]
    if not isinstance(data, dict):
        raise InputError(f"{file}: {name}: found {show(data)}; must be a mapping of options")
    flat: dict[str, Any] = {}
    for key, value in data.items():
        inner = value if isinstance(value, dict) else None
        flat |= {f"{key}.{k}": v for k, v in inner.items()} if inner else {str(key): value}
    return flat
