"""Additions of gradients are captured in place where a real backward makes them so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")


def used_twice(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return h.cos() * h.exp() + g.square()


def residual(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return h + h @ h.t() @ g


def shared_gradient(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The sum's gradient is that of both its terms, so the first addition needs memory of its own."""
    return h.cos() * g.exp() + (h + g)


def views(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return (h[:2].cos() + h[2:].exp()).repeat(2, 1) + h.view(-1).cumsum(0).view(4, 8) * g


def expanded(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g.cos() + g.mean() + h.sum(0) * h


CASES = [used_twice, residual, shared_gradient, views, expanded]


def from_inputs(case: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(4, 8) * scale
    return case(x.sin(), x.cos()).square().sum()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_added_in_place_as_in_a_real_backward(
    case: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    from torch.profiler import ProfilerActivity, profile

    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = torch.nn.Linear(8, 1, bias=False)
        return Step(model, lambda: from_inputs(case, model.weight), torch.optim.SGD(model.parameters()), 4, 1)

    loss = step().loss()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    names = [event.name.replace("::", ".") for event in seen.events()]
    wanted = [name for name in names if name in ("aten.add", "aten.add_")]
    assert "aten.add_" in wanted
    rows = [row.name for row in record(step, "cpu")[1].rows if row.phase == "backward"]
    assert [name for name in rows if name in ("aten.add", "aten.add_")] == wanted


def test_a_sum_in_a_backward_of_ones_own_has_memory_of_its_own() -> None:
    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad + grad.mul(2)

    def step() -> Step:
        model = torch.nn.Linear(8, 8, bias=False)
        x = torch.zeros(4, 8)
        return Step(model, lambda: Own.apply(model(x)).sin().sum(), torch.optim.SGD(model.parameters()), 4, 1)

    rows = [row.name for row in record(step, "cpu")[1].rows if row.phase == "backward"]
    assert "aten.add" in rows
    assert "aten.add_" not in rows
