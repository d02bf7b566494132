"""The flags that start a scenario's layout in another trainer: torchtitan's TOML or Megatron-LM's arguments.

What a trainer cannot do like the scenario is refused, every reason at once; what it does a little differently stands
in a comment.
"""

from __future__ import annotations

from sim.core.errors import InputError
from sim.emit.megatron import Megatron
from sim.emit.torchtitan import Titan
from sim.inputs.scenario import Scenario
from sim.models.balance import with_balanced_stages

TRAINERS = {"torchtitan": Titan, "megatron": Megatron}


def emit(scenario: Scenario, trainer: str) -> str:
    """The text of the flags.

    Raises:
        InputError: for an unknown trainer, a workload that is no training, or a layout that the trainer lacks.
    """
    if trainer not in TRAINERS:
        raise InputError(f"--emit: found '{trainer[:40]}'; must be one of {', '.join(TRAINERS)}")
    if scenario.training is None:
        raise InputError(f"{scenario.name}: --emit: the scenario has no training section, and {trainer} trains")
    scenario = with_balanced_stages(scenario)
    out = TRAINERS[trainer](scenario, scenario.for_training)
    text = out.build()
    if out.reasons:
        shown = "".join(f"\n  - {reason}" for reason in out.reasons)
        raise InputError(f"{scenario.name}: --emit {trainer}: cannot be expressed:{shown}")
    return text
