"""Command lines of serving engines as scenarios."""

from __future__ import annotations

import json
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
        "engine": "vllm-0.33",
        "quantization": "fp8",
        "max_running_requests": 128,
        "max_batch_tokens": 4096,
        "max_request_tokens": 32768,
        "cuda_graphs": False,
        "prefix_cache": "none",
        "kv_cache": {"dtype": "fp8"},
        "requests": {"prompt_len": 1000, "output_len": 200, "range_ratio": 0.1, "count": 320, "max_concurrency": 64},
    }
    assert "not expressed here" not in text
    parse_scenario(found)


def test_sglang_with_attention_by_replicas(tmp_path: Path) -> None:
    script = """
python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention --ep-size 8 \\
    --moe-a2a-backend deepep --moe-dense-tp-size 1 --enable-dp-lm-head --chunked-prefill-size 16384 \\
    --enable-two-batch-overlap --speculative-algorithm EAGLE --speculative-num-steps 1
python3 -m sglang.bench_serving --random-input 1024 --random-output 512 --random-range-ratio 0.5 --request-rate 4
"""
    found, text = converted(tmp_path, script)
    assert found["parallelism"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 8, "expert_tp": 1}
    assert found["inference"]["max_batch_tokens"] == 2048
    assert found["inference"]["two_batch_overlap"]
    assert found["inference"]["all2all_backend"] == "deepep"
    assert found["inference"]["dense_over_replicas"] is found["inference"]["head_over_replicas"] is False
    assert found["inference"]["speculative"] == {"tokens": 1}
    requests = found["inference"]["requests"]
    shortest, longest = (requests["prompt_len"] * (1 + by * requests["range_ratio"]) for by in (-1, 1))
    assert (shortest, longest) == (pytest.approx(512, abs=1), pytest.approx(1024, abs=1))
    assert requests["rate_per_s"] == 4.0
    assert "acceptance: no flag says it" in text
    parse_scenario(found)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 16384),
        ("--max-prefill-tokens 8192", 8192),
        ("--tp 4 --dp 4 --enable-dp-attention", 16384),
        ("--mem-fraction-static 0.7 --tp 4", 16384),
    ],
)
def test_sglang_without_chunks_computes_max_prefill_tokens(tmp_path: Path, flags: str, tokens: int) -> None:
    """srt/managers/schedule_policy.py, PrefillAdder: max_prefill_tokens, 16,384, limit an iteration of each replica."""
    serve = "python3 -m sglang.launch_server --model-path gpt-oss-20b --chunked-prefill-size"
    found, text = converted(tmp_path, f"{serve} -1 {flags}")
    assert (found["inference"]["max_batch_tokens"], found["inference"]["chunked_prefill"]) == (tokens, False)
    assert f"up to {tokens:,} tokens in an iteration" in text
    assert ("here for those of all replicas together" in text) == ("--dp" in flags)
    assert "not expressed" not in text
    parse_scenario(found)


@pytest.mark.parametrize(
    ("server", "flag"),
    [
        ("vllm serve llama3-8b", "--max-model-len"),
        ("python -m sglang.launch_server --model llama3-8b", "--context-length"),
        ("trtllm-serve llama3-8b", "--max_seq_len"),
    ],
)
def test_requests_that_the_engine_would_refuse_are_told(tmp_path: Path, server: str, flag: str) -> None:
    """1,100 and 220 tokens at most."""
    for limit, most in (("1319", 1319), ("1320", 1320), ("1.3k", 1300), ("2K", 2048), ("auto", None)):
        found, text = converted(tmp_path, f"{server} {flag} {limit} &\n{BENCH} --random-range-ratio 0.1")
        assert found["inference"].get("max_request_tokens") == most
        told = most is not None and most < 1320
        assert (f"{limit}: requests have up to 1,320 tokens; the engine refuses longer ones" in text) == told
        assert (f"{limit}: the engine takes as many as its cache has room for" in text) == (most is None)
        assert "not expressed here" not in text
        parse_scenario(found)


