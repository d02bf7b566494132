"""The largest value of a DTensor is one of all its shards: torch all-reduces it, as tensorwise scaling is simulated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402


@pytest.mark.parametrize(("placement", "messages"), [(Shard(1), 1), (Shard(2), 1), (Replicate(), 0)])
def test_torch_agrees_on_what_a_scale_needs(placement: Placement, messages: int) -> None:
    """A scale as torchao computes it (float8/float8_utils.py: tensor_to_amax, amax_to_scale), then the cast."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.ones(1, 8, 16), mesh, [placement], run_check=False)
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            scale = 448 / torch.clamp(torch.max(torch.abs(x)).to(torch.float64), min=1e-12)
            _ = x * scale.to(torch.float32)
        assert counted.get_total_counts() == messages
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("placement", "dim", "messages"),
    [(Shard(1), -1, 1), (Shard(1), 0, 0), (Shard(0), 0, 1), (Shard(0), -1, 0), (Replicate(), -1, 0)],
)
def test_torch_agrees_on_the_scales_of_rows_that_are_cut(placement: Placement, dim: int, messages: int) -> None:
    """Rowwise scaling takes the largest value along `dim` (torchao: `get_maybe_axiswise_dim`), in fp64."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.ones(8, 16), mesh, [placement], run_check=False)
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            largest = torch.amax(torch.abs(x), dim=dim, keepdim=True)
            scale = 448 / torch.clamp(largest.to(torch.float64), min=1e-12)
            _ = x * scale.to(torch.float32)
        assert counted.get_total_counts() == messages
    finally:
        torch.distributed.destroy_process_group()
