"""What an engine sets by itself: limits by GPU, layout and the model's length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from sim.variants.engines.defaults import Server
from sim.variants.engines.names import engine_named
from sim.variants.engines.outside_memory import CONTEXT_BYTES
from sim.variants.engines.sglang_memory import GIB
from tests.sim.serve.serving_cases import ONE, SMALL, engine_scenario, serving


@pytest.mark.parametrize(
    ("engine", "cluster", "tp", "found"),
    [
        ("vllm-v1", "dgx-h100", 1, (1024, 8192, 0.9, "gpu", True)),
        ("vllm-v1", "dgx-a100", 1, (256, 2048, 0.9, "gpu", True)),
        ("vllm-0.19", "dgx-b200", 1, (1024, 8192, 0.9, "gpu", True)),
        ("vllm-0.28", "dgx-b200", 1, (1024, 16384, 0.92, "gpu", True)),
        ("vllm-0.28", "dgx-h200", 1, (1024, 8192, 0.92, "gpu", True)),
        ("vllm-0.2.7", "dgx-a100", 1, (256, 8192, 0.9, "none", False)),
        ("vllm-0.8", "dgx-a100", 1, (1024, 8192, 0.9, "gpu", True)),
        ("vllm-0.6", "dgx-h100", 1, (256, 8192, 0.9, "none", False)),
        ("sglang", "dgx-h100", 8, (4096, 8192, 0.81, "gpu", False)),
        ("sglang-0.5", "dgx-h200", 8, (4096, 8192, 0.897, "gpu", False)),
        ("sglang-0.5", "dgx-h100", 1, (4096, 8192, 0.836, "gpu", False)),
        ("trtllm-1.0", "dgx-h100", 1, (2048, 8192, 1.0, "gpu", False)),
    ],
)
def test_engines_set_their_limits_by_gpu_and_layout(
    engine: str, cluster: str, tp: int, found: tuple[object, ...]
) -> None:
    data = {"model": "llama3-8b", "cluster": cluster, "parallelism": {"tp": tp}}
    i = parse_scenario({**data, "inference": {"engine": engine, "requests": ONE}}).for_serving
    own = (i.max_running_requests, i.max_batch_tokens, i.kv_cache.memory_fraction, i.prefix_cache, i.chunked_prefill)
    assert own == found


@pytest.mark.parametrize(
    ("engine", "gib", "tp", "found"),
    [
        ("sglang", 24, 1, (2048, 8, 0.88)),
        ("sglang", 24, 4, (2048, 80, 0.85)),
        ("sglang", 40, 1, (8192, 160, 0.88)),
        ("sglang-0.4.6", 80, 8, (8192, 160, 0.81)),
        ("sglang-0.4.6", 130, 8, (8192, 256, 0.9)),
        ("sglang-0.4.7", 80, 2, (8192, 160, 0.87)),
        ("sglang-0.4.7", 120, 8, (8192, 256, 0.85)),
        ("sglang-0.4.7", 180, 1, (16384, 512, 0.79)),
        ("sglang-0.4.8", 24, 1, (2048, 8, 0.879)),
        ("sglang-0.4.8", 80, 2, (8192, 160, 0.869)),
        ("sglang-0.4.8", 141, 8, (8192, 256, 0.887)),
        ("sglang-0.4.8", 180, 1, (16384, 512, 0.822)),
        ("sglang-0.5", 16, 1, (2048, 8, 0.772)),
        ("sglang-0.5", 24, 1, (2048, 16, 0.848)),
        ("sglang-0.5", 48, 4, (4096, 160, 0.848)),
        ("sglang-0.5", 192, 8, (16384, 512, 0.862)),
        ("sglang-0.5.10", 24, 1, (2048, 24, 0.833)),
        ("sglang-0.5.20", 24, 1, (4096, 48, 0.704)),
        ("sglang-0.5.20", 32, 4, (4096, 160, 0.759)),
        ("sglang-0.5.20", 48, 4, (4096, 160, 0.84)),
    ],
)
def test_sglang_sizes_chunks_graphs_and_cache_by_the_gpus_memory(
    engine: str, gib: int, tp: int, found: tuple[int, int, float]
) -> None:
    """0.5, 24 GiB: 512 + 1.5 · 2,048 + 2 · 16 + 128 MiB of 24,576 are not the cache's."""
    d = ENGINES[engine].defaults_on("ada", Server(gib * GIB, tp), 0)
    assert (d.max_batch_tokens, d.graphs_to, d.memory_fraction) == found


