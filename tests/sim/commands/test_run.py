"""`python -m sim.run` as a person uses it: output, exit codes, nothing half-written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.modules import run_module

ROOT = Path(__file__).parents[3]
SCENARIO = "scenarios/1f1b_pp8.yaml"
GOOD = """
model: llama3.2-1b
training: {seq_len: 2048, global_batch_size: 4}
cluster: dgx-h100
"""


def run(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_module("sim.run", *args, **environment)


def test_json_alone_on_standard_output() -> None:
    r = run(SCENARIO, "--json", "-")
    assert r.returncode == 0, r.stderr
    result = json.loads(r.stdout)
    assert result["format"] == "sim-result/1"
    keys = """scenario step_time_s step_time_interval_s tokens_per_s tokens_per_s_per_gpu model_flops_per_s_per_gpu mfu
        mfu_full_attention hfu bubble_fraction bubble_ratio exposed_comm_s compute_s layer_forward_s layer_backward_s
        peak_memory_bytes peak_reserved_bytes memory fits_in_memory critical_path ranks provenance warnings engine"""
    assert set(keys.split()) <= result.keys()
    low, high = result["step_time_interval_s"]
    assert low < result["step_time_s"] < high
    row = {"ranks", "parameters", "gradients", "optimizer", "activations", "buffers", "peak"}
    assert all(row <= m.keys() for m in result["memory"])
    assert sum(result["provenance"]["shares"].values()) == pytest.approx(1)


def test_the_resolved_scenario_simulates_to_the_same_result(tmp_path: Path) -> None:
    first = json.loads(run(SCENARIO, "--json", "-").stdout)
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(first["scenario"]), encoding="utf-8")
    second = json.loads(run(again, "--json", "-").stdout)
    assert second["step_time_s"] == first["step_time_s"]
    assert second["scenario"] == first["scenario"]


def test_summary_without_colours_when_piped_or_asked() -> None:
    r = run(SCENARIO, NO_COLOR="1")
    assert r.returncode == 0
    assert "\x1b[" not in r.stdout
    assert "Step time" in r.stdout


def test_views_are_written_whole(tmp_path: Path) -> None:
    page, trace, data = tmp_path / "p.html", tmp_path / "t.json", tmp_path / "r.json"
    r = run(SCENARIO, "--html", page, "--trace", trace, "--json", data, "--set", "training.global_batch_size=8")
    assert r.returncode == 0, r.stderr
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert json.loads(data.read_text(encoding="utf-8"))["scenario"]["training"]["global_batch_size"] == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.html", "r.json", "t.json"]


def test_both_engines_give_the_same(tmp_path: Path) -> None:
    results = [json.loads(run(SCENARIO, "--engine", e, "--json", "-").stdout) for e in ("static", "simpy")]
    assert [r["engine"]["path"] for r in results] == ["static", "simpy"]
    assert results[0]["step_time_s"] == results[1]["step_time_s"]


BAD = {
    "unknown key": ("training.sequence_len=5", ["training", "sequence_len", "seq_len"]),
    "wrong type": ("training.seq_len=many", ["training.seq_len", "many"]),
    "tp not dividing heads": ("parallelism.tp=3", ["tp", "3", "32"]),
    "batch not divisible": ("training.micro_batch_size=3", ["global_batch_size", "3"]),
    "missing profile": ("calibration=nowhere.json", ["nowhere.json"]),
    "NaN bandwidth": ("cluster.intra_node.bandwidth_bytes_per_s=.nan", ["bandwidth_bytes_per_s", "nan"]),
    "negative bandwidth": ("cluster.intra_node.bandwidth_bytes_per_s=-1", ["bandwidth_bytes_per_s"]),
    "schedule's micro-batches": ("parallelism={pp: 4, schedule: dualpipe}", ["schedule", "dualpipe"]),
    "no such schedule": ("parallelism.schedule=2f2b", ["schedule", "2f2b", "1f1b"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_exit_code_2(name: str, tmp_path: Path) -> None:
    change, words = BAD[name]
    scenario, page = tmp_path / "s.yaml", tmp_path / "out.html"
    scenario.write_text(GOOD, encoding="utf-8")
    r = run(scenario, "--set", change, "--html", page, "--json", tmp_path / "r.json")
    assert r.returncode == 2, r.stderr
    assert "Traceback" not in r.stderr
    assert r.stdout == ""
    assert len(r.stderr.strip().splitlines()) <= 2
    for word in words:
        assert word.lower() in r.stderr.lower(), r.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["s.yaml"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model: [unclosed", "bad.yaml:1"),
        ("a: &a [x]\nb: *a\n", "alias"),
        ("", "empty"),
        ("model: llama3-8b\nmodel: x\n", "bad.yaml:2: model"),
        ("model: llama3-8b\ntraning: {}\n", "bad.yaml:2: traning: unknown key; did you mean 'training'"),
    ],
)
def test_unreadable_yaml(text: str, word: str, tmp_path: Path) -> None:
    bomb = tmp_path / "bad.yaml"
    bomb.write_text(text, encoding="utf-8")
    r = run(bomb)
    assert r.returncode == 2
    assert "Traceback" not in r.stderr
    assert "bad.yaml" in r.stderr
    assert word in r.stderr.lower(), r.stderr


def test_yaml_bomb_ends_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    bomb = tmp_path / "bomb.yaml"
    bomb.write_text("\n".join(lines), encoding="utf-8")
    assert run(bomb).returncode == 2


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    r = run(SCENARIO, "--html", tmp_path / "no" / "such" / "folder.html")
    assert r.returncode == 2
    assert "folder.html" in r.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--emit", "megatron", "--html", "out.html"], "--html: cannot be given with --emit"),
        (["--emit", "megatron", "--chakra", "step"], "--chakra: cannot be given with --emit"),
        (["--plan-batch", "--trace", "out.json"], "--trace: cannot be given with --plan-batch"),
        (["--plan-batch", "--require-fit"], "--require-fit: cannot be given with --plan-batch"),
        (["--runs", "3"], "--runs: can be given with --days only"),
        (["--steps", "4"], "--steps: can be given with --html or --trace only"),
        (["--steps", "4", "--json", "out.json"], "--steps: can be given with --html or --trace only"),
        (["--critical-batch", "8"], "--critical-batch: can be given with --plan-batch only"),
        (
            ["--operators", "--json", "-"],
            "--operators: cannot be given with --json -, whose time_by_operator and time_by_part are the same",
        ),
    ],
)
def test_no_option_is_dropped_in_silence(options: list[str], words: str) -> None:
    done = run("scenarios/dp8.yaml", *options)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {words}\n")


@pytest.mark.parametrize("scenario", ["distill_logits", "processes_dp16"])
def test_advice_that_cannot_be_given_is_refused(scenario: str) -> None:
    done = run(f"scenarios/{scenario}.yaml", "--advise")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--advise: compares steps by their time alone; this scenario has" in done.stderr


@pytest.mark.parametrize(
    ("days", "words"), [("5", "faults.failures: is required by --days"), ("nan", "found nan; must be a finite number")]
)
def test_nothing_is_written_where_an_option_is_refused(days: str, words: str, tmp_path: Path) -> None:
    """dp8 has no faults.failures, which only the days ask for."""
    names = ("html", "trace", "topology", "chakra", "json")
    options = [word for name in names for word in (f"--{name}", tmp_path / name)]
    done = run("scenarios/dp8.yaml", "--days", days, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--topology", "--chakra", "--steps", "--tokens"])
def test_what_only_training_has_is_refused_for_serving(option: str, tmp_path: Path) -> None:
    value = {"--steps": "3", "--tokens": "3B"}.get(option, str(tmp_path / "out"))
    done = run("scenarios/serve_batch1.yaml", option, value)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"{option}: is for training; this scenario serves requests\n")


def test_what_does_not_fit_still_runs() -> None:
    r = run(SCENARIO, "--set", "training.seq_len=32768", "--json", "-")
    assert r.returncode == 0
    result = json.loads(r.stdout)
    assert not result["fits_in_memory"]
    assert any("fit" in w for w in result["warnings"])
