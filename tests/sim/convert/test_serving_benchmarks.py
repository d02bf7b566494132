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


@pytest.mark.parametrize(
    ("command", "burstiness"),
    [
        (f"vllm bench serve {LENGTHS} --request-rate 5 --burstiness 0.5", 0.5),
        (f"vllm bench serve {LENGTHS} --request-rate 5 --burstiness 1.0", None),
        (f"vllm bench serve {LENGTHS} --burstiness 0.5", None),
        ("genai-perf profile --synthetic-input-tokens-mean 100 --request-rate 5", 1e9),
        ("genai-perf profile --synthetic-input-tokens-mean 100 --concurrency 5", None),
        (f"vllm bench serve {LENGTHS} --request-rate 5 --burstiness inf", 1e9),
        (
            "genai-perf profile --synthetic-input-tokens-mean 100 --request-rate 5 -- --request-distribution poisson",
            None,
        ),
        ("aiperf profile --synthetic-input-tokens-mean 100 --request-rate 5", None),
        ("aiperf profile --synthetic-input-tokens-mean 100 --request-rate 5 --arrival-pattern constant", 1e9),
        (
            "aiperf profile --synthetic-input-tokens-mean 100 --request-rate 5 --arrival-pattern gamma "
            "--arrival-smoothness 0.5",
            0.5,
        ),
        (
            "aiperf profile --synthetic-input-tokens-mean 100 --request-rate 5 --arrival-pattern poisson "
            "--arrival-smoothness 3",
            None,
        ),
        ("aiperf profile --synthetic-input-tokens-mean 100 --request-rate 5 --arrival-smoothness 3", 3),
    ],
)
def test_how_requests_are_spread(tmp_path: Path, command: str, burstiness: float | None) -> None:
    assert requests(tmp_path, command).get("burstiness") == burstiness


@pytest.mark.parametrize(
    ("server", "command", "exact"),
    [
        ("vllm serve llama3-8b", f"vllm bench serve {LENGTHS} --request-rate 5", True),
        ("docker run vllm/vllm-openai:v0.8.5 --model llama3-8b", f"vllm bench serve {LENGTHS} --request-rate 5", None),
        ("vllm serve llama3-8b", f"vllm bench serve {LENGTHS}", None),
        (
            "trtllm-serve llama3-8b",
            f"python -m tensorrt_llm.serve.scripts.benchmark_serving {LENGTHS} --request-rate 5",
            None,
        ),
        (
            "python -m sglang.launch_server --model-path llama3-8b",
            f"python -m sglang.bench_serving {LENGTHS} --request-rate 5",
            None,
        ),
    ],
)
def test_whose_gaps_sum_to_what_the_rate_says(tmp_path: Path, server: str, command: str, exact: bool | None) -> None:
    found, _ = converted(tmp_path, "s.sh", f"{server} &\n{command}", *CLUSTER)
    assert found["inference"]["requests"].get("exact_rate") is exact
    assert found["inference"]["requests"]["count"] == 20


@pytest.mark.parametrize(("how", "mean"), [("linear", 20 / sum(1 / (2 + 8 * i / 19) for i in range(20)))])
def test_a_rate_that_climbs_is_its_mean(tmp_path: Path, how: str, mean: float) -> None:
    """vllm/benchmarks/serve.py: request i comes 1 / rate(i) after the one before it; gaps are not scaled then."""
    ramp = f"--ramp-up-strategy {how} --ramp-up-start-rps 2 --ramp-up-end-rps 10"
    found, told = converted(tmp_path, "s.sh", f"{SERVER}vllm bench serve {LENGTHS} {ramp}", *CLUSTER)
    assert found["inference"]["requests"]["rate_per_s"] == pytest.approx(mean, rel=1e-5)
    assert "exact_rate" not in found["inference"]["requests"]
    assert "--ramp-up-strategy linear: the rate stays at its mean" in told
    assert "not expressed" not in told


def test_lengths_by_the_names_of_any_data_set(tmp_path: Path) -> None:
    """vllm/benchmarks/serve.py of 0.16: --input-len stands for --random-input-len."""
    command = "vllm bench serve --input-len 700 --output-len 60 --random-prefix-len 100 --num-prompts 4"
    found, told = converted(tmp_path, "s.sh", SERVER + command, *CLUSTER)
    assert found["inference"]["requests"] == {"prompt_len": 800, "output_len": 60, "count": 4}
    assert "--random-prefix-len 100: prompts are longer by these tokens" in told
    assert "spreads them, too" not in told
    _, told = converted(tmp_path, "s.sh", f"{SERVER}{command} --random-range-ratio 0.5", *CLUSTER)
    assert "range_ratio 0.5 spreads them, too, which the benchmark does not" in told


