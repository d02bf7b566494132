"""Optimizers other than AdamW and Muon: what they keep, and how much memory their updates move."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import LLAMA, make

from sim.core.errors import InputError
from sim.emit import emit
from sim.models.optimizers.step import kept_bytes, optimizer_items
from sim.models.parameters import count_parameters
from sim.simulation import simulate

N = 1000
WIDE = {"param_dtype": "fp32", "precision": "bf16"}


def update(optimizer: str, **training: Any) -> tuple[float, int]:
    """Bytes of a parameter's update, and kernels."""
    (item,) = optimizer_items(N, make(LLAMA, {"optimizer": optimizer, **training}).for_training)
    return item.bytes / N, item.kernels


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("sgd", 0), ("sgd_momentum", 1), ("lion", 1), ("adamw", 2), ("ademamix", 3), ("adafactor", 0)],
)
def test_moments(optimizer: str, moments: int) -> None:
    scenario = make(LLAMA, {**WIDE, "optimizer": optimizer})
    assert kept_bytes(scenario.for_training).moments == 4 * moments
    kept = simulate(scenario).result["memory"][0]["optimizer"]
    assert kept == 4 * moments * count_parameters(scenario.model).total


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("sgd_momentum", 1), ("lion", 1), ("ademamix", 3)])
def test_one_kernel_reads_the_gradient_and_reads_and_writes_the_rest(optimizer: str, moments: int) -> None:
    assert update(optimizer, **WIDE) == (4 + 2 * 4 * (1 + moments), 1)
    # Beside an fp32 copy a 16-bit parameter is written, too.
    assert update(optimizer) == (4 + 2 * 4 * (1 + moments) + 2, 1)


def test_eight_bit_lion_keeps_a_byte_and_its_part_of_a_scale() -> None:
    t = make(LLAMA, {**WIDE, "optimizer": "lion", "optimizer_dtype": "int8"}).for_training
    assert kept_bytes(t).moments == 1 + 4 / 256


def test_lion_of_operators() -> None:
    """llm-foundry's `lionw`: p.mul_ (2), lerp (reads m and g, writes u), sign_ (2), p.add_ (3), lerp_ (3).
    Megatron-Core's: p.add_(p) (2), a compiled kernel (g, m twice, u), p.add_ (3)."""
    assert update("lion", **WIDE, framework="composer") == (4 * (2 + 3 + 2 + 3 + 3), 5)
    assert update("lion", **WIDE, framework="megatron") == (4 * (2 + 4 + 3), 3)


def test_adafactor_of_operators() -> None:
    """Accesses of `Adafactor.step`, counted line by line; 16-bit parameters and gradients are cast, and parameters cast
    back."""
    lines = {"rms": 1, "grad**2": 2, "+ eps": 2, "means": 2, "approximate": 1, "mul_(grad)": 3, "rms of update": 1}
    lines |= {"div_": 2, "mul_(lr)": 2, "-update": 2, "add_": 3}
    assert update("adafactor", **WIDE) == (4 * sum(lines.values()), 12)
    narrow = {"framework": "transformers", "param_dtype": "bf16", "grad_dtype": "bf16", "master_weights": False}
    assert update("adafactor", **narrow)[0] == 4 * sum(lines.values()) + 2 * (2 + 4) + (2 + 4)


@pytest.mark.parametrize(
    ("framework", "layout", "noted"),
    [
        ("megatron", {"zero": 1}, True),
        ("megatron", {"zero": 3}, False),
        ("deepspeed", {"zero": 2}, True),
        ("deepspeed", {"zero": 0}, False),
        ("eager", {"zero": 3}, False),
        ("eager", {"zero": 3, "fsdp_version": 1}, True),
    ],
)
def test_adafactors_moment_of_flat_shards_is_noted(framework: str, layout: dict[str, Any], noted: bool) -> None:
    """Of a vector it keeps a number for each, not sums of rows and columns."""
    scenario = make(LLAMA, {"framework": framework, "optimizer": "adafactor"}, dp=2, **layout)
    told = [text for text in scenario.warnings if text.startswith("training.optimizer: with parallelism.zero")]
    assert bool(told) is noted


@pytest.mark.parametrize("optimizer", ["ademamix", "adafactor"])
def test_an_optimizer_that_megatron_lacks_is_refused_in_words(optimizer: str) -> None:
    with pytest.raises(InputError, match=r"training\.optimizer"):
        emit(make(LLAMA, {"framework": "megatron", "optimizer": optimizer}), "megatron")
