"""Servers that a proxy makes compute prompts, or add tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.engine_file import router_of
from sim.inputs.scenario import parse_scenario
from tests.sim.convert.test_serving import converted


@pytest.mark.parametrize(
    ("proxy", "pools"),
    [
        ("--prefiller-hosts localhost --prefiller-ports 8100 --decoder-hosts localhost --decoder-ports 8200", (1, 2)),
        ("--decoder-ports=8100 --prefiller-ports=8200", (2, 1)),
        ("--prefill http://localhost:8200 --decode http://localhost:8100/", (2, 1)),
        ("--prefiller-ports 8100", None),
        ("--prefiller-ports 8100 --decoder-ports 8100 8200", None),
    ],
)
def test_the_proxy_says_what_servers_of_both_roles_do(
    tmp_path: Path, proxy: str, pools: tuple[int, int] | None
) -> None:
    """vLLM, docs/features/nixl_connector_usage.md: both servers are kv_both."""
    both = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}' &\n"""
    serve = [f"vllm serve llama3-8b --port {port} -tp {tp} {both}" for port, tp in ((8100, 1), (8200, 2))]
    script = f"{''.join(serve)}python toy_proxy_server.py --port 8192 {proxy}\n"
    found, text = converted(tmp_path, script)
    if pools is None:
        assert "kv_role kv_both: a proxy's command (--prefiller-ports, --decoder-ports) says which" in text
        assert "disaggregated" not in found["inference"]
    else:
        own = found["inference"]["disaggregated"]
        assert (own["prefill"]["tp"], own["decode"]["tp"]) == pools
        assert "not expressed" not in text
        parse_scenario(found, "found")


def test_one_server_of_both_roles_is_served_alone(tmp_path: Path) -> None:
    both = """--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'"""
    found, text = converted(tmp_path, f"vllm serve llama3-8b {both}")
    assert "disaggregated" not in found["inference"]
    assert "a proxy's command" not in text


SGLANG = "python -m sglang.launch_server --model-path deepseek-v3 --tp-size 8 --dp-size 8 --enable-dp-attention"


def test_pools_whose_replicas_split_experts(tmp_path: Path) -> None:
    servers = [f"{SGLANG} --disaggregation-mode {role}" for role in ("prefill", "decode")]
    found, _ = converted(tmp_path, "\n".join(servers))
    assert found["inference"]["disaggregated"]["decode"] == {"replicas": 8, "tp": 1, "ep": 1, "expert_tp": 8}
    parse_scenario(found, "found")
    found, _ = converted(tmp_path, "\n".join(f"{server} --ep-size 8" for server in servers))
    assert found["inference"]["disaggregated"]["prefill"] == {"replicas": 8, "tp": 1, "ep": 8}


@pytest.mark.parametrize(
    ("model", "flags", "split"),
    [
        ("mixtral-8x7b", "-tp 2 --data-parallel-size 4", {"tp": 2, "pp": 1, "dp": 4, "ep": 1, "expert_tp": 8}),
        ("mixtral-8x7b", "-tp 2 -dp 4 --enable-expert-parallel", {"tp": 2, "pp": 1, "dp": 4, "ep": 8}),
        ("mixtral-8x7b", "-tp 2", {"tp": 2, "pp": 1, "dp": 1}),
        ("llama3-8b", "-tp 2 --data-parallel-size 4", {"tp": 2, "pp": 1, "dp": 4}),
    ],
)
def test_vllms_data_parallel_ranks_split_experts(tmp_path: Path, model: str, flags: str, split: dict[str, int]) -> None:
    """model_executor/layers/fused_moe/config.py, FusedMoEParallelConfig.make: flatten_tp_across_dp without EP."""
    found, _ = converted(tmp_path, f"vllm serve {model} {flags}")
    assert found["parallelism"] == split
    assert found["inference"].get("router") == ("least_loaded" if split["dp"] > 1 else None)
    parse_scenario(found, "found")


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve llama3-8b -dp 4 --data-parallel-external-lb",
        "vllm serve llama3-8b -dp 4 -dph",
        "python -m sglang.launch_server --model-path llama3-8b --dp-size 4",
    ],
)
def test_requests_go_in_turn_where_no_server_of_vllms_chooses(tmp_path: Path, command: str) -> None:
    found, _ = converted(tmp_path, command)
    assert found["parallelism"]["dp"] == 4
    served = parse_scenario(found, "found")
    assert router_of(served.for_serving, served.parallelism) == "round_robin"


