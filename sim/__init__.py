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

if getattr(sys, "argv", [""])[:1] == ["-m"] or sys.argv[0].endswith(("/stepsim", "\\stepsim.exe")):
    from sim.core.first_moments import ctrl_c_ends

    ctrl_c_ends()  # as a command: of a module that is run, `argv` says -m while its package loads

if TYPE_CHECKING:
    from sim.commands.functions import convert_file, difference_of, search_layouts, sweep_values
    from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
    from sim.rl.simulation import simulate_rl
    from sim.serve.simulation import simulate_serving
    from sim.simulation import simulate

_FUNCTIONS = ("convert_file", "difference_of", "search_layouts", "sweep_values")
__all__ = [
    "Scenario",
    "convert_file",
    "difference_of",
    "load_scenario",
    "parse_scenario",
    "search_layouts",
    "simulate",
    "simulate_rl",
    "simulate_serving",
    "sweep_values",
]
_HOMES = {
    **dict.fromkeys(_FUNCTIONS, "sim.commands.functions"),
    "simulate": "sim.simulation",
    "simulate_rl": "sim.rl.simulation",
    "simulate_serving": "sim.serve.simulation",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from sim.core.version import version_words

        return version_words()
    if name not in __all__:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "sim.inputs.scenario")), name)
