"""Sweeps: every combination is what sim.run would say, here, in other processes, and on a Dask cluster that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.commands.options import Study
from sim.commands.sweep import parse_vary, print_result, run_sweep
from sim.core.errors import InputError
from sim.core.executors import dask_workers, local_workers, results
from sim.inputs.scenario import load_scenario, read_source
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.studies import sweep_worker
from sim.studies.sweep_worker import attempt, pack
from sim.views.sweep_page import sweep_page
from tests.modules import run_module
from tests.processes import HANGS_AFTER_S
from tests.sim.search.test_search_dask import cluster

ROOT = Path(__file__).parents[3]
FILE = ROOT / "scenarios" / "1f1b_pp8.yaml"
RANKS = "faults.stragglers.0.rank=0..2,7"
SCALES = "faults.stragglers.0.compute_scale=1,1.3"


def test_every_step_is_the_one_that_run_simulates() -> None:
    found = run_sweep(FILE, [RANKS, SCALES, "faults.jitter.sigma=0,0.05"], Study())
    assert len(found.rows) == 4 * 2 * 2
    healthy_s = simulate(load_scenario(FILE)).step_time_s
    for row in found.rows:
        options = [f"{k}={v}" for k, v in row.values.items()]
        assert row.figures["step_time_s"] == simulate(load_scenario(FILE, options)).step_time_s
        assert row.figures["healthy_s"] == healthy_s
        assert row.figures["lost_s"] == row.figures["step_time_s"] - healthy_s
        off = row.values["faults.jitter.sigma"] == 0 and row.values["faults.stragglers.0.compute_scale"] == 1
        assert (row.figures["lost_s"] == 0) == off


def test_other_keys_have_their_own_healthy_step_and_what_is_illegal_is_a_row_that_says_so() -> None:
    found = run_sweep(FILE, ["parallelism.tp=1,2,5,3", SCALES, "faults.stragglers.0.rank=1"], Study())
    assert len(found.rows) == 8
    healthy = {r.values["parallelism.tp"]: r.figures["healthy_s"] for r in found.rows if not r.refused}
    assert healthy == {tp: simulate(load_scenario(FILE, [f"parallelism.tp={tp}"])).step_time_s for tp in (1, 2)}
    refused = [r for r in found.rows if r.refused]
    assert len(refused) == 4
    assert [r["step_time_s"] for r in found.to_json()["rows"] if r["refused"]] == [None] * len(refused)


def test_steps_of_other_sizes_share_what_was_priced() -> None:
    """A GPU's prices do not depend on how many ranks its node holds; those of ranks that share cores do."""
    source, changes = read_source(FILE, ()), [(("parallelism.pp", pp),) for pp in (2, 4, 8)]
    packed = pack(source, "x", changes)
    before = sweep_worker._costs.cache_info().misses
    assert not any(attempt(packed, change).refused for change in changes)
    assert sweep_worker._costs.cache_info().misses == before + 1


def test_a_varied_key_may_be_what_makes_the_scenario_legal() -> None:
    found = run_sweep(
        FILE,
        ["parallelism.tp=1,2"],
        Study(
            overrides=(
                "parallelism.sp=true",
                "parallelism.pp=4",
            )
        ),
    )
    assert [bool(row.refused) for row in found.rows] == [True, False]
    with pytest.raises(InputError, match="sequence parallelism needs tp above 1"):
        run_sweep(FILE, ["parallelism.pp=4,8"], Study(overrides=("parallelism.sp=true",)))


def test_links_and_presets_and_profiles_can_be_varied(tmp_path: Path) -> None:
    link = "faults.links.0={between: [node0, node0], bandwidth_scale: 0.25},{between: [node0, node0]}"
    found = run_sweep(FILE, [link, "cluster=dgx-a100,dgx-h100"], Study(overrides=("faults.stragglers.0.rank=1",)))
    times = [r.figures["step_time_s"] for r in found.rows]
    assert len(set(times)) == 4
    assert times[0] > times[2]  # a quarter of the bandwidth against half
    page = sweep_page(found)
    assert "dgx-a100" in page
    assert "https://cdn" not in page