@pytest.mark.parametrize(
    ("cluster", "command", "tokens"),
    [
        ("dgx-h100", "vllm bench throughput --model llama3-8b", 16384),
        ("dgx-h100", "vllm bench latency --model llama3-8b", 16384),
        ("dgx-b200", "vllm bench throughput --model llama3-8b", 16384),
        ("dgx-a100", "vllm bench throughput --model llama3-8b", 8192),
        ("dgx-h100", "vllm bench throughput --model llama3-8b --max-num-batched-tokens 4096", 4096),
        ("dgx-h100", "vllm bench throughput --model llama3-8b --async-engine", None),
        ("dgx-h100", "vllm serve llama3-8b", None),
    ],
)
def test_an_engine_without_a_server_computes_more_tokens_an_iteration(
    tmp_path: Path, cluster: str, command: str, tokens: int | None
) -> None:
    """vllm/engine/arg_utils.py, get_batch_defaults: UsageContext.LLM_CLASS."""
    found, _ = converted(tmp_path, "s.sh", command, "--cluster", cluster)
    assert found["inference"].get("max_batch_tokens") == tokens


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


@pytest.mark.parametrize("asked", ["", "vllm bench serve --dataset-name sharegpt --num-prompts 9"])
def test_lengths_that_no_command_states_keep_to_the_engines_limit(tmp_path: Path, asked: str) -> None:
    """1,024 and 128 tokens, the benchmark's default, would all be refused by --max-model-len 1024."""
    text = f"vllm serve llama3-8b --max-model-len 1024 &\n{asked}\n"
    found, told = converted(tmp_path, "s.sh", text, *CLUSTER)
    requests = found["inference"]["requests"]
    assert (requests["prompt_len"], requests["output_len"]) == (896, 128)
    assert "prompts and answers of 896 and 128 tokens, as the engine refuses what is beyond 1,024" in told


def test_lengths_that_a_command_states_stay(tmp_path: Path) -> None:
    text = f"vllm serve llama3-8b --max-model-len 1024 &\nvllm bench serve {LENGTHS}\n"
    found, told = converted(tmp_path, "s.sh", text, *CLUSTER)
    assert found["inference"]["requests"]["prompt_len"] == 1000
    assert "requests have up to 1,500 tokens; the engine refuses longer ones" in told


@pytest.mark.parametrize("module", ["sglang.bench_one_batch_server", "sglang.benchmark.one_batch_server"])
def test_one_batch_sent_to_a_server(tmp_path: Path, module: str) -> None:
    """SGLang 0.5.23, benchmark/one_batch_server.py: several sizes are tried in turn."""
    server = "python3 -m sglang.launch_server --model-path llama3-8b --tp 2 &\n"
    asked = f"python3 -m {module} --model-path none --base-url http://a:1 --batch-size 16 32 --input-len 512\n"
    found, told = converted(tmp_path, "s.sh", server + asked, *CLUSTER)
    assert found["inference"]["requests"] == {"prompt_len": 512, "output_len": 16, "count": 16}
    assert "--batch-size 16 32: the first is simulated, 16" in told


@pytest.mark.parametrize("module", ["sglang.benchmark.serving", "sglang.bench_serving"])
def test_modules_of_sglangs_benchmarks_by_their_old_and_new_names(tmp_path: Path, module: str) -> None:
    server = "python3 -m sglang.launch_server --model-path llama3-8b &\n"
    found, _ = converted(tmp_path, "s.sh", f"{server}python3 -m {module} {LENGTHS}", *CLUSTER)
    assert found["inference"]["requests"]["count"] == 20


SIZES = "--num-requests=100 --input-mean=512 --output-mean=64 --input-stdev=0 --output-stdev=0"


@pytest.mark.parametrize(
    "dataset",
    [
        f"python benchmarks/cpp/prepare_dataset.py --tokenizer=x --stdout token-norm-dist {SIZES} > d.json",
        f"trtllm-bench --model=x prepare-dataset --output d.json token-norm-dist {SIZES}",
    ],
)
def test_tensorrt_llms_own_benchmark(tmp_path: Path, dataset: str) -> None:
    """tensorrt_llm/bench/benchmark/throughput.py, and dataclasses/configuration.py: `enable_block_reuse=False`."""
    bench = (
        "trtllm-bench -m llama3-8b --model_path /models/y throughput --dataset d.json --tp 2 --max_batch_size 64 "
        "--max_num_tokens 4096 --kv_cache_free_gpu_mem_fraction 0.8 --concurrency 32 --num_requests 0 --backend pytorch"
    )
    found, said = converted(tmp_path, "s.sh", f"{dataset}\n{bench}\n", *CLUSTER)
    assert (found["model"], found["parallelism"]["tp"]) == ("llama3-8b", 2)
    i = found["inference"]
    assert (i["max_running_requests"], i["max_batch_tokens"], i["prefix_cache"]) == (64, 4096, "none")
    assert i["kv_cache"] == {"free_fraction": 0.8}
    assert i["requests"] == {"prompt_len": 512, "output_len": 64, "count": 100, "max_concurrency": 32}
    assert "not expressed" not in said
    assert "the first of" not in said


