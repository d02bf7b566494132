"""What a scenario's `engine` section may say."""

from typing import Literal

from sim.inputs.input_source import UserInput


class EngineOptions(UserInput):
    """How a step is simulated. `collectives`: each as one task of its closed form's seconds, or as the messages of its
    ring, tree or exchange."""

    collectives: Literal["closed_form", "messages"] = "closed_form"
