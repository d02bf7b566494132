"""`stepsim convert` of a text that a test gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sim.commands.convert import main
from tests.processes import invoked

OF_RL = ("--cluster", "dgx-h100", "--set", "rl.prompt_len.mean=100", "--set", "rl.output_len.mean=300")


def converted(tmp_path: Path, name: str, text: str, *options: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / name
    file.write_text(text)
    ran = invoked(main, str(file), *options)
    return yaml.safe_load(ran.output), ran.output


def converted_rl(tmp_path: Path, text: str, *options: str) -> tuple[dict[str, Any], str]:
    """A script of reinforcement learning, with the lengths that only its data know."""
    return converted(tmp_path, "run.sh", text, *OF_RL, *options)


def refused(tmp_path: Path, name: str, text: str, *options: str) -> str:
    file = tmp_path / name
    file.write_text(text)
    ran = invoked(main, str(file), *options, code=2)
    return ran.output


def of(data: dict[str, Any], section: str, *keys: str) -> list[Any]:
    return [data[section].get(key) for key in keys]
