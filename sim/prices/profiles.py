"""Load profiles by name or from a file."""

from __future__ import annotations

from pathlib import Path

from sim.core import shipped as shipped_files
from sim.core.errors import InputError
from sim.inputs.file_kinds import read_data, refuse_other_kind
from sim.prices.profile import Profile
from sim.prices.profile_input import profile_from


def load_profile(name_or_path: str | Path, where: str = "calibration") -> Profile:
    """Load a profile: a shipped name, `roofline` (no measurement at all), or a file.

    Raises:
        InputError: for an unknown name, or an unreadable or invalid file. `where`: the key that named it.
    """
    text = str(name_or_path)
    # The system's errors for such names differ between platforms.
    if len(text) > 4096 or "\0" in text or len(Path(text).name) > 240:
        raise InputError(f"{where}: found {text[:60]!r}…; allowed: a path or a profile's name")
    if text == "roofline":
        # Not a shipped file, because it holds nothing.
        return Profile("roofline", "data-sheet roofline: nothing measured")
    shipped = shipped_files.PROFILES / f"{text}.json"
    # A shipped name precedes a file of that name in the current folder, so a scenario means the same everywhere.
    if "/" not in text and shipped.is_file():
        return read_profile(shipped)
    path = Path(name_or_path)
    # A word that is no file is probably a misspelt name, so the error lists the names.
    if not path.is_file() and "/" not in text and not text.endswith(".json"):
        names = ", ".join(shipped_files.shipped_profiles())
        raise InputError(f"{where}: no profile {text!r}; allowed: a path or one of {names}")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """Read a profile from a file of at most 64 MiB.

    Raises:
        InputError: as for `profile_input.profile_from`, and if the file cannot be read or is of another kind.
    """
    data = read_data(path)
    refuse_other_kind(path, data, "a calibration profile is wanted", own="profile")
    return profile_from(data, str(path))
