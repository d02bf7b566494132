import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.core.files import write_json
from sim.core.shipped import shipped_profiles
from sim.prices.coefficients import FORMER, AttentionSpeed, Coefficients, PriceOptions, coefficients_from
from sim.prices.likeness import Features
from sim.prices.nearby import NearbyStep
from sim.prices.power_limit import PowerLimit
from sim.prices.profile import BlockPoint, CollectiveTable, PointTable, Profile
from sim.prices.profile_input import profile_from
from sim.prices.profiles import load_profile
from topology.presets import GPUS

POSITIVE = st.floats(1e-9, 1e3)
LAYOUT = {"ranks": 8, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "sharded": False}
FEATURES = {"gpu": "h100-sxm", "architecture": "hopper", "kind": "dense", "active": 8.03, **LAYOUT}
FEATURES |= {"bits": 16.0, "seq_len": 4096, "framework": "megatron", "date": ""}


def small() -> dict:
    return {
        "format": "profile/1",
        "name": "node",
        "source": "test",
        "hardware": {"device": "cpu", "cores": 2},
        "software": {"torch": "2.13"},
        "settings": {"quick": True},
        "coefficients": {"launch_overhead_s": {"value": 5e-6, "source": "test"}},
        "points": [
            {
                "op": "gemm",
                "dtype": "fp32",
                "shape": [[1, 2, 3, 4], [1, 4, 3, 4]],
                "seconds": [1e-6, 2e-6],
                "spread": 0.01,
                "samples": [5, 6],
            }
        ],
        "blocks": [{"key": "layer b=1", "phase": "forward", "run": 0, "seconds": 1e-3, "spread": 0.1}],
        "collectives": [{"op": "all_reduce", "ranks": 2, "bytes": [8, 16], "seconds": [1e-5, 2e-5]}],
        "nearby": [{"features": dict(FEATURES), "factors": {"launch_overhead_s": 1.1}}],
    }


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    n = draw(st.integers(1, 5))
    numbers = st.lists(POSITIVE, min_size=n, max_size=n).map(np.array)
    table = PointTable(
        "gemm",
        "bf16",
        np.array(draw(st.lists(st.tuples(*[st.integers(1, 2**40)] * 4), min_size=n, max_size=n))),
        draw(numbers),
        draw(numbers),
        np.full(n, draw(st.integers(1, 100))),
    )
    sizes = sorted(draw(st.sets(st.integers(1, 2**40), min_size=n, max_size=n)))
    return Profile(
        draw(st.text(max_size=5)),
        draw(st.text(max_size=5)),
        hardware=draw(st.dictionaries(st.text(max_size=3), st.booleans() | st.integers() | st.text(max_size=3))),
        coefficients=Coefficients(kernel_gap_s=draw(POSITIVE), sources={"kernel_gap_s": "x"}),
        points=(table,),
        blocks=(BlockPoint(draw(st.text(max_size=9)), "weight_grad", draw(st.integers(0, 9)), draw(POSITIVE), 0.0),),
        collectives=(CollectiveTable("broadcast", 4, np.array(sizes, float), draw(numbers), draw(numbers)),),
        nearby=(NearbyStep(Features(**FEATURES), {"kernel_gap_s": draw(POSITIVE)}),),
    )


@given(profiles())
def test_what_is_written_is_read_back(profile: Profile) -> None:
    data = json.loads(json.dumps(profile.to_json()))
    assert profile_from(data).to_json() == data == profile.to_json()