def test_sglangs_mixed_chunks(tmp_path: Path) -> None:
    found, _ = converted(tmp_path, f"python -m sglang.launch_server --model llama3-8b --enable-mixed-chunk &\n{BENCH}")
    assert found["inference"]["chunked_prefill"]


def test_all_gpus_share_the_experts_with_vllms_expert_parallelism(tmp_path: Path) -> None:
    found, _ = converted(tmp_path, f"vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel\n{BENCH}")
    assert found["parallelism"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 8}


def test_weights_in_host_memory_are_read_when_they_are_used(tmp_path: Path) -> None:
    found, text = converted(tmp_path, "vllm serve meta-llama/Llama-3.1-8B --cpu-offload-gb 4")
    assert found["inference"]["weight_offload"] == {"cpu_bytes": 4 * 2**30, "prefetch": False}
    assert "not expressed here" not in text


def test_vllms_short_forms(tmp_path: Path) -> None:
    flags = "-tp 8 -ep -dp 2 -dpl 1 -dpa node0 -dpp 13345 -n 2 -r 0 -asc 2 -q fp8 -O0 -dcp 2 --eplb-conf '{}' -cc '{}'"
    flags += """ -sc '{"method": "mtp", "num_speculative_tokens": 2}'"""
    found, text = converted(tmp_path, f"vllm serve deepseek-ai/DeepSeek-V3 {flags}\n{BENCH}")
    assert found["parallelism"] == {"tp": 8, "pp": 1, "dp": 2, "ep": 16}
    wanted = {"quantization": "fp8", "cuda_graphs": False, "speculative": {"tokens": 2}}
    assert {key: found["inference"].get(key) for key in wanted} == wanted
    assert "# not expressed here: -dcp\n" in text
    parse_scenario(found)


def test_prompts_over_several_ranks(tmp_path: Path) -> None:
    found, text = converted(tmp_path, f"vllm serve llama3-8b -tp 2 -pcp 2 -O3\n{BENCH}", "--gpus", "8")
    assert found["parallelism"] == {"tp": 2, "pp": 1, "dp": 2, "cp": 2, "cp_method": "all_gather"}
    assert "not expressed" not in text
    parse_scenario(found)


@pytest.mark.parametrize(
    ("script", "engine"),
    [
        ("docker run vllm/vllm-openai:v0.11.0 --model llama3-8b", "vllm-0.11"),
        ("pip install vllm==0.6.3\nvllm serve llama3-8b", "vllm-0.6"),
        ("docker run vllm/vllm-openai:latest --model llama3-8b", "vllm-0.33"),
        ("docker run lmsysorg/sglang:v0.4.6 python -m sglang.launch_server --model llama3-8b", "sglang-0.4.6"),
    ],
)
def test_the_engine_is_of_the_version_that_the_script_names(tmp_path: Path, script: str, engine: str) -> None:
    found, text = converted(tmp_path, f"{script} &\n{BENCH}")
    assert found["inference"]["engine"] == engine
    assert ("by the version in" in text) == ("latest" not in script)


@pytest.mark.parametrize(
    "flags",
    [
        "--enable-eplb --num-redundant-experts 32",
        """--enable-eplb --eplb-config '{"num_redundant_experts": 32}'""",
    ],
)
def test_copies_of_experts(tmp_path: Path, flags: str) -> None:
    server = f"vllm serve deepseek-ai/DeepSeek-V3 -dp 32 --enable-expert-parallel {flags}"
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["inference"]["eplb"] == {"redundant_experts": 32}
    assert "not expressed here" not in text
    parse_scenario(found)