@pytest.mark.parametrize(
    ("engine", "all2all", "prefill", "decode"),
    [
        ("sglang-0.5.14", None, 0.85, 0.85),
        ("sglang-0.5.15", None, 0.855, 0.944),
        ("sglang-0.5.15", "deepep", 0.855, 0.933),
    ],
)
def test_sglang_gives_a_pool_memory_by_what_it_does_since_0_5_15(
    engine: str, all2all: str | None, prefill: float, decode: float
) -> None:
    """srt/server_args.py, _handle_gpu_memory_settings. B200: 10 of 180 GiB are free in a server for tokens."""
    server = {"tp": 8, "replicas": 1}
    inference = {
        "engine": engine,
        "requests": {"prompt_len": 8, "output_len": 2},
        "disaggregated": {"prefill": server, "decode": server},
        **({"all2all_backend": all2all} if all2all else {}),
    }
    s = parse_scenario({"model": "qwen3-30b-a3b", "cluster": "dgx-b200", "inference": inference})
    assert s.for_serving.disaggregated is not None
    found = s.for_serving.disaggregated.prefill.memory_fraction, s.for_serving.kv_cache.memory_fraction
    assert found == (prefill, decode)


@pytest.mark.parametrize(
    ("engine", "architecture", "graphs"),
    [("vllm-0.19", "blackwell", 512), ("vllm-0.28", "blackwell", 1024), ("vllm-0.28", "other", 512)],
)
def test_vllm_captures_larger_graphs_on_large_blackwells_since_0_28(
    engine: str, architecture: str, graphs: int
) -> None:
    d = ENGINES[engine].defaults_on(architecture, Server(180 * GIB), 0)
    assert d.graphs_to == graphs
    assert ENGINES[engine].graph_sizes(d.graphs_to, d.max_running_requests)[-1] == graphs


def test_each_pool_has_the_memory_fraction_of_its_own_ranks() -> None:
    pools = {"prefill": {"tp": 1}, "decode": {"tp": 4}}
    data = {"model": "llama3-8b", "cluster": "dgx-h100"}
    for cache, found in (({}, [0.88, 0.85]), ({"memory_fraction": 0.5}, [0.5, 0.5])):
        section = {"engine": "sglang", "requests": ONE, "disaggregated": pools, "kv_cache": cache}
        s = parse_scenario({**data, "inference": section})
        own = [p.scenario.for_serving.kv_cache.memory_fraction for p in simulate_serving(s).pools]
        assert own == found
        assert parse_scenario(s.model_dump(mode="json")).for_serving == s.for_serving


@pytest.mark.parametrize(
    ("model", "prompt", "found"),
    [
        ("llama3.1-8b", 128, (True, 512)),
        ("llama3-8b", 128, (False, 8192)),
        ("llama2-7b", 40_000, (False, 4096)),
        ("gpt2", 128, (False, 2048)),
        ({"preset": "llama2-7b", "trained_positions": None}, 40_000, (False, 8192)),
        ({**SMALL, "positions": "learned"}, 40_000, (False, 8192)),
        ({**SMALL, "positions": "learned", "max_positions": 65_536}, 40_000, (True, 512)),
    ],
)
def test_chunks_and_budget_go_by_the_models_length_not_by_the_prompts(
    model: Any, prompt: int, found: tuple[bool, int]
) -> None:
    requests = {"prompt_len": prompt, "output_len": 33}
    s = engine_scenario("vllm-0.6", model=model, batching="continuous", requests=requests)
    assert (s.for_serving.chunked_prefill, s.for_serving.max_batch_tokens) == found
    assert any("trained_positions: unknown" in w for w in s.warnings) == (s.model.longest == 0)
    assert parse_scenario(s.model_dump(mode="json")).model == s.model


