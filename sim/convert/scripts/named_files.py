"""Files that commands of a launch script name: written by it (`cat > ds.json <<EOF`), or beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.convert.scripts.script_data import Script
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show
from sim.inputs.yaml_input import MAX_BYTES, parse_yaml


def named_mapping(file: Path, script: Script, name: str) -> dict[str, Any] | None:
    """The mapping in the JSON or YAML file `name`; None where the script neither writes it nor has it beside it.

    `file` is the script's own path.

    Raises:
        InputError: for a file that holds no mapping, or neither JSON nor YAML.
    """
    text = script.files.get(Path(name).name)
    if text is None and (found := found_file(file, name)) is not None:
        text = read_text(found, MAX_BYTES)
    if text is None:
        return None
    data: Any = parse_yaml(text, name)[0]
    if not isinstance(data, dict):
        raise InputError(f"{file}: {name}: found {show(data)}; must be a mapping of options")
    return data


def found_file(file: Path, name: str) -> Path | None:
    """The file of a name that `file` gives: beside it, here, or under a folder around it, from which a trainer is
    started where the name begins with the repository's folders (`examples/deepspeed/ds_z3_config.json`)."""
    around = Path(file).resolve().parents if len(Path(name).parts) > 1 else ()
    return next(
        (path for path in (file.parent / name, Path(name), *(up / name for up in around)) if path.is_file()), None
    )
