"""Benchmarks' commands whose ranges of lengths differ, and options that a script computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, refused

SERVER = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 2100 &\n"
CLUSTER = ("--cluster", "dgx-h100")
LENGTHS = "--dataset-name random --random-input-len 1000 --random-output-len 500 --num-prompts 20"


def requests(tmp_path: Path, benchmark: str) -> dict[str, Any]:
    found: dict[str, Any] = converted(tmp_path, "s.sh", SERVER + benchmark, "--cluster", "dgx-h100")[0]
    return dict(found["inference"]["requests"])


@pytest.mark.parametrize(
    ("command", "prompt", "ratio"),
    [
        (f"vllm bench serve {LENGTHS} --random-range-ratio 0.5", 1000, 0.5),
        (f"python benchmarks/benchmark_serving.py {LENGTHS} --random-range-ratio 0.5", 1000, 0.5),
        # kimbochen/bench_serving, sample_random_requests: from ratio·length to the length, 1 by default
        (f"python3 bench_serving/benchmark_serving.py {LENGTHS} --random-range-ratio 0.5", 750, 0.3333),
        (f"python3 bench_serving/benchmark_serving.py {LENGTHS}", 1000, None),
        ("run_benchmark_serving --input-len 1000 --output-len 500 --random-range-ratio 0.5", 750, 0.3333),
    ],
)
def test_a_range_of_lengths(tmp_path: Path, command: str, prompt: int, ratio: float | None) -> None:
    found = requests(tmp_path, command)
    assert (found["prompt_len"], found["output_len"], found.get("range_ratio")) == (prompt, prompt // 2, ratio)


def test_an_option_that_the_script_computes(tmp_path: Path) -> None:
    text = """ISL=1024
LIMIT=$((ISL + 1024 + 20))
cat > config.yaml << EOF
max-model-len: $LIMIT
max-num-batched-tokens: $((ISL * 8))
EOF
vllm serve meta-llama/Llama-3.1-8B --config config.yaml
"""
    found, _ = converted(tmp_path, "s.sh", text, "--cluster", "dgx-h100")
    assert (found["inference"]["max_request_tokens"], found["inference"]["max_batch_tokens"]) == (2068, 8192)


def test_a_benchmark_alone_asks_for_its_server(tmp_path: Path) -> None:
    told = refused(tmp_path, "s.sh", f"vllm bench serve {LENGTHS} --model meta-llama/Llama-3.1-8B", *CLUSTER)
    assert "vllm bench serve measures a server that it does not start" in told


def test_what_costs_the_server_time_and_is_not_simulated_is_named(tmp_path: Path) -> None:
    server = SERVER.replace(" &", " --api-server-count 4 &")
    text = f"{server}vllm bench serve {LENGTHS} --logprobs 5 --use-beam-search"
    found, told = converted(tmp_path, "s.sh", text, *CLUSTER)
    assert found["inference"]["sampling"] == {"temperature": 0, "logprobs": 5}
    assert "not expressed here: --use-beam-search" in told
    assert "--api-server-count 4: one API server for each replica is simulated" in told


def test_penalties_of_an_engine_that_has_none_are_named(tmp_path: Path) -> None:
    text = f"trtllm-serve meta-llama/Llama-3.1-8B\nvllm bench serve {LENGTHS} --temperature 1 --repetition-penalty 1.1"
    found, told = converted(tmp_path, "s.sh", text, *CLUSTER)
    assert found["inference"]["sampling"] == {"temperature": 1}
    assert "--repetition-penalty: engine trtllm-1.3 has no penalties" in told