def test_saved_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    profile = profile_from(small())
    profile.save(file)
    assert load_profile(file).to_json() == profile.to_json()
    with pytest.raises(ValueError, match="Out of range"):
        write_json(file, {"seconds": math.nan})
    assert load_profile(file).to_json() == profile.to_json()
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "profile/2", "format: found 'profile/2'; must be 'profile/1'"),
        (("name",), 3, "name: found 3; allowed: text"),
        (("pionts",), [], "unknown key 'pionts'; did you mean 'points'"),
        (("points", 0, "seconds", 1), -1e-6, r"points\[0\].seconds\[1\]: found -1e-06; allowed: a number from"),
        (("points", 0, "seconds", 1), 0, r"points\[0\].seconds\[1\]: found 0"),
        (("points", 0, "seconds", 1), math.nan, r"seconds\[1\]: found nan"),
        (("points", 0, "seconds", 1), math.inf, r"seconds\[1\]: found inf"),
        (("points", 0, "seconds", 1), True, r"seconds\[1\]: found true"),
        (("points", 0, "seconds", 1), 10**400, r"seconds\[1\]: found a very long number"),
        (("points", 0, "seconds"), [1e-6], r"points\[0\].shape: found 2 rows; allowed: 1"),
        (("points", 0, "spread"), [0.1], r"points\[0\].spread: found 1 numbers; 2 are needed"),
        (("points", 0, "shape", 1), [1, 2, 3], r"points\[0\].shape\[1\]: found \[1, 2, 3\]; allowed: 4 whole"),
        (("points", 0, "shape", 1), [1, 2, 3, 4.5], r"points\[0\].shape\[1\]"),
        (("points", 0, "shape", 1), 7, r"points\[0\].shape\[1\]: found 7"),
        (
            ("points", 0, "shape"),
            [[1, 2, 3], [1, 2, 3]],
            r"shape\[0\]: found \[1, 2, 3\]; allowed: 4 whole numbers, 1 or",
        ),
        (("points", 0, "shape", 1), [1, 0, 3, 4], r"shape\[1\]: found \[1, 0, 3, 4\]"),
        (("points", 0, "dtype"), "bf61", r"points\[0\].dtype: found 'bf61'; allowed: fp32"),
        (("points", 0, "seconds", 1), 1e-300, r"seconds\[1\]: found 1e-300; allowed: a number from 1e-30"),
        (("coefficients", "launch_overhead_s", "value"), 1e300, "launch_overhead_s.value: found 1e.300"),
        (
            ("coefficients", "matmul_efficiency"),
            {"value": 0},
            "matmul_efficiency.value: found 0; allowed: a number from",
        ),
        (
            ("coefficients", "memory_eficiency"),
            {"value": 0.5},
            "p.json: coefficients: unknown coefficient 'memory_eficiency'; did you mean 'memory_efficiency'",
        ),
        (("coefficients", "peak_bf61_flops_per_s"), {"value": 1e12}, "did you mean 'peak_bf16_flops_per_s'"),
        (("coefficients", "memory_efficiency_nrom"), {"value": 1e12}, "did you mean 'memory_efficiency_norm'"),
        (
            ("coefficients", "flsh2_ramp_tokens"),
            {"value": 80},
            "attention kernel 'flsh2' has no 'flsh2_efficiency_128'",
        ),
        (("coefficients", "9" * 5000 + "_ramp_tokens"), {"value": 80}, r"^.{100,400}$"),
        (
            ("coefficients", "attention_group_sums"),
            {"value": 2},
            "attention_group_sums.value: found 2.0; allowed: 0 or 1",
        ),
        (("coefficients", "flash9_overlap"), {"value": 0}, "flash9_overlap.value: found 0; allowed: a number from"),
        (("points", 0), [], r"points\[0\]: found an empty list; allowed: a mapping"),
        (("blocks", 0, "phase"), "forwards", r"blocks\[0\].phase: found 'forwards'; allowed: forward, backward"),
        (("blocks", 0, "seconds"), -1, r"blocks\[0\].seconds: found -1"),
        (("collectives", 0, "bytes"), [16, 8], r"collectives\[0\].bytes: .* larger than the one before"),
        (("collectives", 0, "ranks"), 1, r"collectives\[0\].ranks: found 1"),
        (("coefficients", "launch_overhead_s"), 5e-6, "coefficients.launch_overhead_s: found 5e-06; allowed"),
        (("hardware", "cores"), [2], r"hardware.cores: found a list of 1"),
        (("nearby", 0, "factors", "launch_overhead_s"), 0, r"nearby\[0\].factors.launch_overhead_s: found 0; allowed"),
        (
            ("nearby", 0, "factors"),
            {"matmul_speed": 1.1},
            r"factors: unknown key 'matmul_speed' \(allowed: launch_over",
        ),
        (("nearby", 0, "features", "ranks"), 8.5, r"nearby\[0\].features.ranks: found 8.5; allowed"),
        (("nearby", 0, "features", "sharded"), 1, r"nearby\[0\].features.sharded: found 1; allowed: true or false"),
        (("nearby", 0, "features"), {}, r"nearby\[0\].features: gpu is missing"),
    ],
)
def test_each_mistake_is_named(path: tuple, value: object, message: str) -> None:
    data = small()
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError, match=message):
        profile_from(data, "p.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json:1: is not JSON"),
        ('{"format": "profile/1",\n "name": NaN}', "found NaN; only finite numbers"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "found an empty list; allowed: a mapping"),
        ("1" * 5000, "p.json"),
        ("\ud800", "p.json:1: is not UTF-8"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=message):
        load_profile(file)


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with file.open("wb") as f:
        f.truncate(65 * 1024 * 1024)
    with pytest.raises(InputError, match="is larger than 67108864 bytes"):
        load_profile(file)


