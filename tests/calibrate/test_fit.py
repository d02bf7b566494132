"""Fitting a profile's coefficients: what a table was made with is found again, on rows the fit did not see too."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from calibrate import step_fit
from calibrate.fit import _report, far_off, fitted_profile, main
from calibrate.fitted_rows import Case, rows_to_fit
from calibrate.step_fit import FEW, PRIORS, count_steps, errors_with, fit, fit_given, folds
from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.prices import nearby
from sim.prices.coefficients import Coefficient, coefficients_from
from sim.prices.nearby import mesh_features
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.simulation import simulate
from sim.validation.records import Measurement
from sim.validation.tables import read_table
from tests.processes import invoked

BASE = Profile(
    "base",
    "made up",
    reference="a100-sxm",
    coefficients=coefficients_from(
        {
            "launch_overhead_s": Coefficient(5e-6, "made up"),
            "memory_efficiency": Coefficient(0.85, "made up"),
        }
    ),
)
PUBLISHED = Path(__file__).parents[2] / "scenarios" / "published"
TRUE = {"host_operator_s": 9e-5, "memory_efficiency": 0.75}


def with_values(base: Profile, values: dict[str, float]) -> Profile:
    """`base` with these coefficients."""
    made_up = {name: Coefficient(value, "made up") for name, value in values.items()}
    return structs.replace(base, coefficients=base.coefficients.changed(made_up))


def fitted_values(found: Profile) -> dict[str, float]:
    return {name: value.value for name, value in found.coefficients.flat().items()}


def table(tmp_path: Path) -> Path:
    profile = with_values(BASE, TRUE)
    rows = []
    for hidden in (256, 512, 2048, 4096):
        for batch in (1, 8):
            scenario = {
                "model": {"layers": 2, "hidden": hidden, "heads": 8, "vocab": 1024, "bias": False},
                "training": {"seq_len": 1024, "global_batch_size": batch, "micro_batch_size": batch},
                "cluster": "dgx-a100",
                "calibration": "a100-sxm",
            }
            seconds = simulate(parse_scenario({**scenario, "name": "x"}), profile).step_time_s
            rows.append(
                {
                    "id": f"{hidden}-{batch}",
                    "group": f"{hidden}-{batch}",
                    "scenario": scenario,
                    "measured": {"step_time_s": seconds},
                }
            )
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"format": "measurements/1", "name": "steps", "kind": "training_step", "rows": rows}))
    return path


def test_coefficients_are_found_again(tmp_path: Path) -> None:
    read = read_table(table(tmp_path))
    cases = rows_to_fit(read, BASE).cases
    found = fit(cases, BASE, tuple(TRUE))
    fitted = fitted_values(found.profile)
    assert fitted["host_operator_s"] == pytest.approx(TRUE["host_operator_s"], rel=0.05)
    assert fitted["memory_efficiency"] == pytest.approx(TRUE["memory_efficiency"], rel=0.05)
    before, after, unseen = (float(np.abs(x).mean()) for x in (found.before, found.after, found.held_out))
    assert after < unseen < before
    profile = fitted_profile(BASE, read, found, len(cases))
    assert "0.85, made up" in profile.coefficients.sources["memory_efficiency"]
    assert "steps" in profile.source
    path = tmp_path / "fitted.json"
    profile.save(path)
    assert load_profile(path).coefficients.host_operator_s == fitted["host_operator_s"]
    again = errors_with(load_profile(path), cases)
    assert again == pytest.approx(errors_with(found.profile, cases))


def test_what_no_step_depends_on_is_left_alone(tmp_path: Path) -> None:
    cases = rows_to_fit(read_table(table(tmp_path)), BASE).cases
    found = fit(cases[:4], BASE, ("host_operator_s", "host_message_s", "unaligned_matmul_slowdown"))
    assert found.names == ("host_operator_s",)
    with pytest.raises(InputError, match="host_message_s"):
        fit(cases[:1], BASE, ("host_message_s",))


@pytest.mark.parametrize("count", [8, 10])
def test_a_fold_is_predicted_by_the_fit_to_the_others(tmp_path: Path, count: int) -> None:
    """Slopes are simulated once for all these fits."""
    cases, names = rows_to_fit(read_table(table(tmp_path)), BASE).cases, tuple(TRUE)
    cases = [*cases, *[replace(c, row=structs.replace(c.row, group=f"{c.row.group} again")) for c in cases]][:count]
    ticks: list[int] = []
    whole = fit(cases, BASE, names, lambda: ticks.append(1))
    dealt = folds([c.row.group for c in cases])
    assert len(dealt) == (5 if count >= FEW else count)
    for fold in dealt:
        rest = [cases[i] for i in fold]
        others = fit_given([c for i, c in enumerate(cases) if i not in fold], rest, BASE, names)
        assert whole.held_out[fold] == pytest.approx(others.held_out)
    assert len(ticks) == count_steps(cases, (), names)


def test_a_fit_to_every_second_configuration_helps_on_the_others() -> None:
    """Common coefficients, fitted to the first, third, … configuration of vTrain's steps on one node, in order of
    name."""
    fitted = {
        "host_operator_s": 5.16e-5,
        "host_collective_s": 1.55e-5,
        "host_message_s": 1.29e-4,
        "host_step_s": 1.31e-3,
        "memory_efficiency": 0.867,
        "memory_efficiency_cross_entropy": 0.473,
        "power_at_peak": 1.152,
        "matmul_speed": 1.065,
    }
    cases = rows_to_fit(read_table(PUBLISHED / "vtrain_single_node.json"), BASE).cases
    unseen = sorted({c.row.group for c in cases})[1::2]
    shipped = load_profile("a100-sxm")
    profile = with_values(shipped, fitted)
    off = [[math.expm1(c.log_error(p)) for c in cases if c.row.group in unseen] for p in (shipped, profile)]
    assert np.abs(off[1]).mean() < 0.055
    assert np.abs(off[1]).mean() < np.abs(off[0]).mean() - 0.01
    assert np.median(np.abs(off[1])) < np.median(np.abs(off[0]))


def test_rows_given_are_spread_over_the_steps_on_the_profiles_gpu() -> None:
    table, base = read_table(PUBLISHED / "mosaic_mpt_h100.json"), load_profile("h100-sxm")
    chosen = rows_to_fit(table, base, 5)
    given, rest = chosen.cases, chosen.rest
    assert len(given) == 5
    assert {c.scenario.calibration for c in (*given, *rest)} == {"h100-sxm"}
    assert not {c.row.id for c in given} & {c.row.id for c in rest}
    with pytest.raises(InputError, match="--given"):
        rows_to_fit(table, base, 1000)


def own_steps(*rows: tuple[str, dict[str, Any]], step_s: float | None = 1.0) -> dict[str, Any]:
    """A table of a user's own, without groups: ids and what their training has."""
    measured = {"mfu": 0.4} if step_s is None else {"step_time_s": step_s}
    shared = {"model": "gpt2-124m", "cluster": "dgx-h100", "training": {"seq_len": 512}, "parallelism": {"dp": 8}}
    made = [{"id": name, "scenario": {"training": training}, "measured": measured} for name, training in rows]
    return {"format": "measurements/1", "kind": "training_step", "scenario": shared, "rows": made}