@pytest.mark.parametrize(("cluster", "found"), [("dgx-h100", (True, 2048)), ("mi300x-node", (False, 131072))])
def test_late_vllm_v0_takes_larger_chunks_and_none_on_amd(cluster: str, found: tuple[bool, int]) -> None:
    section = {"engine": "vllm-0.6.5", "requests": ONE}
    i = parse_scenario({"model": "llama3.1-8b", "cluster": cluster, "inference": section}).for_serving
    assert (i.chunked_prefill, i.max_batch_tokens) == found


@pytest.mark.parametrize("engine", ["vllm-0.5", "vllm-0.6", "vllm-0.6.5"])
def test_vllm_v0_computes_whole_prompts_where_tokens_are_drafted(engine: str) -> None:
    section = {"engine": engine, "requests": ONE, "speculative": DRAFT}
    i = parse_scenario({"model": "llama3.1-8b", "cluster": "dgx-h100", "inference": section}).for_serving
    assert (i.chunked_prefill, i.max_batch_tokens) == (False, 131072)


def test_what_a_scenario_resolves_to_parses_to_itself() -> None:
    s = engine_scenario("vllm-v1", batching="continuous", kv_cache={"memory_fraction": 0.8})
    again = parse_scenario(s.model_dump(mode="json"))
    assert again.for_serving == s.for_serving


