"""A scenario's data with absolute paths, for a scenario that is used away from its file."""

from __future__ import annotations

from typing import Any

from sim.inputs.input_source import Source, file_named
from sim.inputs.model_input import MODEL_FILE, model_presets


def anchored(source: Source) -> Any:
    """Return the source's data, in which relative paths of files, and of models' folders, are absolute."""
    return _anchored(source.data, source)


def _anchored(value: Any, source: Source) -> Any:
    if isinstance(value, dict):
        return {key: _anchored(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [_anchored(item, source) for item in value]
    # Any text may be a path. An existing file tells paths from other texts, and so does a point in a file's name.
    if isinstance(value, str) and value and value not in model_presets():
        path = file_named(value, source, MODEL_FILE)
        return str(path.resolve()) if path and ("." in value or path.name == MODEL_FILE) else value
    return value
