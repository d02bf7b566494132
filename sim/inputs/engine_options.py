"""The `engine` section of a scenario."""

from typing import Literal

from sim.inputs.input_source import UserInput


class EngineOptions(UserInput):
    """Options of the simulation of a step. `collectives`: each as one task of its closed form's seconds, or as the
    messages of its ring, tree or exchange."""

    collectives: Literal["closed_form", "messages"] = "closed_form"
