"""Values of a script: texts, in which a character stands for each part that the script does not say.

A value is a plain `str`. What is not known of it (a variable of the environment, the output of a program, what one of
two branches assigned) is one character of Unicode's private planes, so that texts are joined, kept and split as ever,
and everything that looks into one asks `known` first. The plane says whether quotes held the value together.
"""

from __future__ import annotations

import re

from msgspec import Struct

from sim.core.errors import InputError

QUOTED, LOOSE = 0x100000, 0xF0000  # first character of each plane
MOST = 0xFFFD
MARK = re.compile(f"[{chr(LOOSE)}-{chr(QUOTED + MOST)}]")


class Site(Struct, frozen=True, order=True):
    """A test that the script leaves open. `at`: where it stands; `test`: its words."""

    file: str
    at: int
    line: int
    test: str


class Unknown(Struct, frozen=True):
    """What a script does not say. `shown`: as the script writes it; `reason`: why; `unset`: a variable that nobody
    sets, which defaults take to be unset; `sites`: open tests that decide it."""

    shown: str
    reason: str
    line: int
    unset: bool = False
    sites: frozenset[Site] = frozenset()


class Unknowns:
    """All unknown parts of a script's values, by their characters."""

    def __init__(self) -> None:
        self.all: list[Unknown] = []

    def mark(self, unknown: Unknown) -> str:
        """A text that stands for it."""
        if unknown in self.all[-20:]:
            return chr(QUOTED + len(self.all) - 1 - self.all[::-1].index(unknown))
        if len(self.all) >= MOST:
            raise InputError(f"line {unknown.line}: more than {MOST:,} values are not known")
        self.all.append(unknown)
        return chr(QUOTED + len(self.all) - 1)

    def of(self, text: str) -> list[Unknown]:
        """The unknown parts of a text."""
        return [self.all[(ord(mark) & 0xFFFF)] for mark in MARK.findall(text)]

    def sites(self, *texts: str) -> frozenset[Site]:
        return frozenset(site for text in texts for unknown in self.of(text) for site in unknown.sites)

    def shown(self, text: str) -> str:
        """The text with its unknown parts as the script writes them."""
        return MARK.sub(lambda mark: self.of(mark[0])[0].shown, text)

    def without_unset(self, text: str) -> str:
        """The text as it is where nobody sets the variables that the script does not set."""
        return MARK.sub(lambda mark: "" if self.of(mark[0])[0].unset else mark[0], text)

    def is_empty(self, text: str) -> bool | None:
        """Whether a text is empty; None where that is not known."""
        left = self.without_unset(text)
        return True if not left else None if not MARK.sub("", left) else False


def known(*texts: str) -> bool:
    return not any(MARK.search(text) for text in texts)


def loose(text: str) -> str:
    """The text of an expansion outside quotes, whose unknown parts may be several words."""
    return MARK.sub(lambda mark: chr(LOOSE + (ord(mark[0]) & 0xFFFF)), text)


def held(text: str) -> str:
    """The text as a value of a variable."""
    return MARK.sub(lambda mark: chr(QUOTED + (ord(mark[0]) & 0xFFFF)), text)
