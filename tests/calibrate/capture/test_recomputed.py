"""Python code that a backward runs: forwards that are computed again, and backwards of the code's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, CapturedProgram, read_program

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

SIZE, HEADS, LENGTH = 64, 2, 32


class Layer(torch.nn.Module):
    """Attention, all of whose operators but the last matmul lie in a function that is checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.outer = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)

    def attend(self, x: Any) -> Any:
        """Cast, attend, choose: by functions, before and behind a module."""
        h = x.float().unflatten(-1, (HEADS, -1)).transpose(1, 2).bfloat16()
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        h = self.inner(h.transpose(1, 2).flatten(2))
        return F.softmax(h, -1)

    def forward(self, x: Any) -> Any:
        """Return the result of the checkpointed function, multiplied."""
        return self.outer(checkpoint(self.attend, x, use_reentrant=self.reentrant))


def program_of(folder: Path, model: Any, loss: Any) -> CapturedProgram:
    """Capture a step under autocast."""
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    def step() -> Step:
        made = model()
        optimizer = torch.optim.SGD(made.parameters())
        return Step(made, lambda: loss(made), optimizer, LENGTH, 2, autocast="bf16")

    path = folder / f"p{len(list(folder.iterdir()))}.json.gz"
    write_program(path, *record(step))
    return read_program(path)


def kernels(program: CapturedProgram, phase: str) -> list[CapturedOperator]:
    """Return the launched operators of a phase."""
    return [o for o in program.operators if o.launches and o.phase == phase]


def squares(model: Any) -> Any:
    """Return a loss of random inputs, which want a gradient as an embedding's results do."""
    return model(torch.randn(2, LENGTH, SIZE, requires_grad=True)).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_functions_are_computed_again_by_the_kernels_of_the_forward(tmp_path: Path, reentrant: bool) -> None:
    """Also where no module runs: cuDNN's attention, a softmax from 16 bits to fp32, autocast's casts of weights."""
    program = program_of(
        tmp_path, lambda: torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), Layer(reentrant), Layer(reentrant)), squares
    )
    again = kernels(program, "recomputed")
    ahead = [o for o in kernels(program, "forward") if o.module.startswith("2")]
    names = [o.name for o in ahead]
    last = len(names) - 1 - names[::-1].index("aten._softmax")  # behind it only `outer` runs
    assert [o.name for o in again if o.module.startswith("2")][: last + 1] == names[: last + 1]
    assert {o.module.partition(".")[0] for o in again} == {"1", "2"}
    assert not [o for o in kernels(program, "backward") if "attention" in o.name and "back" not in o.name]
    attends = {o.name for o in program.operators if "attention" in o.name}
    assert attends
    assert all("cudnn" in name for name in attends)


def test_a_loss_in_parts_is_computed_again_under_autocast(tmp_path: Path) -> None:
    """cross_entropy takes logarithms in 16 bits and casts them to fp32 for the loss, as on an H200 (RoBERTa)."""

    def loss(model: Any) -> Any:
        x, y = torch.randn(2 * LENGTH, SIZE), torch.zeros(2 * LENGTH, dtype=torch.long)
        parts = zip(x.chunk(2), y.chunk(2), strict=True)
        return sum(checkpoint(lambda a, b: F.cross_entropy(model(a), b), *p, use_reentrant=False) for p in parts)

    again = kernels(program_of(tmp_path, lambda: torch.nn.Linear(SIZE, 128), loss), "recomputed")
    for name, dtype in (("aten._log_softmax", "bf16"), ("aten.nll_loss_forward", "fp32")):
        (first, second) = [o for o in again if o.name == name]
        assert (first.inputs[0].dtype, second.outputs[0].dtype) == (dtype, dtype)


def test_a_backward_of_ones_own_runs_a_gpus_kernels(tmp_path: Path) -> None:
    class Rooted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad * F.scaled_dot_product_attention(x, x, x).to(grad.dtype)

    def loss(model: Any) -> Any:
        h = model(torch.randn(2, LENGTH, SIZE)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return Rooted.apply(h).square().mean()

    program = program_of(tmp_path, lambda: torch.nn.Linear(SIZE, SIZE), loss)
    found = [o for o in kernels(program, "backward") if "attention" in o.name]
    assert [o.name for o in found] == ["aten._scaled_dot_product_cudnn_attention"]
    assert not kernels(program, "recomputed")
