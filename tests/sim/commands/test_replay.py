"""`python -m sim.replay`: what it prints and writes, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.replay import main
from tests.modules import run_module
from tests.sim.traces import programs as p
from tests.sim.traces.test_chakra import coll, comp, encode_file

ITEMS: list[p.Item] = [
    p.Kernel(1000, 1000, 500_000, 7),
    p.Wait(100, 7, 20),
    p.Kernel(100, 1000, 100_000, 20, True),
    p.Wait(100, 20, 7),
    p.Kernel(100, 1000, 50_000, 7),
    p.Sync(0, 100),
]


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    """Two ranks' files, the second with more work."""
    slow = [ITEMS[0]._replace(kernel_ns=600_000), *ITEMS[1:]]
    files = []
    for i, trace in enumerate(p.run([ITEMS, slow])[1]):
        files.append(str(tmp_path / f"rank{i}.json"))
        Path(files[-1]).write_text(json.dumps(trace))
    return files


def invoke(*args: str) -> Any:
    """The command in this process."""
    return CliRunner().invoke(main, args)


def test_json_alone_on_standard_output(traces: list[str]) -> None:
    result = json.loads(run_module("sim.replay", *traces, "--json", "-", "--straggler", "0=1.5").stdout)
    assert result["format"] == "sim-replay/1"
    assert abs(result["error"]) < 1e-6
    assert result["what_if"] == {"straggler": ["0=1.5"]}
    assert result["change"] == pytest.approx(175e-6 / result["replayed_step_s"], rel=1e-3)  # 150 past 100, and 25 after
    assert result["communication"][0] | {"seconds": 0} == {
        "kind": "all_reduce",
        "group": "0",
        "count": 2,
        "bytes": 2 << 21,
        "recorded_s": pytest.approx(1e-4),
        "seconds": 0,
    }


def test_one_replica_is_a_change_and_a_factor_of_one_is_none(traces: list[str]) -> None:
    result = json.loads(invoke(*traces, "--json", "-", "--dp", "1", "--gpu-ratio", "1").stdout)
    assert result["what_if"] == {"dp": 1}
    assert result["step_time_s"] < result["replayed_step_s"]


def test_a_pattern_that_matches_nothing_is_refused_with_the_longest_names(traces: list[str]) -> None:
    done = invoke(*traces, "--scale-kernels", "gemn=2")
    assert done.exit_code == 2
    assert "--scale-kernels: 'gemn' matches nothing; the longest here are " in done.stderr
    assert "gemm" in done.stderr


def test_gpus_are_named_by_the_traces_or_by_the_user(traces: list[str]) -> None:
    done = invoke(*traces, "--gpu", "h100")
    assert "unknown GPU 'h100'; did you mean one of h100-nvl, h100-pcie, h100-sxm?" in done.stderr


def test_a_network_changes_nothing_where_nothing_is_sent(tmp_path: Path) -> None:
    (tmp_path / "job.0.et").write_bytes(encode_file([comp(1, 100), comp(2, 50, 1)]))
    for option, value in (("--network-scale", "2"), ("--cluster", "dgx-h100")):
        done = invoke(str(tmp_path / "job.0.et"), option, value, "--json", "-")
        assert done.exit_code == 0, done.output
        said = f"{option}: the traces hold no collective and no message, so it changes nothing"
        assert said in json.loads(done.stdout)["warnings"]


def test_page_trace_and_summary(traces: list[str], tmp_path: Path) -> None:
    page, trace = tmp_path / "x.html", tmp_path / "x.trace.json"
    done = invoke(*traces, "--html", str(page), "--trace", str(trace), "--scale-kernels", "gemm=2")
    assert done.exit_code == 0, done.output
    assert "replayed unchanged" in done.output
    assert "with scale_kernels" in done.output
    assert "With the change" in page.read_text()
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert {"ALL_REDUCE", "WAIT", "F"} <= names


def test_chakra_and_its_groups(tmp_path: Path) -> None:
    for rank in range(2):
        nodes = [comp(1, 100 * (rank + 1)), coll(2, 1), comp(3, 50, 2)]
        (tmp_path / f"job.{rank}.et").write_bytes(encode_file(nodes))
    files = [str(tmp_path / f"job.{r}.et") for r in range(2)]
    done = invoke(*files, "--cluster", "dgx-a100", "--json", "-")
    result = json.loads(done.stdout)
    assert result["recorded_step_s"] == pytest.approx(250e-6)
    assert result["step_time_s"] > 250e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scale-kernels", "gemm"], "must be NAME=FACTOR"),
        (["--straggler", "0=slow"], "found '0=slow'; must be RANK=FACTOR with a factor above 0, e.g. 3=1.3"),
        (["--scale-kernels", "(=2"], "is no regular expression"),
        (["--scale-kernels", "a=-1"], "factor above 0"),
        (["--straggler", "7=2"], "there are traces of ranks 0, 1"),
        (["--gpu-ratio", "0"], "--gpu-ratio: found 0.0"),
        (["--gpu-ratio", "nan"], "--gpu-ratio: found nan"),
        (["--cluster", "none"], "found 'none'; no such cluster preset (`stepsim clusters` lists them)"),
        (["--gpu", "none"], "unknown GPU 'none'"),
        (["--dp", "4", "--dp-group", "x"], "groups that reduce are: '0'"),
        (["--step", "8"], "every trace has 3"),
        (["--groups", "g.json"], "is for Chakra traces"),
        (["--html", "/nowhere/x.html"], "cannot be written"),
    ],
)
def test_bad_options_exit_with_2_and_one_message(traces: list[str], options: list[str], words: str) -> None:
    done = invoke(*traces, *options)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_mixed_files_are_refused(traces: list[str], tmp_path: Path) -> None:
    other = tmp_path / "a.0.et"
    other.write_bytes(encode_file([comp(1, 1)]))
    done = invoke(traces[0], str(other))
    assert done.exit_code == 2
    assert "give traces of one kind" in done.stderr
