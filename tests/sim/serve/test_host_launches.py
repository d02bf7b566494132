"""What an engine's host launches one by one, beside CUDA graphs and beside its own work."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.engine_file import engine_of
from sim.inputs.scenario import parse_scenario
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.host import prompt_sizes
from sim.serve.prices.iteration_shares import HOST, LAUNCHES, priced_together
from sim.serve.prices.load import Load
from sim.variants.engines import ENGINES
from sim.variants.engines.defaults import Defaults
from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.record import Engine
from tests.sim.serve.serving_cases import costs_of, engine_scenario


def costs(engine: str, **more: Any) -> IterationCosts:
    return costs_of(engine_scenario(engine, **more))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add an engine of one's own: no more than a record is needed."""

    def add(host: HostTimes, **facts: Any) -> str:
        own = Engine("own", "own", (), "2026-01", "a test", host={"hopper": host}, **facts)
        monkeypatch.setitem(ENGINES, "own", own)
        return "own"

    return add


@pytest.mark.parametrize("whole", [True, False])
def test_graphs_of_all_but_attention_leave_three_launches_a_layer(made: Any, whole: bool) -> None:
    """Attention, the write to the cache and the next graph in each of 32 layers, and the last graph."""
    record = made(
        host=HostTimes(launch_s=1e-3), defaults=Defaults(graphs_to=16), prompt_graphs=True, whole_graphs=whole
    )
    own, bare = costs(record), costs("bundled")
    tokens, prompts = Load(8, 8, 800, (), 8), Load(16, 0, 0, ((8, 0, 2),), 2)
    for load, launches in ((tokens, 0 if whole else 97), (prompts, 97)):
        gpu_s = bare.stage_seconds(load)[0]
        expected = (gpu_s**4 + (launches * 1e-3) ** 4) ** 0.25
        assert own.stage_seconds(load)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("engine", "launches"), [("vllm-v1", 97), ("vllm-0.11", 0), ("vllm-0.19", 0), ("vllm-0.6", 0)])
def test_vllm_has_had_whole_graphs_of_single_tokens_but_from_0_8_to_0_10(engine: str, launches: int) -> None:
    assert costs(engine).host.launches(0, Load(8, 8, 800, (), 8)) == launches


@pytest.mark.parametrize("times", [0.2, 0.7, 3.0])
def test_a_host_that_overlaps_launches_kernels_beside_its_own_work(made: Any, times: float) -> None:
    """max((launches^4 + GPU^4)^(1/4), launches + own work), and the shares sum up to it."""
    load, bare = Load(512, 0, 0, ((512, 0, 1),), 1), costs("bundled")
    gpu_s = bare.stage_seconds(load)[0]
    launches_s = own_s = times * gpu_s
    host = HostTimes(iteration_s=own_s, launch_s=launches_s / bare.host.kernels[0])
    own = costs(made(host=host, overlaps=True))
    expected = max((launches_s**4 + gpu_s**4) ** 0.25, launches_s + own_s)
    assert own.stage_seconds(load)[0] == pytest.approx(expected, rel=1e-9)
    whole = priced_together(own, [(load, 1)])
    waits_s = sum(s for (kind, *_), s in whole.shares.items() if kind in (HOST, LAUNCHES))
    assert waits_s == pytest.approx(expected - gpu_s, rel=1e-9)


@pytest.mark.parametrize(
    ("more", "padded", "launches"),
    [
        ({}, 704, 97),
        ({"cuda_graphs": False}, 700, None),
        ({"max_batch_tokens": 512}, 700, None),
        ({"speculative": {"draft": "llama3.2-1b", "tokens": 4}}, 700, None),
        ({"lora": {"rank": 16}}, 700, None),
        ({"engine": "sglang-0.5"}, 700, None),
    ],
)
def test_sglang_keeps_graphs_of_prompts(more: dict[str, Any], padded: int, launches: int | None) -> None:
    """Of all but attention, to the size of a chunk, in steps of its own."""
    host = costs(**{"engine": "sglang-0.5.10", **more}).host
    assert host.padded(700, prompts=True) == padded
    assert host.launches(0, Load(700, 0, 0, ((700, 0, 1),), 1)) == (launches or host.kernels[0])