def test_sglangs_copies_of_experts(tmp_path: Path) -> None:
    server = "python -m sglang.launch_server --model deepseek-v3 --tp 16 --ep 16 --enable-eplb"
    assert converted(tmp_path, f"{server}\n{BENCH}")[0]["inference"]["eplb"] == {"redundant_experts": 0}
    found, _ = converted(tmp_path, f"{server} --ep-num-redundant-experts 16\n{BENCH}")
    assert found["inference"]["eplb"] == {"redundant_experts": 16}


def test_a_container_of_vllm(tmp_path: Path) -> None:
    docker = "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.19.0 --model Qwen/Qwen3-32B -tp 2"
    found, _ = converted(tmp_path, f"{docker}\n{BENCH}")
    assert (found["model"], found["parallelism"]["tp"]) == ("hf://Qwen/Qwen3-32B", 2)


def test_tensorrt_llm_with_requests_of_ones_own(tmp_path: Path) -> None:
    wanted = ("--model", "llama3-70b", "--set", "inference.requests={prompt_len: 10, output_len: 5}", "--gpus", "16")
    found, _ = converted(tmp_path, "trtllm-serve serve /models/mine --tp_size 8 --max_batch_size 64", *wanted)
    assert found["inference"]["engine"] == "trtllm-1.3"
    assert found["inference"]["max_running_requests"] == 64
    assert found["parallelism"] == {"tp": 8, "pp": 1, "dp": 2}


def test_a_draft_model_of_vllm(tmp_path: Path) -> None:
    draft = '{"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 3}'
    found, _ = converted(tmp_path, f"vllm serve llama3-70b -tp 8 --speculative-config '{draft}'\n{BENCH}")
    assert found["inference"]["speculative"] == {"tokens": 3, "draft": "hf://meta-llama/Llama-3.2-1B"}


def test_each_line_is_a_command_of_its_own(tmp_path: Path) -> None:
    script = """
vllm serve llama3-8b -tp 2 --speculative-config '{"model": "llama3.2-1b",
  "num_speculative_tokens": 2}'
python benchmarks/benchmark_serving.py --backend vllm --dataset-name sharegpt --num-prompts 7 --request-rate 10
"""
    found, text = converted(tmp_path, script)
    assert found["inference"]["speculative"] == {"tokens": 2, "draft": "llama3.2-1b"}
    requests = found["inference"]["requests"]
    assert (requests["count"], requests["rate_per_s"]) == (7, 10.0)
    assert "# the requests of dataset sharegpt are not in the command" in text
    assert "not expressed" not in text


@pytest.mark.parametrize(
    ("before", "flag", "backend", "graphs"),
    [
        ("# vllm==0.11.0", "--all2all-backend naive", None, None),
        ("pip install vllm==0.11.0", "--all2all-backend naive", "naive", None),
        ("", "--all2all-backend deepep_low_latency", "deepep", None),
        ("export VLLM_ALL2ALL_BACKEND=deepep_high_throughput", "", "deepep", False),
        ("", "", None, None),
    ],
)
def test_vllms_backends_of_experts_messages(
    tmp_path: Path, before: str, flag: str, backend: str | None, graphs: bool | None
) -> None:
    script = f"{before}\nvllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel {flag}\n{BENCH}"
    found, text = converted(tmp_path, script, "--gpus", "8")
    assert found["inference"].get("all2all_backend") == backend
    assert found["inference"].get("cuda_graphs") is graphs
    assert "not expressed here" not in text


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("vllm serve llama3-8b --no-async-scheduling", False),
        ("vllm serve llama3-8b --async-scheduling", True),
        ("vllm serve llama3-8b", None),
        ("python -m sglang.launch_server --model llama3-8b --disable-overlap-schedule", False),
    ],
)
def test_asynchronous_scheduling(tmp_path: Path, server: str, told: bool | None) -> None:
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["inference"].get("async_scheduling") is told
    assert "not expressed here" not in text


