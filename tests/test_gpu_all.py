"""What is measured on a GPU by one command can be tried without one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import load_scenario

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "gpu_all.py"), run_name="loaded")


def test_a_dry_run_asks_for_no_gpu_and_its_scenarios_are_whole(tool: dict[str, Any]) -> None:
    """Every command but the power loops; each scenario with what is set is one that a CPU's ranks can be given."""
    works = tool["works"]()
    dry = [d for w in works if (d := w.dry()) is not None]
    assert {w.name for w in works} - {d.name for d in dry} == {"power"}
    for d in dry:
        assert "cuda" not in d.command
        if "calibrate.measure" in d.command:
            words = d.command
            keys = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
            scenario = load_scenario(ROOT / words[2], keys)
            assert scenario.cluster.gpu.architecture == "cpu"
            assert scenario.for_training.precision == "fp32"


def test_without_a_gpu_or_a_package_nothing_is_tried(
    tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        tool["main"]()
    assert ended.value.code == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setitem(tool["PACKAGES"], "no_such_module", "no-such-package")
    work = tool["Work"]("x", (), packages=("no_such_module",))
    assert work.missing == ["no-such-package"]
    assert not (tmp_path / "new").exists()
