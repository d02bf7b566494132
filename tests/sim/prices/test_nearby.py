"""Coefficients that vary with what is run: a fitted step's factor counts near it, and fades with distance."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec import structs

from sim.core.errors import InputError
from sim.distillation import teacher_of, teacher_scenario
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.prices.coefficients import Coefficient
from sim.prices.likeness import columns, distances
from sim.prices.nearby import NearbyStep, mesh_features, shifts_near
from sim.prices.profile import Profile
from sim.prices.profile_input import profile_from
from sim.prices.profiles import load_profile
from sim.prices.shared_cores import costs_of
from sim.simulation import simulate
from tests.sim.cases import SCENARIOS


def step(**parallelism: int | str) -> Scenario:
    return parse_scenario(
        {
            "name": "x",
            "model": "llama3-8b",
            "cluster": "dgx-h100",
            "parallelism": {"dp": 8, **parallelism},
            "training": {"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 32},
        }
    )


def fitted(scenario: Scenario, factor: float) -> Profile:
    base = load_profile("h100-sxm")
    speed = base.coefficients.changed({"matmul_speed": Coefficient(1.0, "fit")})
    features = mesh_features(scenario)
    assert features is not None
    return structs.replace(base, coefficients=speed, nearby=(NearbyStep(features, {"matmul_speed": factor}),))


def test_a_factor_fades_with_the_distance() -> None:
    mine, far = step(), step(dp=1, tp=8)
    profile = fitted(mine, 0.8)
    assert shifts_near(profile.nearby, mine) == {"matmul_speed": pytest.approx(math.log(0.8))}
    own, other = mesh_features(mine), mesh_features(far)
    assert own is not None
    assert other is not None
    apart = float(distances(own, columns([other]))[0])
    assert apart == pytest.approx(3 * 0.2)  # tp 8 for 1 on as many ranks
    weight = math.exp(-apart)
    assert shifts_near(profile.nearby, far) == {"matmul_speed": pytest.approx(weight * math.log(0.8))}
    speed = costs_of(far, profile).near(far).coefficients.matmul_speed
    assert speed == pytest.approx(0.8**weight)


def test_a_step_is_as_if_the_profile_had_these_coefficients() -> None:
    mine = step(zero=1)
    profile = fitted(mine, 0.8)
    plain = structs.replace(
        profile, nearby=(), coefficients=profile.coefficients.changed({"matmul_speed": Coefficient(0.8, "x")})
    )
    assert simulate(mine, profile).step_time_s == pytest.approx(simulate(mine, plain).step_time_s, rel=1e-12)
    assert simulate(mine, profile).step_time_s > 1.05 * simulate(mine, load_profile("h100-sxm")).step_time_s


def test_prices_near_two_steps_are_kept_apart() -> None:
    mine, far = step(), step(dp=1, tp=8)
    costs = costs_of(mine, fitted(mine, 0.8))
    near = costs.near(mine)
    assert near.near(mine) is near
    assert near.near(far) is costs.near(far)  # shifts are those of the profile, not added to those of `near`
    assert near.near(far).coefficients.matmul_speed > near.coefficients.matmul_speed
    plain = costs_of(mine, load_profile("h100-sxm"))
    assert plain.near(mine) is plain


def test_what_is_not_trained_has_the_common_coefficients() -> None:
    serving = parse_scenario(
        {
            "name": "x",
            "model": "llama3-8b",
            "cluster": "dgx-h100",
            "inference": {"requests": {"count": 4, "prompt_len": 128, "output_len": 4}},
        }
    )
    assert shifts_near(fitted(step(), 0.8).nearby, serving) == {}


def test_a_teacher_has_the_coefficients_near_its_own_forward_and_its_loss_those_near_the_student() -> None:
    mine = load_scenario(SCENARIOS / "distill_logits.yaml")
    assert mine.distillation is not None
    for near, part in ((teacher_scenario(mine, mine.distillation), "forward_s"), (mine, "loss_s")):
        profile, features = fitted(step(), 1.0), mesh_features(near)
        assert features is not None
        faster = Coefficient(profile.coefficients.streaming_efficiency / 2, "x")
        changed = profile.coefficients.changed({"memory_efficiency": faster, "matmul_speed": Coefficient(0.5, "x")})
        steps = (NearbyStep(features, {"memory_efficiency": 0.5, "matmul_speed": 0.5}),)
        local = teacher_of(mine, structs.replace(profile, nearby=steps))
        plain = teacher_of(mine, structs.replace(profile, nearby=(), coefficients=changed))
        assert getattr(local, part) == pytest.approx(getattr(plain, part), rel=1e-12)


def test_each_kind_of_gpu_has_the_coefficients_of_its_own_profile_near_its_own_steps(tmp_path: Path) -> None:
    def mixed(calibration: str) -> Scenario:
        return parse_scenario(
            {
                "name": "x",
                "model": "llama3.2-1b",
                "cluster": {"mixed": [{"preset": "dgx-h100", "nodes": 1}, {"preset": "dgx-a100", "nodes": 1}]},
                "calibrations": {"a100-sxm": calibration},
                "parallelism": {"dp": 16},
                "training": {"seq_len": 2048, "global_batch_size": 16},
            }
        )

    base, own = load_profile("a100-sxm"), mixed("a100-sxm")
    (other,) = own.cluster.others
    features = mesh_features(own, other.gpu)
    assert features is not None
    assert features.gpu == "a100-sxm"
    speed = base.coefficients.changed({"matmul_speed": Coefficient(1.0, "fit")})
    local = structs.replace(base, coefficients=speed, nearby=(NearbyStep(features, {"matmul_speed": 0.5}),))
    plain = structs.replace(base, coefficients=speed.changed({"matmul_speed": Coefficient(0.5, "fit")}))
    paths = [tmp_path / "local.json", tmp_path / "plain.json"]
    for profile, path in zip((local, plain), paths, strict=True):
        profile.save(path)
    times = [simulate(mixed(str(path))).step_time_s for path in paths]
    assert times[0] == pytest.approx(times[1], rel=1e-12)
    assert times[0] > 1.2 * simulate(own).step_time_s


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("factors", "attention_speed", 0.9),  # not stated
        ("factors", "host_bandwidth_bytes_per_s", 0.9),  # of an earlier version, which no price reads
        ("factors", "matmul_speed", 0.0),
        ("features", "date", "last year"),
        ("features", "date", "2024"),
    ],
)
def test_a_file_with_a_wrong_step_is_refused(part: str, key: str, value: object) -> None:
    data = fitted(step(), 0.8).to_json()
    assert profile_from(data, "p.json").nearby == fitted(step(), 0.8).nearby
    data["coefficients"]["host_bandwidth_bytes_per_s"] = {"value": 1.0}
    data["nearby"][0][part][key] = value
    with pytest.raises(InputError, match=rf"p\.json: nearby\[0\].*{part}.*{key}"):
        profile_from(data, "p.json")
