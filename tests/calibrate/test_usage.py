"""Usage mistakes of commands give one message and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.modules import run_module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate.sft_files"], "Missing argument 'FOLDER'"),
        (["calibrate.sft_files", "a", "b"], "Got unexpected extra argument (b)"),
        (["calibrate.sft_files", "{file}/folder"], "cannot be made: Not a directory"),
        (["calibrate.memory_curve", "--steps", "3"], "No such option"),
        (["calibrate.memory_curve", "scenario.yaml"], "Got unexpected extra argument (scenario.yaml)"),
    ],
)
def test_a_usage_mistake_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    words = [word.format(file=file) for word in arguments]
    done = run_module(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
