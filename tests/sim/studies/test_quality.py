"""Scores joined with serving: each model is the scenario's simulation of it, and the Pareto marks are right."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.serve.simulation import simulate_serving
from sim.studies.quality import ScoredModel, quality, read_scores
from sim.views.quality_page import sources
from tests.modules import run_module

ROOT = Path(__file__).parents[3]
SERVING, SCORES = ROOT / "scenarios" / "quality_serving.yaml", ROOT / "scenarios" / "quality_mmlu.csv"
FEW = ("inference.requests.count=4", "inference.requests.output_len=8")


@cache
def rows() -> dict[str, ScoredModel]:
    return {row.model: row for row in quality(SERVING, read_scores(SCORES), FEW)}


def test_a_model_is_the_scenario_s_simulation_of_it() -> None:
    result = simulate_serving(load_scenario(SERVING, [*FEW, "model=mixtral-8x7b", "parallelism.ep=4"])).result
    assert rows()["mixtral-8x7b"].output_tokens_per_s_per_gpu == result["output_tokens_per_s_per_gpu"]
    assert rows()["mixtral-8x7b"].peak_memory_bytes == result["peak_memory_bytes"]


@pytest.mark.parametrize(("name", "sign"), [("output_tokens_per_s_per_gpu", 1), ("peak_memory_bytes", -1)])
def test_nothing_beats_a_marked_model_and_something_beats_the_others(name: str, sign: int) -> None:
    for row in rows().values():
        beaten = [
            r.model
            for r in rows().values()
            if r is not row and r.score >= row.score and sign * r.figure(name) >= sign * row.figure(name)
        ]
        assert bool(beaten) != row.is_best(name)


def test_every_shipped_score_names_its_source() -> None:
    assert all(score.source for score in read_scores(SCORES))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model\nllama3-8b\n",
        "model,score,colour\na,1,red\n",
        "model,score\n,3\n",
        "model,score\na,high\n",
        "model,score\na,nan\n",
        "model,score\n",
        "model,score\na,1,2,3\n",
    ],
)
def test_a_table_that_is_none_is_one_message(text: str, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"scores\.csv"):
        read_scores(path)


def test_a_model_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("model,score\nllama3.2-1b,1\nnobody,2\n")
    found = quality(SERVING, read_scores(path), FEW)
    assert not found[0].refused
    assert "nobody" in found[1].refused
    path.write_text("model,score\nnobody,2\n")
    with pytest.raises(InputError, match="none of 1 model"):
        quality(SERVING, read_scores(path), FEW)


def test_a_model_may_stand_in_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("model,score,set\nllama3.2-1b,2,\nllama3.2-1b,1,inference.quantization=fp8\n")
    found = quality(SERVING, read_scores(path), FEW)
    assert [row.score for row in found] == [2, 1]
    assert found[0].figure("peak_memory_bytes") > found[1].figure("peak_memory_bytes")
    assert [row.is_best("peak_memory_bytes") for row in found] == [True, True]


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "quality.html"
    command = ("sim.quality", *(x for s in FEW for x in ("--set", s)))
    done = run_module(*command, "--json", "-", "--html", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["format"] == "sim-quality/1"
    assert "llama3-70b" in [row["model"] for row in result["models"]]
    assert all(text in out.read_text() for text in ("llama3-70b", "Score and memory"))


def test_a_source_is_named_once_for_all_its_models() -> None:
    named = sources(list(rows().values()))
    assert len(named) == len({row.source for row in rows().values()})
    assert sum(words.count("llama3-70b") for words in named) == 1
