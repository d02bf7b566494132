"""The table of schemes says what the simulator says; which rank lies where costs what the picture says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import load_scenario
from sim.simulation import simulate

ROOT = Path(__file__).parents[2]
ALONE = ("dp=1", "zero=0")
ROWS = {
    "plain data parallelism": ("zero=0",),
    "ZeRO-1": (),
    "ZeRO-2": ("zero=2",),
    "ZeRO-3 (FSDP)": ("zero=3",),
    "pipeline, 1F1B": (*ALONE, "pp=8"),
    "tensor and sequence": (*ALONE, "tp=8", "sp=true"),
    "context, ring": (*ALONE, "cp=8"),
}


def run(name: str, *layout: str) -> dict[str, float]:
    path = ROOT / "scenarios" / f"{name}.yaml"
    return simulate(load_scenario(path, [f"parallelism.{x}" for x in layout])).result  # type: ignore[return-value]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_simulators(name: str) -> None:
    lines = (ROOT / "docs" / "schemes.md").read_text("utf-8").splitlines()
    _, step, rate, memory, exposed = (
        c.strip(" ✗") for c in next(line for line in lines if line.startswith(f"| {name} |")).strip("|").split("|")
    )
    r = run("schemes_llama8b", *ROWS[name])
    assert float(step.removesuffix(" s")) == pytest.approx(r["step_time_s"], rel=0.03)
    assert float(rate.replace(",", "")) == pytest.approx(r["tokens_per_s_per_gpu"], rel=0.03)
    assert float(memory.removesuffix(" GiB")) == pytest.approx(r["peak_memory_bytes"] / 2**30, rel=0.03)
    assert float(exposed.removesuffix(" %")) == pytest.approx(100 * r["exposed_comm_s"] / r["step_time_s"], abs=0.5)


def test_tensor_parallelism_over_nodes_costs_more_than_any_other_dimension() -> None:
    seconds = {
        order: run("mesh_llama8b", f"rank_order={order}")["step_time_s"]
        for order in ("tp-cp-pp-dp", "tp-cp-dp-pp", "dp-pp-cp-tp")
    }
    assert seconds["dp-pp-cp-tp"] > 1.25 * seconds["tp-cp-pp-dp"]
    assert seconds["tp-cp-dp-pp"] != seconds["tp-cp-pp-dp"]
