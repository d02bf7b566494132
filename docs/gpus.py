"""`python -m docs.gpus`: write the table of GPUs in docs/gpus.md, from their files and the shipped profiles."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs.command_line import parser  # noqa: E402
from sim.inputs.calibration_input import profile_of  # noqa: E402
from sim.prices.profiles import load_profile  # noqa: E402
from topology.presets import GPU_SOURCES, GPUS  # noqa: E402
from topology.spec import GpuSpec  # noqa: E402

PAGE = ROOT / "docs" / "gpus.md"
BEGIN, END = "<!-- written by python -m docs.gpus -->\n", "<!-- end -->\n"
HEAD = "| GPU | memory GiB | TB/s | Tflop/s in 16 bits | in 8 | W | kernels | collectives in a node | documents |"
RULE = "|---|---:|---:|---:|---:|---:|---|---|---|"


def table() -> str:
    """All GPUs, a row each."""
    return "\n".join([HEAD, RULE, *(_row(gpu) for gpu in GPUS.values())]) + "\n"


def _row(gpu: GpuSpec) -> str:
    peaks = gpu.peak_flops_per_s
    sixteen, eight = (max((peaks.get(d, 0.0) for d in names), default=0.0) for names in (("bf16", "fp16"), ("fp8",)))
    kernels, collectives = _measured(gpu)
    figures = [
        f"{gpu.memory_bytes / 2**30:.0f}",
        f"{gpu.memory_bandwidth_bytes_per_s / 1e12:.4g}",
        f"{sixteen / 1e12:,.4g}",
        f"{eight / 1e12:,.{0 if eight >= 1e15 else 1}f}".removesuffix(".0") if eight else "",
        f"{gpu.power_limit_w:g}",
    ]
    # The document of most figures stands for the rest; the file has all of them.
    sources = list(GPU_SOURCES[gpu.name].values())
    usual = max(dict.fromkeys(sources), key=sources.count)
    return f"| `{gpu.name}` | {' | '.join(figures)} | {kernels} | {collectives} | {usual} |"


def _measured(gpu: GpuSpec) -> tuple[str, str]:
    """Where a GPU's kernels and its collectives within a node are from."""
    own, name = gpu.variant_of or gpu.name, profile_of(gpu)
    if name == "roofline":
        return name, "closed forms"
    profile = load_profile(name)
    if not profile.kernels:
        return "roofline with coefficients", "closed forms"
    sizes = sorted({each.ranks for each in profile.collectives}) if name == own else []
    ops = {each.op for each in profile.collectives}
    which = "all-reduces measured" if ops == {"all_reduce"} else "measured"
    groups = f"{which}: {', '.join(map(str, sizes))} GPUs" if sizes else "closed forms"
    if profile.reference != own:
        alike = gpu.same_multiprocessors(GPUS[profile.reference])
        return f"{'those' if alike else 'efficiencies'} of `{profile.reference}`", groups
    return "measured" if own == gpu.name else f"those of `{own}`", groups


def main() -> None:
    """Write the table into the page."""
    parser("docs.gpus", __doc__).parse_args()
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
