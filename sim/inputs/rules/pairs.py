"""Rules of layouts for steps over pairs of answers (`training.preference`)."""

from __future__ import annotations

from typing import Protocol

from sim.inputs.training_config import Training
from sim.inputs.yaml_input import KeyPath


class Pairs(Protocol):
    """What these rules ask of `sim.inputs.rules.sizes.Sizes`."""

    @property
    def training(self) -> Training | None: ...

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def cp(self) -> int: ...

    @property
    def pp(self) -> int: ...


def pairs(s: Pairs) -> tuple[KeyPath, str] | None:
    """Both answers of a pair are in one micro-batch."""
    t = s.training
    if t is None or t.preference is None or t.reads_others or s.micro_batch_size % 2 == 0:
        return None
    found = f"found {s.micro_batch_size}; with training.preference a pair is two sequences, so it must be even"
    return ("training", "micro_batch_size"), found


def whole_pairs(s: Pairs) -> tuple[KeyPath, str] | None:
    """A pair's log-probabilities are sums over whole sequences, and a reference runs on the ranks of one stage."""
    t = s.training
    if t is None or t.preference is None:
        return None
    if s.cp > 1:
        why = "a loss over pairs needs whole sequences on a rank: cp 1"
        return ("parallelism", "cp"), f"found {s.cp}; {why}"
    if s.pp > 1 and t.reads_others:
        return (
            "parallelism",
            "pp",
        ), f"found {s.pp}; loss kto, which also reads answers that it does not learn from, needs pp 1"
    if s.pp > 1 and t.runs_reference:
        why = f"a reference (training.preference.reference {t.reference}) is simulated without pipeline stages"
        return ("parallelism", "pp"), f"found {s.pp}; {why}: pp 1, or reference precomputed or none"
    return None
