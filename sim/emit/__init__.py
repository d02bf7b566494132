"""Write the flags that start a scenario's layout in another trainer, or the command line of a serving engine.

A scenario that the trainer or engine cannot run in the same way is refused, with all reasons at once. Small
differences are named in a comment of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.emit.common import Emission, Reason
from sim.emit.megatron import Megatron
from sim.emit.torchtitan import Titan
from sim.emit.torchtitan_python import TitanPython
from sim.inputs.scenario import Scenario
from sim.inputs.trainer_names import MEGATRON_SCHEDULES, TITAN_SCHEDULES
from sim.models.balance import with_balanced_stages


class Trainer(Struct, frozen=True, dict=True):
    """Hold a trainer that flags are written for, and the limits of a search for it.

    `unsaid`: the trainer's values of keys that a scenario leaves out. `only`: values of a layout's fields that it has.
    `sums_in_pipelines`: its pipelines reduce sharded gradients once a step, its other layouts once a micro-batch
    (`accumulate_unsharded`).
    """

    writer: type[Emission]
    unsaid: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    sums_in_pipelines: bool = False


_TITAN = Trainer(
    Titan,
    {"training.param_dtype": "fp32"},
    {
        "schedule": tuple(TITAN_SCHEDULES),
        "recompute": ("none", "selective_op", "full"),
        "zero": (0, 3),
    },
    sums_in_pipelines=True,
)
SERVERS = ("vllm", "sglang", "trtllm", "dynamo")
TRAINERS = {
    "torchtitan": _TITAN,
    "torchtitan-python": replace(_TITAN, writer=TitanPython),
    "megatron": Trainer(
        Megatron,
        {"training.framework": "megatron", "parallelism.tp_overlap": "wgrad"},
        {"schedule": MEGATRON_SCHEDULES, "recompute": ("none", "selective", "full")},
    ),
}


def emit(scenario: Scenario, trainer: str, where: str | Path = "") -> str:
    """Return the text of the flags. Errors begin with `where`, the scenario's file; by default with its name.

    Raises:
        InputError: for an unknown trainer or engine, another workload, or what it cannot express.
    """
    where = where or scenario.name
    if trainer not in TRAINERS and scenario.inference is not None and scenario.training is None:
        return _of_serving(scenario, trainer, where)
    if trainer not in TRAINERS:
        for_serving = "; this one serves requests: a scenario with inference only" if trainer in SERVERS else ""
        raise InputError(f"--emit: found '{trainer[:40]}'; must be one of {', '.join(TRAINERS)}{for_serving}")
    if scenario.training is None:
        raise InputError(f"{where}: training: is missing; --emit {trainer} writes flags for training only")
    if scenario.rl is not None:
        raise InputError(f"{where}: rl: --emit writes no flags for a step of reinforcement learning")
    text, reasons = _written(scenario, trainer)
    if reasons:
        name = TRAINERS[trainer].writer.TRAINER
        said = f"--emit {trainer}: flags of {name} cannot express this scenario"
        raise InputError(f"{where}: {said}:{_listed(reasons)}")
    return text


def _of_serving(scenario: Scenario, server: str, where: str | Path) -> str:
    if server not in SERVERS:
        raise InputError(f"--emit: found '{server[:40]}'; for serving must be one of {', '.join(SERVERS)}")
    from sim.emit.serving import emit_serving  # the converter, which reads back what was written

    text, reasons = emit_serving(scenario, server)
    if reasons:
        raise InputError(f"{where}: --emit {server}: cannot express this scenario:{_listed(reasons)}")
    return text


def check_every_layout(scenario: Scenario, trainer: str, where: str | Path) -> None:
    """Check, before a search, that the trainer can run the training scenario of the file `where` in any layout.

    Raises:
        InputError: if the trainer lacks something of the model or of its training.
    """
    reasons = [r for r in _written(scenario, trainer)[1] if r.of_every_layout]
    if reasons:
        name = TRAINERS[trainer].writer.TRAINER
        said = f"--for {trainer}: {name} cannot run this scenario in any layout"
        raise InputError(f"{where}: {said}:{_listed(reasons)}")


def reasons_against(scenario: Scenario, trainer: str) -> list[str]:
    """Return why the trainer cannot run a training scenario; empty if `emit` writes its flags."""
    return [reason.text for reason in _written(scenario, trainer)[1]]


def _listed(reasons: list[Reason]) -> str:
    return "".join(f"\n  - {reason.text}" for reason in reasons)


def _written(scenario: Scenario, trainer: str) -> tuple[str, list[Reason]]:
    scenario = with_balanced_stages(scenario)
    out = TRAINERS[trainer].writer(scenario, scenario.for_training)
    return out.build(), out.reasons
