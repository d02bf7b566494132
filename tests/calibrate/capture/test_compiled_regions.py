"""Code that compiles a part of itself: what becomes one graph, what runs eagerly, and what a script then exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedProgram, read_program
from sim.inputs.script_program import RankProgram, What
from sim.models.captured.operators import compute_of
from sim.traces.program_prices import ProgramPrices
from tests.calibrate.capture.captured_scripts import captures_of_scripts
from topology.presets import CLUSTERS

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from tests.calibrate.capture import compiled_blocks  # noqa: E402
from tests.calibrate.capture.compiled_blocks import WIDTH, Block, Reads  # noqa: E402

LAYERS = 3
LAYER_BYTES = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH + 2 * WIDTH)  # of one block's parameters


def captured(
    folder: Path, prepare: Callable[[Any], Any], block: type[Block] = Block, whole: bool = False
) -> tuple[CapturedProgram, list[str]]:
    """Capture layers of which `prepare` makes the forward; `whole`: as one graph, loss included. Return notes, too."""
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(block() for _ in range(LAYERS))})
        x, run = torch.randn(8, WIDTH), prepare(model)
        optimizer = torch.optim.SGD(model.parameters())
        return Step(model, lambda: run(x).square().mean(), optimizer, 1, 8, "bf16", compiled=whole)

    path = folder / f"p{len(list(folder.iterdir()))}.json.gz"  # a file is read once
    made, recorder = record(step)
    write_program(path, made, recorder)
    return read_program(path), recorder.notes


def in_turn(model: Any) -> Callable[[Any], Any]:
    """Return the layers' forward, one after the other."""

    def run(x: Any) -> Any:
        for layer in model["layers"]:
            x = layer(x)
        return x

    return run


def each_compiled(model: Any) -> Callable[[Any], Any]:
    for layer in model["layers"]:
        layer.compile()
    return in_turn(model)


def kernels(program: CapturedProgram, phase: str = "") -> Counter[str]:
    return Counter(o.name for o in program.operators if o.launches and phase in o.phase)


def flops(program: CapturedProgram) -> float:
    return sum(compute_of(o).flops for o in program.operators if o.name in ("aten.mm", "aten.addmm"))


def test_each_compiled_layer_is_a_graph_with_all_gradients(tmp_path: Path) -> None:
    eager, _ = captured(tmp_path, in_turn)
    program, notes = captured(tmp_path, each_compiled)
    assert notes == ["torch.compile: captured as compiled graphs: Block"]
    assert flops(program) == flops(eager)
    forward = kernels(program, "forward")
    assert forward["inductor.reduction"] == LAYERS  # norms; what else is not fused is the loss
    assert set(forward) == {"inductor.reduction", "inductor.pointwise", "aten.addmm", "aten.pow", "aten.mean"}
    gradients = [s for s in program.storages if s.kind == "gradient"]
    assert sum(s.bytes for s in gradients) == LAYERS * LAYER_BYTES


@pytest.mark.parametrize(("slopes", "alike"), [((2.0, 2.0, 2.0), 2), ((2.0, 2.0, 3.0), 3)])
def test_graphs_of_the_same_operators_are_scheduled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slopes: tuple[float, ...], alike: int
) -> None:
    """The first layer's input needs no gradient, so it differs. A schedule for each layer gives the same program."""
    from calibrate.capture.compiled import alike as graphs_alike
    from calibrate.capture.compiled import inductor

    def prepare(model: Any) -> Callable[[Any], Any]:
        for layer, slope in zip(model["layers"], slopes, strict=True):
            layer.up = torch.nn.Sequential(layer.up, torch.nn.Softplus(slope))
        return each_compiled(model)

    made: list[Any] = []

    def scheduled(*given: Any) -> Any:
        made.append(given)
        return inductor.scheduled(*given)

    monkeypatch.setattr(graphs_alike, "scheduled", scheduled)
    shared, _ = captured(tmp_path, prepare)
    assert len(made) == 2 * alike  # forward and backward
    monkeypatch.setattr(graphs_alike, "operators_of", lambda *_: None)
    alone, _ = captured(tmp_path, prepare)
    assert (shared.operators, shared.storages) == (alone.operators, alone.storages)


def test_kernels_belong_to_the_layer_that_is_compiled(tmp_path: Path) -> None:
    program, _ = captured(tmp_path, each_compiled)
    for phase in ("forward", "backward"):
        fused = [o.module for o in program.operators if o.name.startswith("inductor.") and o.phase == phase]
        assert set(fused) == {f"layers.{i}" for i in range(LAYERS)}


