"""Wrong values of options: the message names the option that the user wrote, what was found and what is allowed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sim.commands.diagnose import main as diagnose
from sim.commands.run import main as run
from sim.core.errors import InputError
from sim.core.json_text import parse_json
from sim.inputs.scenario import load_scenario
from sim.inputs.script_program import HEAD
from sim.studies.quality import Score, quality
from tests.processes import ROOT, invoked

SCENARIO = str(ROOT / "scenarios" / "1f1b_pp8.yaml")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tokens", "lots", "'--tokens': found 'lots'; must be a number of tokens, or one with K, M, B or T"),
        ("--tokens", "15", "'--tokens': found '15'; 15 tokens? write 15B or 15T"),
        ("--price", "abc", "'--price': found 'abc'; must be a number"),
        ("--days", "x", "'--days': found 'x'; must be a number"),
        ("--days", "nan", "'--days': found nan; must be a finite number"),
        ("--set", "parallelism.pp=[1", "--set parallelism.pp:1: is not valid YAML"),
        ("--set", "faults.stragglers[0].rank=99", "--set faults.stragglers[0].rank: found 99; must be below"),
    ],
)
def test_the_message_names_the_option(option: str, value: str, said: str) -> None:
    assert said in invoked(run, SCENARIO, option, value, code=2).output


def test_tokens_are_those_of_the_scenario() -> None:
    result = invoked(run, SCENARIO, "--tokens", "15T", "--json", "-").output
    assert parse_json(result, "result")["scenario"]["training"]["tokens"] == 15e12


def test_an_entry_of_a_list_goes_by_its_number_with_a_point_or_in_brackets() -> None:
    one, other = (
        load_scenario(SCENARIO, [f"faults.stragglers{entry}.rank=3", f"faults.stragglers{entry}.compute_scale=1.3"])
        for entry in (".0", "[0]")
    )
    assert one.faults == other.faults


def test_another_command_than_replay_says_what_it_wants(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.touch()
    said = invoked(diagnose, str(path), code=2).output
    assert "is empty; a recorded trace is wanted: profiler JSON" in said
    assert "replay" not in said


def test_a_captured_program_has_no_slow_rank(tmp_path: Path) -> None:
    path = tmp_path / "step.rank0.json.gz"
    path.write_bytes(gzip.compress(HEAD + b"}"))
    said = invoked(diagnose, str(path), code=2).output
    assert "is a captured program, which has no recorded times; `stepsim replay` simulates one" in said


def test_a_scenario_that_cannot_be_read_is_no_fault_of_the_models() -> None:
    with pytest.raises(InputError) as error:
        quality(Path("nowhere.yaml"), [Score("llama3-8b", 60.0, (), "")])
    assert str(error.value) == "nowhere.yaml: no such file"


def test_json_that_ends_within_a_text() -> None:
    with pytest.raises(InputError, match=r"x:1: is not JSON: Unterminated string starting at column 2$"):
        parse_json('{"a', "x")
