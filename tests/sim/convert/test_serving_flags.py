"""Flags of caches, chunks and CUDA graphs in command lines of serving engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.test_serving import BENCH, converted


@pytest.mark.parametrize(
    ("server", "expected", "told"),
    [
        ("vllm serve llama3-8b --kv-cache-dtype bfloat16", {"kv_cache": {"dtype": "bf16"}}, ""),
        ("vllm serve llama3-8b --kv-cache-dtype auto --max-num-batched-tokens 8k", {"max_batch_tokens": 8000}, ""),
        ("vllm serve llama3-8b --kv-cache-dtype nvfp4", {}, "not expressed here: --kv-cache-dtype"),
        ("trtllm-serve llama3-8b --enable_chunked_prefill", {"chunked_prefill": True}, ""),
        ("""vllm serve llama3-8b -cc '{"cudagraph_mode": "NONE"}'""", {"cuda_graphs": False}, ""),
        ("vllm serve llama3-8b -cc.cudagraph_mode=none", {"cuda_graphs": False}, ""),
        (
            """vllm serve llama3-8b --compilation-config '{"cudagraph_mode": "PIECEWISE", "level": 3}'""",
            {},
            "--compilation-config: cudagraph_mode PIECEWISE: not expressed here",
        ),
        ("vllm serve llama3-8b --preemption-mode recompute", {}, ""),
        ("vllm serve llama3-8b -O1", {}, "-O1: graphs of all but attention alone, and no fused all-reduces"),
        ("vllm serve llama3-8b -O2", {}, ""),
        ("""vllm serve llama3-8b -cc '{"level": 3}'""", {}, "--compilation-config: level: not expressed here"),
        ("vllm serve llama3-8b --max-cudagraph-capture-size 64", {"cuda_graph_max_size": 64}, ""),
        ("vllm serve llama3-8b --cudagraph-capture-sizes 4 1 2", {"cuda_graph_sizes": [1, 2, 4]}, ""),
        ("vllm serve llama3-8b --cuda-graph-sizes 128", {"cuda_graph_max_size": 128}, ""),
        ("vllm serve llama3-8b --cuda-graph-sizes 8 16", {"cuda_graph_sizes": [8, 16]}, ""),
        ("""vllm serve llama3-8b -cc '{"cudagraph_capture_sizes": [1, 8]}'""", {"cuda_graph_sizes": [1, 8]}, ""),
        ("vllm serve llama3-8b -cc.max_cudagraph_capture_size=0", {"cuda_graphs": False}, ""),
        ("sglang serve --model-path llama3-8b --cuda-graph-max-bs 24", {"cuda_graph_max_size": 24}, ""),
        ("sglang serve --model-path llama3-8b --cuda-graph-bs-decode 1 2", {"cuda_graph_sizes": [1, 2]}, ""),
        (
            """sglang serve --model-path llama3-8b --cuda-graph-config '{"decode": {"max_bs": 8, "wide": 1}}'""",
            {"cuda_graph_max_size": 8},
            "--cuda-graph-config: decode: wide: not expressed here",
        ),
        ("sglang serve --model-path llama3-8b --max-total-tokens 9000", {"kv_cache": {"max_tokens": 9000}}, ""),
        ("vllm serve llama3-8b --kv-cache-memory-bytes 8G", {"kv_cache": {"memory_bytes": 8 * 2**30}}, ""),
        ("vllm serve llama3-8b --num-gpu-blocks-override 512", {"kv_cache": {"max_tokens": 8192}}, ""),
        (
            "vllm serve llama3-8b --num-gpu-blocks-override 512 --block-size 32",
            {"kv_cache": {"block_tokens": 32, "max_tokens": 16384}},
            "",
        ),
        (
            "vllm serve gpt-oss-20b --num-gpu-blocks-override 512",
            {},
            "--num-gpu-blocks-override: blocks of this model are not expressed here",
        ),
    ],
)
def test_caches_chunks_and_graphs_by_their_flags(
    tmp_path: Path, server: str, expected: dict[str, Any], told: str
) -> None:
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert expected.items() <= found["inference"].items()
    assert ("not expressed here" in text) == bool(told)
    assert told in text
    parse_scenario(found)


@pytest.mark.parametrize(
    ("graphs", "told"),
    [
        ("{max_batch_size: 64, enable_padding: true}", ""),
        ("{max_batch_size: 32}", ""),
        ("{batch_sizes: [1, 2, 4], enable_padding: false}", "cuda_graph_config.enable_padding"),
    ],
)
def test_graphs_that_tensorrt_llm_is_told_and_that_are_not_simulated_are_named(
    tmp_path: Path, graphs: str, told: str
) -> None:
    (tmp_path / "more.yml").write_text(f"cuda_graph_config: {graphs}\n")
    _, text = converted(tmp_path, f"trtllm-serve llama3-8b --max_batch_size 64 --config more.yml\n{BENCH}")
    assert (f"not expressed here: {told}\n" in text) if told else ("not expressed here" not in text)


@pytest.mark.parametrize(
    ("policy", "expected", "told"),
    [
        ("MAX_UTILIZATION", "max_utilization", False),
        ("GUARANTEED_NO_EVICT", None, False),
        ("STATIC_BATCH", None, True),
    ],
)
def test_whom_tensorrt_llm_lets_in(tmp_path: Path, policy: str, expected: str | None, told: bool) -> None:
    own = f"capacity_scheduler_policy: {policy}, context_chunking_policy: FIRST_COME_FIRST_SERVED"
    (tmp_path / "more.yml").write_text(f"scheduler_config: {{{own}}}\n")
    found, text = converted(tmp_path, f"trtllm-serve llama3-8b --max_batch_size 32 --config more.yml\n{BENCH}")
    assert found["inference"].get("capacity_policy") == expected
    assert ("not expressed here: " in text) == told
    parse_scenario(found)


@pytest.mark.parametrize("workers", [0, 4])
def test_processes_behind_tensorrt_llm_are_a_note(tmp_path: Path, workers: int) -> None:
    (tmp_path / "more.yml").write_text(f"num_postprocess_workers: {workers}\n")
    _, text = converted(tmp_path, f"trtllm-serve llama3-8b --max_batch_size 32 --config more.yml\n{BENCH}")
    assert ("num_postprocess_workers 4: one process of trtllm-serve makes all pieces" in text) == bool(workers)
    assert "not expressed here" not in text


def test_how_careful_sglang_is(tmp_path: Path) -> None:
    serve = "python -m sglang.launch_server --model-path llama3-8b --schedule-conservativeness 0.5"
    found, text = converted(tmp_path, f"{serve}\n{BENCH}")
    assert found["inference"]["schedule_conservativeness"] == 0.5
    assert "not expressed here" not in text
    parse_scenario(found)


WAITS = "batch_wait_timeout_iters: 20\nbatch_wait_max_tokens_ratio: 0.9\n"
BALANCE = "attention_dp_config: {enable_balance: true, batching_wait_iters: 0, timeout_iters: 60}\n"


@pytest.mark.parametrize(
    ("config", "model", "expected", "told"),
    [
        (WAITS, "llama3-8b", {"batch_wait": {"iterations": 20, "tokens_ratio": 0.9}}, ""),
        ("batch_wait_timeout_iters: 20\n", "llama3-8b", {}, "prompts wait only if both are above 0"),
        (
            f"{WAITS}enable_attention_dp: true\n",
            "qwen3-30b-a3b",
            {},
            "no prompt waits so with",
        ),
        (
            f"{BALANCE}enable_attention_dp: true\n",
            "qwen3-30b-a3b",
            {"balanced_prompts": {"timeout_iterations": 60, "wait_iterations": 0}},
            "",
        ),
        (BALANCE, "llama3-8b", {}, "attention_dp_config.enable_balance: without effect"),
        ("enable_attention_dp: true\n", "qwen3-30b-a3b", {}, ""),
    ],
)
def test_prompts_that_tensorrt_llm_lets_wait(
    tmp_path: Path, config: str, model: str, expected: dict[str, Any], told: str
) -> None:
    (tmp_path / "more.yml").write_text(config)
    command = f"trtllm-serve {model} --tp_size 2 --ep_size 2 --max_batch_size 32 --extra_llm_api_options more.yml"
    found, text = converted(tmp_path, f"{command}\n{BENCH}")
    keys = ("batch_wait", "balanced_prompts")
    assert {key: found["inference"][key] for key in keys if key in found["inference"]} == expected
    assert told in text
    assert ("batch_wait_timeout_iters" in text or "attention_dp_config" in text) == bool(told)
    assert "not expressed here" not in text
    parse_scenario(found)


def test_sizes_that_tensorrt_llm_is_told(tmp_path: Path) -> None:
    (tmp_path / "more.yml").write_text(
        "cuda_graph_config: {batch_sizes: [8, 2]}\nkv_cache_config: {max_tokens: 4096}\n"
    )
    found, _ = converted(tmp_path, f"trtllm-serve llama3-8b --config more.yml\n{BENCH}")
    assert (found["inference"]["cuda_graph_sizes"], found["inference"]["kv_cache"]) == ([2, 8], {"max_tokens": 4096})


@pytest.mark.parametrize(
    ("image", "mode", "told"),
    [
        ("vllm/vllm-openai:v0.6.3", "swap", ""),
        (
            "vllm/vllm-openai:v0.11.0",
            None,
            "--preemption-mode swap: without effect, engine vllm-0.11 swaps no requests",
        ),
    ],
)
def test_what_a_preempted_request_keeps(tmp_path: Path, image: str, mode: str | None, told: str) -> None:
    script = f"docker run {image} --model llama3-8b --preemption-mode swap\n{BENCH}"
    found, text = converted(tmp_path, script)
    assert found["inference"].get("preemption") == mode
    assert told in text
    parse_scenario(found)


@pytest.mark.parametrize(("shared", "kept"), [("", None), (" --dp 8 --enable-dp-attention", True)])
def test_two_batches_of_one_replica_are_a_note(tmp_path: Path, shared: str, kept: bool | None) -> None:
    serve = "python -m sglang.launch_server --model-path qwen3-30b-a3b --tp 8 --ep 8 --moe-a2a-backend deepep"
    found, text = converted(tmp_path, f"{serve} --enable-two-batch-overlap{shared}")
    assert found["inference"].get("two_batch_overlap") is kept
    assert ("--enable-two-batch-overlap: is simulated only where replicas share experts" in text) == (kept is None)
    parse_scenario(found)


@pytest.mark.parametrize(
    ("command", "config", "to", "padded"),
    [
        ("trtllm-serve llama3-8b", "stream_interval: 1", 128, False),
        ("trtllm-serve llama3-8b", "cuda_graph_config: {enable_padding: true}", 128, True),
        ("trtllm-serve llama3-8b", "cuda_graph_config: {enable_padding: true, max_batch_size: 512}", 512, True),
        ("trtllm-serve llama3-8b", "cuda_graph_config: null\nallreduce_strategy: AUTO", None, True),
        ("trtllm-serve llama3-8b", "cuda_graph_config: {}", 128, False),
        ("trtllm-serve llama3-8b --max_batch_size 64", "stream_interval: 1", None, False),
        ("trtllm-serve llama3-8b --max_batch_size 32", "stream_interval: 1", None, True),
        ("trtllm-bench --model llama3-8b throughput", "stream_interval: 1", None, True),
    ],
)
def test_a_server_of_tensorrt_llm_has_graphs_to_128_by_itself(
    tmp_path: Path, command: str, config: str, to: int | None, padded: bool
) -> None:
    """llmapi/llm_args.py, CudaGraphConfig: max_batch_size 128, enable_padding false; trtllm-bench says both."""
    (tmp_path / "more.yml").write_text(f"{config}\n")
    found, text = converted(tmp_path, f"{command} --extra_llm_api_options more.yml")
    assert found["inference"].get("cuda_graph_max_size") == to
    assert ("cuda_graph_config.enable_padding is false" in text) != padded
    assert "not expressed here" not in text
    parse_scenario(found)