def test_a_backend_that_is_not_simulated_is_told(tmp_path: Path) -> None:
    _, text = converted(tmp_path, f"vllm serve deepseek-ai/DeepSeek-V3 -dp 8 -ep --all2all-backend nixl_ep\n{BENCH}")
    assert "# not expressed here: --all2all-backend" in text


def test_deepep_gives_each_rank_experts_of_its_own(tmp_path: Path) -> None:
    script = "python -m sglang.launch_server --model deepseek-v3 --tp 16 --moe-a2a-backend deepep --deepep-mode normal"
    found, _ = converted(tmp_path, script)
    assert found["parallelism"] == {"tp": 16, "pp": 1, "dp": 1, "ep": 16, "expert_tp": 1}
    assert found["inference"]["cuda_graphs"] is False


@pytest.mark.parametrize(
    ("script", "engine", "requests"),
    [
        ("vllm bench throughput --model llama3-8b --input-len 64 --output-len 8 --num-prompts 9", "vllm", (9, 64, 8)),
        ("vllm bench latency --model llama3-8b --batch-size 4 --backend vllm", "vllm", (4, 32, 128)),
        ("python -m sglang.bench_one_batch --model llama3-8b --batch 2 --input-len 64", "sglang", (2, 64, 16)),
        ("vllm serve llama3-8b", "vllm", (1000, 1024, 128)),
    ],
)
def test_benchmarks_that_start_the_engine_and_servers_without_one(
    tmp_path: Path, script: str, engine: str, requests: tuple[int, int, int]
) -> None:
    limit = "--context-length" if engine == "sglang" else "--max-model-len"
    found, text = converted(tmp_path, f"{script} --tensor-parallel-size 2 {limit} 4096 --new-flag 3")
    assert found["inference"]["max_request_tokens"] == 4096
    assert found["inference"]["engine"].startswith(engine)
    assert found["parallelism"]["tp"] == 2
    asked = found["inference"]["requests"]
    assert (asked["count"], asked["prompt_len"], asked["output_len"]) == requests
    assert "# not expressed here: --new-flag\n" in text
    parse_scenario(found)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("text-generation-launcher --model-id llama3-8b", "which is not read: this engine has no record here"),
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


def test_a_model_that_stands_for_a_checkpoint_may_lack_its_quantization(tmp_path: Path) -> None:
    command = f"vllm serve Qwen/Qwen3-32B-FP8 -tp 2\n{BENCH}"
    assert "stands for Qwen/Qwen3-32B-FP8; if its checkpoint" in converted(tmp_path, command, "--model", "qwen3-32b")[1]
    command = command.replace("-tp 2", "-tp 2 --quantization fp8")
    assert "stands for" not in converted(tmp_path, command, "--model", "qwen3-32b")[1]


def test_other_nodes_are_of_the_same_server_and_a_second_server_is_told(tmp_path: Path) -> None:
    node = "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 16 --nnodes 2 --node-rank"
    found, text = converted(tmp_path, f"{node} 0\n{node} 1")
    assert found["parallelism"]["tp"] == 16
    assert "commands that start an engine" not in text
    _, text = converted(tmp_path, "vllm serve llama3-8b\nvllm serve llama3-8b --tensor-parallel-size 2")
    assert "the first of 2 commands that start an engine is read" in text


def test_expert_parallelism_of_a_model_without_experts_is_passed_over(tmp_path: Path) -> None:
    found, text = converted(tmp_path, "vllm serve llama3-8b -tp 2 -ep")
    assert found["parallelism"] == {"tp": 2, "pp": 1, "dp": 1}
    assert "expert parallelism: without effect, the model has no experts" in text


OPTIONS = """OPTIONS=./more.yml
cat > ./more.yml <<EOF
cuda_graph_config:
  enable_padding: true
  max_batch_size: 512
enable_attention_dp: true
kv_cache_config:
  dtype: fp8
  enable_block_reuse: false
speculative_config:
  decoding_type: MTP
  num_nextn_predict_layers: 1
moe_config: {backend: DEEPGEMM}
EOF
trtllm-serve deepseek-ai/DeepSeek-V3 --max_batch_size 128 --tp_size 8 --ep_size 8 --extra_llm_api_options ${OPTIONS}
"""


