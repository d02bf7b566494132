import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sim.core.program import Compute, Phase
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from tests.processes import HANGS_AFTER_S
from topology.presets import GPUS


def calibrate(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "calibrate.run", *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode == code, err
    return out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "matmull"], "--only: found 'matmull'; allowed: matmul, attention"),
        (["--device", "tpu"], "--device: found 'tpu'; allowed: cpu, cuda"),
        (["--out", "no/such/folder/p.json"], "no/such/folder is not a folder that can be written to"),
        (["--out", "."], "--out: . is a folder; allowed: a file"),
        (["--quik"], "No such option"),
    ],
)
def test_bad_arguments_end_with_2_and_one_message(arguments: list[str], message: str) -> None:
    out, err = finish(calibrate(*arguments), code=2)
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_where_there_is_none_ends_with_2() -> None:
    _, err = finish(calibrate("--device", "cuda"), code=2)
    assert "--device: cuda is not available on this machine; allowed: cpu" in err


@pytest.mark.slow
def test_a_profile_of_this_machine_prices_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    groups = ("launch", "optimizer", "memory")
    out, _ = finish(
        calibrate("--device", "cpu", "--quick", "--out", str(file), *(x for g in groups for x in ("--only", g)))
    )
    assert str(file) in out
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
    profile = load_profile(file)
    assert profile.settings["threads_per_rank"] == 1
    costs = Costs(profile, GPUS["cpu"])
    table = next(t for t in profile.points if t.op == "optimizer:adamw")
    moved = float(table.shapes[0, 0])
    step = Compute("adamw", "optimizer", (1,), "fp32", 0.0, moved, Phase.OPTIMIZER, kernel="adamw")
    assert costs.compute(step)[:2] == (table.seconds[0], "measured")
    copy = Compute("x", "copy", (1,), "fp32", 0.0, 2.0**22, Phase.FORWARD)
    assert costs.compute(copy).source == "interpolated"
    assert costs.coefficients.kernel_gap_s > 0


def kept(partial: Path) -> dict:
    """What the partial file holds; it must be whole JSON whenever it is there."""
    if not partial.exists():
        return {}
    data = json.loads(partial.read_text())
    assert data["format"] == "profile-partial/1"
    return data["done"]


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid` (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, timeout_s: float = HANGS_AFTER_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_whole_files_and_goes_on(tmp_path: Path) -> None:
    file, partial = tmp_path / "p.json", tmp_path / "p.json.partial"
    arguments = ("--device", "cpu", "--quick", "--only", "optimizer", "--out", str(file))
    moments, before = random.Random(7), {}
    for _ in range(2):
        process = calibrate(*arguments)
        wait_until(lambda before=before: len(kept(partial)) > len(before))
        time.sleep(moments.uniform(0.0, 0.2))
        process.kill()
        process.communicate()
        assert not file.exists()
        after = kept(partial)
        assert after.items() >= before.items()  # nothing is measured twice
        before = after
    _, err = finish(calibrate(*arguments))
    assert f"resuming from {len(before)} measurements" in err
    profile = load_profile(file)
    seconds = {(t.op, s) for t in profile.points for s in t.seconds.tolist()}
    assert {(row[1], row[4]) for rows in before.values() for row in rows} <= seconds
    left = {p.name for p in tmp_path.iterdir()} - {"p.json"}
    assert len(left) <= 2, "one killed while it writes may leave the temporary file that it writes to (sim.core.files)"
    assert all(name.startswith(".p.json.partial.") for name in left)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core forms no group")
def test_ranks_die_with_a_killed_parent_and_their_results_stay(tmp_path: Path) -> None:
    partial = tmp_path / "p.json.partial"
    arguments = ("--device", "cpu", "--quick", "--only", "collectives", "--out", str(tmp_path / "p.json"))
    process = calibrate(*arguments)
    wait_until(lambda: len(kept(partial)) >= 2)
    ranks = children(process.pid)
    assert len(ranks) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in ranks), 5.0)
    assert all(key.startswith("collective all_reduce 2 ") for key in kept(partial))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    finish(calibrate("--device", "cuda", "--quick", "--only", "launch", "--only", "attention", "--out", str(file)))
    profile = load_profile(file)
    assert profile.hardware["device"] == "cuda"
    assert profile.coefficients.launch_overhead_s > 0
    assert {"attention_forward", "attention_backward"} <= {t.op for t in profile.points}


@pytest.mark.slow
def test_a_profile_says_how_busy_others_were(tmp_path: Path) -> None:
    """A stranger who keeps a core busy shows, the measurement's own work does not count."""
    from calibrate.machine_load import Others, machine_busy_s

    if not machine_busy_s():
        pytest.skip("this system's /proc/stat counts nothing")
    begin = time.monotonic()
    others, busy = Others(), subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(lambda: _cpu_seconds(busy.pid) > 0.5)
        used, seconds = _cpu_seconds(busy.pid), time.monotonic() - begin
        assert others.cores() * seconds > 0.8 * used
    finally:
        busy.kill()
        busy.wait()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
