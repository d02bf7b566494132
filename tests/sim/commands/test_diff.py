"""`sim.diff`: what differs between two scenarios or results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.diff import main, result_of
from sim.core.errors import InputError
from sim.studies.difference import difference, differing_keys
from tests.processes import ROOT, invoked

TP8, TP8_SP = (str(ROOT / "scenarios" / f"{name}.yaml") for name in ("tp8", "tp8_sp"))


def as_json(*words: str) -> dict[str, Any]:
    done = invoked(main, *words, "--json", "-")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_two_scenarios_differ_in_the_keys_that_their_files_differ_in() -> None:
    found = as_json(TP8, TP8_SP)
    assert found["keys"] == {"parallelism.sp": {"a": False, "b": True}}
    a, b = result_of(Path(TP8), ()), result_of(Path(TP8_SP), ())
    step = found["times"]["step_time_s"]
    assert (step["a"], step["b"]) == (a["step_time_s"], b["step_time_s"])
    assert step["change"] == pytest.approx(b["step_time_s"] / a["step_time_s"] - 1)
    assert sum(v["a"] for v in found["critical_path_s"].values()) == pytest.approx(a["step_time_s"])
    assert found["memory_bytes"]["peak"]["b"] == b["peak_memory_bytes"]
    assert found["buffer_bytes"]["all_gather tp"] == {
        "a": 0.0,
        "b": found["buffer_bytes"]["all_gather tp"]["b"],
        "change": None,
    }


def test_a_scenario_against_itself_differs_in_nothing() -> None:
    found = as_json(TP8, TP8)
    assert not found["keys"]
    pairs = (p for part in ("times", "memory_bytes", "critical_path_s", "buffer_bytes") for p in found[part].values())
    assert all(pair["change"] == 0 for pair in pairs)


def test_keys_that_follow_from_others_are_named_apart() -> None:
    found = as_json("1f1b_pp8", "zb_v_pp8")
    assert list(found["keys"]) == ["parallelism.schedule"]
    assert {"parallelism.virtual_stages", "parallelism.layers_per_stage"} <= set(found["follow"])
    stated = as_json("1f1b_pp8", "--set", "parallelism.p2p_overlap=true")
    assert (list(stated["keys"]), stated["follow"]) == (["parallelism.p2p_overlap"], {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model=llama2-7b"], "model."),
        (["training.seq_len=1024", "training.global_batch_size=8"], "seq_len, global_batch_size."),
        (["training.recompute=full"], "recompute."),
        (["parallelism.schedule=gpipe", "training.precision=fp8"], None),
    ],
)
def test_of_different_programs_no_change_is_said(changes: list[str], said: str | None, tmp_path: Path) -> None:
    page = tmp_path / "d.html"
    words = [word for change in changes for word in ("--set", change)]
    printed = invoked(main, "1f1b_pp8", *words, "--html", str(page)).stdout
    for text in (printed, page.read_text()):
        assert ("different programs" in text) == (said is not None)
    assert said is None or f"A and B are different programs: {said}" in printed
    assert bool(re.search(r"[+−]\d+\.\d %", printed)) == (said is None)


def test_a_list_without_entries_is_no_difference() -> None:
    slow = {"faults": {"stragglers": [{"rank": 1}], "links": [], "jitter": None}, "tp": 0}
    keys = {key for key, _, _ in differing_keys({"faults": None, "tp": 1}, slow)}
    assert keys == {"faults.stragglers", "tp"}


def test_one_scenario_and_overrides() -> None:
    found = as_json(TP8, "--set", "training.global_batch_size=16")
    assert found["keys"] == {"training.global_batch_size": {"a": 8, "b": 16}}
    both = as_json(TP8, TP8_SP, "--set", "training.global_batch_size=16")
    assert "training.global_batch_size" not in both["keys"]


def test_equal_scenarios_change_in_nothing_and_are_told_how_set_compares() -> None:
    done = invoked(main, TP8, TP8, "--set", "training.global_batch_size=16")
    assert "The scenarios are equal." in done.stdout
    assert "smaller changes" not in done.stdout
    assert " without change" in done.stdout
    assert "note: --set changed both A and B" in done.stderr
    assert "note" not in invoked(main, TP8, TP8_SP).stderr


def test_stored_results_and_serving(tmp_path: Path) -> None:
    stored = tmp_path / "r.json"
    result = result_of(ROOT / "scenarios" / "serve_batch1.yaml", ())
    stored.write_text(json.dumps(result))
    found = as_json(str(stored), "serve_batch1_int4")
    assert found["times"]["request_latency_s.p50"]["change"] < -0.5
    assert difference(result, result)["keys"] == {}
    with pytest.raises(InputError, match="--set changes scenarios only"):
        result_of(stored, ("a=1",))


def test_a_training_step_and_serving_have_nothing_to_compare() -> None:
    done = invoked(main, TP8, "serve_batch1", code=2)
    assert "A, B: found a training step and a serving workload; diff compares two of one kind" in done.output


def test_the_tables_name_keys_times_and_memory() -> None:
    said = CliRunner().invoke(main, [TP8, TP8_SP]).stdout
    assert all(w in said for w in ("parallelism.sp", "Step time", "activations", "critical path", "all_gather tp"))
    assert "…" not in said
    changes = {line.split("  ")[0]: line.split()[-1] for line in said.splitlines() if line}
    assert (changes["tp all_reduce input_grad"], changes["tp all_gather forward"]) == ("gone", "new")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "profile/1"}', "is a calibration profile"),
        ("[]", "is no result"),
        ("{", "not JSON"),
        ('{"format": "sim-result/1"}', "x.json: is no whole result .*: the key 'scenario' is missing"),
        ('{"format": "sim-result/1", "scenario": []}', "a key holds another kind of value"),
    ],
)
def test_other_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        result_of(path, ())


def test_the_page_and_the_terminal_show_what_changes_most(tmp_path: Path) -> None:
    page = tmp_path / "d.html"
    done = invoked(main, TP8, TP8_SP, "--html", str(page))
    operators = as_json(TP8, TP8_SP)["operators_s"]
    most = max(operators, key=lambda name: abs(operators[name]["b"] - operators[name]["a"]))
    text = page.read_text()
    rows = text[text.index("<h2>Operators") :]
    assert rows.index(most) < min(rows.index(name) for name in operators if name != most)
    changed = sum(pair["a"] != pair["b"] for pair in operators.values())
    assert f"and {changed - 15} smaller changes, {len(operators) - changed} without change" in " ".join(
        done.output.split()
    )
    assert "https://" not in text.replace("https://bokeh.org", "")[:2000]


def test_figures_of_clusters_have_units_and_their_sources_are_left_out() -> None:
    """The JSON keeps the numbers and the sources."""
    said = invoked(main, TP8, "--set", "cluster=dgx-a100").stdout
    assert re.search(r"cluster\.gpu\.memory_bandwidth_bytes_per_s +8\.000 TB/s +2\.039 TB/s", said)
    assert "000000" not in said
    assert ".source" not in said
    assert "cluster.gpu.source" in as_json(TP8, "--set", "cluster=dgx-a100")["keys"]
