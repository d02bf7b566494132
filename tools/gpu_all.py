"""Runs all measurements of a GPU and writes them to one folder.

    python tools/gpu_all.py FOLDER [--list] [--dry-run] [--only NAME …]

It needs one CUDA GPU (torch with CUDA, nvidia-ml-py for the power loops). The measurements, in this order:
`calibrate.run` of the node, with fused and unfused kernels; loops of single kernels with power and clocks; every
scenario of scenarios/cuda as a real run, with two ranks on one GPU by NCCL's multi-rank mode; torch's own DDP, FSDP2,
tensor parallelism and pipelining beside the bundled ones; a Transformers model, full and with adapters; the node's
topology. Files that FOLDER already has are not measured again. At the end each real run is compared with two
simulations, by the calibration between its steps and by that of `calibrate.run`.

`--dry-run` runs the same commands and comparisons on CPU ranks, with two layers of each model and one step. It takes
minutes and finds mistakes before a GPU is rented. Power loops need a GPU and are left out. Its results say nothing
about any machine, so give it another folder.

Exit codes: 0 all done, 1 something failed (the rest still ran), 2 no GPU, a missing package or a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800.0
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # ranks that share a GPU; NCCL 2.30.7 or later
PACKAGES = {"pynvml": "nvidia-ml-py", "transformers": "transformers", "peft": "peft"}  # by module
SMALL = {  # overrides of each scenario in a dry run
    "cluster": "cpu-host",
    "model.layers": "2",
    "model.vocab": "512",
    "training.seq_len": "64",
    "training.precision": "fp32",
    "training.grad_dtype": "fp32",
}
TORCH_BESIDE = ("dp2_bucketed", "1f1b_pp2", "tp2_sp", "zero3_dp2")  # of scenarios/cuda


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement: its file in the folder, its command (OUT stands for the file), and its environment."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # keys of PACKAGES

    def dry(self) -> Work | None:
        """Return a quick version on a CPU; None if the measurement needs a GPU."""
        if self.name == "power":
            return None
        command = tuple("cpu" if word == "cuda" else word for word in self.command)
        if "calibrate.run" in command:
            command += ("--quick", "--only", "launch", "--only", "sharing")
        if "calibrate.measure" in command:
            # The Transformers model is small, and its size is in its own file.
            of_file = "--huggingface" in command
            keys = {k: v for k, v in SMALL.items() if not (of_file and k.startswith("model."))}
            command += (*overrides(keys), "--steps", "1", "--budget", "2")
        return Work(self.name, command, packages=self.packages)

    @property
    def missing(self) -> list[str]:
        """Return the packages that must be installed before it can run."""
        return [PACKAGES[p] for p in self.packages if find_spec(p) is None]


def overrides(keys: dict[str, str]) -> tuple[str, ...]:
    """Return the options that set these keys."""
    return tuple(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))


def works() -> list[Work]:
    """Return all measurements, the most useful first."""
    out = [
        Work("node", ("-m", "calibrate.run", "--device", "cuda", "--out", "OUT")),
        Work("power", ("tools/gpu_power.py", "measure", "OUT"), packages=("pynvml",)),
    ]
    for path in sorted((ROOT / "scenarios" / "cuda").glob("*.yaml")):
        file = str(path.relative_to(ROOT))
        out.append(Work(path.stem, ("-m", "calibrate.measure", file, "--out", "OUT"), SHARING))
        if path.stem in TORCH_BESIDE:
            more = ("--torch", "--set", "training.precision=fp32", "--set", "training.grad_dtype=fp32")
            out.append(Work(f"torch_{path.stem}", ("-m", "calibrate.measure", file, "--out", "OUT", *more), SHARING))
    folder = "scenarios/huggingface"
    for name in ("sft_full", "sft_lora"):
        command = ("-m", "calibrate.measure", f"{folder}/{name}.yaml", "--huggingface", folder, "--out", "OUT")
        packages = ("transformers", "peft") if name == "sft_lora" else ("transformers",)
        command += overrides({"cluster": "dgx-h100"})
        out.append(Work(f"huggingface_{name}", command, packages=packages))
    return [*out, Work("topology", ("-m", "calibrate.topology", "--out", "OUT"))]


def gpu_name() -> str:
    """Return the GPU's name.

    Raises:
        SystemExit: 2, after one line, if there is no GPU.
    """
    try:
        import torch
    except ModuleNotFoundError:
        print("error: torch is not installed; pip install the project with its extra `real`", file=sys.stderr)
        raise SystemExit(2) from None
    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    return torch.cuda.get_device_name(0)


def measured(work: Work, folder: Path) -> bool:
    """Run the measurement unless its file exists; return whether the file exists now."""
    out = folder / f"{work.name}.json"
    if out.exists():
        print(f"{work.name}: exists", flush=True)
        return True
    words = [str(out) if word == "OUT" else word for word in work.command]
    print(f"{work.name}: {' '.join(words)}", flush=True)
    try:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | work.environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{work.name}: took more than {LIMIT_S:g} s", file=sys.stderr)
        return False
    return done.returncode == 0 and out.exists()


def compared(folder: Path, changed: tuple[str, ...] = ()) -> None:
    """Compare every real run with its simulation by both calibrations; `changed`: overrides of the runs' scenarios."""
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        scenario = ROOT / "scenarios" / "cuda" / f"{path.stem}.yaml"
        if run.get("format") != "measured-run/1" or not scenario.exists():
            continue
        for calibration in ((), ("--calibration", str(folder / "node.json"))):
            command = ["-m", "sim.compare", str(scenario), str(path), *calibration, *changed]
            subprocess.run([sys.executable, *command], cwd=ROOT)


def main() -> None:
    """Find the GPU, measure what is missing, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print what would be measured, without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="the same commands with small models, without a GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    args = parser.parse_args()
    wanted = [w for w in works() if args.only is None or w.name in args.only]
    unknown = sorted(set(args.only or ()) - {w.name for w in works()})
    if unknown:
        parser.error(f"--only: found {', '.join(unknown)}; allowed: {', '.join(w.name for w in works())}")
    if args.list:
        print("\n".join(f"{w.name}: {' '.join(w.command)}" for w in wanted))
        return
    if args.dry_run:
        wanted = [dry for w in wanted if (dry := w.dry()) is not None]
    else:
        print(gpu_name())
    missing = sorted({package for w in wanted for package in w.missing})
    if missing:
        print(f"error: missing packages; pip install {' '.join(missing)}, or leave out with --only", file=sys.stderr)
        raise SystemExit(2)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = [w.name for w in wanted if not measured(w, folder)]
    compared(folder, overrides(SMALL) if args.dry_run else ())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
