"""What engines launch for a draft's passes, and for whom they draft in an iteration of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.inputs.workloads import Speculative
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.load import Load
from sim.serve.scheduling.speculation import drafting
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import costs_of

LAYER = {"draft": {"preset": "llama3-8b", "layers": 1}, "hidden_states": 1}
MODEL = {"draft": {"preset": "llama3-8b", "layers": 16}}
CHECK, PROMPTS = Load(16, 4, 400, (), 16, 4), Load(200, 0, 0, ((100, 100, 2),), 2)
BESIDE = Load(216, 4, 400, ((100, 100, 2),), 18, 4)


def costs(engine: str, draft: dict[str, Any], cluster: str = "dgx-h100", **more: Any) -> IterationCosts:
    section = {
        "engine": engine,
        "requests": {"prompt_len": 100, "output_len": 20, "count": 4},
        "speculative": {**draft, "tokens": 3},
        **more,
    }
    return costs_of(parse_scenario({"model": "llama3-8b", "cluster": cluster, "inference": section}))


@pytest.mark.parametrize(
    ("engine", "draft", "checked", "later", "prompts"),
    [
        ("vllm-0.8", LAYER, "none", ("none", 11), "none"),
        ("vllm-v1", LAYER, "pieces", ("pieces", 15), "pieces"),
        ("vllm-0.14", MODEL, "pieces", ("pieces", 15), "pieces"),
        ("vllm-0.21", LAYER, "pieces", ("pieces", 4), "pieces"),
        ("vllm-0.28", LAYER, "whole", ("whole", 0), "pieces"),
        ("vllm-0.28", MODEL, "pieces", ("pieces", 4), "pieces"),
        ("vllm-0.31", MODEL, "none", ("none", 8), "none"),
        ("sglang-0.4.6", LAYER, "none", ("whole", 0), "none"),
        ("sglang-0.5", LAYER, "whole", ("whole", 0), "none"),
        ("sglang-0.5.11", LAYER, "none", ("whole", 0), "none"),
        ("sglang-0.5.20", MODEL, "none", ("whole", 0), "pieces"),
        ("sglang-0.5.23", MODEL, "whole", ("whole", 0), "pieces"),
        ("trtllm-1.2", LAYER, "whole", ("whole", 0), "none"),
    ],
)
def test_each_release_has_its_own_graphs_of_a_draft(
    engine: str, draft: dict[str, Any], checked: str, later: tuple[str, int], prompts: str
) -> None:
    """`sim.variants.engines.drafting` has the sources. Pieces are 3 launches a layer and a last one; two passes follow
    the first."""
    own = costs(engine, draft)
    assert own.host.draft is not None
    assert own.draft is not None
    kernels = own.draft.host.kernels[0]
    launches = {"none": kernels, "pieces": 3 * draft["draft"]["layers"] + 1, "whole": 0}
    behind = [launches[later[0]] + later[1]] * 2
    assert own.host.draft.launches(CHECK) == (launches[checked], *behind)
    follow = behind if own.host.engine.drafts_on_prompts else []
    assert own.host.draft.launches(PROMPTS) == (launches[prompts], *follow)
    assert own.host.draft.launches(BESIDE) == (launches[prompts], 0, *behind)  # one pass has both


@pytest.mark.parametrize(("cluster", "eager"), [("dgx-h100", True), ("dgx-b200", False), ("dgx-a100", False)])
def test_sglang_lacked_graphs_of_checked_tokens_where_flash_attention_3_is_its_default(
    cluster: str, eager: bool
) -> None:
    host = costs("sglang-0.5.14", LAYER, cluster).host
    assert host.draft is not None
    assert bool(host.draft.launches(CHECK)[0]) is eager


@pytest.mark.parametrize(("cluster", "each"), [("dgx-h100", 0), ("dgx-a100", 0), ("dgx-b200", 2)])
def test_vllm_has_all_later_passes_in_one_graph_with_flash_attention(cluster: str, each: int) -> None:
    host = costs("vllm-0.28", LAYER, cluster).host
    assert host.draft is not None
    assert host.draft.launches(CHECK) == (0, each, each)


@pytest.mark.parametrize(
    ("engine", "tree", "beside", "eager"),
    [
        ("sglang-0.5.11", False, True, True),
        ("sglang-0.5.11", False, False, False),  # the earlier worker
        ("sglang-0.5.11", True, None, False),
        ("sglang-0.5.14", False, False, True),  # the same worker, with the host beside the GPU or not
        ("sglang-0.5.14", True, None, False),  # FlashInfer, not FlashAttention 3
        ("sglang-0.5.14", True, False, False),
    ],
)
def test_sglangs_trees_and_its_earlier_worker_have_graphs_of_checked_tokens(
    engine: str, tree: bool, beside: bool | None, eager: bool
) -> None:
    draft = {**LAYER, **({"branches": 2, "tree_tokens": 3} if tree else {})}
    host = costs(engine, draft, async_scheduling=beside).host
    assert host.draft is not None
    assert bool(host.draft.launches(CHECK)[0]) is eager


@pytest.mark.parametrize(("engine", "most"), [("vllm-0.14", 16), ("sglang-0.5.23", 4)])
def test_a_later_pass_has_the_graphs_of_as_many_tokens_or_sequences(engine: str, most: int) -> None:
    """Of 16 tokens, which 4 sequences have to check: vLLM's serve 16 sequences of one token, SGLang's 4."""
    host = costs(engine, LAYER, max_running_requests=64, cuda_graph_sizes=[most]).host
    assert host.draft is not None
    assert host.draft.later_sizes[-1] == most
    fits, beyond = (host.draft.launches(Load(4 * n, n, 400, (), 4 * n, 4))[-1] for n in (most, most + 1))
    assert beyond > fits


@pytest.mark.parametrize("engine", ["vllm-v1", "vllm-0.14", "vllm-0.33"])
def test_launches_lengthen_a_drafts_passes_and_an_overlapping_hosts_work(engine: str) -> None:
    """(h^4 + d^4)^(1/4) of each pass; what a host that overlaps launches, its own time has, too."""
    own, bare = costs(engine, MODEL), costs("bundled", MODEL)
    assert own.host.draft is not None
    launch_s, launches = own.host.times.launch_s, own.host.draft.launches(CHECK)
    device_s = bare.drafting_device_s(CHECK)
    expected = [(d**4 + (n * launch_s) ** 4) ** 0.25 for d, n in zip(device_s, launches, strict=True)]
    assert own.draft_seconds(CHECK)[0] == pytest.approx(sum(expected), rel=1e-9)
    assert sum(expected) > sum(device_s)
    beside_s = own.host.launches_s(0, CHECK) + sum(launches) * launch_s if own.host.overlaps else 0.0
    assert own.host.own_s(CHECK) - own.host.between_s(CHECK) == pytest.approx(beside_s, abs=1e-12)


def test_without_graphs_every_pass_is_launched_kernel_by_kernel() -> None:
    own = costs("vllm-0.33", LAYER, cuda_graphs=False)
    assert own.host.draft is not None
    assert own.draft is not None
    n = own.draft.host.kernels[0]
    assert own.host.draft.launches(CHECK) == (n, n + 2, n + 2)


def test_who_computes_a_prompt_drafts_all_tokens_on_vllm_and_tensorrt_llm() -> None:
    """Two prompts of 100 tokens beside four sequences that see 96 tokens before the four to check."""
    given = Speculative.model_validate({"tokens": 3})
    later = drafting(BESIDE, given, on_prompts=True)[2:]
    assert [(x.decodes, x.decode_kv) for x in later] == [(6, 400 - 16 + 200 + 12), (6, 400 - 16 + 200 + 18)]
    alone = drafting(PROMPTS, given, on_prompts=True)
    assert [(x.tokens, x.decode_kv, x.samples) for x in alone] == [(200, 0, 2), (2, 204, 2), (2, 206, 2)]
    assert len(drafting(PROMPTS, given)) == 1
    assert drafting(BESIDE, given)[2].decodes == 4
    assert costs("vllm-v1", LAYER).drafted(PROMPTS)[1:]
    assert costs("trtllm-1.1", LAYER).drafted(PROMPTS)[1:]
    assert not costs("sglang-0.5.23", LAYER).drafted(PROMPTS)[1:]


@pytest.mark.parametrize(
    ("engine", "draft", "tokens"),
    [
        ("vllm-0.14", MODEL, 8192),
        ("vllm-0.17", MODEL, 7168),
        ("vllm-0.21", MODEL, 7168),
        ("vllm-0.21", LAYER, 8192),
        ("vllm-0.28", MODEL, 8192),
    ],
)
def test_a_draft_model_took_a_token_of_each_request_that_may_run(
    engine: str, draft: dict[str, Any], tokens: int
) -> None:
    """vLLM 0.17 to 0.27: of an H100's 8,192 tokens 1,024 are kept, one for each of max_num_seqs."""
    section = {"engine": engine, "requests": {"prompt_len": 9000, "output_len": 2}}
    section |= {"speculative": {**draft, "tokens": 3}}
    model = {"preset": "llama3-8b", "max_positions": 16384}
    sim = simulate_serving(parse_scenario({"model": model, "cluster": "dgx-h100", "inference": section}))
    assert sim.replicas[0].iterations[0].load.tokens == tokens


@pytest.mark.parametrize("engine", ["vllm-0.17", "vllm-0.21"])
def test_a_draft_model_that_leaves_no_token_is_refused(engine: str) -> None:
    """vLLM 0.20: "which does not allow any tokens to be scheduled"."""
    section = {"engine": engine, "requests": {"prompt_len": 9, "output_len": 2}, "max_batch_tokens": 64}
    section |= {"speculative": {**MODEL, "tokens": 3}}
    for running in ({}, {"max_running_requests": 64}):
        with pytest.raises(InputError, match=r"max_batch_tokens: found 64.*max_running_requests \(64\)"):
            parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": {**section, **running}})
    parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": {**section, "max_running_requests": 63}})
