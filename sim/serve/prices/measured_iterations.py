"""Prices of an iteration's parts that were measured in a real engine."""

from __future__ import annotations

from sim.prices.cost import REPEAT_UNCERTAINTY
from sim.prices.serving_parts import MeasuredParts
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.operator_prices import PricedProgram


def priced_as_measured(measured: MeasuredParts, key: Key, layers: int, slowdown: float) -> PricedProgram:
    """Price a part by a real engine's measured parts, which hold the embedding in those of the model's `layers`;
    `slowdown`: how many times as long this rank takes."""
    seconds = 0.0
    if key.work is Work.PREFILL:
        seconds = measured.core("prefill", key.a, key.a + key.b) * key.c
    elif key.work is Work.DECODE and key.c > 1:
        seconds = measured.check(key.a, key.b, key.c)
    elif key.work is Work.DECODE:
        seconds = measured.core("decode", key.a, key.b)
    elif key.work is Work.LAYER:
        seconds = measured.rest(key.a) / layers
    elif key.work is Work.HEAD:
        seconds = measured.head(key.a)
    seconds *= slowdown
    return PricedProgram(seconds, 0.0, {(key.work.value, "measured", REPEAT_UNCERTAINTY): seconds})