def test_a_compiled_function_is_as_the_whole_compiled_model(tmp_path: Path) -> None:
    """The parameters of modules that a function calls are found."""
    one, notes = captured(tmp_path, lambda model: torch.compile(in_turn(model)))
    whole, _ = captured(tmp_path, in_turn, whole=True)
    assert notes == ["torch.compile: captured as compiled graphs: in_turn.<locals>.run"]
    shared = ("aten.mm", "aten.addmm")
    assert [kernels(one)[name] for name in shared] == [kernels(whole)[name] for name in shared]
    fused = [kernels(p)["inductor.pointwise"] + kernels(p)["inductor.reduction"] for p in (one, whole)]
    assert abs(fused[0] - fused[1]) <= 2  # the loss is a part of the whole graph alone


def test_parameters_of_modules_that_are_not_called_get_gradients(tmp_path: Path) -> None:
    def scaled(model: Any) -> Callable[[Any], Any]:
        run, norms = in_turn(model), [layer.norm for layer in model["layers"]]
        factor = torch.compile(lambda x: x * norms[0].weight)
        return lambda x: factor(run(x))

    program, notes = captured(tmp_path, scaled)
    assert len(notes) == 1
    assert kernels(program, "forward")["inductor.pointwise"] == 1
    assert kernels(program, "backward")["inductor.reduction"] == 1  # the gradient of `weight`, summed over rows


def test_a_compiled_attention_knows_the_blocks_of_its_mask(tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def computed(window: int, compiled: bool) -> float:
        attend = torch.compile(flex_attention) if compiled else flex_attention

        def prepare(model: Any) -> Callable[[Any], Any]:
            mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < window), None, None, 512, 512, device="cpu")
            run = in_turn(model)

            def forward(x: Any) -> Any:
                y = run(x).sum() + torch.ones(1, 2, 512, 64)
                return attend(y, y, y, block_mask=mask)

            return forward

        program, _ = captured(tmp_path, prepare)
        return sum(compute_of(o).flops for o in program.operators if "flex_attention" in o.name)

    assert computed(128, True) == computed(128, False) < computed(512, True)


def test_code_that_breaks_its_graph_runs_eagerly_and_a_note_says_so(tmp_path: Path) -> None:
    program, notes = captured(tmp_path, each_compiled, Reads)
    assert not any(name.startswith("inductor.") for name in kernels(program))
    assert len(notes) == 1
    assert (
        "Reads is captured eagerly, because it cannot be traced as one graph: the code reads a tensor's value"
        in notes[0]
    )


@pytest.mark.parametrize("how", [{"backend": "eager"}, {"disable": True}])
def test_what_is_not_compiled_by_inductor_runs_eagerly(tmp_path: Path, how: dict[str, Any]) -> None:
    program, notes = captured(tmp_path, lambda model: torch.compile(in_turn(model), **how))
    assert kernels(program) == kernels(captured(tmp_path, in_turn)[0])
    assert not notes


def test_a_forward_that_its_class_compiles_is_a_graph_of_each_layer(tmp_path: Path) -> None:
    from calibrate.capture.compiled.regions import code_compiled

    with code_compiled():  # as where a capture imports the code

        class Decorated(Block):
            @torch.compile  # type: ignore[untyped-decorator]
            def forward(self, x: Any) -> Any:
                return super().forward(x)

    program, notes = captured(tmp_path, in_turn, Decorated)
    assert notes == ["torch.compile: captured as compiled graphs: Decorated"]
    layers, _ = captured(tmp_path, each_compiled)
    assert kernels(program) == kernels(layers)
    assert [o.module for o in program.operators] == [o.module for o in layers.operators]


def test_a_compiled_module_has_the_names_of_the_one_in_it(tmp_path: Path) -> None:
    def prepare(model: Any) -> Callable[[Any], Any]:
        names = [name for name, _ in model.named_parameters()]
        for layer in model["layers"]:
            compiled = torch.compile(layer)
            assert compiled._orig_mod is layer
        assert [name for name, _ in model.named_parameters()] == names
        return in_turn(model)

    assert captured(tmp_path, prepare)[1] == ["torch.compile: captured as compiled graphs: Block"]


def test_code_that_was_compiled_before_the_capture_runs_eagerly(tmp_path: Path) -> None:
    gelu = torch.compile(torch.nn.functional.gelu)

    def prepare(model: Any) -> Callable[[Any], Any]:
        run = in_turn(model)
        return lambda x: gelu(run(x))

    assert kernels(captured(tmp_path, prepare)[0])["aten.gelu"] == 1


