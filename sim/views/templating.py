"""HTML from the Jinja2 templates in `sim/views/templates`: everything is escaped, units are filters.

Jinja2 is loaded where a page is written, and nowhere else.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sim.core.units import change_percent, count, n_bytes, percent, ranks_text, rate, seconds
from sim.views.palette import part_colour, style_of

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@cache
def environment() -> Environment:
    """The templates with their filters. A name that a template does not know is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("sim.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    units = {f.__name__: f for f in (count, n_bytes, percent, rate, seconds)}
    found.filters |= {**units, "ranks": ranks_text, "marked": marked, "signed": signed}
    found.filters |= {"style_of": style_of, "part_colour": part_colour}
    return found


def render(template: str, **values: Any) -> str:
    """A whole template."""
    return environment().get_template(template).render(values)


def fragment(macro: str, *values: Any) -> str:
    """A piece of the explorer's page."""
    return str(getattr(environment().get_template("explorer.html").module, macro)(*values))


def marked(text: str) -> Markup:
    """Escaped text in which `back-quoted` words are code."""
    from markupsafe import Markup, escape

    pieces = escape(text).split("`")
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(p) if i % 2 else p for i, p in enumerate(pieces))


def signed(error: float | None) -> str:
    """An error with its sign, or a dash where there is none.

    >>> signed(-0.2), signed(None)
    ('−20.0 %', '–')
    """
    return "–" if error is None else change_percent(error)
