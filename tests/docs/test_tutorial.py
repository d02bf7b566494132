"""What the tutorial says of its layouts is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sim import load_scenario, simulate
from sim.core.errors import InputError

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
REPLICAS = ("parallelism.tp=1", "parallelism.dp=16")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    text = re.search(r"^```yaml\n(# first\.yaml\n.*?)^```$", TUTORIAL.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert text
    (tmp_path / "first.yaml").write_text(text[1], "utf-8")
    return tmp_path / "first.yaml"


def test_each_piece_of_advice_does_what_the_text_says(first: Path) -> None:
    def result(*overrides: str) -> dict[str, Any]:
        return simulate(load_scenario(first, overrides)).result

    plain, sp, replicas = result(), result("parallelism.sp=true"), result(*REPLICAS)
    zero2, zero3 = (result(*REPLICAS, f"parallelism.zero={n}") for n in (2, 3))
    assert plain["fits_in_memory"]
    assert sp["step_time_s"] < plain["step_time_s"]
    assert sp["peak_memory_bytes"] < plain["peak_memory_bytes"]
    assert not replicas["fits_in_memory"]
    assert replicas["step_time_s"] < sp["step_time_s"]
    assert zero3["fits_in_memory"]
    assert zero3["tokens_per_s_per_gpu"] > 2 * plain["tokens_per_s_per_gpu"]
    assert zero3["exposed_comm_s"] < 0.05 * zero3["step_time_s"]
    assert zero2["step_time_s"] < zero3["step_time_s"] < 1.05 * zero2["step_time_s"]
    assert zero2["peak_memory_bytes"] > zero3["peak_memory_bytes"]


def test_the_first_tries_losses_are_slow_kernels_and_then_communication(first: Path) -> None:
    (kernels, _), (messages, remedy) = simulate(load_scenario(first)).losses(2)
    assert (kernels.key, messages.key) == ("below_peak", "communication")
    assert "`tp` stream" in remedy  # though the step was not simulated operator by operator


def test_the_shown_mistake_is_one(first: Path) -> None:
    with pytest.raises(InputError, match=r"parallelism\.tp"):
        load_scenario(first, ["parallelism.tp=3"])