SCRIPT = """
import os, sys, torch, torch.nn as nn, torch.distributed as dist
from tests.calibrate.capture.compiled_blocks import Block
dist.init_process_group("nccl")
model = nn.Sequential(*[Block() for _ in range({layers})]).cuda()
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(8, {width}).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
DDP = "model = nn.parallel.DistributedDataParallel({}, bucket_cap_mb=0.02)"
FSDP = "from torch.distributed.fsdp import fully_shard\nfor layer in model: fully_shard(layer)\nfully_shard(model)"


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, wrap: str) -> RankProgram:
    path = folder / f"s{len(list(folder.iterdir()))}.py"
    path.write_text(SCRIPT.format(layers=LAYERS, width=WIDTH, wrap=wrap), encoding="utf-8")
    with captures_of_scripts(monkeypatch) as capture:
        return capture(path, 4, 0)


@pytest.mark.parametrize(
    ("eager", "compiled"),
    [
        (DDP.format("model"), DDP.format("torch.compile(model)")),
        (DDP.format("model"), DDP.format("model") + "\nmodel = torch.compile(model)"),
        (FSDP, f"{FSDP}\nmodel = torch.compile(model)"),
        (FSDP, f"for layer in model: layer.compile()\n{FSDP}"),
    ],
)
def test_a_compiled_script_exchanges_what_the_eager_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: str, compiled: str
) -> None:
    before, after = (script(tmp_path, monkeypatch, wrap) for wrap in (eager, compiled))
    exchanged: list[Counter[str]] = [Counter(), Counter()]
    for program, kinds in zip((before, after), exchanged, strict=True):
        for c in program.collectives:  # gradients of one graph come in another order, so buckets may differ
            kinds[c.kind] += c.bytes
    assert exchanged[0] == exchanged[1]
    fused = kernels(after.program)
    assert fused["inductor.reduction"] >= 2 * LAYERS
    assert flops(after.program) == flops(before.program)
    assert not any(o.host_copy for o in after.program.operators if o.phase != "forward")  # gradients are on the GPU


@pytest.mark.parametrize("wrap", ["model = torch.compile(model)", "for layer in model: layer.compile()"])
def test_a_script_for_a_gpu_may_copy_into_parts_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: str
) -> None:
    """Torch's own code asks a tensor for copies while it traces: on no device that the script names."""
    monkeypatch.setattr(compiled_blocks, "Block", compiled_blocks.Halves)
    program = script(tmp_path, monkeypatch, wrap)
    assert kernels(program.program)["inductor.reduction"] >= 2 * LAYERS
    assert not any(o.host_copy for o in program.program.operators if o.phase != "forward")


def test_gradients_of_late_layers_are_reduced_during_a_compiled_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo cuts the graph of a model in DistributedDataParallel into its buckets."""
    program = script(tmp_path, monkeypatch, DDP.format("torch.compile(model)"))
    first = min(e.before for e in program.entries if e.what is What.START)
    later = [o for o in program.program.operators[first:] if o.phase == "backward" and o.name == "aten.mm"]
    assert len(later) >= 2 * (LAYERS - 1)


@pytest.mark.parametrize(
    "how", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}], ids=str
)
def test_cuda_graphs_launch_the_kernels_of_compiled_code(tmp_path: Path, how: dict[str, Any]) -> None:
    """The host issues one kernel of the forward and one of the backward, which stand for the graphs' launches."""
    program, notes = captured(tmp_path, lambda model: torch.compile(in_turn(model), **how))
    assert [note.partition(":")[0] for note in notes] == ["torch.compile"] * 2
    assert "CUDA graphs launch the kernels" in notes[1]
    launched = [o for o in program.operators if o.launches]
    compiled = [o for o in launched if o.name.startswith("inductor.") or o.name == "aten.mm"]
    assert sum(not o.graphed for o in compiled) <= 2 < sum(o.graphed for o in compiled)
    assert not any(o.graphed for o in launched if o.phase == "optimizer")


def test_the_host_takes_no_time_for_what_a_cuda_graph_launches(tmp_path: Path) -> None:
    graphed, _ = captured(tmp_path, lambda model: torch.compile(in_turn(model), mode="reduce-overhead"))
    issued, _ = captured(tmp_path, lambda model: torch.compile(in_turn(model)))
    prices = ProgramPrices(CLUSTERS["dgx-h100"])

    def seconds(program: CapturedProgram) -> tuple[float, float]:
        each = [prices.operator(o) for o in program.operators if o.launches]
        return sum(device for device, _ in each), sum(host for _, host in each)

    saved, each_s = sum(o.graphed for o in graphed.operators), prices.costs.coefficients.host_operator_eager_s
    assert each_s
    assert seconds(graphed)[0] == pytest.approx(seconds(issued)[0])
    assert seconds(issued)[1] - seconds(graphed)[1] == pytest.approx(saved * each_s)
