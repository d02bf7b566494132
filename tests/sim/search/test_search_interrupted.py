"""Ctrl-C ends a search with what it has found, and everything that shows it says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sim.commands.search import main
from sim.commands.search_tables import _so_far
from sim.core.executors import local_workers
from sim.search.best_first import BestFirst
from tests.processes import invoked
from tests.sim.search.search_spaces import small_space

SCENARIO = """
version: 1
model: {layers: 4, hidden: 256, heads: 4, vocab: 512}
training: {seq_len: 128, global_batch_size: 8}
cluster: {preset: dgx-h100, nodes: 1}
"""
FOUND = 3


def interrupted_after(found: int) -> Callable[[], object]:
    """A progress whose every search is interrupted once it has simulated so many layouts that fit."""

    def look(search: BestFirst) -> None:
        if len(search.fitting) >= found:
            raise KeyboardInterrupt

    @contextmanager
    def progress() -> Iterator[Callable[[BestFirst], None]]:
        yield look

    return progress


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sim.commands.search_tables.progress", interrupted_after(FOUND))
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return str(tmp_path / "small.yaml")


def test_what_was_found_is_shown_as_incomplete(scenario: str, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("out.json", "out.html", "saved")}
    options = ("--json", str(files["out.json"]), "--html", str(files["out.html"]), "--save", str(files["saved"]))
    ran = invoked(main, scenario, "--workers", "1", *options, code=130)
    assert ran.stdout.startswith("INCOMPLETE, ended by Ctrl-C: ")
    assert ran.stderr.splitlines()[-1] == "interrupted"
    result = json.loads(files["out.json"].read_text())
    c, left = result["counts"], result["unexamined"]
    assert c["simulated"] == FOUND
    assert len(result["best"]) >= 1
    assert left > 0
    assert c["legal"] == c["pruned_by_memory"] + c["pruned_by_bound"] + c["evaluated"] + left
    assert f"{left:,} not looked at" in " ".join(ran.stdout.split())
    assert f"INCOMPLETE, ended by Ctrl-C: {left:,} layouts not looked at" in files["out.html"].read_text("utf-8")
    assert (files["saved"] / "1.yaml").exists()


def test_of_several_clusters_those_not_searched_are_counted(scenario: str) -> None:
    ran = invoked(main, scenario, "--workers", "1", "--cluster", "dgx-h100,dgx-h200,dgx-b200", code=130)
    said = " ".join(ran.stdout.split())
    assert said.startswith("INCOMPLETE, ended by Ctrl-C: dgx-h100 is not searched to its end, 2 searches not begun")


def test_ctrl_c_before_anything_is_found_shows_no_table(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.commands.search_tables.progress", interrupted_after(0))
    ran = invoked(main, scenario, "--workers", "1", code=130)
    assert (ran.stdout, ran.stderr) == ("", "interrupted\n")


def test_a_finished_search_says_nothing_of_it(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.commands.search_tables.progress", interrupted_after(1_000_000))
    ran = invoked(main, scenario, "--workers", "1", "--json", "-")
    assert "unexamined" not in json.loads(ran.stdout)


def test_progress_says_what_is_ruled_out_and_which_layout_is_best() -> None:
    seen: list[tuple[int, BestFirst]] = []
    said: list[str] = []

    def look(search: BestFirst) -> None:
        seen.append((search.ruled_out, search))
        said.append(_so_far(search))

    with local_workers(1) as pool:
        found = BestFirst(small_space(0), float("inf"), 1, False, pool, look).run()
    assert 0 < seen[-1][0] <= found.counts["pruned_by_bound"] + found.counts["pruned_by_memory"]
    of = f"{found.counts['evaluated'] - found.counts['beaten']:,} evaluated"
    assert said[-1].startswith(of)
    assert f"of {found.counts['legal']:,} layouts; best " in said[-1]
