"""One colour and one name for each kind of span and each category of memory, on every page.

Kinds take Okabe and Ito's colours, memory Paul Tol's "muted" ones: both can be told apart with any common
colour blindness, and no colour means a kind in one plot and a category in the other.
Sources: https://jfly.uni-koeln.de/color, https://personal.sron.nl/~pault.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class Style(NamedTuple):
    """Hold the colours and the name of a kind of span."""

    label: str
    fill: str
    text: str  # a colour readable on `fill`


INK, FAINT, GRID = "#1b2733", "#5b6875", "#e3e8ee"  # of text, of lesser text, of lines on a light page
BAD = "#b3261e"  # a limit, and what is beyond it
GREY = "#a3a9b3"
# Okabe and Ito's.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
OCHRE = "#8a6d00"  # ORANGE, dark enough for lines and text
_LIGHT = "#ffffff"

_INKS = {"light": _LIGHT, "dark": INK}
_TABLE = json.loads(Path(__file__).with_name("kinds.json").read_text("utf-8"))  # label, fill, and the text's ink
KINDS: dict[str, Style] = {kind: Style(label, fill, _INKS[ink]) for kind, (label, fill, ink) in _TABLE.items()}
SERVING_KINDS = ("PREFILL", "MIXED", "DECODE")
PARTS = {  # of a step's time, or of a replica's
    "useful": BLUE,
    "below_peak": "#7fb2d6",
    "recompute": "#f0e442",
    "optimizer": PURPLE,
    "communication": VERMILION,
    "bubble": "#aab4bf",
    "teacher": "#5d3a9b",
    "other": "#d5dbe1",
    "idle": "#d5dbe1",
}
MEMORY: dict[str, Style] = {
    "parameters": Style("Parameters", "#332288", _LIGHT),
    "gradients": Style("Gradients", "#88ccee", INK),
    "optimizer": Style("Optimizer state", "#44aa99", INK),
    "activations": Style("Activations", "#ddcc77", INK),
    "buffers": Style("Buffers", "#cc6677", INK),
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
    return KINDS.get(kind) or Style(kind.replace("_", " ").capitalize(), "#9aa3ad", INK)


def part_colour(key: str) -> str:
    """The colour of a part of a step's time (`sim.results.losses`); a kind of span has its own."""
    return PARTS.get(key) or style_of(key).fill


def in_order(kinds: tuple[str, ...]) -> list[str]:
    """Kinds as legends list them: known ones in the order above, then the others."""
    return [k for k in KINDS if k in kinds] + sorted(k for k in kinds if k not in KINDS)