def test_sglang_leaves_memory_for_every_rank_of_a_pipeline() -> None:
    """128 MiB each of 81,920."""
    servers = (Server(80 * GIB, 8, pp) for pp in (1, 16))
    one, two = (ENGINES["sglang-0.5"].defaults_on("hopper", server, 0).memory_fraction for server in servers)
    assert one - two == pytest.approx(8 * 15 * 128 / 81920, abs=1e-3)
    section = {"engine": "sglang-0.5", "requests": ONE}
    data = {"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"tp": 8, "pp": 16}, "inference": section}
    assert parse_scenario(data).for_serving.kv_cache.memory_fraction == two


@pytest.mark.parametrize(("speculative", "left_bytes"), [({"tokens": 3}, 2 * GIB), ({"draft": "llama3.2-1b"}, 6 * GIB)])
def test_sglang_loads_a_draft_into_what_its_fraction_leaves(speculative: dict[str, Any], left_bytes: float) -> None:
    """Weights and cache of the model fill its fraction, which is smaller by what is set aside; the draft's come on
    top."""
    model = {"preset": "llama3-8b", "mtp_layers": 1} if "draft" not in speculative else "llama3-8b"
    section: dict[str, Any] = {"engine": "sglang-0.5", "requests": ONE}
    plain, sim = (
        simulate_serving(parse_scenario({"model": model, "cluster": "dgx-h100", "inference": {**section, **own}}))
        for own in ({}, {"speculative": speculative})
    )
    gpu_bytes = sim.scenario.cluster.gpu.shown_bytes
    before, after = (s.scenario.for_serving.kv_cache.memory_fraction for s in (plain, sim))
    assert before - after == pytest.approx(left_bytes / gpu_bytes, abs=1e-3)
    room = (gpu_bytes - CONTEXT_BYTES) * after - plain.capacity.weight_bytes[0]
    assert sim.capacity.blocks == room // plain.capacity.stage_token_bytes  # blocks of one token
    assert sim.capacity.weight_bytes[0] > plain.capacity.weight_bytes[0]


@pytest.mark.parametrize(
    ("engine", "own", "reserved_mib"),
    [
        ("sglang-0.5.10", {}, 14336 + 8 * 58),
        ("sglang-0.5.10", {"latent": True}, 14336 + 1536),
        ("sglang-0.5.10", {"pp": 2}, 14336 + 512),
        ("sglang-0.5.10", {"replicas": 8}, 14336 + 128 * 28 + 4.5 * 512 * 8),
        ("sglang-0.5.10", {"drafts": "layer"}, 14336 + 4096),
        ("sglang-0.5.14", {"drafts": "layer"}, 14336 + 8 * 58),
    ],
)
def test_sglang_keeps_room_for_graphs_of_prompts_where_it_has_them_and_for_drafts(
    engine: str, own: dict[str, Any], reserved_mib: float
) -> None:
    """Of 80 GiB with 4 ranks: 512 + 1.5 · 8,192 + 2 · 512 + 128 · 4 MiB, which are 14,336."""
    d = ENGINES[engine].defaults_on("hopper", Server(80 * GIB, 4, **own), 0)
    assert d.memory_fraction == pytest.approx(1 - reserved_mib / (80 * 1024), abs=1e-3)


def test_sglang_since_0_5_14_has_a_draft_in_its_fraction() -> None:
    """The draft's weights, and its part of a token's cache, are taken off what weights and cache have."""
    section = {"engine": "sglang-0.5.14", "requests": ONE, "speculative": {"draft": "llama3.2-1b"}}
    sim = simulate_serving(parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": section}))
    memory = sim.scenario.cluster.gpu.shown_bytes - CONTEXT_BYTES
    room = memory * sim.scenario.for_serving.kv_cache.memory_fraction
    room -= sim.capacity.weight_bytes[0]
    cache_bytes = 2 * 2 * (32 * 8 * 128 + 16 * 8 * 64)  # K and V in 16 bits of 32 layers, and of the draft's 16
    assert sim.capacity.blocks == room // cache_bytes


@pytest.mark.parametrize(("engine", "overlaps"), [("sglang-0.5.10", False), ("sglang-0.5.11", True)])
@pytest.mark.parametrize("drafts", ["layer", "model"])
def test_sglang_since_0_5_11_works_beside_the_gpu_with_drafts(engine: str, overlaps: bool, drafts: Any) -> None:
    assert ENGINES[engine].overlaps_with(None, drafts, 1) == overlaps
    assert not ENGINES[engine].overlaps_with(None, drafts, 2)


@pytest.mark.parametrize(
    ("engine", "told", "overlaps"),
    [("vllm-0.14", True, False), ("vllm-0.19", None, False), ("vllm-0.19", True, True), ("vllm-0.28", None, True)],
)
def test_vllm_works_beside_the_gpu_with_a_draft_model_by_itself_since_0_28(
    engine: str, told: bool | None, overlaps: bool
) -> None:
    """config/vllm.py: until 0.27 `draft_model` is allowed where --async-scheduling is given, and else turns it off."""
    assert ENGINES[engine].overlaps_with(told, "model", 1) == overlaps
    assert ENGINES[engine].overlaps_with(None, "layer", 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ("chunked_prefill false", "max_batch_tokens 8192")),
        ({"max_batch_tokens": 4096}, ("chunked_prefill false",)),
        ({"max_batch_tokens": 4096, "chunked_prefill": False}, ()),
        ({"batching": "static", "chunked_prefill": False}, ()),
    ],
)
def test_an_unknown_length_is_noted_where_a_key_follows_from_it(given: dict[str, Any], said: tuple[str, ...]) -> None:
    model = {"preset": "llama2-7b", "trained_positions": None}
    s = engine_scenario("vllm-0.6", model=model, **{"batching": "continuous", **given})  # type: ignore[arg-type]
    notes = [w for w in s.warnings if "trained_positions: unknown" in w]
    assert len(notes) == bool(said)
    assert all(what in note for what in said for note in notes)
    assert all(("max_batch_tokens" in note) == ("max_batch_tokens" not in given) for note in notes)


