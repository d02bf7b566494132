"""The per-rank lists against those of torch.distributed.pipelining, where torch has the schedule."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sim.schedules import build

torch = pytest.importorskip("torch")
torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")


@contextlib.contextmanager
def skipped_where_changed() -> Iterator[None]:
    """These names are torch's own affair: a release may call them otherwise."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        pytest.skip(f"torch {torch.__version__} computes its lists otherwise: {error}")


def torch_lists(name: str, p: int, m: int, v: int | None = None) -> list[list[str]]:
    """torch's lists without idle slots and without REDUCE_GRAD, which is no work of the pipeline's."""
    with contextlib.redirect_stdout(io.StringIO()), skipped_where_changed():
        lists = visualizer.get_schedule_ops(name, p, m, v)
    return [[str(a) for a in entries if a is not None and "REDUCE_GRAD" not in str(a)] for entries in lists]


def own_lists(name: str, p: int, m: int, v: int | None = None) -> list[list[str]]:
    return [[str(entry) for entry in entries] for entries in build(name, p, m, v).ranks]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 4), (4, 8), (8, 20)])
def test_gpipe(p: int, m: int) -> None:
    assert own_lists("gpipe", p, m) == torch_lists("GPipe", p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 4), (4, 8), (8, 20)])
def test_1f1b(p: int, m: int) -> None:
    """Equal, but that torch's display numbers the last rank's forwards from 1 (what it executes is right)."""
    own, theirs = own_lists("1f1b", p, m), torch_lists("1F1B", p, m)
    assert own[:-1] == theirs[:-1]
    last = f"{p - 1}F"
    assert own[-1] == [f"{last}{int(x[len(last) :]) - 1}" if x.startswith(last) else x for x in theirs[-1]]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)])
def test_interleaved_1f1b(p: int, m: int, v: int) -> None:
    assert own_lists("interleaved_1f1b", p, m, v) == torch_lists("Interleaved1F1B", p, m, v)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 9), (8, 32)])
def test_zb_h1_is_the_interleaved_zero_bubble_of_one_stage_per_rank(p: int, m: int) -> None:
    """torch takes two stages or more to a rank; its rule for one, asked directly, is ZB-H1's."""
    shape = SimpleNamespace(n_local_stages=1, microbatches_per_round=p, pp_group_size=p, _n_microbatches=m)
    with skipped_where_changed():
        rule = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
        found = [[str(a) for a in rule(shape, r) if a is not None] for r in range(p)]
    assert own_lists("zb_h1", p, m) == found


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 5, 3), (4, 4, 2), (4, 3, 2), (8, 12, 4)])
def test_looped_bfs(p: int, m: int, v: int) -> None:
    assert own_lists("looped_bfs", p, m, v) == torch_lists("LoopedBFS", p, m, v)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 12, 3), (8, 16, 4)])
def test_interleaved_zb(p: int, m: int, v: int) -> None:
    assert own_lists("interleaved_zb", p, m, v) == torch_lists("InterleavedZeroBubble", p, m, v)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (2, 7), (4, 3), (4, 8), (8, 32)])
def test_zb_v(p: int, m: int) -> None:
    assert own_lists("zb_v", p, m) == torch_lists("ZBVZeroBubble", p, m)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 7), (3, 8), (4, 8), (4, 11), (8, 32)])
def test_dualpipe_v(p: int, m: int) -> None:
    assert own_lists("dualpipe_v", p, m) == torch_lists("DualPipeV", p, m)
