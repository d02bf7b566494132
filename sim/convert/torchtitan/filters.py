"""torchtitan's `filter_fqns`: names of linear layers that its converters leave in 16 bits.

A name leaves out every module whose full name it is part of (torchtitan/components/quantization: `module_filter_fn`).
"""

from __future__ import annotations

from itertools import takewhile

from sim.convert.settings import Settings
from sim.inputs.rules.layers_apart import IN_SIXTEEN_BITS

SECTIONS = {"fp8": "float8", "mxfp8": "mx"}  # of a precision
HEADS = ("output", "lm_head")  # the output matrix, by release
ALWAYS = (*HEADS, "router.gate", "gate")  # what is simulated in 16 bits anyhow


def filtered_layers(s: Settings, precision: str, layers: int) -> dict[str, int]:
    """Whole layers at either end that stay in 16 bits, as keys of `training`; a note names what else is left out."""
    name = f"{SECTIONS.get(precision)}.filter_fqns"
    given = s.values.get(name)
    words = s.take(name).split(",") if isinstance(given, str) else s.listed(name)
    if precision == "fp8" and not any(word in head for word in words for head in HEADS):
        s.notes.append(
            f"the output matrix is simulated in 16 bits; torchtitan multiplies it in 8 unless {name} names it"
        )
    whole = [any(word in f"layers.{n}." for word in words) for n in range(layers)]
    start = len([*takewhile(bool, whole)])
    end = len([*takewhile(bool, whole[::-1])]) if start < layers else 0
    parts = [w for w in words if not any(w in f"layers.{n}." for n in range(layers)) and w not in ALWAYS]
    parts += [f"layers.{n}" for n in range(start, layers - end) if whole[n]]
    if parts:
        s.notes.append(f"{name}: simulated in 8 bits all the same: {', '.join(parts)}")
    return {key: n for key, n in zip(IN_SIXTEEN_BITS, (start, end), strict=True) if n}