@pytest.mark.parametrize(
    ("vary", "problem"),
    [
        ("parallelism.pp", "must be KEY=VALUE"),
        ("parallelism.pp=", "must be KEY=VALUE"),
        ("=3", "must be KEY=VALUE"),
        ("faults.stragglers.0.rank=0..99999999", "combinations"),
        ("faults.stragglers.0.rank=7..0", "combinations"),
        ("parallelism.pp=[1", "is not valid YAML"),
        ("faults.jiter.sigma=1", "did you mean 'jitter'"),
        ("model.heads=7,9", "--vary model.heads: found 7; must"),
        ("parallelism.pp=*a", "anchors and aliases"),
        ("parallelism.tp=5,7", "none of the 2 combinations can be simulated"),
    ],
)
def test_bad_options_are_one_message(vary: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        run_sweep(FILE, [vary], Study())


def test_without_faults_nothing_is_said_of_them_and_memory_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["cluster={preset: dgx-h100, gpu: {preset: h100-sxm, memory_bytes: 28GiB}}"]
    found = run_sweep(FILE, ["training.recompute=none,full"], Study(overrides=tuple(small)))
    assert [row.fits_in_memory for row in found.rows] == [False, True]
    print_result(found)
    said = capsys.readouterr().out
    assert "Fastest step that fits" in sweep_page(found)
    assert "recompute none; none fits" in sweep_page(replace(found, rows=found.rows[:1]))
    assert (said.count("✗"), sweep_page(found).count("✗")) == (2, 1)  # the table's line below it says what it means
    assert "fault" not in said
    assert "aults" not in re.sub(r"<script.*?</script>", "", sweep_page(found), flags=re.S)
    assert "lost to faults" in sweep_page(run_sweep(FILE, [SCALES, "faults.stragglers.0.rank=1"], Study()))


def test_rows_on_different_numbers_of_gpus_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_sweep(FILE, ["parallelism.dp=1,2"], Study())
    pp = found.rows[0].gpus
    assert [row.gpus for row in found.rows] == [pp, 2 * pp]
    print_result(found)
    assert "GPUs" in capsys.readouterr().out
    assert ">GPUs<" in sweep_page(found)
    print_result(run_sweep(FILE, ["training.recompute=none,full"], Study()))
    assert "GPUs" not in capsys.readouterr().out


def test_sizes_that_grow_by_a_factor_stand_equally_far_apart() -> None:
    page = sweep_page(run_sweep(FILE, ["training.seq_len=1024,4096,16384"], Study()))
    scale = '"name":"LogScale"'
    assert scale in page
    assert "16,384" in page
    assert scale not in sweep_page(run_sweep(FILE, ["training.seq_len=1024,2048"], Study()))


def test_linked_keys_vary_together_and_are_compared_by_tokens_a_second() -> None:
    found = run_sweep(
        FILE, ["parallelism.dp,training.global_batch_size=1:16,2:64", "training.recompute=none,full"], Study()
    )
    values = [tuple(row.values.values()) for row in found.rows]
    assert values == [(1, 16, "none"), (1, 16, "full"), (2, 64, "none"), (2, 64, "full")]
    assert (found.metric, found.linked) == (
        "tokens_per_s_per_gpu",
        (("parallelism.dp", "training.global_batch_size"),),
    )
    assert found.vary["training.global_batch_size"] == [16, 64]
    page = sweep_page(found)
    assert "Best tok/s/GPU that fits" in page or "none fits" in page
    assert run_sweep(FILE, ["training.recompute=none,full"], Study()).metric == "step_time_s"
    chosen = run_sweep(FILE, ["training.recompute=none,full"], Study(), metric="peak_memory_bytes")
    assert "Best memory that fits" in sweep_page(chosen)
    with pytest.raises(InputError, match="--metric: found 'hfu'; must be one of step_time_s"):
        run_sweep(FILE, ["training.recompute=none"], Study(), metric="hfu")
    with pytest.raises(InputError, match="must be rows of 2 values joined by ':', such as 1:2"):
        run_sweep(FILE, ["parallelism.dp,training.global_batch_size=1,2"], Study())


def test_linked_rows_at_one_place_have_no_line_between_them() -> None:
    """A vertical line between two numbers of micro-batches of one length would look like a change over the length."""
    line = '"name":"Line"'
    longer = "training.seq_len,training.micro_batch_size=1024:1,2048:1"
    assert line in sweep_page(run_sweep(FILE, [longer], Study()))
    assert line not in sweep_page(run_sweep(FILE, [f"{longer},2048:2"], Study()))


def test_serving_is_swept_too(capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "scenarios" / "serve_llama8b.yaml"
    few = ["inference.requests.count=8"]
    found = run_sweep(file, ["inference.requests.rate_per_s=1,50", "parallelism.tp=1,3"], Study(overrides=tuple(few)))
    assert found.workload == "serving"
    assert [bool(row.refused) for row in found.rows] == [False, True, False, True]
    alone = simulate_serving(load_scenario(file, [*few, "inference.requests.rate_per_s=50"])).result
    assert found.rows[2].figures["ttft_p99_s"] == alone["time_to_first_token_s"]["p99"]
    assert found.rows[2].figures["output_tokens_per_s_per_gpu"] == alone["output_tokens_per_s_per_gpu"]
    print_result(found)
    said = capsys.readouterr().out
    assert "refused (1)" in said
    assert "(1) refused: " in said
    assert "TTFT p99" in said
    assert "Best TTFT p99 that fits" in sweep_page(found)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("serve_autoscaling", ["inference.requests={prompt_len: 64, output_len: 4, count: 8}"], "parallelism.dp=1,2"),
        (
            "serve_llama8b",
            ["inference.requests.count=8", "parallelism.dp=2"],
            "inference.router=round_robin,least_loaded",
        ),
        ("serve_llama8b", ["inference.requests.count=8"], "inference.disaggregated=null,{prefill: {}}"),
    ],
)
def test_replicas_that_affect_each_other_are_swept(name: str, changes: list[str], key: str) -> None:
    found = run_sweep(ROOT / "scenarios" / f"{name}.yaml", [key], Study(overrides=tuple(changes)))
    assert [row.refused for row in found.rows] == ["", ""]


