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

from sim.core.errors import InputError  # noqa: E402
from sim.inputs.overrides import merge  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402
from sim.validation.what_ran import with_what_ran  # noqa: E402

FOLDERS = ("gpu_programs", "gpu_programs_h200")
NARROW = {"param_dtype": "bf16", "grad_dtype": "bf16", "master_weights": False, "optimizer_dtype": "bf16"}
RECIPES = {"tensorwise": {"precision": "fp8"}, "rowwise": {"precision": "fp8", "fp8_recipe": "rowwise"}}


def described(row: Any) -> dict[str, Any]:
    """A row's scenario by what its program says of weights, adapters and recomputation."""
    program = row.data["program"]
    training: dict[str, Any] = {"framework": "compiled"} if program.get("torch_compile") else {}
    training |= NARROW if program.get("weights") == "bf16" else {"param_dtype": "fp32"}
    training |= {"attention": "unfused"} if program.get("attn_implementation") == "eager" else {}
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
        for row in read_table(ROOT / "scenarios" / "measured" / folder / "table.json").rows:
            if "step_time_s" not in row.measured or "huggingface_config" not in row.data["program"]:
                continue
            try:
                result = simulate(parse_scenario(described(row)))
            except InputError:  # a family or a step that scenarios have no words for
                continue
            step = result.step_time_s / row.measured["step_time_s"] - 1
            peak = result.outcome.peak_memory_bytes / row.measured["peak_memory_bytes"] - 1
            gpu = result.scenario.cluster.gpu.name
            print(f"| {row.id} | {gpu} | {row.measured['step_time_s'] * 1e3:.1f} ms | {step:+.1%} | {peak:+.1%} |")


if __name__ == "__main__":
    main()