def test_every_row_without_a_group_is_fitted_and_others_are_named(tmp_path: Path) -> None:
    path, base = tmp_path / "own.json", load_profile("h100-sxm")
    steps = own_steps(*[(f"batch {n}", {"global_batch_size": n}) for n in (8, 16, 32, 64, 128)])
    untimed = own_steps(("mfu alone", {"global_batch_size": 8}), step_s=None)
    foreign = own_steps(("a100", {"global_batch_size": 8}))
    foreign["rows"][0]["scenario"]["cluster"] = "dgx-a100"
    group = own_steps(*[(f"same {n}", {"global_batch_size": 8}) for n in range(3)])
    for row in group["rows"]:
        row["group"] = "same"
    rows = [row for part in (steps, untimed, foreign, group) for row in part["rows"]]
    path.write_text(json.dumps(steps | {"rows": rows}))
    chosen = rows_to_fit(read_table(path), base)
    assert [c.row.id for c in chosen.cases] == [f"batch {n}" for n in (8, 16, 32, 64, 128)] + ["same 0", "same 2"]
    assert chosen.left_out == [
        "1 without measured.step_time_s (mfu alone)",
        "1 on another GPU than h100-sxm (a100)",
        "1 between the first and the last of a group (same 1)",
    ]


def test_a_row_that_is_wrong_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own_steps(("odd", {"global_batch_size": 7}))))
    with pytest.raises(InputError, match=r"own\.json: odd: training\.global_batch_size: found 7"):
        rows_to_fit(read_table(path), BASE)
    path.write_text(json.dumps(own_steps(("timeless", {"global_batch_size": 8}), step_s=-1.0)))
    with pytest.raises(InputError, match=r"own\.json: rows\[0\]\.measured\.step_time_s: found -1"):
        rows_to_fit(read_table(path), BASE)