@pytest.mark.parametrize(
    ("engine", "cache", "room"),
    [
        ("vllm-v1", {}, lambda memory, weights, buffers: 0.9 * memory - weights - buffers),
        ("sglang", {}, lambda memory, weights, _: 0.88 * (memory - CONTEXT_BYTES) - weights),
        (
            "sglang",
            {"memory_fraction": 1.0},
            lambda memory, weights, buffers: memory - CONTEXT_BYTES - weights - buffers,
        ),
        ("trtllm-0.6", {}, lambda memory, weights, buffers: 0.85 * (memory - weights - buffers)),
        ("trtllm-1.0", {}, lambda memory, *held: 0.9 * (memory - CONTEXT_BYTES - sum(held))),
        ("trtllm-1.0", {"free_fraction": 0.5}, lambda memory, *held: 0.5 * (memory - CONTEXT_BYTES - sum(held))),
        ("trtllm-1.0", {"memory_fraction": 0.8}, lambda memory, *held: 0.8 * memory - CONTEXT_BYTES - sum(held)),
    ],
)
def test_each_engine_gives_the_cache_room_by_its_own_rule(
    engine: str, cache: dict[str, float], room: Callable[[float, float, float], float]
) -> None:
    section = {"engine": engine, "requests": ONE, "kv_cache": cache}
    s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": section})
    c = simulate_serving(s).capacity
    block = s.for_serving.kv_cache.block_tokens * c.token_bytes[0]
    fits = room(s.cluster.gpu.shown_bytes, c.weight_bytes[0], c.buffer_bytes[0]) / block
    assert c.blocks_fit == int(fits)
    assert parse_scenario(s.model_dump(mode="json")).for_serving == s.for_serving


DRAFT = {"draft": {"preset": "llama3.2-1b", "vocab": 128256}, "tokens": 3}


@pytest.mark.parametrize(
    ("engine", "own", "model", "running", "padded"),
    [
        ("vllm-v1", False, False, 1024, 136),
        ("vllm-0.14", True, False, 1024, 136),
        ("vllm-0.19", True, False, 1024, 136),
        ("vllm-0.28", True, True, 1024, 136),
        ("sglang", False, False, 48, 192),
        ("sglang-0.5", False, False, 48, 160),
        ("trtllm-1.0", True, False, 2048, 160),
    ],
)
def test_what_drafted_tokens_change_in_an_engine(
    engine: str, own: bool, model: bool, running: int, padded: int
) -> None:
    """Whether the host still works beside the GPU, how many requests run, and the tokens of the graph for 33 sequences
    of 4: sizes of sequences are 40 (TensorRT-LLM, SGLang 0.5) and 48 (SGLang 0.4)."""
    for served, draft, overlaps in (("deepseek-v3", {"tokens": 3}, own), ("llama3-8b", DRAFT, model)):
        section = {"engine": engine, "requests": ONE, "speculative": draft}
        data = {"model": served, "cluster": "dgx-h100", "parallelism": {"tp": 8}, "inference": section}
        s = parse_scenario(data)
        host = iteration_costs(s, load_profile(s.calibration)).host
        assert (host.overlaps, s.for_serving.max_running_requests, host.padded(132)) == (overlaps, running, padded)
        alone = parse_scenario({**data, "inference": {**section, "speculative": None}})
        assert iteration_costs(alone, load_profile(s.calibration)).host.overlaps == ENGINES[engine].overlaps


def test_graphs_came_with_vllm_0_2_7() -> None:
    """A batch of 33 is padded to the graph of 40; before there were none."""
    for release, name, padded in (("0.2.6", "vllm-0.2", 33), ("0.2.7", "vllm-0.2.7", 40)):
        found = engine_named((f"vLLM {release}",))
        assert found is not None
        assert found.name == name
        s = engine_scenario(name, batching="continuous")
        assert iteration_costs(s, load_profile(s.calibration)).host.padded(33) == padded


