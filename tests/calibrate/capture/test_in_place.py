"""Operators of a backward are captured in place where a real backward runs them so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

EITHER = [
    f"aten.{name}{end}"
    for name in ("add", "scatter_add", "scatter", "index_put", "index_add", "put")
    for end in ("", "_")
]


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


def parts(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Their gradients are written into zeros."""
    rows, columns = torch.zeros(3, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long)
    taken = h.gather(1, columns).sum() + h[rows].sum() + h.index_select(0, rows).exp().sum() + h.take(columns).sum()
    return taken + g.topk(2).values.sum() + g.max(1).values.sum()


CASES = [used_twice, residual, shared_gradient, views, expanded, parts]


def from_inputs(case: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(4, 8) * scale
    return case(x.sin(), x.cos()).square().sum()


@pytest.mark.parametrize("case", CASES)
def test_a_backward_runs_in_place_what_a_real_one_does(
    case: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    from torch.profiler import ProfilerActivity, profile

    from calibrate.real_steps.operator_times import OperatorTimes

    def step() -> Step:
        model = torch.nn.Linear(8, 1, bias=False)
        return Step(model, lambda: from_inputs(case, model.weight), torch.optim.SGD(model.parameters()), 4, 1)

    loss = step().loss()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    ran = [e for e in seen.events() if e.cpu_parent is None or kernel_of(e.cpu_parent.name) not in EITHER]
    wanted = Counter(name for name in (kernel_of(e.name) for e in ran) if name in EITHER)
    assert any(name.endswith("_") for name in wanted)
    rows = [row.name for row in record(step, "cpu")[1].rows if row.phase == "backward"]
    assert Counter(name for name in rows if name in EITHER) == wanted
    loss = step().loss()
    with OperatorTimes("cpu") as times:
        loss.backward()
    assert {name: n for (name, _), n in times.counts.items() if name in EITHER} == wanted


def kernel_of(event: str) -> str:
    """Return the operator of a profiler's event."""
    name = event.replace("::", ".")
    return {"aten._index_put_impl_": "aten.index_put_"}.get(name, name)


def test_a_sum_in_a_backward_of_ones_own_has_memory_of_its_own() -> None:
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
