"""Profiles by name or file."""

from __future__ import annotations

from pathlib import Path

from sim.core import shipped as shipped_files
from sim.core.errors import InputError
from sim.core.files import read_json
from sim.prices.profile import Profile
from sim.prices.profile_input import profile_from


def load_profile(name_or_path: str | Path, where: str = "calibration") -> Profile:
    """A shipped profile's name, `roofline` (no measurement at all), or a file.

    Raises:
        InputError: unknown name, unreadable or invalid file. `where` names the key it came from.
    """
    text = str(name_or_path)
    # The system's own errors for such names differ from one platform to the next.
    if len(text) > 4096 or "\0" in text or len(Path(text).name) > 240:
        raise InputError(f"{where}: found {text[:60]!r}…; allowed: a path or a profile's name")
    if text == "roofline":
        # Made here and not shipped as a file: it holds nothing, and its name must not depend on what is installed.
        return Profile("roofline", "data-sheet roofline: nothing measured")
    shipped = shipped_files.PROFILES / f"{text}.json"
    # A shipped name goes before a file of that name in the current folder, so a scenario means the same everywhere.
    if "/" not in text and shipped.is_file():
        return read_profile(shipped)
    path = Path(name_or_path)
    # A bare word that is no file is most likely a misspelt name. The list of names helps more than "file not found".
    if not path.is_file() and "/" not in text and not text.endswith(".json"):
        names = ", ".join(shipped_files.shipped_profiles())
        raise InputError(f"{where}: no profile {text!r}; allowed: a path or one of {names}")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """A profile from a file of at most 64 MiB.

    Raises:
        InputError: as `profile_input.profile_from`, and where the file cannot be read.
    """
    return profile_from(read_json(path), str(path))
