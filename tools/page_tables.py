"""Puts a table that a tool prints into its page."""

from __future__ import annotations


def marks(name: str) -> tuple[str, str]:
    """Return the comments between which a page has the table of a name."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def table_in(text: str, name: str) -> str:
    """Return the table that a page has now."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0].strip("\n")


def with_table(text: str, name: str, table: str) -> str:
    """Return the page's text with another table."""
    begin, end = marks(name)
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