@pytest.mark.parametrize("engine", ["simpy", "static"])
def test_chunks_of_sglang_are_of_prompts_alone(engine: Any) -> None:
    """More sequences run than a chunk has tokens: each gets a token in every iteration after those of prompts."""
    requests = {"prompt_len": 4, "output_len": 100, "count": 40}
    scenario = serving({"engine": "sglang-0.5", "max_batch_tokens": 16, "requests": requests})
    assert simulate_serving(scenario, engine=engine).result["iterations"] == 40 * 4 // 16 + 99


def test_replicas_of_sglang_that_share_experts_share_a_chunk() -> None:
    """enable_dp_attention: tp counts all ranks, the chunk is divided, and the share of output is 0.3 of it."""
    requests = {"prompt_len": 64, "output_len": 64, "count": 8}
    scenario = parse_scenario(
        {
            "model": "qwen3-30b-a3b",
            "cluster": "dgx-h100",
            "parallelism": {"dp": 8, "ep": 8},
            "inference": {"engine": "sglang-0.5", "requests": requests},
        }
    )
    inference = scenario.for_serving
    assert inference.max_batch_tokens == 8192 // 8
    reserved_mib = 512 + 1.5 * 8192 + 2 * 512 + 128 * 8 + 4.5 * 512 * 8
    assert inference.kv_cache.memory_fraction == round(1 - reserved_mib / (80 * 1024), 3)
    sim = simulate_serving(scenario)
    shares = [(s.output.first, s.output.least) for s in (r.scheduler for r in sim.replicas)]
    assert shares == [(0.3 * 0.7, pytest.approx(0.3 * 0.098))] * 8


def test_replicas_that_share_no_experts_or_are_no_sglang_keep_the_chunk() -> None:
    requests = {"prompt_len": 64, "output_len": 64, "count": 8}
    for engine, layout in (("sglang-0.5", {"dp": 4, "tp": 2, "ep": 2}), ("vllm-0.19", {"dp": 8, "ep": 8})):
        inference = {"engine": engine, "requests": requests}
        given = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "parallelism": layout, "inference": inference}
        assert parse_scenario(given).for_serving.max_batch_tokens == 8192


def test_each_pipeline_stage_has_a_layer() -> None:
    """As many stages as layers are served; a stage more would have no keys and values."""
    data = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": ONE}}
    assert parse_scenario({**data, "parallelism": {"pp": 32}}).parallelism.pp == 32
    with pytest.raises(InputError, match="pp: found 33; the model has 32 layers, and each stage needs one"):
        parse_scenario({**data, "parallelism": {"pp": 33}})


@pytest.mark.parametrize(("engine", "most"), [("vllm-v1", 8), ("vllm-0.33", 8), ("sglang-0.5.20", 4), ("bundled", 4)])
def test_short_prompts_go_through_vllms_stages_together(engine: str, most: int) -> None:
    """v1/core/sched/scheduler.py: what is ready and fits; SGLang: pp_max_micro_batch_size."""
    requests = {"prompt_len": 8, "output_len": 4, "count": 8}
    inference = {"engine": engine, "max_running_requests": 8, "requests": requests}
    s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"pp": 2}, "inference": inference})
    assert max(i.load.decodes for i in simulate_serving(s).replicas[0].iterations) == most


@pytest.mark.parametrize(("engine", "run"), [("trtllm-1.0", 8), ("vllm-0.6", 8), ("vllm-0.33", 4)])
def test_some_engines_run_a_batch_for_each_stage(engine: str, run: int) -> None:
    """TensorRT-LLM, _torch/pyexecutor/_util.py; vLLM before V1, engine/llm_engine.py: a scheduler for each stage."""
    requests = {"prompt_len": 8, "output_len": 16, "count": 12}
    inference = {"engine": engine, "max_running_requests": 4, "requests": requests}
    s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"pp": 2}, "inference": inference})
    (replica,) = simulate_serving(s).replicas
    assert max(replica.states.arrays().running) == run
