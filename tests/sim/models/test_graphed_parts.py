"""CUDA graphs that hold parts of layers (`training.cuda_graph_scope`): what they replay, copy and keep."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, ModelPart, Program
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.results.graph_pools import static_bytes
from sim.simulation import simulate
from tests.sim.cases import case

MOE: dict[str, Any] = {"moe": {"experts": 16, "top_k": 2, "ffn": 512, "dense_layers": 1}, "bias": False}
SHARED: dict[str, Any] = {
    "moe": {"experts": 16, "top_k": 2, "ffn": 512, "dense_layers": 1, "shared_experts": 1},
    "bias": False,
}
USUAL = ("attn", "moe_router", "moe_preprocess")
OF_DISPATCH = {"count_copies", "gather_counts", "permutation_map", "permute", "permute_backward"}


def scenario(*scope: str, model: dict[str, Any] = MOE, graphs: str = "layers", **layout: Any) -> Scenario:
    training = {"framework": "megatron", "cuda_graphs": graphs, "cuda_graph_scope": list(scope)}
    return case({"dp": 4, "ep": 4, **layout}, training, model)


def outside(program: Program) -> list[Compute | Comm]:
    """What the host issues, without the copies at the seams of graphs."""
    return [i for i in program if isinstance(i, (Compute, Comm)) and not i.graphed and getattr(i, "kind", "") != "copy"]


def names(items: list[Compute | Comm]) -> set[str]:
    return {i.name for i in items}


def test_the_host_issues_experts_and_exchanges_alone() -> None:
    """With attention, router and preprocessing captured; the norm before the router is in the graph, too."""
    s = scenario(*USUAL)
    block, plain = layer_block(s, 1), layer_block(scenario(graphs="none"), 1)
    left = outside(block.forward)
    assert {i.part for i in left if isinstance(i, Compute)} == {ModelPart.EXPERTS}
    assert {i.kind for i in left if isinstance(i, Comm)} == {"all_to_all"}
    assert not names(left) & (OF_DISPATCH | {"router", "router_scores", "router_top_k"})
    assert names(outside(plain.forward)) >= OF_DISPATCH - {"permute_backward"} | {"router", "router_scores"}
    behind = names(outside(block.backward))
    assert not behind & {"router_dgrad", "router_wgrad", "permute_backward", "attention_backward"}
    assert behind >= {"dispatch_backward", "combine_backward"}


def test_without_preprocessing_tokens_are_sorted_by_the_host() -> None:
    left = names(outside(layer_block(scenario("attn", "moe_router"), 1).forward))
    assert left >= OF_DISPATCH - {"permute_backward"}
    assert not left & {"router", "router_scores"}


def test_what_is_computed_stays_the_same() -> None:
    block, plain = layer_block(scenario(*USUAL), 1), layer_block(scenario(graphs="none"), 1)
    for mine, others in ((block.forward, plain.forward), (block.backward, plain.backward)):
        kept = [i for i in mine if not (isinstance(i, Compute) and i.kind == "copy" and i.name.startswith("graph_"))]
        assert [(i.name, i.bytes) for i in kept if isinstance(i, (Compute, Comm))] == [
            (i.name, i.bytes) for i in others if isinstance(i, (Compute, Comm))
        ]


def copied(program: Program) -> list[tuple[int, Any]]:
    return [(i.kernels, i.bytes) for i in program if isinstance(i, Compute) and i.name.startswith("graph_")]


@pytest.mark.parametrize(
    ("scope", "model", "dispatcher", "tensors", "copies", "weights"),
    [
        (USUAL, MOE, "all_to_all", 3, 1 + 2, 2),  # the stream and two copies of each token; their two weights
        (USUAL, SHARED, "all_to_all", 4, 1 + 2 + 1, 2),
        (USUAL, MOE, "hybridep", 3, 1 + 1, 16),  # tokens as they are, and the weights of all experts
        (("attn", "moe_router"), MOE, "all_to_all", 3, 1 + 1, 16),
    ],
)
def test_gradients_of_a_graph_s_results_are_copied_into_it(
    scope: tuple[str, ...], model: dict[str, Any], dispatcher: str, tensors: int, copies: int, weights: int
) -> None:
    """Transformer Engine, pytorch/graph.py: forward the input, backward the gradient of each result."""
    s = scenario(*scope, model=model, ep_dispatcher=dispatcher)
    d, block = dims(s), layer_block(s, 1)
    stream = d.rows * d.hidden * 2
    assert copied(block.forward) == [(1, pytest.approx(2 * stream))]
    assert copied(block.backward) == [(tensors, pytest.approx(2 * (copies * stream + weights * 4 * d.rows)))]
    first = layer_block(s, 0)  # a dense layer has its attention captured
    assert copied(first.forward) == copied(first.backward) == [(1, pytest.approx(2 * stream))]
    assert static_bytes(s) == pytest.approx(stream + copies * stream + weights * 4 * d.rows)


@pytest.mark.parametrize(("dispatcher", "copies"), [("all_to_all", 2), ("hybridep", 0)])
def test_sorted_tokens_stay_until_the_backward(dispatcher: str, copies: int) -> None:
    """A graph's results are not freed behind the dispatch (fine_grained_callables.py: `should_free_input`)."""
    s = scenario(*USUAL, ep_dispatcher=dispatcher)
    saved, plain = (
        sum(x.bytes for x in layer_block(c, 1).saved) for c in (s, scenario("attn", ep_dispatcher=dispatcher))
    )
    d = dims(s)
    assert saved - plain == pytest.approx(copies * d.rows * d.hidden * 2)