V3 = {"model": "deepseek-v3", "parallelism": {"tp": 8, "ep": 8}}
SHARED = {"model": "deepseek-v3", "parallelism": {"dp": 8, "ep": 8}}
POOLS = {"disaggregated": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}}


@pytest.mark.parametrize(
    ("more", "releases"),
    [
        ({}, ["10", "11", "14", "15", "17", "18", "20", "23"]),
        (
            {"inference": {"speculative": {"draft": "llama3.2-1b", "tokens": 4}}},
            ["11", "14", "15", "17", "18", "20", "23"],
        ),
        ({"inference": {"lora": {"rank": 16}}}, ["17", "18", "20", "23"]),
        ({"parallelism": {"pp": 2}}, ["15", "17", "18"]),
        ({"inference": POOLS}, ["15", "17", "18", "20", "23"]),
        ({"inference": {"prefix_cache": "cpu"}}, ["15", "17", "18", "20", "23"]),
        (V3, ["10", "11", "14", "18", "20", "23"]),
        ({**V3, "cluster": "dgx-b200"}, ["14"]),
        ({**V3, "model": "deepseek-v3.2"}, ["14", "17", "18", "20", "23"]),
        (SHARED, ["18", "20", "23"]),
        ({**SHARED, "inference": {"all2all_backend": "deepep"}}, []),
        ({"model": "qwen3-30b-a3b", "cluster": "dgx-b200"}, ["14", "15", "17", "18", "20", "23"]),
        ({"model": "qwen3-next-80b-a3b"}, ["15", "17", "18", "20", "23"]),
    ],
)
def test_what_sglang_keeps_graphs_of_prompts_beside(more: dict[str, Any], releases: list[str]) -> None:
    """srt/server_args.py of each release, later srt/arg_groups/cuda_graph_hook.py."""
    found = []
    for release in ["10", "11", "14", "15", "17", "18", "20", "23"]:
        requests = {"prompt_len": 700, "output_len": 1}
        section = {"engine": f"sglang-0.5.{release}", "requests": requests, **more.get("inference", {})}
        scenario = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h200", **more, "inference": section})
        if prompt_sizes(scenario, engine_of(section["engine"])):
            found.append(release)
    assert found == releases


@pytest.mark.parametrize(("engine", "largest"), [("sglang-0.5.20", 2048), ("sglang-0.5.23", 8192)])
def test_sglangs_graphs_of_latent_prompts_are_larger_since_0_5_23(engine: str, largest: int) -> None:
    """srt/arg_groups/memory_hook.py. In these, prompts attend in the latent's width."""
    section = {"engine": engine, "requests": {"prompt_len": 700, "output_len": 1}}
    scenario = parse_scenario({**V3, "cluster": "dgx-h200", "inference": section})
    assert prompt_sizes(scenario, engine_of(engine))[-1] == largest
    assert serving_dims(scenario).latents.absorbed_tokens == largest


@pytest.mark.parametrize(
    ("engine", "sequences", "padded"), [("vllm-0.14", 16, 64), ("vllm-0.14", 7, 32), ("vllm-0.28", 9, 40)]
)
def test_vllm_keeps_graphs_for_the_drafted_tokens_of_all_sequences(engine: str, sequences: int, padded: int) -> None:
    """Of 16 sequences with 4 tokens each: to twice 64 tokens, in whole sequences."""
    drafting = {"speculative": {"draft": "llama3.2-1b", "tokens": 3}}
    host = costs(engine=engine, max_running_requests=16, **drafting).host
    assert host.graph_sizes[-1] == 128
    assert host.padded(4 * sequences) == padded
    assert all(n % 4 == 0 for n in host.graph_sizes)
