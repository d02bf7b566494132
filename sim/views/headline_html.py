"""The headline numbers of any result as a table for a notebook, its warnings below.

Styles stand in the elements and nothing is fetched or run, so that a saved notebook shows the same everywhere. Colours
of text are the notebook's own, light or dark; where a viewer takes styles away, plain tables are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.views.headline import headline, layout_line
from sim.views.page import escape

LEFT = "text-align:left;padding:2px 14px 2px 0"
_MOODS = {"bad": ";color:#c62828", "good": ";color:#2e7d32"}


def result_html(name: str, result: Mapping[str, Any], more: str = "") -> str:
    """The numbers of any result, such as a serving workload's, and `more` below them."""
    notes = "".join(f'<p style="margin:4px 0;color:#c77700">{escape(w)}</p>' for w in result.get("warnings") or ())
    return (
        '<div style="max-width:62em">'
        f'<p style="margin:0 0 4px"><b>{escape(name)}</b> · {escape(layout_line(result))}</p>'
        f"{_numbers(result)}{notes}{more}</div>"
    )


def _numbers(result: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th style="{LEFT}">{escape(n.name)}</th><td style="{LEFT}"><b>{escape(n.value)}</b></td>'
        f'<td style="{LEFT}{_MOODS.get(n.mood, "")}">{escape(n.note)}</td></tr>'
        for n in headline(result)
    )
    return f'<table style="margin:0"><tbody>{rows}</tbody></table>'
