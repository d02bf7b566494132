"""Fused kernels: what attention and element-wise chains move, against the papers' counts, and what a step gains."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sim.core.program import Compute
from sim.inputs.scenario import load_scenario
from sim.models.layer import layer_block
from sim.simulation import simulate
from sim.views.roofline_svg import clock_hz, roofline_svg, sram_bytes_per_s
from tests.sim.cases import scenario_with
from topology.presets import GPUS

ROOT = Path(__file__).parents[3]


def attention_bytes(seq: int, attention: str) -> float:
    """Bytes that a layer's attention core moves forward, one sequence."""
    scenario = scenario_with(
        {"seq_len": seq, "global_batch_size": 1, "attention": attention}, model="llama2-7b", cluster="dgx-a100"
    )
    items = layer_block(scenario, 0).forward
    return sum(
        i.bytes
        for i in items
        if isinstance(i, Compute)
        and i.name.startswith("attention")
        and i.name not in ("attention_out", "attention_norm", "attention_residual")
    )


def test_unfused_attention_moves_the_square_of_the_sequence_and_fused_does_not() -> None:
    """Standard attention Θ(Nd + N²), FlashAttention with d ≤ M^½ only Θ(Nd) beside re-reads (Dao 2022, theorem 2)."""
    unfused = [attention_bytes(n, "unfused") for n in (8192, 16384)]
    fused = [attention_bytes(n, "fused") for n in (8192, 16384)]
    assert unfused[1] / unfused[0] == pytest.approx(4, rel=0.05)
    assert fused[1] / fused[0] == pytest.approx(2, rel=0.01)
    scores = 32 * 16384.0**2 * 2
    assert unfused[1] == pytest.approx(4 * scores, rel=0.05)  # written and read, twice


@pytest.mark.parametrize(("gpu", "clock"), [("v100", 1.53e9), ("a100-sxm", 1.41e9), ("h100-sxm", 1.83e9)])
def test_memories_on_the_chip(gpu: str, clock: float) -> None:
    """Clocks as the data sheets have them; of an A100 Dao et al. (figure 1) write 19 TB/s of SRAM."""
    assert clock_hz(GPUS[gpu]) == pytest.approx(clock, rel=0.01)
    assert sram_bytes_per_s(GPUS["a100-sxm"]) == pytest.approx(19e12, rel=0.03)
    assert sram_bytes_per_s(GPUS[gpu]) > 5 * GPUS[gpu].memory_bandwidth_bytes_per_s


@cache
def step(**training: str) -> dict[str, Any]:
    return simulate(
        scenario_with({"seq_len": 4096, "global_batch_size": 16, **training}, {"dp": 8, "zero": 3}, cluster="dgx-a100")
    ).result


def test_fused_kernels_save_time_and_memory() -> None:
    """The direction of Liger's claim (arXiv 2410.10989): +20 % throughput, and most of the loss's memory."""
    plain = step(attention="fused", cross_entropy="unfused", framework="eager")
    fused = step(attention="fused", cross_entropy="fused", framework="compiled")
    unfused_attention = step(attention="unfused", cross_entropy="unfused", framework="eager")
    assert 1.08 < fused["tokens_per_s"] / plain["tokens_per_s"] < 1.35
    assert fused["peak_memory_bytes"] < 0.9 * plain["peak_memory_bytes"]
    assert unfused_attention["peak_memory_bytes"] > 1.5 * plain["peak_memory_bytes"]


def test_liger_like_kernels_on_large_micro_batches() -> None:
    """Liger's claim for Llama 3 8B at such sizes: +20 % throughput, −60 % memory (arXiv 2410.10989, section 4.2)."""
    eager, fused = (
        simulate(load_scenario(ROOT / "scenarios" / f"kernels_{name}_llama8b.yaml")).result
        for name in ("eager", "fused")
    )
    assert 1.10 < fused["tokens_per_s"] / eager["tokens_per_s"] < 1.30
    assert 0.35 < fused["peak_memory_bytes"] / eager["peak_memory_bytes"] < 0.50


def test_the_shipped_picture_is_the_drawn_one() -> None:
    drawn = roofline_svg(GPUS["a100-sxm"])
    assert (ROOT / "docs" / "roofline_a100.svg").read_text() == drawn
    ElementTree.fromstring(drawn)


PAGE_ROWS = {  # of the table of docs/fused_kernels.md: how the row begins, and what it sets
    "attention unfused": ("training.attention=unfused", "training.attention_kernel=null"),
    "attention fused": (),
    "and norm": ("training.framework=megatron",),
    "and all": ("training.framework=compiled",),
    "and the loss": ("training.framework=compiled", "training.cross_entropy=fused"),
    "or the loss": ("training.framework=compiled", "training.cross_entropy=chunked"),
    "rope, too": ("training.framework=transformers_compiled", "training.cross_entropy=chunked"),
}
SMALL_BATCH = ("training.global_batch_size=16", "training.micro_batch_size=1", "training.recompute=none")


@pytest.mark.parametrize("row", PAGE_ROWS)
def test_the_pages_numbers_are_the_simulators(row: str) -> None:
    page = (ROOT / "docs" / "fused_kernels.md").read_text("utf-8").splitlines()
    cells = next(line for line in page if line.startswith(f"| {row}")).split("|")[2:6]
    found = []
    for more in (SMALL_BATCH, ()):
        file = ROOT / "scenarios" / "kernels_eager_llama8b.yaml"
        result = simulate(load_scenario(file, [*more, *PAGE_ROWS[row]])).result
        found += [result["step_time_s"], result["peak_memory_bytes"] / 2**30]
    assert [float(cell.split()[0]) for cell in cells] == pytest.approx(found, rel=0.02)