def test_unknown_names_list_what_is_there() -> None:
    with pytest.raises(InputError, match=r"calibration: no profile 'h100'; .*roofline, a100-pcie.*h100-sxm"):
        load_profile("h100")
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        load_profile("nowhere.json")


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_saved_shipped_profile_keeps_its_measured_kernels(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    profile.save(tmp_path / "copy.json")
    copy = load_profile(tmp_path / "copy.json")
    assert copy.to_json() == profile.to_json()
    assert (copy.kernels, copy.reference) == (profile.kernels, profile.reference)


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_load_and_name_their_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.source
    assert all(c.source for c in profile.coefficients.flat().values())
    if name != "roofline":
        assert profile.reference in GPUS
        assert profile.name == name


def test_every_gpu_of_the_contract_has_a_profile() -> None:
    needed = {
        "v100",
        "a100-sxm",
        "a100-pcie",
        "h100-sxm",
        "h200-sxm",
        "b200-sxm",
        "b300-sxm",
        "gb200",
        "gb300",
    }
    assert needed | {"cpu", "roofline"} <= set(shipped_profiles())


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200", "gb300"])
def test_sparse_attention_has_a_speed_of_its_own(name: str) -> None:
    """Each GPU that AIConfigurator measured with it."""
    kernels = load_profile(name).coefficients.attention
    for kernel in ("sparse_mla", "mqa_logits"):
        assert 0.2 < (kernels[kernel].efficiency_128 or 0) < 0.6


def test_the_docs_say_what_each_coefficient_is() -> None:
    text = (Path(__file__).parents[3] / "docs" / "calibration.md").read_text()
    for record in (Coefficients, AttentionSpeed):
        for field in fields(record):
            assert not field.metadata or f"| {field.metadata['meaning']} |" in text, field.name


@pytest.mark.parametrize("name", FORMER)
def test_coefficients_of_an_earlier_version_are_left_out(name: str) -> None:
    data = small()
    data["coefficients"][name] = {"value": 1e-5, "source": "measured then"}
    assert list(profile_from(data, "p.json").coefficients.flat()) == ["launch_overhead_s"]


def test_names_on_disk_come_back_as_they_were() -> None:
    stated = load_profile("h100-sxm").coefficients.flat()
    assert coefficients_from(stated).flat() == stated
    assert (
        stated["flash2_efficiency_128"].value
        == load_profile("h100-sxm").coefficients.attention["flash2"].efficiency_128
    )


def test_options_switch_off_what_a_measurement_did_not_have() -> None:
    stated = load_profile("h100-sxm").coefficients
    off = PriceOptions(host=False, group_launch=False).applied(stated)
    assert (off.host_operator_s, off.host_operator_eager_s, off.group_launch_s) == (0, None, 0)
    h100 = GPUS["h100-sxm"]
    assert PowerLimit.of(stated, h100, h100).at_peak > 1
    assert PowerLimit.of(stated, h100, h100, acts=False).at_peak == 0
    assert PriceOptions().applied(stated) is stated
