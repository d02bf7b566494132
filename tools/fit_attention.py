"""Print the coefficients of fused attention, fitted to every second row of published tables, with the error on the
others: `python tools/fit_attention.py flash_attention.json b200_kernels.json`. They go into profile_coefficients.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent.parent))

from sim.flash import flash_seconds
from sim.published.kernel_rows import _MATMULS_AND_ATTENTION, IMPLEMENTATIONS, UNFUSED
from sim.published.tables import Row, read_table
from topology.presets import GPUS

FORWARD_SHARE = 0.85  # backward by forward: what FlashAttention-2's H100 rows of both kinds say together


def seconds(row: Row, p: np.ndarray, gpu: str) -> float:
    """`p`: logs of e64, e128, e256, ramp, share."""
    names = [f"x_efficiency_{d}" for d in (64, 128, 256)] + ["x_ramp_tokens", "x_backward_share"]
    values = dict(zip(names, np.exp(p), strict=True))
    items = [
        type(i)("x", *[getattr(i, f) for f in i.__slots__[1:]])
        for i in _MATMULS_AND_ATTENTION[row.data["op"]](row.data)
    ]
    peak = GPUS[gpu].peak_flops_per_s["bf16"]
    return sum(flash_seconds(i, GPUS[gpu], peak, lambda n, d: float(values.get(n, d))) or 0.0 for i in items)


def main() -> None:
    groups: dict[tuple[str, str], list[Row]] = {}
    for path in sys.argv[1:]:
        for row in read_table(path).rows:
            if "attention" in str(row.data.get("op")) and row.data.get("impl") not in UNFUSED:
                name = str(row.data.get("impl", "attention"))
                gpu = str(row.scenario["calibration"])
                groups.setdefault((gpu, IMPLEMENTATIONS.get(name, name)), []).append(row)
    for (gpu, name), rows in sorted(groups.items()):
        start = np.log([0.5, 0.6, 0.6, 100.0, FORWARD_SHARE])
        width = np.array([1.0, 1.0, 0.2, 1.0, 0.05 if name != "attention" else 1.0])

        def errors(p: np.ndarray, which: list[Row], gpu: str = gpu) -> np.ndarray:
            return np.array([np.log(seconds(r, p, gpu) / r.measured["seconds"]) for r in which])

        found = least_squares(
            lambda p, rows=rows, start=start, width=width: np.concatenate(
                [errors(p, rows[::2]) / 0.05, (p - start) / width]
            ),
            start,
            loss="soft_l1",
        )
        off = np.abs(np.expm1(errors(found.x, rows[1::2])))
        print(
            gpu,
            name,
            np.round(np.exp(found.x), 3).tolist(),
            f"rows not fitted: median {np.median(off):.1%}, 95th percentile {np.quantile(off, 0.95):.1%}",
        )


if __name__ == "__main__":
    main()
