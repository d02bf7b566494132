"""Optimizer states in host memory: they cost their copies, and no memory before the optimizer."""

from __future__ import annotations

import pytest
from model_programs import LLAMA, make

from sim.models.parameters import count_parameters
from sim.simulation import simulate


def test_states_are_copied_both_ways_and_are_no_longer_beside_activations() -> None:
    plain, away = (make(LLAMA, {"optimizer_offload": off, "seq_len": 4096}) for off in (False, True))
    before, after = simulate(plain).result, simulate(away).result
    states = 12 * count_parameters(plain.model).total
    assert before["memory"][0]["optimizer"] == states
    assert after["memory"][0]["optimizer"] == 0
    assert after["peak_memory_bytes"] < before["peak_memory_bytes"]
    at_least = 2 * states / plain.cluster.gpu.host_bandwidth_bytes_per_s
    assert after["step_time_s"] - before["step_time_s"] == pytest.approx(at_least, rel=0.35)
    assert after["step_time_s"] - before["step_time_s"] >= 0.99 * at_least
