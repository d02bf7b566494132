"""Ranks are started once for all cases of a test module: importing torch takes longer than the cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.ranks import on_ranks

ROOT = Path(__file__).parents[2]
WORKER = str(Path(__file__).with_name("worker.py"))

pytest.importorskip("torch")


@pytest.fixture(scope="session", autouse=True)
def importable() -> Iterator[None]:
    """Ranks find the packages wherever the tests were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="session")
def prove(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """Runs the proofs of many cases on one set of ranks."""

    def run(cases: dict[str, Any], ranks: int) -> dict[str, Any]:
        return on_ranks("worker", cases, tmp_path_factory.mktemp("prove"), ranks, "prove")

    return run


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank of a group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small(parallelism: dict[str, Any], m: int = 4, **model: Any) -> dict[str, Any]:
    """A scenario of m micro-batches a rank with a model that runs in milliseconds."""
    attention = model.pop("attention", "unfused")
    recompute = model.pop("recompute", "none")
    base = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 100, "positions": "learned"}
    return {
        "model": base | model,
        "training": {
            "seq_len": 16,
            "global_batch_size": m * parallelism.get("dp", 1),
            "precision": "fp32",
            "attention": attention,
            "recompute": recompute,
        },
        "parallelism": parallelism,
        "cluster": "cpu-host",
    }
