"""Kernels whose instructions were counted in their machine code, beside the bytes they move."""

from __future__ import annotations

import re
import subprocess
import sys
from math import hypot
from pathlib import Path

import pytest

from sim.core.program import Compute
from sim.inputs.scenario import Scenario
from sim.models.layer import layer_block
from sim.prices.instructions import STARTED_PER_CLOCK, with_instructions
from sim.prices.unvectorized import sm_clocks_per_s
from sim.simulation import simulate
from sim.variants.activations import ACTIVATIONS
from tests.sim.cases import scenario_with
from topology.presets import GPUS

SWIGLU = ACTIVATIONS["swiglu"].compiled
MOE = "mixtral-8x7b"
TOOL = Path(__file__).parents[3] / "tools" / "count_instructions.py"


def instructions(scenario: Scenario) -> dict[str, float]:
    """Return instructions for each element of the inner width, by operator of one layer."""
    block = layer_block(scenario, 0)
    items = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute)]
    return {i.name: i.instructions / i.shape[0] for i in items if i.instructions}


@pytest.mark.parametrize(
    ("framework", "model", "expected"),
    [
        # One matmul gives Megatron's gate and up, so its kernel joins their gradients; plain code has two.
        ("megatron", "llama3-8b", {"swiglu": SWIGLU.forward, "swiglu_backward": SWIGLU.joined}),
        ("compiled", "llama3-8b", {"swiglu": SWIGLU.forward, "swiglu_backward": SWIGLU.backward}),
        ("eager", "llama3-8b", {}),
        (
            "megatron",
            MOE,
            {
                "swiglu": SWIGLU.weighted,
                "swiglu_backward": SWIGLU.joined_weighted,
                "expert_weights_grad": SWIGLU.of_weight,
            },
        ),
    ],
)
def test_a_framework_that_compiles_its_activation(framework: str, model: str, expected: dict[str, float]) -> None:
    scenario = scenario_with({"framework": framework, "seq_len": 512, "global_batch_size": 8}, None, model)
    assert instructions(scenario) == pytest.approx(expected)


@pytest.mark.slow
def test_the_record_has_what_the_tool_counts() -> None:
    """In machine code that Triton makes here, for a GPU that is not here."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch", minversion="2.11")  # Inductor of other releases may write other kernels
    command = [sys.executable, str(TOOL), "--only", "swiglu"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = dict(re.split(r"  +", line) for line in printed)
    # Triton 3.9 of torch 2.15 writes a tenth fewer for one kernel than 3.8 of 2.14, of which the record is.
    weighted = 0.05 if torch.__version__.startswith("2.14.") else 0.12
    counts = {name: [float(x) for x in numbers.split(", ")] for name, numbers in found.items()}
    assert counts == {
        "swiglu": pytest.approx([SWIGLU.forward], rel=0.05),
        "swiglu backward": pytest.approx([SWIGLU.backward], rel=0.05),
        "swiglu backward, joined": pytest.approx([SWIGLU.joined], rel=0.05),
        "swiglu, weighted": pytest.approx([SWIGLU.weighted], rel=0.05),
        "swiglu backward, weighted": [
            pytest.approx(SWIGLU.joined_weighted, rel=weighted),
            pytest.approx(SWIGLU.of_weight, rel=0.05),
        ],
    }


def test_megatron_before_torch_2_2_is_not_counted() -> None:
    """Then `jit_fuser` was torch.jit.script (core/jit.py)."""
    training = {"framework": "megatron", "seq_len": 512, "global_batch_size": 8, "software_date": "2023-12"}
    assert instructions(scenario_with(training)) == {}


def test_bytes_and_instructions_that_take_as_long_hide_each_other_badly() -> None:
    clocks_per_s = 1e12
    alone_s = 3e9 / (STARTED_PER_CLOCK * clocks_per_s)
    assert with_instructions(0.0, 3e9, clocks_per_s) == pytest.approx(alone_s)
    assert with_instructions(alone_s, 3e9, clocks_per_s) == pytest.approx(2**0.5 * alone_s)
    assert with_instructions(100 * alone_s, 3e9, clocks_per_s) == pytest.approx(100 * alone_s, rel=1e-4)
    assert with_instructions(1.0, 3e9, 0.0) == 1.0  # a CPU, whose multiprocessors' clocks nobody counts


@pytest.mark.parametrize(("preset", "gpu", "longer"), [("dgx-h100", "h100-sxm", 1.4), ("dgx-b200", "b200-sxm", 2.2)])
def test_swiglus_backward_on_hopper_and_blackwell(preset: str, gpu: str, longer: float) -> None:
    """On an H100 it takes a third longer than its bytes, on a B200 more than twice as long."""
    training = {"framework": "megatron", "seq_len": 8192, "global_batch_size": 1}
    rows = simulate(scenario_with(training, None, cluster=preset)).result["time_by_operator"][0]["operators"]
    took_s = sum(row["seconds"] for row in rows if row["operator"] == "swiglu_backward")
    elements, spec = 32 * 8192 * 14336, GPUS[gpu]
    bytes_s = 10 * elements / (0.85 * spec.memory_bandwidth_bytes_per_s)
    counted_s = SWIGLU.joined * elements / (STARTED_PER_CLOCK * sm_clocks_per_s(spec))
    assert took_s == pytest.approx(hypot(bytes_s, counted_s), rel=0.01)
    assert took_s == pytest.approx(longer * bytes_s, rel=0.1)
