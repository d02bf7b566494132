"""Coefficients that vary with what is run: a fitted step's factor counts near it, and fades with distance."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.coefficients import Coefficient
from sim.prices.likeness import columns, distances
from sim.prices.nearby import NearbyStep, mesh_features, shifts_near
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.prices.shared_cores import costs_of
from sim.simulation import simulate


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