def test_a_data_set_that_no_command_writes(tmp_path: Path) -> None:
    bench = "trtllm-bench --model llama3-8b throughput --dataset d.json --concurrency -1 --num_requests 9\n"
    found, said = converted(tmp_path, "s.sh", bench, *CLUSTER)
    assert found["inference"]["requests"] == {"prompt_len": 1024, "output_len": 128, "count": 9}
    assert "the requests of dataset d.json are not in the command" in said


def test_several_answers_of_a_prompt_are_requests(tmp_path: Path) -> None:
    """`--n` is no abbreviation of --num-prompts (vllm/benchmarks/throughput.py)."""
    text = (
        "vllm bench throughput --model meta-llama/Llama-3.1-8B --input-len 512 --output-len 128 --num-prompts 500 --n 4"
    )
    found, told = converted(tmp_path, "s.sh", text, *CLUSTER)
    assert found["inference"]["requests"]["count"] == 2000
    assert "--n 4: 4 answers of a prompt" in told


def test_the_most_tokens_of_one_prompt(tmp_path: Path) -> None:
    server = SERVER.replace(" &", " --long-prefill-token-threshold 512 &")
    assert converted(tmp_path, "s.sh", server, *CLUSTER)[0]["inference"]["max_prompt_tokens"] == 512


@pytest.mark.parametrize(
    ("connector", "more"),
    [
        ("LMCacheConnectorV1", ""),
        ("LMCacheMPConnector", ""),
        ("OffloadingConnector", ',"kv_connector_extra_config":{"num_cpu_blocks":1000}'),
    ],
)
def test_a_store_below_the_cache_of_unknown_size_is_named(tmp_path: Path, connector: str, more: str) -> None:
    config = f'{{"kv_connector":"{connector}","kv_role":"kv_both"{more}}}'
    found, told = converted(tmp_path, "s.sh", f"vllm serve llama3-8b --kv-transfer-config '{config}'\n", *CLUSTER)
    assert "tiers" not in found["inference"].get("kv_cache", {})
    assert f"kv_connector {connector}: how much it keeps of the cache is not known here" in told
    assert "inference.kv_cache.tiers.host.capacity_bytes says it" in told
    assert "not expressed here: --kv-transfer-config" in told


BENCH = "trtllm-bench --model llama3-70b throughput --dataset d.json --tp 4 --backend pytorch"


@pytest.mark.parametrize(
    ("prompt", "output", "flags", "found"),
    [
        # 0.9 of what 131.4 GiB of weights leave of 4 · 79.11 are 166.5 GiB, and a token has 320 KiB.
        (1000, 1000, "", (384, 2048)),  # 273 sequences; 546 tokens
        (128, 128, "", (2304, 4608)),  # 2,131; 4,263
        (4096, 16, "", (160, 32768)),  # 133; 34,100, of which 32,768 are the most
        (3000, 3000, "", (96, 3096)),  # 91; 182, but a whole prompt and all sequences fit
        (1000, 1000, " --max_batch_size 100", (100, 2048)),
        (2040, 1000, " --max_num_tokens 3000", (192, 3000)),  # 179
    ],
)
def test_trtllm_bench_sets_limits_by_its_data(
    tmp_path: Path, prompt: int, output: int, flags: str, found: tuple[int, int]
) -> None:
    """tensorrt_llm/bench/build/tuning.py, by hand."""
    data = f"trtllm-bench prepare-dataset --output d.json token-norm-dist --input-mean={prompt} --output-mean={output}"
    scenario, _ = converted(tmp_path, "s.sh", f"{data} --num-requests=10\n{BENCH}{flags}\n", *CLUSTER)
    i = scenario["inference"]
    assert (i["max_running_requests"], i["max_batch_tokens"]) == found


def test_a_server_of_tensorrt_llm_keeps_its_own_limits(tmp_path: Path) -> None:
    found, _ = converted(tmp_path, "s.sh", "trtllm-serve llama3-70b --tp_size 4\n", *CLUSTER)
    assert not {"max_running_requests", "max_batch_tokens"} & {*found["inference"]}
