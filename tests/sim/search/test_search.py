"""The best layouts that a search finds are exhaustive search's; what it counts and prints."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import sim
from sim.commands.options import Study
from sim.commands.search import main
from sim.commands.search_tables import _reasons, _so_far
from sim.commands.sweep import run_sweep
from sim.core.errors import InputError
from sim.core.executors import Workers, local_workers
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import Coefficient
from sim.prices.nearby import NearbyStep, mesh_features
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.search.best_first import COUNTED, BestFirst, pareto
from sim.search.evaluation import FATES, Outcome, evaluate, pack
from sim.search.space import Layout, MeshSizes, Space, scenario_of, simplest
from sim.simulation import prepare, simulate
from tests.processes import exit_code
from tests.sim.search.search_spaces import (
    BASE,
    all_outcomes,
    legal,
    legal_layouts,
    run_search,
    small_space,
    space_of,
    varied,
)


def search(space: Space, limit_bytes: float, top: int = 5, front: bool = False, workers: int = 1) -> BestFirst:
    with local_workers(workers) as pool:
        return BestFirst(space, limit_bytes, top, front, pool).run()


def key(o: Outcome) -> tuple[float, float, Layout]:
    return o.step_time_s, o.peak_memory_bytes, o.layout


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("share", [0.3, 0.6, 2.0])
def test_best_is_that_of_exhaustive_search(variant: int, share: float) -> None:
    space, outcomes = all_outcomes(variant)
    peaks = sorted(o.peak_memory_bytes for o in outcomes)
    limit = share * peaks[len(peaks) // 2]
    expected: dict[Layout, Any] = {}
    for o in sorted((o for o in outcomes if o.peak_memory_bytes <= limit), key=key):
        expected.setdefault(o.layout._replace(virtual_stages=0), key(o))  # the best number of virtual stages alone
    found = search(space, limit)
    assert [key(o) for o in found.best] == list(expected.values())[:5]
    c = found.counts
    assert tuple(c) == COUNTED
    assert c["legal"] == len(outcomes) == c["pruned_by_memory"] + c["pruned_by_bound"] + c["evaluated"]
    assert c["evaluated"] == sum(c[fate] for fate in FATES) < c["legal"]
    assert c["simulated"] == len(found.fitting)
    assert found.cpu_s["bounding"] > 0
    assert all(found.cpu_s[fate] > 0 for fate in FATES if c[fate])


def test_a_search_tells_how_many_meshes_have_bounds_before_it_evaluates() -> None:
    seen: list[tuple[int, int, float, str]] = []

    def look(s: BestFirst) -> None:
        seen.append((s.meshes_bounded, s.counts["evaluated"], s.progress, _so_far(s)))

    with local_workers(1) as pool:
        found = BestFirst(small_space(0), math.inf, 1, False, pool, look).run()
    before = [each for each in seen if each[0] < found.meshes]
    assert [each[0] for each in before] == list(range(1, found.meshes))
    assert all(evaluated == 0 and share < 0.5 for _, evaluated, share, _ in before)
    assert before[0][3].startswith(f"first, bounds of all layouts: 1 of {found.meshes} meshes")
    assert all(share >= 0.5 and "evaluated" in text for _, _, share, text in seen[len(before) :])
    assert seen[-1][0] == found.meshes


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_what_no_layout_fits_into_is_told_with_the_least_that_one_needs(share: float) -> None:
    """Exact below the states; a bound below the peak of each layout otherwise."""
    space, outcomes = all_outcomes(0)
    least = min(o.peak_memory_bytes for o in outcomes)
    found = search(space, share * least)
    assert found.counts["pruned_by_memory"] + found.counts["too_large"] == found.counts["legal"] == len(outcomes)
    assert share * least < found.too_large_bytes <= least


def test_a_number_of_virtual_stages_makes_no_layout_of_its_own() -> None:
    only = {"pp": (2,), "schedule": ("interleaved_1f1b", "1f1b"), "recompute": ("none",)}
    space = varied({"model": {"layers": 8}, "training": {"global_batch_size": 16}}, 2, only)
    found = search(space, float("inf"))
    assert len({o.layout.virtual_stages for o in found.fitting}) > 2
    alike = [o.layout._replace(virtual_stages=0) for o in found.best]
    assert len(alike) == len(set(alike)) > 1
    assert found.best[0] == found.fitting[0]


def test_recomputation_that_saves_no_memory_makes_no_layout_of_its_own() -> None:
    """With a fused kernel selective recomputation has nothing to save; without one it has."""
    only = {"pp": (1,), "zero": (0, 1), "sp": (True,), "recompute": ("none", "selective", "full")}
    model, listed = {"layers": 8, "tied_embeddings": False}, {}
    for attention in ("fused", "unfused"):
        space = varied({"model": model, "training": {"attention": attention}}, 4, only)
        found = search(space, float("inf"), top=1000)
        listed[attention] = Counter(o.layout.recompute for o in found.best)
        rest = [o for o in found.fitting if o not in found.best]
        for o in rest:
            twins = [b for b in found.best if b.layout._replace(recompute="") == o.layout._replace(recompute="")]
            faster = [b for b in twins if b.step_time_s <= o.step_time_s]
            assert any(o.peak_memory_bytes > 0.99 * b.peak_memory_bytes for b in faster)
        assert [key(o) for o in search(space, float("inf"), top=4).best] == [key(o) for o in found.best[:4]]
    assert listed["fused"]["none"] > 0 == listed["fused"]["selective"]
    assert min(listed["unfused"]["selective"], listed["fused"]["full"]) > 0


def test_a_rule_that_refuses_several_layouts_is_told_once() -> None:
    reasons = [f"megatron: parallelism.pp: found {pp}; flags are for one stage" for pp in (2, 4)]
    other = "megatron: parallelism.cp: found 2; no flags"
    assert _reasons([*reasons, other]) == [reasons[0], other]


def test_whole_front_is_that_of_exhaustive_search() -> None:
    space, outcomes = all_outcomes(0)
    line = pareto(outcomes)
    found = search(space, float("inf"), front=True)
    assert [(o.step_time_s, o.peak_memory_bytes) for o in pareto(found.fitting)] == [
        (o.step_time_s, o.peak_memory_bytes) for o in line
    ]
    assert found.counts["evaluated"] < len(outcomes)


@pytest.mark.parametrize("variant", [0, 1, 3])
def test_shared_links_take_time_but_no_memory(variant: int) -> None:
    space = space_of(variant)
    packed = pack(space)
    slower = 0
    for x in legal_layouts(variant)[:: len(legal_layouts(variant)) // 12]:
        try:
            alone, shared = (simulate(scenario_of(space, x), share_links=share) for share in (False, True))
        except InputError:
            continue
        peaks = [max(float(c.total.max()) for c in each.memory) for each in (alone, shared)]
        assert alone.step_time_s <= shared.step_time_s * (1 + 1e-9)
        assert peaks[0] == peaks[1] == prepare(scenario_of(space, x), alone.pricing.costs).peak_bytes
        too_large = evaluate(packed, x, limit_bytes=peaks[0] - 1)
        assert (too_large.step_time_s, too_large.peak_memory_bytes) == (math.inf, peaks[0])
        slower += shared.step_time_s > alone.step_time_s
        found, beaten = evaluate(packed, x), evaluate(packed, x, patience_s=alone.step_time_s * 0.5)
        assert (found.step_time_s, found.fate) == (shared.step_time_s, "simulated")
        assert (too_large.fate, beaten.fate) == ("too_large", "beaten")
        assert 0.5 * alone.step_time_s < beaten.step_time_s <= alone.step_time_s
        assert evaluate(packed, x, patience_s=alone.step_time_s).fate == "simulated"
    assert slower or variant != 0


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_programs_kept_from_one_schedule_to_the_next_change_no_time(variant: int) -> None:
    space = space_of(variant)
    packed = pack(space)
    by_schedule = sorted(legal_layouts(variant), key=lambda x: x._replace(schedule="", virtual_stages=0))
    ways = [list(g) for _, g in itertools.groupby(by_schedule, lambda x: x._replace(schedule="", virtual_stages=0))]
    for x in max(ways, key=len)[:16]:
        found = evaluate(packed, x)
        if found.fate == "simulated":
            assert found.step_time_s == simulate(scenario_of(space, x)).step_time_s, x


@pytest.mark.parametrize("faults", [{}, {"stragglers": [{"rank": 1, "compute_scale": 2.0}]}])
def test_what_a_schedule_is_searched_with_is_what_runs(faults: dict[str, Any]) -> None:
    """Programs compiled for the search are not compiled again; with faults, those of the search know none of them."""
    space = varied({"faults": faults}, 8)
    scenario = scenario_of(space, Layout(1, False, 1, 4, 2, 1, 1, "zb_search", 1, 1, "none", "none"))
    costs = Costs(load_profile("h100-sxm"), space.base.cluster.gpu)
    step = prepare(scenario, costs)
    compiled = {template for known in step.cache.by_content.values() for _, template in known}
    assert bool(compiled) is not bool(faults)
    simulated, given = step.run().times, prepare(scenario, costs, step.schedule).run().times
    assert compiled <= set(step.cache.by_action.values())
    assert simulated == given


def test_other_processes_find_the_same() -> None:
    space = small_space(0, tp=(2, 4))
    assert [key(o) for o in search(space, 1e18).best] == [key(o) for o in search(space, 1e18, workers=2).best]


def test_a_worker_s_error_is_not_lost() -> None:
    with local_workers(1) as pool, pytest.raises(TypeError):
        pool.executor.submit(evaluate, None).result()
    assert Workers(pool.executor, lambda: 3).slots == 1


def test_pareto_line() -> None:
    x = legal_layouts(0)[0]
    points = [Outcome(x, "simulated", t, m, m, 0.0) for t, m in ((1, 9), (2, 9), (2, 5), (3, 6), (4, 1))]
    assert [(o.step_time_s, o.peak_memory_bytes) for o in pareto(points)] == [(1, 9), (2, 5), (4, 1)]


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(BASE), encoding="utf-8")
    return file


def test_command_writes_a_result_that_parses(
    scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    options = ("--gpus", "4", "--top", "3", "--only", "schedule=1f1b", "--only", "micro_batch_size=1,2")
    assert exit_code(main, str(scenario_file), *options, "--json", str(target), "--memory-limit", "10GiB") == 0
    result = json.loads(target.read_text())
    assert result["format"] == "sim-search/1"
    assert result["gpus"] == 4
    assert result["memory_limit_bytes"] == 10 * 2**30
    assert {r["layout"]["schedule"] for r in result["best"]} == {"1f1b"}
    best = result["best"][0]
    again = simulate(parse_scenario(best["scenario"]))
    assert again.step_time_s == best["step_time_s"]
    assert best["tokens_per_s_per_gpu"] == pytest.approx(16 * 256 / best["step_time_s"] / 4)
    assert result["best"] == sorted(result["best"], key=lambda r: r["step_time_s"])
    assert "legal layouts" in capsys.readouterr().out


def test_nothing_fits(scenario_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "2", "--only", "schedule=1f1b", "--memory-limit", "1MiB")
    assert exit_code(main, str(scenario_file), *options) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"No legal layout fits in memory; .* needs at least [\d.]+ [KMG]iB on its fullest GPU", said)
    assert "Not tried: more GPUs (--gpus N)" in said


def test_nothing_is_legal(scenario_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, str(scenario_file), "--gpus", "1", "--only", "tp=3") == 1
    said = capsys.readouterr().out
    assert "1 GPU," in said
    assert said.endswith("No layout is legal with these values of --only: tp 3: must divide the GPUs (1)\n")


@pytest.mark.parametrize(
    ("only", "rule"),
    [
        ("tp=4 pp=4", "tp 4 with pp 4: tp·cp·pp·dp must be the GPUs (8)"),
        ("ep=2", "ep 2: the model has no experts (model.moe)"),
        ("cp=8 sp=true", "sp true (true needs tp above 1)"),
        ("tp=8 micro_batch_size=7", "micro_batch_size 7 (must divide global_batch_size / dp)"),
        ("pp=4 schedule=dualpipe micro_batch_size=8", "found dualpipe; with pp 4"),
    ],
)
def test_the_rule_that_leaves_no_layout_is_named(
    scenario_file: Path, only: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, str(scenario_file), *(o for pair in only.split() for o in ("--only", pair))) == 1
    assert rule in capsys.readouterr().out


@pytest.mark.parametrize(("layout", "gpus"), [(None, 4), ({"tp_overlap": "wgrad"}, 4), ({"tp": 2, "sp": True}, 2)])
def test_without_degrees_the_whole_cluster_is_laid_out(
    scenario_file: Path, layout: dict[str, Any] | None, gpus: int
) -> None:
    scenario_file.write_text(json.dumps({**BASE, "parallelism": layout}), encoding="utf-8")
    overrides = ["cluster={preset: dgx-h100, nodes: 2, gpus_per_node: 2}"]
    only = ["schedule=1f1b", "recompute=none", "zero=0"]
    assert run_search(scenario_file, overrides, only, top=1).gpus == gpus


def test_files_beside_the_scenario_are_found(scenario_file: Path) -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (scenario_file.parent / "config.json").write_text(json.dumps(llama), encoding="utf-8")
    shutil.copy(
        Path(sim.__file__).parent / "presets" / "profiles" / "h100-sxm.json", scenario_file.parent / "mine.json"
    )
    overrides = ["model=config.json", "calibration=mine.json"]
    result = run_search(scenario_file, overrides, ["schedule=1f1b"], gpus=2, top=1)
    assert result.name == scenario_file.stem
    found = result.best[0].scenario
    assert (found.model.layers, Path(str(found.calibration))) == (2, scenario_file.parent / "mine.json")
    swept = run_sweep(scenario_file, ["parallelism.zero=0,1"], Study(overrides=tuple(overrides), workers=1))
    assert [row.refused for row in swept.rows] == ["", ""]


def test_refusals_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "blocking.yaml"
    file.write_text(json.dumps(merge(BASE, {"parallelism": {"p2p_overlap": False}})), encoding="utf-8")
    only = ("--only", "schedule=dualpipe_v", "--only", "pp=2", "--only", "tp=1")
    assert exit_code(main, str(file), "--gpus", "4", *only, "--json", str(tmp_path / "out.json")) == 1
    result = json.loads((tmp_path / "out.json").read_text())
    assert sum(r["count"] for r in result["refusals"]) == result["counts"]["refused"] == result["counts"]["evaluated"]
    said = " ".join(capsys.readouterr().out.split())
    assert "fits in memory and can be simulated" in said
    assert "refused: " + " ".join(result["refusals"][0]["reason"].split()) in said


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("[1]", r"bad.yaml:2: parallelism: "),
        ("{shard_size: a, dp: 8}", r"bad.yaml:2: parallelism.shard_size: found 'a'"),
        ("{dp: 8, zerro: 1}", r"bad.yaml:2: parallelism.zerro: unknown key; did you mean 'zero'"),
    ],
)
@pytest.mark.parametrize("gpus", [None, 8])
def test_errors_name_the_line(tmp_path: Path, written: str, problem: str, gpus: int | None) -> None:
    file = tmp_path / "bad.yaml"
    rest = "".join(f"{k}: {json.dumps(v)}\n" for k, v in BASE.items() if k != "parallelism")
    file.write_text(f"name: bad\nparallelism: {written}\n{rest}", encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        run_search(file, gpus=gpus)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"wgrad_deferral_limit": 2, "pp": 2}, "wgrad_deferral_limit: found 2; a search compares"),
        (
            {"overlap_param_gather_with_optimizer_step": True, "zero": 1},
            "with_optimizer_step: found true; a search compares",
        ),
    ],
)
def test_what_the_ends_of_a_pipeline_put_off_is_refused(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    file = tmp_path / "ends.yaml"
    file.write_text(json.dumps(merge(BASE, {"parallelism": keys})), encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        run_search(file, gpus=8)


@pytest.mark.parametrize(
    ("keys", "zero", "problem"),
    [
        (
            {"precision": "fp8", "framework": "megatron", "fp8_param_gather": True},
            1,
            r"training.fp8_param_gather: found true; a search compares layouts",
        ),
        (
            {"optimizer_offload": "cpu", "parameter_offload": True},
            3,
            r"training.parameter_offload: found true; a search compares ZeRO's stages with parameters on the GPU",
        ),
    ],
)
def test_parameters_in_8_bits_or_on_the_host_are_refused(
    tmp_path: Path, keys: dict[str, Any], zero: int, problem: str
) -> None:
    file = tmp_path / "parameters.yaml"
    file.write_text(json.dumps(merge(BASE, {"training": keys, "parallelism": {"zero": zero}})), encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        run_search(file, gpus=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "depth=3"), "must be KEY=VALUE"),
        (("--only", "schedule=1f1b,zbv"), "found 'zbv'; must be one of naive, "),
        (("--only", "recompute=some"), "found 'some'; must be one of none, "),
        (("--only", "tp=2,x"), "found 'x'; must be an integer, at least 1"),
        (("--only", "tp=true"), "found true; must be an integer, at least 1"),
        (("--only", "micro_batch_size=0"), "found 0; must be an integer, at least 1"),
        (("--only", "pp="), "found null; must be an integer, at least 1"),
        (("--only", "zero=9"), "found 9; must be one of 0, 1, 2, 3"),
        (("--only", "sp=1"), "found 1; must be true or false"),
        (("--memory-limit", "lots"), "--memory-limit"),
        (("--memory-limit", "-5"), "--memory-limit"),
        (("--objective", "joy"), "--objective"),
        (("--gpus", "1000001"), "at most 1,000,000 GPUs; found 1,000,001"),
        (("--dask", "tcp://127.0.0.1:9"), "--dask"),
    ],
)
def test_bad_options(
    scenario_file: Path,
    options: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sim.core.executors.PATIENCE_S", 1)
    assert exit_code(main, str(scenario_file), *options) == 2
    assert words in capsys.readouterr().err


def test_inference_is_refused(tmp_path: Path) -> None:
    data = {k: v for k, v in BASE.items() if k not in ("training", "parallelism")}
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({**data, "inference": {"requests": {"prompt_len": 8, "output_len": 8}}}))
    with pytest.raises(InputError, match="training"):
        run_search(file)


def test_best_is_that_of_exhaustive_search_with_coefficients_that_vary(tmp_path: Path) -> None:
    """Near a fitted step without tensor parallelism kernels take twice as long, so other layouts win."""
    base, near = load_profile("h100-sxm"), varied({}, 4)
    fitted = mesh_features(scenario_of(near, simplest(near, MeshSizes(tp=1, cp=1, pp=1, dp=4, ep=1))))
    assert fitted is not None
    stated = base.coefficients.changed(
        {"memory_efficiency": Coefficient(0.9, "x"), "matmul_speed": Coefficient(1, "x")}
    )
    slower = (NearbyStep(fitted, {"memory_efficiency": 0.5, "matmul_speed": 0.5}),)
    structs.replace(base, coefficients=stated, nearby=slower).save(tmp_path / "fitted.json")
    space = varied(
        {"calibration": str(tmp_path / "fitted.json")}, 4, {"recompute": ("none",), "micro_batch_size": (4,)}
    )
    outcomes = [evaluate(pack(space), layout) for layout in legal(space)]
    best = min((o for o in outcomes if math.isfinite(o.step_time_s)), key=key)
    found = search(space, math.inf).best[0]
    assert key(found) == key(best)
    assert found.step_time_s == simulate(scenario_of(space, found.layout)).step_time_s
