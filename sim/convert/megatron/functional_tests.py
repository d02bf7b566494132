"""Megatron-LM's arguments as its own tests have them: tests/functional_tests/test_cases/*/*/model_config.yaml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

SEVERAL = re.compile(r"\[([^\[\]]+)\]")


def is_arguments(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping holds Megatron-LM's arguments as its tests have them (tests/functional_tests)."""
    return isinstance(data.get("MODEL_ARGS"), dict)


def as_command(data: Mapping[str, Any]) -> str:
    """The arguments of such a mapping as a command line; a switch that is off is left out.

    A text in brackets is several values, as the script that runs the tests has it (shell_test_utils/_run_training.sh).
    """
    environment = data.get("ENV_VARS")
    words = [f"{name}={value}" for name, value in environment.items()] if isinstance(environment, dict) else []
    for flag, value in data["MODEL_ARGS"].items():
        listed = SEVERAL.fullmatch(value) if isinstance(value, str) else None
        values = listed[1].split() if listed else [] if value is True else value if isinstance(value, list) else [value]
        words += [] if value is False else [str(flag), *(shlex.quote(str(one)) for one in values)]
    return " ".join(words)