PREFILL = "python -m sglang.launch_server --model-path zai-org/GLM-4.5-Air --disaggregation-mode prefill --tp-size 4"


def test_servers_for_prompts_and_servers_for_further_tokens(tmp_path: Path) -> None:
    script = f"""{PREFILL} --chunked-prefill-size 16384 --disaggregation-ib-device mlx5_0 &
{PREFILL} --chunked-prefill-size 16384 --port 30009 --base-gpu-id 4 &
{PREFILL.replace("prefill", "decode")} --ep-size 4 --mem-fraction-static 0.8 --max-running-requests 64 &
python -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30000 --port 8000
"""
    found, text = converted(tmp_path, script)
    assert "parallelism" not in found
    assert found["inference"]["disaggregated"] == {
        "prefill": {"replicas": 2, "tp": 4},
        "decode": {"replicas": 1, "tp": 4, "ep": 4, "memory_fraction": 0.8},
    }
    assert (found["inference"]["max_batch_tokens"], found["inference"]["max_running_requests"]) == (16384, 64)
    assert "max_batch_tokens: prefill and decode servers differ; that of prefill servers is simulated" in text
    assert "not expressed" not in text
    parse_scenario(found, "found")


def test_vllms_producer_and_consumer_of_keys_and_values(tmp_path: Path) -> None:
    sends = """--kv-transfer-config '{"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer"}' &\n"""
    serve = f"vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 {sends}"
    found, text = converted(tmp_path, serve + serve.replace("producer", "consumer"))
    pool = {"replicas": 1, "tp": 1}
    assert found["inference"]["disaggregated"] == {"prefill": pool, "decode": pool}
    assert "not expressed" not in text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (PREFILL, "starts prefill servers alone; can be simulated: with decode servers"),
        (
            f"{PREFILL} --pp-size 2\n{PREFILL.replace('prefill', 'decode')}",
            "prefill servers: found pp 2; can be simulated",
        ),
        (
            f"{PREFILL}\n{PREFILL} --ep-size 4\n{PREFILL.replace('prefill', 'decode')}",
            "prefill servers: found different ones",
        ),
    ],
)
def test_pools_that_are_not_simulated(tmp_path: Path, script: str, said: str) -> None:
    _, text = converted(tmp_path, script)
    assert said in text


ORCHESTRATOR = """cat > disagg.yaml << 'EOF'
port: 8000
conditional_disagg_config: {max_local_prefill_length: 64}
context_servers: {num_instances: 1, urls: ["localhost:8001"]}
generation_servers: {num_instances: 1, urls: ["localhost:8002/"]}
EOF
"""


@pytest.mark.parametrize(
    ("told", "orchestrator"),
    [
        (("", ""), f"{ORCHESTRATOR}trtllm-serve disaggregated -c disagg.yaml -t 3600 &"),
        (("", ""), f"{ORCHESTRATOR}trtllm-serve disaggregated --config disagg.yaml &"),
        (("--server_role CONTEXT", "--server_role generation"), "trtllm-serve disaggregated --config_file none.yaml"),
    ],
)
def test_tensorrt_llms_orchestrator_says_which_servers_compute_prompts(
    tmp_path: Path, told: tuple[str, str], orchestrator: str
) -> None:
    """tensorrt_llm/commands/serve.py: disaggregated, --server_role; llmapi/disagg_utils.py: context_servers."""
    servers = [
        f"trtllm-serve llama3-8b --port {port} --tp_size {tp} {role} &"
        for port, tp, role in zip((8002, 8001), (2, 1), reversed(told), strict=True)
    ]
    found, text = converted(tmp_path, "\n".join([*servers, orchestrator]))
    own = found["inference"]["disaggregated"]
    assert (own["prefill"]["tp"], own["decode"]["tp"]) == (1, 2)
    assert ("prefill servers compute every prompt here" in text) == ("cat" in orchestrator)
    assert "not expressed" not in text
    parse_scenario(found, "found")
