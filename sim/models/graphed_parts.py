"""Parts of a layer that CUDA graphs replay (Megatron-Core's `--cuda-graph-scope`), and what the seams of a graph cost.

Megatron-Core 0.16.1, transformer/transformer_layer.py: `_te_cuda_graph_capture` captures a layer's parts as one graph,
which ends behind attention, behind the MLP, or inside the expert layer: behind the router, or behind what prepares the
tokens' dispatch. `_get_submodules_under_cudagraphs`: shared experts are captured with the router, unless they run
beside exchanges.

A replay reads and writes the addresses of its capture. Transformer Engine, pytorch/graph.py (`Graphed.forward`,
`Graphed.backward`): what enters a graph is copied to its own buffer, forward the residual stream, backward the gradient
of each of its results. core/transformer/cuda_graphs.py copies so, too (`_CudagraphReplayNode`). Results stay until the
graph of the backward has run: they are not freed behind the dispatch (models/gpt/fine_grained_callables.py:
`should_free_input`). Left out: the host's time for the replay's call, and copies between whole layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program, Saved, Wait
from sim.models.dims import Dims, Shard, dims, layer_dims
from sim.models.moe.routing import Routing, routing
from sim.models.operators import F, I, Operator, memory_op

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import GraphPart

MAMBAS = ("mamba1", "mamba2")  # states of other kinds stand in attention's place (core/ssm/gated_delta_net.py)


def graph_scope(scenario: Scenario) -> tuple[GraphPart, ...]:
    """The parts of a layer that graphs hold; empty: none, or whole layers, or the whole step."""
    t = scenario.training
    return t.cuda_graph_scope if t is not None and t.graphs_layers else ()


def replayed(program: Program) -> Program:
    """The program's computations and messages as a graph replays them."""
    return tuple(item if isinstance(item, Wait) else replace(item, graphed=True) for item in program)


def captured(parts: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators in a graph, with what they keep in its pool."""
    return tuple(
        replace(
            part,
            forward=replayed(part.forward),
            backward=replayed(part.backward),
            saved=tuple(saved._replace(graphed=True) for saved in part.saved),
        )
        for part in parts
    )


def captured_layer(
    scenario: Scenario,
    d: Dims,
    attention: tuple[Operator, ...],
    mlp: tuple[Operator, ...],
    *,
    scans: bool,
    experts: bool,
) -> tuple[Operator, ...]:
    """A layer's operators, those of the scope in one graph; `scans`: the first branch has a state, `experts`: the
    second one has experts."""
    scope = graph_scope(scenario)
    if not scope:
        layer = (*attention, *mlp)
        training = scenario.training
        return captured(layer) if training is not None and training.graphs_layers else layer
    states = scenario.model.state_space
    of_mamba = scans and states is not None and states.kind in MAMBAS
    first = bool(attention) and ("mamba" if of_mamba else "attn") in scope
    whole, router = ("moe" if experts else "mlp") in scope and bool(mlp), experts and "moe_router" in scope
    attention = captured(attention) if first else attention
    mlp = captured(mlp) if whole else _to_dispatch(mlp, scope) if router else mlp
    enters = (_entrance(d),) if first or whole or router else ()
    leaves = () if router else (_exit(d),)  # a router's results are copied back beside the dispatch
    if whole or router:
        return (*enters, *attention, *mlp, *leaves) if first else (*attention, *enters, *mlp, *leaves)
    return (*enters, *attention, *leaves, *mlp) if first else (*attention, *mlp)


def _to_dispatch(mlp: tuple[Operator, ...], scope: tuple[GraphPart, ...]) -> tuple[Operator, ...]:
    """An expert layer with its norm, its router and what the scope names besides in a graph."""
    router = next(i for i, part in enumerate(mlp) if part.graph == "moe_router")
    held = (i < router or part.graph in scope for i, part in enumerate(mlp))
    return tuple(captured((part,))[0] if here else part for part, here in zip(mlp, held, strict=True))


def _entrance(d: Dims) -> Operator:
    size = d.stream_bytes
    return Operator("graph_input", (_copies(d, "graph_input_copy", 1, size),), forward_bytes=size)


def _exit(d: Dims) -> Operator:
    size = d.stream_bytes
    copied = replace(_copies(d, "graph_gradient_copy", 1, size), phase=I)
    return Operator("graph_output", backward=(copied,), backward_bytes=size)


def _copies(d: Dims, name: str, kernels: int, size: float) -> Compute:
    """Copies by torch of `kernels` tensors with `size` bytes in all, which are read and written."""
    return replace(memory_op(name, F, "copy", size / d.act_bytes, 2 * size, d.act, kernels), plain_host=True)


def _results(scenario: Scenario, d: Dims, r: Routing) -> tuple[float, ...]:
    """Bytes of the results of a graph that ends inside an expert layer: the stream, the tokens to dispatch, their
    weights in fp32, and what shared experts give."""
    m, t, prepared = scenario.model, scenario.for_training, "moe_preprocess" in graph_scope(scenario)
    assert m.moe is not None
    row = m.hidden * d.act_bytes
    narrow = (m.moe.latent or m.hidden) * d.act_bytes if prepared else row
    sorted_here = prepared and not r.dispatcher.copies_on_arrival
    tokens, weights = (r.sent, r.sent) if sorted_here else (r.tokens, r.tokens * m.moe.experts)
    shared = (r.tokens * row,) if m.moe.shared_width and not t.moe_shared_expert_overlap else ()
    return (r.tokens * row, tokens * narrow, weights * FP32_BYTES, *shared)


def gradients_handed_over(scenario: Scenario, d: Dims, r: Routing) -> Program:
    """The copies of the gradients that come back from an expert layer into the graph of its router."""
    if "moe_router" not in graph_scope(scenario):
        return ()
    sizes = _results(scenario, d, r)
    return (replace(_copies(d, "graph_gradient_copy", len(sizes), sum(sizes)), phase=I),)


def results_held(scenario: Scenario, d: Dims, r: Routing) -> tuple[Saved, ...]:
    """What stays of such a graph's results, beyond what its operators keep: sorted copies of tokens, and the results of
    shared experts, and narrower tokens. The stream and the whole tokens are inputs of the norm and the router."""
    if "moe_router" not in graph_scope(scenario):
        return ()
    _, tokens, _, *shared = _results(scenario, d, r)
    moe = scenario.model.moe
    narrow = moe is not None and moe.latent is not None
    made_here = "moe_preprocess" in graph_scope(scenario) and (narrow or not r.dispatcher.copies_on_arrival)
    held = ("graph's tokens", tokens if made_here else 0.0), ("graph's shared results", sum(shared))
    return tuple(Saved(name, size, graphed=True) for name, size in held if size)


def gradient_buffers_bytes(scenario: Scenario) -> float:
    """The buffers of gradients that graphs read and write: of a graph's results and of its input, one set, since the
    next graph uses them again (pytorch/graph.py: `_reuse_graph_input_output_buffers`)."""
    m, scope = scenario.model, graph_scope(scenario)
    experts = next((n for n in range(m.layers) if m.is_moe_layer(n)), None)
    stream = dims(scenario).stream_bytes
    if experts is None or "moe_router" not in scope:
        return 2 * stream
    d = layer_dims(scenario, experts).of_experts
    return stream + sum(_results(scenario, d, routing(scenario, d, experts, Shard())))
