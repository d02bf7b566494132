"""Draws layouts of two ranks that can be run for real.

Keys are drawn by themselves, so that their combinations are those that nobody thought of.
"""

from __future__ import annotations

import random
from typing import Any

from calibrate.real_steps.runnable import check_runnable
from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.schedules import FORMS
from tests.real.conftest import small

SEED, DRAWN = 20_261_201, 240
QUICK = 6  # of these, in `test_quick.py`
AXES = ({"pp": 2}, {"dp": 2}, {"tp": 2}, {"cp": 2})
LAYOUT: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(FORMS),
    "zero": (0, 1, 2, 3),
    "sp": (False, True),
    "dp_sync": ("after_backward", "per_parameter", "bucketed", "reduce_broadcast"),
    "cp_method": ("ring", "all_gather", "all_to_all"),
    "cp_split": ("contiguous", "zigzag", "striped"),
    "tp_overlap": ("none", "wgrad", "full"),
    "accumulate_unsharded": (False, True),
    "reshard_after_forward": (False, True),
    "layers_per_stage": (None, [3, 1], [4, 0]),
}
MODEL: dict[str, tuple[Any, ...]] = {
    "tied_embeddings": (False, True),
    "dropout": (0.0, 0.1),
    "positions": ("none", "learned", "rope"),
    "kv_heads": (1, 2, 4),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "swiglu", "relu2"),
    "bias": (False, True),
    "attention": ("unfused", "fused"),
    "recompute": ("none", "selective", "selective_op", "full"),
}


def drawn() -> dict[str, dict[str, Any]]:
    """Return scenarios that can be run for real, the same in every run, by what was drawn for each."""
    draw, found = random.Random(SEED), dict[str, dict[str, Any]]()
    for _ in range(DRAWN):
        axis = draw.choice(AXES)
        layout = {**axis, **{k: draw.choice(v) for k, v in LAYOUT.items() if draw.random() < 0.3}}
        if "pp" in axis:
            layout["schedule"] = draw.choice(LAYOUT["schedule"])
        model = {key: draw.choice(values) for key, values in MODEL.items() if draw.random() < 0.4}
        scenario = small(layout, draw.choice((1, 2, 4)), **model)
        try:
            check_runnable(parse_scenario(scenario), "drawn")
        except InputError:
            continue
        found[", ".join(f"{k} {v}" for k, v in (layout | model).items())] = scenario
    return found