def test_five_steps_of_a_slower_machine_are_fitted_and_each_is_predicted_by_the_others(tmp_path: Path) -> None:
    path, base = tmp_path / "own.json", load_profile("h100-sxm")
    batches = (64, 128, 256, 512, 1024)
    rows = own_steps(*[(f"batch {n}", {"global_batch_size": n, "micro_batch_size": 8}) for n in batches])
    path.write_text(json.dumps(rows))
    slower = with_values(base, {"matmul_speed": 0.7, "memory_efficiency": 0.6})
    for row, case in zip(rows["rows"], rows_to_fit(read_table(path), base).cases, strict=True):
        row["measured"] = {"step_time_s": simulate(case.scenario, slower).step_time_s}
    path.write_text(json.dumps(rows))
    ran = invoked(main, str(path), "--profile", "h100-sxm", "--out", str(tmp_path / "mine.json"))
    off = {line.split("  ")[0].strip(): float(line.split("mean")[1].split("%")[0]) for line in error_lines(ran.output)}
    assert set(off) == {"before", "fitted rows", "rows not fitted"}
    assert off["rows not fitted"] < off["before"] / 3
    assert ran.output.count("(5 steps)") == 3


def error_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if " mean " in line]


def test_one_step_alone_is_no_fit(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own_steps(("one", {"global_batch_size": 8}))))
    ran = invoked(main, str(path), "--profile", "h100-sxm", "--out", str(tmp_path / "mine.json"), code=2)
    assert "own.json: found 1 step to fit; allowed: 2 or more (`stepsim run --measured`" in ran.output


def test_a_time_in_milliseconds_is_asked_about(tmp_path: Path) -> None:
    steps = json.loads(table(tmp_path).read_text())
    cases = rows_to_fit(read_table(tmp_path / "steps.json"), BASE).cases
    assert far_off(cases, np.array([case.log_error(BASE) for case in cases])) == []
    measured = steps["rows"][3]["measured"]
    measured["step_time_s"] *= 10_000
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    cases = rows_to_fit(read_table(tmp_path / "steps.json"), BASE).cases
    (words,) = far_off(cases, np.array([case.log_error(BASE) for case in cases]))
    assert words.startswith(f"512-8: measured.step_time_s: {measured['step_time_s']:.4g}, simulated ")


def test_a_row_that_the_fit_does_not_explain_is_asked_about(tmp_path: Path) -> None:
    table(tmp_path)
    cases = rows_to_fit(read_table(tmp_path / "steps.json"), BASE).cases
    before = np.full(len(cases), math.log(20.0))  # as of a profile of another machine
    after = np.zeros(len(cases))
    assert far_off(cases, before, after) == []
    after[3] = -math.log(4.0)
    (words,) = far_off(cases, before, after)
    assert words.startswith("512-8: measured.step_time_s: ")
    assert "are the scenario's model, batch and GPUs the run's?" in words


def test_a_few_rows_of_a_slower_machine_tell_the_others() -> None:
    """Matmuls and attention a fifth slower than the profile: three rows given, the others are four times nearer."""
    base, names = load_profile("h100-sxm"), ("matmul_speed", "attention_speed")
    slower = with_values(base, dict.fromkeys(names, 0.8))
    rows = rows_to_fit(read_table(PUBLISHED / "mosaic_mpt_h100.json"), base, 5).rest[20:25]
    made = []
    for case in rows:
        step_s = simulate(case.scenario, slower).step_time_s
        made.append(replace(case, row=structs.replace(case.row, measured={"step_time_s": step_s})))
    rest = fit_given(made[::2], made[1::2], base, names)
    assert np.abs(np.expm1(rest.before)).min() > 0.1
    assert np.abs(rest.held_out).mean() < np.abs(rest.before).mean() / 4


def test_rows_that_contradict_each_other_move_little(tmp_path: Path) -> None:
    """Like steps of one machine, made 15 % longer and shorter in turn: no coefficient explains it."""
    path, base, names = tmp_path / "own.json", load_profile("h100-sxm"), ("matmul_speed", "attention_speed")
    batches = (64, 128, 256, 512)
    path.write_text(json.dumps(own_steps(*[(f"batch {n}", {"global_batch_size": n}) for n in batches])))
    made = []
    for case, factor in zip(rows_to_fit(read_table(path), base).cases, (1.15, 1 / 1.15, 1 / 1.15, 1.15), strict=True):
        measured = {"step_time_s": factor * simulate(case.scenario, base).step_time_s}
        made.append(replace(case, row=structs.replace(case.row, measured=measured)))
    found = fit(made, base, names)
    changes = [math.log(fitted_values(found.profile)[name]) for name in names]
    changes += [math.log(factor) for step in found.profile.nearby for factor in step.factors.values()]
    assert max(map(abs, changes)) < 0.05