def test_an_rl_step_whose_engine_spreads_experts_is_swept() -> None:
    small = ["model=mixtral-8x7b", "rl.prompts_per_step=8", "rl.generations_per_prompt=8", "parallelism.ep=8"]
    small += ["training.global_batch_size=64", "rl.generation={tp: 2, ep: 4}"]
    found = run_sweep(
        ROOT / "scenarios" / "rl_grpo_llama8b.yaml", ["training.recompute=full"], Study(overrides=tuple(small))
    )
    assert [row.refused for row in found.rows] == [""]


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(InputError, match="1,000,000 combinations"):
        parse_vary([f"{key}=1..100" for key in ("a", "b", "c")])
    with pytest.raises(InputError, match="given twice"):
        parse_vary(["a=1", "a=2"])


def rows_of(packed: bytes, changes: list[Any], pool: Any) -> list[Any]:
    return list(results(pool, attempt, ((packed, change) for change in changes)))


def test_other_processes_find_the_same_to_the_last_bit() -> None:
    one, two = (run_sweep(FILE, [RANKS, SCALES], Study(workers=n)).rows for n in (1, 2))
    assert one == two


@pytest.mark.slow
def test_a_killed_dask_worker_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    changes = [
        (("faults.stragglers.0.rank", r), ("faults.stragglers.0.compute_scale", 1 + s / 10))
        for r in range(8)
        for s in range(1, 11)
    ]
    packed = pack(read_source(FILE), "steps", changes)
    with local_workers(1) as here:
        expected = rows_of(packed, changes, here)
    with cluster(tmp_path) as (address, victim), dask_workers(address) as pool:
        until = time.monotonic() + HANGS_AFTER_S
        while pool.cores() < 2 and time.monotonic() < until:
            time.sleep(0.05)
        found = []
        for row in results(pool, attempt, ((packed, change) for change in changes)):
            found.append(row)
            if len(found) == 5:
                os.kill(victim.pid, signal.SIGKILL)
        assert victim.wait(HANGS_AFTER_S) == -signal.SIGKILL
        assert found == expected
        whole = run_sweep(FILE, [RANKS, SCALES], Study(dask=address))
    assert whole.rows == run_sweep(FILE, [RANKS, SCALES], Study()).rows
    assert whole.cores == 1


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "sweep.html"
    command = ("sim.sweep", FILE, "--vary", RANKS, "--vary", SCALES)
    done = run_module(*command, "--json", "-", "--html", out)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"] == "sim-sweep/1"
    assert "Sweep: 1f1b_pp8" in out.read_text()
    shown = run_module(*command).stdout
    assert "lost to faults" in shown
    bad = run_module(*command, "--vary", "x=1")
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr


def test_a_cluster_of_which_no_kernels_were_measured_is_marked() -> None:
    from pathlib import Path

    from sim.commands.options import Study
    from sim.commands.sweep import run_sweep
    from sim.inputs.shipped import shipped_scenarios

    found = run_sweep(Path(shipped_scenarios()["1f1b_pp8"]), ["cluster=dgx-h100,gaudi3-node"], Study())
    marks = [row["not_measured"] for row in found.to_json()["rows"]]
    assert marks == ["", "not measured: borrowed efficiencies"]
    assert found.not_measured == "gaudi3-node not measured: borrowed efficiencies"