def test_a_step_takes_less_than_without_and_more_than_with_graphs_of_whole_layers() -> None:
    def step_s(*scope: str, graphs: str = "layers") -> float:
        data: dict[str, Any] = {
            "model": {
                "layers": 4,
                "hidden": 1024,
                "heads": 8,
                "vocab": 8192,
                "mlp": "swiglu",
                "norm": "rmsnorm",
                **MOE,
            },
            "training": {"seq_len": 1024, "global_batch_size": 4, "framework": "megatron", "cuda_graphs": graphs},
            "parallelism": {"dp": 4, "ep": 4},
            "cluster": "dgx-h100",
        }
        data["training"] |= {"cuda_graph_scope": list(scope)}
        return simulate(parse_scenario(data)).outcome.step_time_s

    steps = [step_s(), step_s(*USUAL), step_s("attn", "moe_router"), step_s("attn"), step_s(graphs="none")]
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)


def test_graphs_of_whole_layers_hold_nothing_beside_them() -> None:
    s = scenario()
    layer, head = layer_block(s, 1), head_block(s)
    assert not outside((*layer.forward, *layer.backward))
    assert outside(head.forward)
    assert not copied(layer.forward)  # left out between whole layers


@pytest.mark.parametrize(
    ("scope", "model", "layout", "what"),
    [
        (("moe_router",), {}, {"ep": 1}, "model.moe"),
        (("moe_preprocess",), MOE, {}, "moe_router beside moe_preprocess"),
        (("moe",), MOE, {}, r"model\.moe\.pad_to_capacity"),
        (("mlp",), {"moe": {**MOE["moe"], "dense_layers": 0}}, {}, "a dense layer"),
        (("mamba",), MOE, {}, r"model\.state_space"),
    ],
)
def test_what_a_part_needs(scope: tuple[str, ...], model: dict[str, Any], layout: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=rf"training\.cuda_graph_scope: found {', '.join(scope)}; needs {what}"):
        scenario(*scope, model=model, **layout)


def test_parts_without_graphs_are_named() -> None:
    s = scenario("attn", graphs="step")
    assert any("cuda_graph_scope: of no effect with cuda_graphs step" in text for text in s.warnings)
    assert simulate(s).outcome.step_time_s == simulate(scenario(graphs="step")).outcome.step_time_s
