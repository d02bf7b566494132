"""The commands on real ranks: measuring and comparing, ranks that die, parents that die, bad input."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibrate.launch import RankError, run_ranks
from calibrate.measure import main as measure
from sim.commands.compare import main as compare
from sim.inputs.measured_run import QUIET_CORES
from tests.processes import HANGS_AFTER_S, exit_code
from tests.real.conftest import WORKER, small

MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages whose blocks take about a millisecond."""
    data = small({"pp": 2, "schedule": "1f1b"}, hidden=128, vocab=512)
    data["training"]["seq_len"] = 128
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.timed
def test_measure_then_compare(scenario: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Within a factor of two where the machine was quiet (a busy one has longer steps); memory within 5 %."""
    out = tmp_path / "measured.json"
    assert exit_code(measure, str(scenario), "--out", str(out), "--steps", "4", "--budget", "2") == 0
    run, words = json.loads(out.read_text()), capfd.readouterr().err
    assert run["format"] == "measured-run/1"
    assert f"small: {len(run['step_times_s'])} steps, median" in words
    assert all(f"warning: {w}" in words for w in run["warnings"])
    assert any("no round was quiet" in w for w in run["warnings"]) or max(run["foreign_cores"]) <= QUIET_CORES
    kinds = {a["kind"] for a in run["actions"]}
    assert kinds >= {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "OPTIMIZER"}
    assert run["proof"]["parallel_loss"] == pytest.approx(run["proof"]["single_device_loss"], rel=1e-5)
    assert sum(a["kind"] == "F" and a["rank"] == 1 for a in run["actions"]) == 4
    assert exit_code(compare, str(scenario), str(out), "--json", "-", "--tolerance", "1.0") == 0
    result = json.loads(capfd.readouterr().out)
    assert result["format"] == "sim-compare/1"
    ratio = result["step_time_s"]["simulated"] / result["step_time_s"]["measured"]
    assert ratio < 2.0
    assert ratio > 0.5 or not result["quiet"]
    # Recorded durations give the recorded step, but for what a busy machine's other processes took between two actions.
    assert abs(result["replay"]["error"]) < (0.15 if result["quiet"] else 0.5)
    for row in result["memory_over_steps"]:
        assert len(row["peaks"]) == 4
        for pair in row["peaks"]:  # the first without, the others with the optimizer's states
            assert abs(pair["error"]) < 0.06
        assert row["peaks"][0]["measured"] < row["peaks"][1]["measured"]
    assert [row["rank"] for row in result["memory_over_steps"]] == [0, 1]
    for row in result["memory"]:
        assert abs(row["peak_bytes"]["error"]) < 0.05
        assert abs(row["saved_for_backward_bytes"]["error"]) < 0.01


def test_rank_that_dies_ends_the_others(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as error:
        run_ranks([sys.executable, WORKER, "dying", str(scenario), "--out", str(out)], 2, HANGS_AFTER_S)
    assert error.value.code == 1
    assert error.value.killed_by == signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_wrong_gradients_are_refused(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    with pytest.raises(RankError, match="the ranks' results differ from one device's") as error:
        run_ranks([sys.executable, WORKER, "sabotaged", str(scenario), "--out", str(out)], 2, HANGS_AFTER_S)
    assert error.value.code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ({"parallelism": {"dp": 1000}}, "parallelism: found 1,000 ranks"),
        ({"training": {"precision": "bf16"}}, "training.grad_dtype: found fp32; calibrate.measure can run: bf16"),
        (
            {"training": {"recompute": "selective_op"}, "model": {"moe": {"experts": 4, "top_k": 2, "ffn": 48}}},
            "training.recompute: found selective_op with experts",
        ),
        (
            {
                "model": {"moe": {"experts": 4, "top_k": 2, "ffn": 48}},
                "parallelism": {"tp": 2, "sp": True, "pp": 2, "ep": 2, "schedule": "dualpipe", "ep_overlap": True},
            },
            "parallelism.ep_overlap: found true with tp 2",
        ),
        (
            {"model": {"mla": MLA}, "training": {"attention": "fused"}},
            "training.attention: found fused with heads of 12 and values of 6",
        ),
        (
            {"model": {"mla": MLA}, "training": {"recompute": "selective_op"}, "parallelism": {"tp": 2}},
            "training.recompute: found selective_op with latent attention and tp",
        ),
        (
            {"model": {"mlp": "swiglu"}, "training": {"recompute": "selective_op"}},
            "training.recompute: found selective_op with swiglu and separate projections",
        ),
        ({"model": {"positions": "rope", "head_dim": 5}}, "model.head_dim: found 5 with rope"),
        (
            {"model": {"moe": {"experts": 4, "top_k": 2, "ffn": 48, "groups": 2, "top_groups": 1}}},
            "model.moe.groups: found 2",
        ),
        (
            {
                "model": {"moe": {"experts": 4, "top_k": 2, "ffn": 48, "router_fp32": True}},
                "training": {"precision": "bf16", "grad_dtype": "bf16"},
            },
            "model.moe.router_fp32: found true with precision bf16",
        ),
        ({"cluster": "dgx-h100"}, "cluster: found 1 GPU"),
    ],
)
def test_refused(override: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small({})
    for section, values in override.items():
        data[section] = data[section] | values if isinstance(values, dict) else values
    data["training"]["global_batch_size"] = 4000
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(data))
    assert exit_code(measure, str(path), "--out", str(tmp_path / "m.json")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: {key}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--steps", "0"], "--steps: found 0"),
        (["--budget", "0"], "--budget: found 0"),
        (["--profile", "nothing"], "--profile"),
        (["--out", "/does/not/exist/m.json"], "/does/not/exist is not a folder that can be written to"),
    ],
)
def test_bad_options(
    extra: list[str], message: str, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(measure, str(scenario), "--out", str(tmp_path / "m.json"), *extra) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
