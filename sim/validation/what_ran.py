"""Read what a row's `program` says of the Hugging Face model that ran, in a scenario's words.

The row's scenario is then only the nearest description. The config names the model exactly, such as an activation that
Transformers writes in separate operators, and the modules are Transformers' own, as they are or as torch compiled them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.core.errors import InputError
from sim.inputs.huggingface import model_of_config
from sim.inputs.overrides import with_present_keys
from sim.inputs.training_config import USUAL_FRAMEWORK


def with_what_ran(scenario: dict[str, Any], row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A training row's scenario with the model and the framework of its `program`; as it is without one.

    >>> with_what_ran({"model": "gpt2", "training": {"seq_len": 8}}, {}, "")
    {'model': 'gpt2', 'training': {'seq_len': 8}}
    """
    program = row.get("program")
    config = program.get("huggingface_config") if isinstance(program, Mapping) else None
    if not isinstance(program, Mapping) or not isinstance(config, dict):
        return scenario
    training = with_present_keys(scenario["training"], ("training",))
    nearest, compiled = training.get("framework", USUAL_FRAMEWORK), bool(program.get("torch_compile"))
    if nearest == ("compiled" if compiled else USUAL_FRAMEWORK):
        training["framework"] = "transformers_compiled" if compiled else "transformers"
    try:
        model: Any = model_of_config(config, f"{where}.program.huggingface_config")
    except InputError:  # a family that scenarios have no words for: the description is all there is
        model = scenario.get("model")
    return {**scenario, "model": model, "training": training}
