"""Ctrl-C ends sweeps and searches of serving with what they have found, and everything that shows it says so."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.commands.search import main as search
from sim.commands.sweep import main as sweep
from tests.processes import invoked

pytestmark = pytest.mark.slow

SERVED = """
version: 1
model: {layers: 4, hidden: 256, heads: 4, vocab: 512}
inference: {requests: {prompt_len: 100, output_len: 10, count: 20, rate_per_s: 5}}
cluster: dgx-h100
"""


def interrupted_after(count: int) -> Callable[..., Iterator[Any]]:
    """A progress under which Ctrl-C is pressed once so many results have come."""

    def tracked(found: Iterable[Any], *_: object) -> Iterator[Any]:
        yield from itertools.islice(found, count)
        raise KeyboardInterrupt

    return tracked


@pytest.mark.parametrize(("asked", "code"), [([], 130), ([True], 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_sweep_shows_the_steps_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[bool], code: int
) -> None:
    monkeypatch.setattr("sim.core.executors.tracked", interrupted_after(1))
    monkeypatch.setattr("sim.commands.command._asked_to_end", asked)
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    options = ("--vary", "training.micro_batch_size=1,2,4,8", "--json", str(out), "--html", str(page))
    ran = invoked(sweep, "dp8", *options, code=code)
    said = "INCOMPLETE, ended by Ctrl-C: 2 combinations not simulated"
    assert ran.stdout.startswith(said)
    assert (ran.stderr.splitlines()[-1:] == ["interrupted"]) == (code == 130)
    result = json.loads(out.read_text())
    assert [row["values"] for row in result["rows"]] == [{"training.micro_batch_size": n} for n in (1, 2)]
    assert result["left"] == 2
    assert said in page.read_text("utf-8")


def test_a_sweep_that_ends_has_no_such_number() -> None:
    ran = invoked(sweep, "dp8", "--vary", "training.micro_batch_size=1,2", "--json", "-")
    assert "left" not in json.loads(ran.stdout)


@pytest.mark.parametrize("count", [0, 1])
def test_a_search_of_serving_shows_the_layouts_that_are_done(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.search.serving.tracked", interrupted_after(count))
    (tmp_path / "served.yaml").write_text(SERVED)
    options = ("--slo", "ttft_p99=1", "--gpus", "2", "--workers", "1", "--json", str(tmp_path / "out.json"))
    ran = invoked(search, str(tmp_path / "served.yaml"), *options, code=130)
    assert ran.stderr.splitlines()[-1] == "interrupted"
    if count == 0:
        assert not ran.stdout
        return
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["best"]) == 1
    assert result["unsearched"] == 2  # of tp 2, pp 2 and dp 2
    assert "INCOMPLETE, ended by Ctrl-C: 2 layouts not searched" in " ".join(ran.stdout.split())


EARLY = "import os, signal, sys; sys.argv = ['-m']; import sim; os.kill(os.getpid(), signal.SIGINT); signal.pause()"


def test_ctrl_c_while_a_command_loads_ends_it_with_one_word() -> None:
    ran = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_of_a_program_that_imports_sim_is_its_own() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", EARLY.replace("['-m']", "['own.py']")], capture_output=True, check=False
    )
    assert b"KeyboardInterrupt" in ran.stderr
