"""Headline numbers for what an option asked: a measured step beside the simulated one, costs in money and energy."""

from __future__ import annotations

from sim.studies.anchor import Anchor
from sim.studies.spending import Bill, Spending
from sim.views.headline import Number
from sim.views.units import count, seconds


def anchor_numbers(found: Anchor) -> list[Number]:
    """The measured step beside the simulated one and, where something was changed, the changed step scaled to it."""
    where = "inside" if found.inside_interval else "outside"
    note = f"simulated {seconds(found.simulated_s)} ({found.error:+.1%}), measured {where} the 90 % interval"
    numbers = [Number("Measured step", seconds(found.measured_s), note, "" if found.inside_interval else "bad")]
    if found.anchored_step_time_s != found.measured_s:
        factor = found.measured_s / found.simulated_s
        rate = f"{count(found.anchored_tokens_per_s)} tokens/s; simulated × {factor:.3f}, measured ÷ simulated"
        numbers.append(Number("With --set, scaled", seconds(found.anchored_step_time_s), rate))
    return numbers


def spending_numbers(spent: Spending) -> list[Number]:
    """Cost and energy of a trillion tokens, a million output tokens, or the whole training, at the given price."""
    bills = (
        ("Cost per trillion tokens", spent.trillion_tokens),
        ("Cost per million output tokens", spent.million_output_tokens),
        ("Cost of the whole training", spent.whole_training),
    )
    return [Number(name, _money(bill.price), _bill_note(bill)) for name, bill in bills if bill is not None]


def _money(price: float) -> str:
    return f"{price:,.0f}" if price >= 100 else f"{price:.3g}"


def _bill_note(bill: Bill) -> str:
    hours = f"{bill.gpu_hours:,.0f}" if bill.gpu_hours >= 100 else f"{bill.gpu_hours:.3g}"
    kwh = bill.energy_kwh
    energy = f"{kwh / 1e3:,.0f} MWh" if kwh >= 1e5 else f"{kwh:,.0f} kWh" if kwh >= 100 else f"{kwh:.3g} kWh"
    return f"{hours} GPU hours; GPUs take {energy} at their power limit"
