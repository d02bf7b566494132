"""One colour and one name for each kind of span and each category of memory, on every page.

Kinds take Okabe and Ito's colours, memory Paul Tol's "muted" ones: both can be told apart with any common
colour blindness, and no colour means a kind in one plot and a category in the other.
Sources: https://jfly.uni-koeln.de/color, https://personal.sron.nl/~pault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class Style(NamedTuple):
    """How a kind of span is drawn and named."""

    label: str
    fill: str
    text: str  # a colour readable on `fill`


_LIGHT, _DARK = "#ffffff", "#1b2733"

KINDS: dict[str, Style] = {
    "F": Style("Forward", "#0072b2", _LIGHT),
    "B": Style("Backward", "#009e73", _DARK),
    "W": Style("Weight gradient", "#f0e442", _DARK),
    "F+B": Style("Forward and backward", "#00869b", _LIGHT),
    "OPTIMIZER": Style("Optimizer", "#cc79a7", _DARK),
    "TEACHER": Style("Teacher forward", "#5d3a9b", _LIGHT),
    "GENERATE": Style("Teacher writes", "#5d3a9b", _LIGHT),
    "PREFILL": Style("Prefill", "#0072b2", _LIGHT),
    "DECODE": Style("Decode", "#009e73", _DARK),
    "MIXED": Style("Prefill and decode", "#56b4e9", _DARK),
    "SEND_F": Style("Send activations", "#56b4e9", _DARK),
    "RECV_F": Style("Receive activations", "#b5dcf3", _DARK),
    "SEND_B": Style("Send gradients", "#5fc4a6", _DARK),
    "RECV_B": Style("Receive gradients", "#b8e3d6", _DARK),
    "ALL_REDUCE": Style("All-reduce", "#d55e00", _DARK),
    "ALL_GATHER": Style("All-gather", "#e69f00", _DARK),
    "REDUCE_SCATTER": Style("Reduce-scatter", "#8c3d00", _LIGHT),
    "ALL_TO_ALL": Style("All-to-all", "#7b3294", _LIGHT),
    "SEND_RECV": Style("Ring exchange", "#b2abd2", _DARK),
    "WAIT": Style("Waiting for another rank", "#c0c8d0", _DARK),
    "OFFLOAD": Style("Offload to host", "#6b7280", _LIGHT),
    "RELOAD": Style("Reload from host", "#a3a9b3", _DARK),
    "SWAP_OUT": Style("Swap out to host", "#6b7280", _LIGHT),
    "SWAP_IN": Style("Swap in from host", "#a3a9b3", _DARK),
    "GENERATE_ANSWERS": Style("Answers", "#009e73", _DARK),
    "REWARD": Style("Reward", "#f0e442", _DARK),
    "LOGPROBS": Style("Log-probabilities", "#56b4e9", _DARK),
    "REFERENCE": Style("Reference policy", "#b2abd2", _DARK),
    "UPDATE": Style("Training", "#0072b2", _LIGHT),
    "WEIGHTS": Style("New weights", "#d55e00", _DARK),
    "HOST_COPY": Style("Copies to and from the host", "#a3a9b3", _DARK),
    "KV_TRANSFER": Style("Computed prompt from prefill", "#d55e00", _DARK),
}
COMPUTE_KINDS = ("F", "B", "W", "F+B", "OPTIMIZER")
SERVING_KINDS = ("PREFILL", "MIXED", "DECODE")
MEMORY: dict[str, Style] = {
    "parameters": Style("Parameters", "#332288", _LIGHT),
    "gradients": Style("Gradients", "#88ccee", _DARK),
    "optimizer": Style("Optimizer state", "#44aa99", _DARK),
    "activations": Style("Activations", "#ddcc77", _DARK),
    "buffers": Style("Buffers", "#cc6677", _DARK),
}
SERVING_MEMORY: dict[str, Style] = {
    "parameters": MEMORY["parameters"]._replace(label="Weights"),
    "activations": MEMORY["activations"]._replace(label="KV cache"),
    "buffers": MEMORY["buffers"],
}


def memory_styles(scenario: Scenario) -> dict[str, Style]:
    """The categories of memory in a result, bottom to top; a serving workload's cache stands as activations."""
    return MEMORY if scenario.inference is None else SERVING_MEMORY


def style_of(kind: str) -> Style:
    """The style of a kind; one without an entry is grey, under its own name."""
    return KINDS.get(kind) or Style(kind.replace("_", " ").capitalize(), "#9aa3ad", _DARK)


def in_order(kinds: tuple[str, ...]) -> list[str]:
    """Kinds as legends list them: known ones in the order above, then the others."""
    return [k for k in KINDS if k in kinds] + sorted(k for k in kinds if k not in KINDS)