def test_tensorrt_llms_further_options(tmp_path: Path) -> None:
    found, text = converted(tmp_path, OPTIONS)
    assert found["parallelism"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 8, "expert_tp": 1}
    inference = found["inference"]
    assert inference["router"] == "one_queue"
    assert (inference["kv_cache"], inference["prefix_cache"]) == ({"dtype": "fp8"}, "none")
    assert (inference["speculative"], inference["max_running_requests"]) == ({"tokens": 1}, 128)
    assert "not expressed here: moe_config.backend\n" in text
    parse_scenario(found, "found")
    (tmp_path / "more.yml").write_text("cuda_graph_config: null\nmax_batch_size: 64\n")
    found, _ = converted(tmp_path, OPTIONS[OPTIONS.index("trtllm-serve") :].replace("${OPTIONS}", "more.yml"))
    assert (found["inference"]["cuda_graphs"], found["inference"]["max_running_requests"]) == (False, 64)
    (tmp_path / "more.yml").write_text("- 1")
    _, text = converted(tmp_path, OPTIONS[OPTIONS.index("trtllm-serve") :].replace("${OPTIONS}", "more.yml"))
    assert "more.yml: found a list of 1; must be a mapping of options" in text
    _, text = converted(
        tmp_path, OPTIONS.replace("cat > ./more.yml", "cat > ./other.yml").replace("./more.yml", "none.yml")
    )
    assert "none.yml, which has further options, is neither in the script nor beside it" in text


def test_flags_in_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text(
        "model: llama3-8b\ntensor-parallel-size: 4\nmax_num_seqs: 64\nmax-model-len: 512\n"
    )
    found, text = converted(tmp_path, "vllm serve --config vllm.yaml --max-num-seqs 32")
    assert (found["model"], found["parallelism"]["tp"], found["inference"]["max_running_requests"]) == (
        "llama3-8b",
        4,
        32,
    )
    assert "not expressed" not in text


def test_roles_and_options_of_dynamo(tmp_path: Path) -> None:
    worker = "python3 -m dynamo.vllm --model llama3-8b --tensor-parallel-size"
    found, text = converted(tmp_path, f"{worker} 2 --is-prefill-worker &\n{worker} 4")
    pools = found["inference"]["disaggregated"]
    assert (pools["prefill"]["tp"], pools["decode"]["tp"]) == (2, 4)
    assert "not expressed" not in text
    assert "commands that start an engine" not in text
    found, text = converted(tmp_path, f"{worker} 2 &\n{worker} 4")
    assert "disaggregated" not in found["inference"]
    (tmp_path / "engine.yaml").write_text("tensor_parallel_size: 4\nmax_batch_size: 64\n")
    found, _ = converted(tmp_path, "python3 -m dynamo.trtllm --model-path llama3-8b --extra-engine-args engine.yaml")
    assert (found["parallelism"]["tp"], found["inference"]["max_running_requests"]) == (4, 64)


@pytest.mark.parametrize(
    ("method", "drafts", "said"),
    [
        ("ngram", {"tokens": 4, "lookup": 1.0}, "no flag says how often the text holds a draft"),
        ("suffix", None, "drafts of method suffix, without a model, are not simulated"),
    ],
)
def test_drafts_without_a_model_are_told(
    tmp_path: Path, method: str, drafts: dict[str, float] | None, said: str
) -> None:
    config = json.dumps({"method": method, "num_speculative_tokens": 4})
    found, text = converted(tmp_path, f"vllm serve llama3-8b --speculative-config '{config}'")
    assert found["inference"].get("speculative") == drafts
    assert said in text
    parse_scenario(found, "found")