def test_what_makes_other_steps_worse_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases = rows_to_fit(read_table(table(tmp_path)), BASE).cases[:3]
    found = fit(cases, BASE, tuple(TRUE))
    for held_out, said in ((2 * found.before, True), (found.before / 2, False)):
        _report(BASE, replace(found, held_out=held_out), cases, Path("mine.json"))
        assert ("worse with it: keep" in capsys.readouterr().out) is said


def test_errors_that_like_steps_share_are_corrected_for_like_steps() -> None:
    """Steps on 64 GPUs take 15 % longer than simulated, those on eight as long: a machine's one speed cannot say so."""
    base, names = load_profile("h100-sxm"), ("matmul_speed", "attention_speed")
    made = []
    for gpus, slower in ((8, 1.0), (64, 1.15)):
        for batch in (1, 2, 4):
            scenario = parse_scenario(
                {
                    "name": f"{gpus} {batch}",
                    "model": "llama3-8b",
                    "cluster": "dgx-h100",
                    "parallelism": {"dp": gpus, "zero": 3},
                    "training": {"seq_len": 4096, "micro_batch_size": batch, "global_batch_size": 4 * batch * gpus},
                }
            )
            step_s = slower * simulate(scenario, base).step_time_s
            row = Measurement("made up", "training_step", scenario.name, scenario.name, {}, {"step_time_s": step_s}, {})
            made.append(Case(row, scenario))
    rest = fit_given([made[0], made[2], made[3], made[5]], [made[1], made[4]], base, names)
    assert np.abs(rest.before).max() > 0.13
    assert np.abs(rest.held_out).max() < 0.05
    assert rest.profile.nearby[0].factors["matmul_speed"] > rest.profile.nearby[-1].factors["matmul_speed"]


def test_errors_after_a_fit_are_those_of_its_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of captured programs, near which a profile holds nothing."""
    cases = rows_to_fit(read_table(table(tmp_path)), BASE).cases[:5]
    captured = cases[0].scenario, cases[3].scenario
    for without in ((), captured):
        monkeypatch.setattr(step_fit, "mesh_features", lambda s, c=without: None if s in c else mesh_features(s))
        monkeypatch.setattr(nearby, "mesh_features", lambda s, *_, c=without: None if s in c else mesh_features(s))
        found = fit(cases, BASE, tuple(TRUE))
        assert len(found.profile.nearby) == len(cases) - len(without)
        assert found.after == pytest.approx(errors_with(found.profile, cases), rel=1e-9, abs=1e-12)


def test_a_fitted_profile_that_is_fitted_again_keeps_what_it_knows(tmp_path: Path) -> None:
    cases = rows_to_fit(read_table(table(tmp_path)), BASE).cases
    first = fit(cases, BASE, tuple(TRUE)).profile
    again = fit(cases[:4], first, tuple(TRUE))
    assert again.profile.nearby[: len(cases)] == first.nearby
    assert again.before == pytest.approx(errors_with(first, cases[:4]))
    assert again.after == pytest.approx(errors_with(again.profile, cases[:4]), rel=1e-9, abs=1e-12)
    assert np.abs(again.after).mean() <= np.abs(again.before).mean() + 1e-3


def test_groups_are_held_out_whole() -> None:
    groups = ["a", "a", "b", "c", "c", "d", "e", "f"]
    dealt = folds(groups)
    assert sorted(i for fold in dealt for i in fold) == list(range(8))
    for fold in dealt:
        inside = {groups[i] for i in fold}
        assert not inside & {groups[i] for i in range(8) if i not in fold}


def test_a_table_without_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    kernel = {"id": "one", "scenario": {"cluster": "dgx-h100"}, "measured": {"time_s": 1e-3}}
    path.write_text(json.dumps({"format": "measurements/1", "kind": "kernel", "rows": [kernel]}))
    with pytest.raises(InputError, match="step_time_s"):
        rows_to_fit(read_table(path), BASE)


def test_priors_are_positive() -> None:
    assert all(start > 0 and math.isfinite(width) and width > 0 for start, width in PRIORS.values())
    assert Case.__slots__
