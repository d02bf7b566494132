"""Files that commands of a launch script name: written by it (`cat > ds.json <<EOF`), or beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sim.convert.scripts.command_line import with_own_values
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show
from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

# The command before `<<EOF`, what follows on its line, and the lines up to EOF.
HEREDOC = re.compile(r"(?ms)^([^\n]*)<<-?\s*(['\"]?)(\w+)\2([^\n]*)\n(.*?)\n?^\s*\3\s*$")
TARGET = re.compile(r"(?:>{1,2}\s*|\btee\s+(?:-a\s+)?)[\"']?([^\s\"'|]+)")


def named_mapping(file: Path, script: str, name: str) -> dict[str, Any] | None:
    """The mapping in the JSON or YAML file `name`; None where the script neither writes it nor has it beside it.

    `file` is the script's own path, and `script` its text, with values for variables where they are known.

    Raises:
        InputError: for a file that holds no mapping, or neither JSON nor YAML.
    """
    text = _text(file, script, name)
    if text is None:
        return None
    data: Any = parse_yaml(text, name)[0]
    if not isinstance(data, dict):
        raise InputError(f"{file}: {name}: found {show(data)}; must be a mapping of options")
    return data


def _text(file: Path, script: str, name: str) -> str | None:
    """All that the script writes into the file, or else what stands in it."""
    script = with_own_values(script)
    parts = [
        found[5]
        for found in HEREDOC.finditer(script)
        if (target := TARGET.search(found[1] + found[4])) and Path(target[1]).name == Path(name).name
    ]
    if parts:
        return "\n".join(parts)
    found = found_file(file, name)
    return None if found is None else read_text(found, MAX_BYTES)


def found_file(file: Path, name: str) -> Path | None:
    """The file of a name that `file` gives: beside it, here, or under a folder around it, from which a trainer is
    started where the name begins with the repository's folders (`examples/deepspeed/ds_z3_config.json`)."""
    around = Path(file).resolve().parents if len(Path(name).parts) > 1 else ()
    return next(
        (path for path in (file.parent / name, Path(name), *(up / name for up in around)) if path.is_file()), None
    )
