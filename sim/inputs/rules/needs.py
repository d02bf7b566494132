"""What a key's value needs beside it: pairs of a condition and its words, and the message on one that is not met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from sim.inputs.input_source import Problems, show
from sim.inputs.training_config import Training
from sim.inputs.yaml_input import KeyPath
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.records import FRAMEWORKS, framework_at, framework_of

Need: TypeAlias = tuple[bool, str]  # whether it is met, and what is needed
Has: TypeAlias = Callable[[Framework], bool]


def unmet(path: KeyPath, value: Any, needs: Iterable[Need]) -> Problems:
    """Return the problems of a key at `path` that has a value: one for each need that is not met.

    >>> list(unmet(("training", "fp8_output_proj"), True, [(True, "a GPU"), (False, "precision mxfp8")]))
    [(('training', 'fp8_output_proj'), 'found true; needs precision mxfp8')]
    """
    for met, what in needs:
        if not met:
            yield path, f"found {_written(value)}; needs {what}"


def needs_framework(t: Training, has: Has) -> Need:
    """Return the need of a framework whose record has a fact."""
    return (True, "") if has(framework_of(t)) else (False, frameworks_with(t, has))


def accumulates(framework: Framework) -> bool:
    """Tell whether a framework has Megatron-Core's linear layers, which add to kept gradients."""
    return framework.accumulates_in_matmul


def quantizes_by_engine(framework: Framework) -> bool:
    """Tell whether a framework quantizes with Transformer Engine."""
    return framework.quantizer == "te"


def frameworks_with(t: Training, has: Has) -> str:
    """Name the frameworks that have a fact on the training's `software_date`, or else those that have it today.

    >>> frameworks_with(Training(seq_len=1, global_batch_size=1), lambda framework: framework.captures_layers)
    'framework megatron, megatron_bridge or nemo'
    """
    then = [name for name in FRAMEWORKS if has(framework_at(name, t.software_date))]
    names = then or [name for name, framework in FRAMEWORKS.items() if has(framework)]
    named = f"framework {either(names)}"
    return named if then else f"a later training.software_date with {named}"


def either(names: Iterable[str]) -> str:
    """Join names of which one is needed.

    >>> either(["adamw", "sgd", "lion"]), either(["adamw"])
    ('adamw, sgd or lion', 'adamw')
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else show(value)
