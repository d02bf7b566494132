"""Simulator of LLM training and inference steps. Never imports torch or calibrate.

In a notebook or a program:

>>> from sim import parse_scenario, simulate
>>> step = simulate(parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100",
...                                 "training": {"seq_len": 4096, "global_batch_size": 8}}))
>>> 0 < step.result["mfu"] < 1
True

`import sim` itself loads nothing: names are fetched when they are asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
    from sim.serve.serving import simulate_serving
    from sim.simulation import simulate

__all__ = ["Scenario", "load_scenario", "parse_scenario", "simulate", "simulate_serving"]
_HOMES = {"simulate": "sim.simulation", "simulate_serving": "sim.serve.serving"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "sim.inputs.scenario")), name)


def _interrupted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv and sys.argv[0] == "-m":  # `python -m sim.run`: Ctrl-C while a command's modules load is no bug to trace
    sys.excepthook = _interrupted
