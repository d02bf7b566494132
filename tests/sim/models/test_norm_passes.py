"""What a compiled norm's backward reads and writes, against the kernels that Inductor makes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from model_programs import LLAMA, make, named

from sim.core.program import Compute
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.torch_kernels.norm_passes import backward_accesses, gradient_reads

RESIDUAL = 1  # the residual stream's gradient, which the same kernel adds


def inductor_accesses(rows: int, width: int, shares: int, norm: str, folder: Path) -> float:
    """Return the reads and writes of Inductor's kernels in the backward of a residual, a norm and `shares` matmuls."""
    torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record
    from sim.inputs.program_file import read_program

    def linear() -> Any:
        return torch.nn.Linear(width, width, bias=False)

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = linear(), getattr(torch.nn, norm)(width)
            self.shares = torch.nn.ModuleList(linear() for _ in range(shares))

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            h = self.norm(x)
            return (x, *(layer(h) for layer in self.shares))

    def step() -> Step:
        model = torch.nn.ModuleDict({"block": Block()}).bfloat16()
        model["block"].compile()
        x = torch.randn(2, rows // 2, width, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters())
        return Step(model, lambda: sum(y.sum() for y in model["block"](x)), optimizer, rows // 2, 2)

    path = folder / "program.json.gz"
    made, recorder = record(step)
    write_program(path, made, recorder)
    kernels = [o for o in read_program(path).operators if o.name.startswith("inductor.") and o.phase == "backward"]
    return sum(prod(x.shape) for o in kernels for x in (*o.inputs, *o.outputs)) / (rows * width)


def date_of_torch() -> str | None:
    """Return a month in which the installed release was the newest; None: today."""
    torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
    release = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    return "2025-12" if release < (2, 10) else "2026-11" if release < (2, 15) else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "rows", "width", "shares", "accesses"),
    [
        ("RMSNorm", 8192, 1024, 1, {4}),  # one kernel: gradients, input, the residual's gradient; one result
        ("RMSNorm", 8192, 1024, 3, {6}),
        ("RMSNorm", 8192, 4096, 2, {5}),
        ("RMSNorm", 8192, 8192, 1, {4, 6}),  # before torch 2.15 too wide: another kernel reads gradients and input
        ("RMSNorm", 8192, 8192, 3, {6, 10}),
        ("RMSNorm", 2048, 512, 2, {8}),  # too small
        ("LayerNorm", 8192, 1024, 2, {5}),
        ("LayerNorm", 8192, 8192, 2, {5, 8}),
    ],
)
def test_as_many_accesses_as_inductors_kernels(
    tmp_path: Path, norm: str, rows: int, width: int, shares: int, accesses: set[int]
) -> None:
    d = dims(make(LLAMA, {"framework": "compiled", "software_date": date_of_torch()}))
    own = backward_accesses(d, rows, width) + (shares - 1) * gradient_reads(d, rows, width) + RESIDUAL
    assert own in accesses
    assert inductor_accesses(rows, width, shares, norm, tmp_path) == pytest.approx(own, rel=0.02)


def sum_of_gradients(**training: Any) -> Compute:
    found = named(layer_block(make(LLAMA, training), 0).backward, "qkv_dgrad_sum")
    return found[0]


def test_a_compiler_launches_no_kernel_for_the_sum_of_three_gradients() -> None:
    eager, compiled = (sum_of_gradients(framework=f) for f in ("eager", "compiled"))
    assert (eager.kernels, compiled.kernels) == (1, 0)
    assert compiled.bytes in (eager.bytes / 3, eager.bytes * 2 / 3)


@pytest.mark.parametrize(
    ("date", "square", "narrow"), [("2025-12", 5, 5), ("2026-01", 5, 3), ("2026-11", 5, 3), (None, 3, 3)]
)
def test_releases_of_torch_make_one_kernel_of_more_norms(date: str | None, square: int, narrow: int) -> None:
    d = dims(make(LLAMA, {"framework": "compiled", "software_date": date}))
    assert (backward_accesses(d, 8192, 8192), backward_accesses(d, 8192, 1024)) == (square, narrow)
