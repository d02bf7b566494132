"""Checkpoints in compiled code: Torch's partition computes again what Dynamo's graphs do, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

from tests.calibrate.capture.compiled_blocks import WIDTH, Block  # noqa: E402
from tests.calibrate.capture.test_compiled_regions import LAYERS, captured, flops, in_turn, kernels  # noqa: E402

Forward = Callable[[Any], Any]


def every_second_matmul(counts: Counter[bool]) -> Callable[..., Any]:
    """Save every second matmul's result, as trainers' selective recomputation does."""

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> Any:
        if function is not torch.ops.aten.addmm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def selective() -> Any:
    return create_selective_checkpoint_contexts(every_second_matmul(Counter()))


WAYS = {
    "none": lambda f, x: f(x),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=selective),
}


def checkpointed(way: str, layers: Any) -> Forward:
    def run(x: Any) -> Any:
        for layer in layers:
            x = WAYS[way](layer, x)
        return x

    return run


def matmuls_of_dynamo(way: str, whole: bool = False) -> list[int]:
    """Return the matmuls of the forward's and the backward's graph that `torch.compile` makes in a real run.

    `whole`: the loss is a part of the graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        called = [node for node in graph.graph.nodes if node.op == "call_function"]
        found.append(sum(node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for node in called))
        return make_boxed_func(graph.forward)

    def loss(x: Any) -> Any:
        return x.square().mean()

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    run = checkpointed(way, [Block() for _ in range(LAYERS)])
    compiled = torch.compile(lambda x: loss(run(x)) if whole else run(x), backend=backend)
    out = compiled(torch.randn(8, WIDTH))
    (out if whole else loss(out)).backward()
    torch._dynamo.reset()
    return found


def matmuls(program: Any, *phases: str) -> int:
    return sum(kernels(program, phase)[f"aten.{name}"] for phase in phases for name in ("mm", "addmm"))


def compiled(way: str) -> Callable[[Any], Forward]:
    return lambda model: torch.compile(checkpointed(way, model["layers"]))


@pytest.mark.parametrize(("way", "again"), [("none", 0), ("checkpoint", 1), ("reentrant", 1), ("selective", 0)])
def test_as_many_matmuls_as_in_the_graphs_of_dynamo(tmp_path: Path, way: str, again: int) -> None:
    """A layer's last matmul is never computed again: no gradient needs its result."""
    program, notes = captured(tmp_path, compiled(way))
    assert notes == [f"torch.compile: captured as compiled graphs: {checkpointed.__qualname__}.<locals>.run"]
    assert matmuls(program, "recomputed") == LAYERS * again
    assert [matmuls(program, "forward"), matmuls(program, "recomputed", "backward")] == matmuls_of_dynamo(way)


def test_only_inputs_of_layers_live_until_the_backward(tmp_path: Path) -> None:
    """As in eager code: [8, width] fp32 for each layer, and what the loss keeps."""
    eager, _ = captured(tmp_path, lambda model: checkpointed("checkpoint", model["layers"]))
    program, _ = captured(tmp_path, compiled("checkpoint"))
    plain, _ = captured(tmp_path, compiled("none"))
    kept = [sum(s.bytes for s in p.storages if s.kind == "activation") for p in (eager, program, plain)]
    assert kept[0] == kept[1] < kept[2] / 4
    assert flops(program) == flops(eager) > flops(plain)


def test_kernels_of_a_checkpoint_stand_in_the_backward_of_their_layer(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def prepare(model: Any) -> Forward:
        layers = model["layers"]
        for i, layer in enumerate(layers):
            layers[i] = torch.compile(checkpoint_wrapper(layer))
        return in_turn(model)

    program, notes = captured(tmp_path, prepare)
    assert notes == ["torch.compile: captured as compiled graphs: CheckpointWrapper"]
    fused = [o for o in program.operators if o.name.startswith("inductor.") and o.phase == "recomputed"]
    assert {o.module for o in fused} == {f"layers.{i}" for i in range(LAYERS)}
    assert matmuls(program, "recomputed") == LAYERS


def test_a_checkpoint_of_a_compiled_layer_runs_all_its_forward_again(tmp_path: Path) -> None:
    """A compiled graph cannot end before its last matmul."""

    def prepare(model: Any) -> Forward:
        for layer in model["layers"]:
            layer.compile()
        return checkpointed("checkpoint", model["layers"])

    program, _ = captured(tmp_path, prepare)
    assert matmuls(program, "recomputed") == matmuls(program, "forward") == 2 * LAYERS


def test_a_whole_compiled_step_computes_again_what_the_graphs_of_dynamo_do(tmp_path: Path) -> None:
    """The loss is a part of the graph, and its gradient needs the last layer's result: one more matmul."""
    program, _ = captured(tmp_path, lambda model: checkpointed("checkpoint", model["layers"]), whole=True)
    assert matmuls(program, "recomputed") == LAYERS + 1
    found = [matmuls(program, "forward"), matmuls(program, "recomputed", "backward")]
    assert found == matmuls_of_dynamo("checkpoint", whole=True)
