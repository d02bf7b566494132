"""Drafts of SGLang whose number its command leaves to the engine."""

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
