"""Compare measured prefill attention over heads of 64 with that over heads of 128, on Blackwell.

    python tools/narrow_heads.py

The kernels are those of serving libraries in the shipped profiles. Both calls of a pair have the same batch, heads and
tokens; the ratio is that of their FLOP/s. `attention_efficiency_64` of the Blackwell profiles is the median of the four
GPUs' medians times `attention_efficiency_128` (tools/attention_coefficients.py).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from itertools import product

from sim.core.operator_kinds import shape_flops
from sim.core.program import Compute, Phase
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS

PROFILES = ("b200-sxm", "gb200", "b300-sxm", "gb300")
HEADS = ((32, 8), (64, 8), (32, 32), (16, 16), (64, 4), (32, 4))  # of queries, of keys
TOKENS, BATCHES = (2048, 4096, 8192, 16384), (1, 2, 4, 8)


def ratios(name: str) -> Iterator[float]:
    """Return the speed of heads of 64 ÷ that of heads of 128, of every pair of calls that were both measured."""
    costs = Costs(load_profile(name), GPUS[name])
    for (heads, kv_heads), tokens, batch in product(HEADS, TOKENS, BATCHES):
        found = []
        for d in (64, 128):
            shape = (batch, heads, kv_heads, tokens, tokens, d, d, 1)
            flops = shape_flops("attention_forward", shape)
            op = Compute("attention", "attention_forward", shape, "bf16", flops, 1.0, Phase.FORWARD, served=True)
            found.append(costs.compute(op))
        if all(cost.source == "measured" for cost in found):
            yield found[1].seconds / found[0].seconds / 2


def main() -> None:
    """Print the median of each GPU, and the median of these."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    own = {name: list(ratios(name)) for name in PROFILES}
    medians = {name: statistics.median(pairs) for name, pairs in own.items()}
    for name, pairs in own.items():
        print(f"{name}: {len(pairs)} pairs, median {medians[name]:.3f}")
    print(f"median of the medians: {statistics.median(medians.values()):.3f}")


if __name__ == "__main__":
    main()
