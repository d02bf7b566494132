"""The Python API of notebooks: cheap to import, callable both ways, and a result that shows itself."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

BUG = "<script>alert(1)</script>"


def test_importing_sim_loads_nothing_else() -> None:
    code = "import sys, sim; print(sorted({'numpy', 'pydantic', 'bokeh', 'sim.inputs.scenario'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("first", ["", "import sim.simulation\n", "from sim.simulation import Simulation\n"])
def test_simulate_can_be_called_however_it_was_imported(first: str) -> None:
    code = first + (
        "from sim import Scenario, parse_scenario, simulate\n"
        "s = parse_scenario({'model': 'gpt2', 'cluster': 'dgx-a100',"
        " 'training': {'seq_len': 1024, 'global_batch_size': 8}})\n"
        "assert isinstance(s, Scenario)\n"
        "from sim.simulation import simulate as function\n"
        "assert simulate(s).step_time_s == function(s).step_time_s > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STEP = {"model": "gpt2", "cluster": "dgx-a100", "training": {"seq_len": 1024, "global_batch_size": 8}}


def test_overrides_are_read_and_checked_anew() -> None:
    from sim import load_scenario, parse_scenario, simulate
    from sim.core.errors import InputError

    changed = {**STEP, "parallelism": {"pp": 2}}
    scenario = parse_scenario(STEP)
    assert scenario.with_overrides({"parallelism.pp": 2}) == parse_scenario(changed)
    assert scenario.with_overrides(["parallelism.pp=2"]) == parse_scenario(changed)
    by_override = simulate(scenario, overrides={"parallelism.pp": 2}).step_time_s
    assert by_override == simulate(parse_scenario(changed)).step_time_s
    assert load_scenario("1f1b_pp8", {"parallelism.pp": 4}) == load_scenario("1f1b_pp8", ["parallelism.pp=4"])
    with pytest.raises(InputError, match="tp"):
        scenario.with_overrides({"parallelism.tp": 7})
    with pytest.raises(InputError, match="with_overrides"):
        scenario.model_copy(update={"parallelism": None})


def test_commands_have_functions() -> None:
    from sim import difference_of, parse_scenario, simulate, sweep_values

    rows = sweep_values("1f1b_pp8", {"training.global_batch_size": [32, 64]}).rows
    assert [row.values["training.global_batch_size"] for row in rows] == [32, 64]
    one, other = (simulate(parse_scenario({**STEP, "parallelism": {"pp": pp}})) for pp in (1, 2))
    assert "parallelism.pp" in str(difference_of(one, other)["keys"])
    assert one.plot().renderers


def test_a_converted_file_can_be_loaded(tmp_path: Path) -> None:
    from sim import convert_file, parse_scenario

    (tmp_path / "run.sh").write_text("vllm serve llama3-8b -tp 2\n")
    found = convert_file(tmp_path / "run.sh", "dgx-h100")
    assert parse_scenario(found.scenario).parallelism.tp == 2
    assert found.notes


def test_an_unknown_name_is_an_attribute_error() -> None:
    import sim

    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        sim.nothing_of_that_name  # noqa: B018


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_step_shows_itself_in_a_notebook() -> None:
    from sim import parse_scenario, simulate

    step = simulate(
        parse_scenario(
            {
                "name": BUG,
                "model": "llama3-8b",
                "cluster": "dgx-h100",
                "parallelism": {"pp": 4},
                "training": {"seq_len": 4096, "global_batch_size": 8},
            }
        )
    )
    page = _Tags()
    page.feed(step._repr_html_())
    assert page.open == []
    assert "script" not in page.seen
    for words in (BUG, "Step time", "Peak memory", "pp 4", "Where the step goes", "Pipeline bubble"):
        assert words in page.words
