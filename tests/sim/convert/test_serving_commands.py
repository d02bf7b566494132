"""What a serving command says in unusual places: the model behind its flags, requests of a data set, variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted

ON = ("--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("command", "tp"),
    [
        ("vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2", 2),
        ("vllm serve --tensor-parallel-size 2 Qwen/Qwen3-8B", 2),
        ("vllm serve --trust-remote-code Qwen/Qwen3-8B --tensor_parallel_size=2", 2),
        ("vllm serve --trust-remote-code --tensor_parallel_size 2 --gpu_memory_utilization=0.98 Qwen/Qwen3-8B", 2),
        ("vllm serve --enable-prefix-caching true --no-enable-chunked-prefill Qwen/Qwen3-8B -tp 4", 4),
        ("docker run --gpus all vllm/vllm-openai:v0.11.0 --tensor-parallel-size 2 --model Qwen/Qwen3-8B", 2),
        ("trtllm-serve --tp_size 2 Qwen/Qwen3-8B", 2),
        ("trtllm-serve serve --trust_remote_code Qwen/Qwen3-8B --tp_size 2", 2),
        ("trtllm-bench --model Qwen/Qwen3-8B throughput --tp 2 --num_requests 10", 2),
    ],
)
def test_the_model_stands_anywhere(command: str, tp: int, tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "serve.sh", command, *ON)
    assert (data["model"], data["parallelism"]["tp"]) == ("hf://Qwen/Qwen3-8B", tp)


@pytest.mark.parametrize(
    ("benchmark", "said"),
    [
        (
            "python3 benchmark_serving.py --dataset-path ShareGPT_V3_unfiltered_cleaned_split.json",
            "of dataset sharegpt",
        ),
        ("vllm bench serve --dataset-name sharegpt --dataset-path x.json", "of dataset sharegpt"),
        ("python -m sglang.bench_serving --num-prompts 10", "of dataset sharegpt"),
        ("vllm bench serve --num-prompts 10", "prompts of 1,024 and answers of 128 tokens, the benchmark's defaults"),
        ("vllm bench serve --random-input-len 64 --random-output-len 8", ""),
    ],
)
def test_requests_that_are_assumed_are_said(benchmark: str, said: str, tmp_path: Path) -> None:
    text = f"vllm serve Qwen/Qwen3-32B --max-num-seqs 32 &\n{benchmark} --model Qwen/Qwen3-32B\n"
    _, notes = converted(tmp_path, "serve.sh", text, *ON)
    assert said in notes
    assert bool(said) == ("are not in the command" in notes or "defaults, as no flag" in notes)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("SGL_ENABLE_JIT_DEEPGEMM=0 ", "SGL_ENABLE_JIT_DEEPGEMM=0"),
        ("export SGLANG_SOMETHING_NEW=1\n", "SGLANG_SOMETHING_NEW=1"),
        ("env VLLM_FLASH_ATTN_VERSION=2 ", "VLLM_FLASH_ATTN_VERSION=2"),
        ("docker run -e SGL_X=3 lmsysorg/sglang:v0.5.3 ", "SGL_X=3"),
        ("SGL_ENABLE_JIT_DEEPGEMM=0\n", ""),  # which the server does not see
        ("export TP=8 HF_HOME=/data OMP_NUM_THREADS=8 CUDA_VISIBLE_DEVICES=0,1\n", ""),
    ],
)
def test_variables_that_a_server_sees_are_named(line: str, named: str, tmp_path: Path) -> None:
    text = f"{line}python3 -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp ${{TP:-8}}\n"
    _, notes = converted(tmp_path, "sglang.sh", text, *ON)
    assert notes.partition("environment, not expressed here: ")[2].partition("\n")[0] == named


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("export VLLM_USE_V1=0\n", "vllm-0.6.5"),
        ("VLLM_USE_V1=0 ", "vllm-0.6.5"),
        ("pip install vllm==0.6.5\nVLLM_USE_V1=0 ", "vllm-0.6.5"),
        ("VLLM_USE_V1=1 ", "vllm-0.33"),
    ],
)
def test_the_engine_before_v1(line: str, engine: str, tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "vllm.sh", f"{line}vllm serve Qwen/Qwen3-8B\n", *ON)
    assert data["inference"]["engine"] == engine
    assert "not expressed here: VLLM_USE_V1" not in notes
