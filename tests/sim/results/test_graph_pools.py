"""Memory of captured graphs: the sum of two peaks, by hand, and the same for a search."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import BlockKind
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.source import source_of
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.results.graph_pools import static_bytes
from sim.results.memory import levels
from sim.simulation import prepare, simulate

MODEL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 8192, "norm": "rmsnorm", "mlp": "swiglu"}


def scenario(graphs: str, pp: int = 1, layout: dict[str, int] | None = None, **training: Any) -> Scenario:
    keys = {"seq_len": 512, "global_batch_size": 4, "framework": "megatron", "cuda_graphs": graphs} | training
    return parse_scenario(
        {"model": MODEL, "training": keys, "parallelism": layout or {"pp": pp}, "cluster": "dgx-h100"}
    )


def peak(s: Scenario) -> float:
    return simulate(s).outcome.peak_memory_bytes


def test_a_pool_of_layers_stands_beside_what_the_head_takes() -> None:
    """One rank: the head's logits come on top of the layers' activations and of one layer's own temporaries."""
    plain, graphed = scenario("none"), scenario("layers")
    step = simulate(plain)
    (stage,) = step.stages[0].values()
    layers = [b for b in stage.blocks if b.kind is BlockKind.LAYER]
    saved = sum(t.bytes for b in layers for t in b.saved)
    pool = max(saved + layers[-1].backward_peak_bytes, saved + layers[-1].forward_peak_bytes)
    outside = [b for b in stage.blocks if b.kind is not BlockKind.LAYER]
    kept = sum(t.bytes for b in outside for t in b.saved)
    head = max(kept + outside[-1].backward_peak_bytes, kept + outside[-1].forward_peak_bytes)
    states = step.states[0]
    lasting = states.parameters + states.gradients + states.optimizer + states.gathered
    static = 2 * source_of(graphed).input_bytes(None)
    assert static_bytes(graphed) == static == 2 * 512 * 256 * 2
    assert peak(graphed) == pytest.approx(lasting + pool + head + static)


def test_a_pool_of_the_step_stays_while_the_optimizer_runs() -> None:
    """Without gradients' fp32 sums in the way: an optimizer kept in host memory needs its states beside the pool."""
    plain, graphed = (scenario(g, optimizer_offload=True) for g in ("none", "step"))
    step = simulate(plain)
    curve = step.memory[0]
    pool = (curve.activations + curve.buffers - step.states[0].gathered)[:-1].max()
    states = step.states[0]
    expected = states.parameters + states.gradients + states.gathered + pool + states.at_end
    assert static_bytes(graphed) == 32 * 512 * 4
    assert peak(graphed) == pytest.approx(expected + static_bytes(graphed))
    assert peak(plain) < peak(graphed)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pool_of_the_step_holds_the_copies_that_are_reduced(zero: int) -> None:
    """Gradients are copied for their reduction as a block's activations are freed, within the graph: the same peak."""
    layout = {"dp": 4, "zero": zero}
    plain, graphed = scenario("none", layout=layout), scenario("step", layout=layout)
    assert static_bytes(graphed) == 32 * 512
    assert peak(graphed) == pytest.approx(peak(plain) + static_bytes(graphed), rel=1e-12)
    costs = Costs(load_profile(graphed.calibration), graphed.cluster.gpu)
    assert prepare(graphed, costs).peak_bytes == pytest.approx(peak(graphed))


@pytest.mark.parametrize("graphs", ["none", "layers", "step"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_search_knows_the_same_peak(graphs: str, pp: int, recompute: str) -> None:
    s = scenario(graphs, pp, recompute=recompute)
    costs = Costs(load_profile(s.calibration), s.cluster.gpu)
    assert prepare(s, costs).peak_bytes == pytest.approx(peak(s))
    curves = simulate(s).memory
    assert max(c.total.max() for c in curves) == pytest.approx(peak(s))
    assert all((c.buffers >= 0).all() for c in curves)


def test_graphs_take_more_and_change_no_activations() -> None:
    found = [simulate(scenario(g)).outcome for g in ("none", "layers")]
    assert found[0].memory[0].activations == found[1].memory[0].activations
    assert found[0].peak_memory_bytes < found[1].peak_memory_bytes


@pytest.mark.parametrize("graphs", ["layers", "step"])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_page_draws_memory_up_to_the_same_peak(graphs: str, layout: dict[str, Any]) -> None:
    """Pages take memory within actions (`expand`), which a graph's one pool does not have."""
    keys = {"seq_len": 512, "global_batch_size": 4, "framework": "megatron", "cuda_graphs": graphs}
    s = parse_scenario({"model": MODEL, "training": keys, "parallelism": layout, "cluster": "dgx-h100"})
    drawn = max(float(curve.total.max()) for curve in simulate(s, expand=True).memory)
    assert drawn == pytest.approx(peak(s))


MOE = MODEL | {"moe": {"experts": 8, "top_k": 2, "ffn": 512}}


@pytest.mark.parametrize("graphs", ["layers", "step"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}], ids=str)
def test_a_pairs_forward_takes_what_its_backward_frees_in_the_pool(graphs: str, layout: dict[str, Any]) -> None:
    """Not two micro-batches' activations at once (core/pipeline_parallel/combined_1f1b.py: layer by layer)."""
    paired = {"dp": 2, "ep": 2, "ep_overlap": True, **layout}
    keys = {"seq_len": 512, "global_batch_size": 16, "framework": "megatron", "cuda_graphs": graphs}
    s = parse_scenario({"model": MOE, "training": keys, "parallelism": paired, "cluster": "dgx-h100"})
    step = simulate(s)
    times = step.times.start_s, step.times.end_s
    block_by_block, at_once = (levels(step.stages, step.built.actions, *times, step.states, x) for x in (True, False))
    kept = float(step.levels.activations.max())
    assert kept == pytest.approx(float(block_by_block.activations.max()))
    assert kept < 0.85 * float(at_once.activations.max())
    costs = Costs(load_profile(s.calibration), s.cluster.gpu)
    assert prepare(s, costs).peak_bytes == pytest.approx(peak(s), rel=0.05)
