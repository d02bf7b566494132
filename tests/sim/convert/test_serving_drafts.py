"""Drafts of SGLang whose number its command leaves to the engine, and TensorRT-LLM's benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted

SERVER = "python3 -m sglang.launch_server --model-path {} --tp 8 --speculative-algorithm {}\n"


@pytest.mark.parametrize(
    ("model", "algorithm", "drafted"),
    [
        ("deepseek-ai/DeepSeek-V3", "EAGLE", {"tokens": 3}),
        (
            "meta-llama/Llama-3.1-8B",
            "EAGLE3 --speculative-draft-model-path llama3.2-1b",
            {"tokens": 5, "draft": "llama3.2-1b"},
        ),
        (
            "meta-llama/Llama-3.1-8B",
            "STANDALONE --speculative-draft-model-path llama3.2-1b",
            {"tokens": 3, "draft": "llama3.2-1b"},
        ),
        ("deepseek-ai/DeepSeek-V3", "EAGLE --speculative-num-steps 1", {"tokens": 1}),
        ("deepseek-ai/DeepSeek-V3", "NGRAM", None),
    ],
)
def test_the_default_number_of_drafts(
    tmp_path: Path, model: str, algorithm: str, drafted: dict[str, Any] | None
) -> None:
    """sglang/srt/server_args.py: `auto_choose_speculative_params`."""
    data, said = converted(tmp_path, "serve.sh", SERVER.format(model, algorithm), "--cluster", "dgx-h100")
    assert data["inference"].get("speculative") == drafted
    assert ("SGLang's default for this model" in said) == (drafted is not None and "num-steps" not in algorithm)
    assert ("without a model are not simulated" in said) == (drafted is None)


def test_tensorrt_llms_own_benchmark(tmp_path: Path) -> None:
    """tensorrt_llm/serve/scripts/benchmark_serving.py has the flags and defaults of vLLM's."""
    bench = "python -m tensorrt_llm.serve.scripts.benchmark_serving --random-input-len 512 --max-concurrency 8\n"
    data, said = converted(tmp_path, "a.sh", f"trtllm-serve llama3-8b --tp_size 2\n{bench}", "--cluster", "dgx-h100")
    wanted = {"prompt_len": 512, "output_len": 128, "count": 1000, "max_concurrency": 8}
    assert data["inference"]["requests"] == wanted
    assert "no benchmark's command" not in said
