"""Measured steps of Hugging Face models, simulated from their configs alone.

    python tools/described_and_measured.py

The rows of scenarios/measured/gpu_programs (H100) and scenarios/measured/gpu_programs_h200 whose config can be read.
Each is described as `framework: transformers`, or `transformers_compiled` where torch compiled it, and simulated with
the shipped profile of its GPU. A state-space layer that ran as plain torch code (falcon_h1) is described as its
library's kernel. The columns are the measured step, and how far the described step and peak are from the
measured ones. docs/models.md and docs/fine_tuning.md quote rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sim.convert.settings import ALL_IN_BF16  # noqa: E402
from sim.core.errors import InputError  # noqa: E402
from sim.inputs.overrides import merge  # noqa: E402
from sim.inputs.program_file import read_program  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402
from sim.validation.what_ran import with_what_ran  # noqa: E402

FOLDERS = ("gpu_programs", "gpu_programs_h200")
RECIPES = {"tensorwise": {"precision": "fp8"}, "rowwise": {"precision": "fp8", "fp8_recipe": "rowwise"}}


def attends_in_separate_operators(row: Any, program: Path) -> bool:
    """Whether the row asks for eager attention, or leaves the choice to a release of Transformers that took it: GPT-J
    had no fused attention in 5.17, has it in 5.24, and the captured program tells which ran."""
    asked = row.data["program"].get("attn_implementation")
    if asked is not None or not program.exists():
        return bool(asked == "eager")
    return not any("_scaled_dot_product_" in o.name for o in read_program(program).operators)


def described(row: Any, captured: Path) -> dict[str, Any]:
    """A row's scenario by what its program says of weights, attention, adapters and recomputation."""
    program = row.data["program"]
    training: dict[str, Any] = {"framework": "compiled"} if program.get("torch_compile") else {}
    training |= ALL_IN_BF16 if program.get("weights") == "bf16" else {"param_dtype": "fp32"}
    training |= {"attention": "unfused"} if attends_in_separate_operators(row, captured) else {}
    if program.get("weights") == "fp32" and program.get("autocast") is None:
        training["precision"] = "fp32"
    training |= RECIPES.get(str(program.get("float8")), {})
    if program.get("lora_rank"):
        training |= {"lora": {"rank": program["lora_rank"]}, "autocast": program.get("autocast") is not None}
    training |= {"recompute": "full"} if program.get("gradient_checkpointing") else {}
    return with_what_ran(merge(row.scenario, {"training": training}), row.data, row.id)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| program | GPU | measured | step | peak |\n|---|---|---:|---:|---:|")
    for folder in FOLDERS:
        stored = ROOT / "scenarios" / "measured" / folder
        for row in read_table(stored / "table.json").rows:
            if "step_time_s" not in row.measured or "huggingface_config" not in row.data["program"]:
                continue
            try:
                result = simulate(parse_scenario(described(row, stored / "programs" / f"{row.id}.json.gz")))
            except InputError:  # a family or a step that scenarios have no words for
                continue
            step = result.step_time_s / row.measured["step_time_s"] - 1
            peak = result.outcome.peak_memory_bytes / row.measured["peak_memory_bytes"] - 1
            gpu = result.scenario.cluster.gpu.name
            print(f"| {row.id} | {gpu} | {row.measured['step_time_s'] * 1e3:.1f} ms | {step:+.1%} | {peak:+.1%} |")


if __name__ == "__main__":
    main()
