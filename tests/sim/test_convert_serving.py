"""Command lines of serving engines as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sim.commands.convert import main
from sim.inputs.scenario import parse_scenario

BENCH = "vllm bench serve --random-input-len 1000 --random-output-len 200 --num-prompts 320"


def converted(folder: Path, script: str, *options: str) -> tuple[dict[str, Any], str]:
    """The scenario and its comment, or the message."""
    (folder / "serve.sh").write_text(script)
    done = CliRunner().invoke(main, [str(folder / "serve.sh"), "--cluster", "dgx-h100", *options])
    text = done.stdout if done.exit_code == 0 else done.stderr
    return (yaml.safe_load(text) if done.exit_code == 0 else {}), text


def test_vllm_and_its_benchmark(tmp_path: Path) -> None:
    script = f"""
TP=4
vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size $TP \\
    --max-num-seqs 128 --max-num-batched-tokens=4096 --kv-cache-dtype fp8_e4m3 --quantization fp8 --port 8000 \\
    --no-enable-prefix-caching --enforce-eager --max-model-len 32768 -q fp8 &
{BENCH} --random-range-ratio 0.1 --max-concurrency 64 --request-rate inf
"""
    found, text = converted(tmp_path, script)
    assert found["model"] == "hf://meta-llama/Llama-3.1-70B-Instruct"
    assert found["parallelism"] == {"tp": 4, "pp": 1, "dp": 1}
    assert found["inference"] == {
        "engine": "vllm-0.19",
        "quantization": "fp8",
        "max_running_requests": 128,
        "max_batch_tokens": 4096,
        "cuda_graphs": False,
        "prefix_cache": "none",
        "kv_cache": {"dtype": "fp8"},
        "requests": {"prompt_len": 1000, "output_len": 200, "range_ratio": 0.1, "count": 320, "max_concurrency": 64},
    }
    assert "not expressed here: --max-model-len" in text
    parse_scenario(found)


def test_sglang_with_attention_by_replicas(tmp_path: Path) -> None:
    script = """
python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention --ep-size 8 \\
    --chunked-prefill-size 16384 --enable-two-batch-overlap --speculative-algorithm EAGLE --speculative-num-steps 1
python3 -m sglang.bench_serving --random-input 1024 --random-output 512 --random-range-ratio 0.5 --request-rate 4
"""
    found, text = converted(tmp_path, script)
    assert found["parallelism"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 8, "expert_tp": 1}
    assert found["inference"]["max_batch_tokens"] == 2048
    assert found["inference"]["two_batch_overlap"]
    assert found["inference"]["speculative"] == {"tokens": 1}
    requests = found["inference"]["requests"]
    shortest, longest = (requests["prompt_len"] * (1 + by * requests["range_ratio"]) for by in (-1, 1))
    assert (shortest, longest) == (pytest.approx(512, abs=1), pytest.approx(1024, abs=1))
    assert requests["rate_per_s"] == 4.0
    assert "acceptance: no flag says it" in text
    parse_scenario(found)


def test_all_gpus_share_the_experts_with_vllms_expert_parallelism(tmp_path: Path) -> None:
    found, _ = converted(tmp_path, f"vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel\n{BENCH}")
    assert found["parallelism"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 8}


def test_a_container_of_vllm(tmp_path: Path) -> None:
    docker = "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.19.0 --model Qwen/Qwen3-32B -tp 2"
    found, _ = converted(tmp_path, f"{docker}\n{BENCH}")
    assert (found["model"], found["parallelism"]["tp"]) == ("hf://Qwen/Qwen3-32B", 2)


def test_tensorrt_llm_with_requests_of_ones_own(tmp_path: Path) -> None:
    wanted = ("--model", "llama3-70b", "--set", "inference.requests={prompt_len: 10, output_len: 5}", "--gpus", "16")
    found, _ = converted(tmp_path, "trtllm-serve serve /models/mine --tp_size 8 --max_batch_size 64", *wanted)
    assert found["inference"]["engine"] == "trtllm-1.0"
    assert found["inference"]["max_running_requests"] == 64
    assert found["parallelism"] == {"tp": 8, "pp": 1, "dp": 2}


def test_a_draft_model_of_vllm(tmp_path: Path) -> None:
    draft = '{"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 3}'
    found, _ = converted(tmp_path, f"vllm serve llama3-70b -tp 8 --speculative-config '{draft}'\n{BENCH}")
    assert found["inference"]["speculative"] == {"tokens": 3, "draft": "hf://meta-llama/Llama-3.2-1B"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("vllm serve llama3-8b", "inference.requests: is required and missing"),
        (f"vllm serve --max-num-seqs 4\n{BENCH}", "names no model: give --model"),
        (f"vllm serve llama3-8b --max-num-seqs many\n{BENCH}", "--max-num-seqs: found 'many'; must be a whole number"),
        (
            f"vllm serve llama3-8b --gpu-memory-utilization most\n{BENCH}",
            "--gpu-memory-utilization: found 'most'; must be a number",
        ),
        (
            f"vllm serve llama3-8b --speculative-config '[1]'\n{BENCH}",
            "speculative-config: found '[1]'; must be a JSON",
        ),
    ],
)
def test_wrong_values(tmp_path: Path, script: str, said: str) -> None:
    assert said in converted(tmp_path, script)[1]
