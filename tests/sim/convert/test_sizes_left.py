"""A size that a file has and its reader does not know is named, wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sim.convert import test_bridge, test_bridge_saved, test_gpt_neox, test_litgpt, test_nanotron, test_nemo
from tests.sim.convert.converting import converted

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bridge": (test_bridge.WHOLE, ("--cluster", "dgx-h100", "--gpus", "16")),
    "bridge, as saved": (test_bridge_saved.SAVED, test_bridge_saved.ON),
    "gpt-neox": (test_gpt_neox.TEXT, test_gpt_neox.HERE),
    "litgpt": (test_litgpt.FULL, test_litgpt.ON),
    "nanotron": (test_nanotron.TEXT, test_nanotron.ON),
    "nemo": (test_nemo.NEMO, ("--cluster", "dgx-h100", "--set", "model.vocab=128256")),
}


def places(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """The top and each section."""
    return [(), *((key,) for key, value in data.items() if isinstance(value, dict))]


CASES = [(name, place) for name, (text, _) in FILES.items() for place in places(yaml.safe_load(text))]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_size_that_nobody_knows_is_named_with_its_place(tmp_path: Path, name: str, place: tuple[str, ...]) -> None:
    text, options = FILES[name]
    data: Any = yaml.safe_load(text)
    section = data[place[0]] if place else data
    section["num_phantom_layers"] = 7
    _, said = converted(tmp_path, "run.yaml", yaml.safe_dump(data, sort_keys=False), *options)
    assert ".".join((*place, "num_phantom_layers")) in said


def test_a_size_that_decides_something_is_not_named(tmp_path: Path) -> None:
    for name, (text, options) in FILES.items():
        _, said = converted(tmp_path, "run.yaml", text, *options)
        assert "num_layers" not in said.partition("not expressed here")[2], name
