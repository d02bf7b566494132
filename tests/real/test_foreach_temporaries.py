"""torch's AdamW over lists of tensors holds the roots of all second moments at once; the simulator counts them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sim.results.states import states  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from tests.sim.cases import scenario_with  # noqa: E402

SIZES = (3, 5, 7)


class _NewLists(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the bytes of lists of new tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, list | tuple):
            self.made[str(func)] = sum(x.numel() * x.element_size() for x in out)
        return out


@pytest.mark.parametrize("foreach", [True, False])
def test_torch_makes_one_list_as_large_as_a_moment(foreach: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in SIZES]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, foreach=foreach)
    optimizer.step()
    with _NewLists() as found:
        optimizer.step()
    assert found.made == ({"aten._foreach_sqrt.default": 4 * sum(SIZES)} if foreach else {})


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 8), (3, 8)])
def test_the_simulated_update_holds_a_root_of_each_number_of_the_shard(zero: int, shards: int) -> None:
    def at_end(kernels: str) -> float:
        training = {"seq_len": 128, "global_batch_size": 8, "framework": "eager", "adamw_kernels": kernels}
        step = simulate(scenario_with(training, {"dp": 8, "zero": zero}))
        return states(step.plan, list(step.stages[0].values())).at_end

    assert at_end("foreach") - at_end("fused") == pytest.approx(4 * 8_030_261_248 / shards)
