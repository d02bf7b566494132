"""Numbers with units, wherever a key's name says what unit it has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.inputs.schema import scenario_schema
from sim.inputs.units import BYTES, FLOPS, POWER, RATE, TIME, UNITS

BASE: dict[str, Any] = {
    "model": "llama3.2-1b",
    "training": {"seq_len": 512, "global_batch_size": 1},
    "cluster": {"preset": "dgx-h100", "nodes": 1},
}
NUMBERS = st.decimals(min_value=0, max_value=10**6, places=3)


@given(NUMBERS, st.sampled_from([("", ""), (" ", "")]), st.sampled_from("KMGT"))
def test_a_bit_rate_is_an_eighth_of_the_byte_rate(number: Any, space: tuple[str, str], prefix: str) -> None:
    text = f"{number}{space[0]}{prefix}"
    assert RATE.parse(f"{text}bps") * 8 == pytest.approx(RATE.parse(f"{text}B/s"))
    assert RATE.parse(f"{text}bit/s") == RATE.parse(f"{text}bps") == RATE.parse(f"{text}b/s")


@given(NUMBERS)
def test_each_unit_is_its_multiple(number: Any) -> None:
    plain = float(number)
    assert TIME.parse(f"{number}us") == pytest.approx(plain * 1e-6)
    assert TIME.parse(f"{number} h") == pytest.approx(plain * 3600)
    assert POWER.parse(f"{number}kW") == pytest.approx(1000 * POWER.parse(f"{number} W"))
    assert FLOPS.parse(f"{number}PFLOPS") == pytest.approx(1000 * FLOPS.parse(f"{number} TFLOP/s"))
    assert BYTES.parse(f"{number}GiB") == round(plain * 2**30)


@given(st.text(max_size=12))
@example("1e400")
@example("1e300TB")
def test_any_text_is_a_number_or_one_message(text: str) -> None:
    for unit in UNITS:
        try:
            found = unit.parse(text)
        except ValueError as error:
            found = str(error)
        assert found.startswith("must be a number of") if isinstance(found, str) else found >= 0


@pytest.mark.parametrize(
    ("path", "text", "number"),
    [
        ("cluster.inter_node.nic_bandwidth_bytes_per_s", "400Gbps", 50e9),
        ("cluster.intra_node.bandwidth_bytes_per_s", "450 GB/s", 450e9),
        ("cluster.inter_node.latency_s", "14us", 14e-6),
        ("cluster.gpu.memory_bytes", "96GB", 96e9),
        ("cluster.gpu.memory_bandwidth_bytes_per_s", "3.35TB/s", 3.35e12),
        ("cluster.gpu.power_limit_w", "0.7kW", 700.0),
        ("cluster.gpu.launch_overhead_s", "2.5 µs", 2.5e-6),
        ("cluster.gpu.peak_flops_per_s.bf16", "989TFLOPS", 989e12),
        ("parallelism.bucket_bytes", "100MB", 10**8),
        ("faults.failures.checkpoint_interval_s", "20min", 1200.0),
        ("faults.failures.mtbf_s_per_gpu", "50000h", 1.8e8),
    ],
)
def test_wherever_a_number_has_that_unit(path: str, text: str, number: float) -> None:
    def scenario(value: Any) -> Any:
        *sections, key = path.split(".")
        data = {**BASE, "cluster": {"preset": "dgx-h100", "nodes": 1}}
        place: Any = data
        for name in sections:
            place[name] = dict(place.get(name, {}))
            place = place[name]
        place[key] = value
        return parse_scenario(data)

    assert getattr(scenario(text), path.partition(".")[0]) == getattr(scenario(number), path.partition(".")[0])
    with pytest.raises(InputError, match=path.replace(".", r"\.") + ": found '3 parsecs'; must be a number of"):
        scenario("3 parsecs")


def test_shipped_processes_take_units() -> None:
    def listed(n_bytes: Any, bytes_per_s: Any, at_s: Any) -> Any:
        flap = {"at_s": at_s, "down_s": 0.5}
        processes = {"checkpoint": [{"n_bytes": n_bytes, "bytes_per_s": bytes_per_s}], "link_flap": [flap]}
        return parse_scenario({**BASE, "processes": processes}).processes

    assert listed("100GB", "2GB/s", "10ms") == listed(100e9, 2e9, 0.01)
    with pytest.raises(
        InputError, match=r"processes\.checkpoint\[0\]\.n_bytes: found '3 parsecs'; must be a number of"
    ):
        listed("3 parsecs", 2e9, 0.01)


def test_the_schema_takes_texts_too() -> None:
    definitions = scenario_schema()["$defs"]
    for owner, key in (("GpuSpec", "power_limit_w"), ("InterNode", "latency_s"), ("Failures", "checkpoint_s")):
        assert "string" in str(definitions[owner]["properties"][key])
