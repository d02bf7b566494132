"""Which profiles are shipped, found without reading one: a scenario's default asks, before anything is priced."""

from __future__ import annotations

from pathlib import Path

PROFILES = Path(__file__).parents[1] / "presets" / "profiles"


def shipped_profiles() -> tuple[str, ...]:
    """Names of profiles that need no file of the user's, `roofline` first."""
    return ("roofline", *sorted(p.stem for p in PROFILES.glob("*.json")))
