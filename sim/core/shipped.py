"""Names of the shipped profiles, without reading one: a scenario's default is chosen before anything is priced."""

from __future__ import annotations

from functools import cache
from pathlib import Path

PROFILES = Path(__file__).parents[1] / "presets" / "profiles"


def shipped_profiles() -> tuple[str, ...]:
    """Names of profiles that need no file of the user's, `roofline` first."""
    return _names_in(PROFILES)


@cache  # a step whose changes are tried asks some seven times
def _names_in(folder: Path) -> tuple[str, ...]:
    return ("roofline", *sorted(p.stem for p in folder.glob("*.json")))
