"""Batch planning: the cuts multiply up, memory decides, and larger is not always better."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.studies.batch_plan import batch_sizes, kaplan_critical_tokens, plan_batch, steps_factor, tokens_factor
from tests.modules import run_module

ROOT = Path(__file__).parents[3]
FILE = ROOT / "scenarios" / "zero1_llama8b_dp8.yaml"


def test_cuts_multiply_up_to_the_global_batch() -> None:
    eager = "training.framework=eager"  # frees gradients after the step
    cuts = plan_batch(lambda more: load_scenario(FILE, [eager, *more]), (0.5, 1.0))
    assert {c.dp for c in cuts} == {4, 8}
    for c in cuts:
        assert c.dp * c.micro_batch_size * c.accumulation == 16
        assert c.gpus == c.dp
    fits = [c.fits_in_memory for c in cuts]
    assert fits == sorted(fits, reverse=True)
    of_eight = {c.micro_batch_size: c for c in cuts if c.dp == 8}
    kept = {
        size: simulate(load_scenario(FILE, [eager, *layout, "training.zero_grad=keep"])).result["peak_memory_bytes"]
        for size in (1, 2)
        for layout in [[f"training.micro_batch_size={size}", "parallelism.dp=8", "training.global_batch_size=16"]]
    }
    assert kept[2] > kept[1]
    # One micro-batch has no gradients at its peak, two have.
    assert of_eight[2].peak_memory_bytes < of_eight[1].peak_memory_bytes
    assert of_eight[2].step_time_s < of_eight[1].step_time_s


def test_critical_batch_size_trades_steps_for_tokens() -> None:
    """(S/S_min - 1)(E/E_min - 1) = 1 (McCandlish 2018, equation 5.1)."""
    for batch in (1.0, 64.0, 1e5):
        assert (steps_factor(batch, 300.0) - 1) * (tokens_factor(batch, 300.0) - 1) == pytest.approx(1)


def test_time_and_tokens_as_a_function_of_the_batch() -> None:
    """Steps fall and tokens grow with the batch; on the same GPUs time falls while larger batches run better."""
    sizes = batch_sizes(lambda more: load_scenario(FILE, more), 64.0)
    assert [s.global_batch_size for s in sizes] == [8, 16, 32, 64, 128, 256, 512]
    assert [s.accumulation for s in sizes] == [1, 2, 4, 8, 16, 32, 64]
    for a, b in itertools.pairwise(sizes):
        assert b.steps_factor < a.steps_factor
        assert b.tokens_factor > a.tokens_factor
    for s in sizes:
        assert s.time_s == pytest.approx(s.step_time_s * (1 + 64 / s.global_batch_size))
        tokens = s.global_batch_size * s.steps_factor  # of the fewest steps, in sequences
        assert tokens == pytest.approx(64 * s.tokens_factor)


def test_serving_has_no_batch_to_plan() -> None:
    with pytest.raises(InputError, match="training: is missing; --plan-batch needs it"):
        plan_batch(lambda more: load_scenario(ROOT / "scenarios" / "serve_batch1.yaml", more))


def test_command() -> None:
    changes = ["--set", "parallelism.dp=4", "--set", "cluster=dgx-h200"]
    arguments = ["--plan-batch", "--critical-batch", "16", "--json", "-", *changes]
    plan = json.loads(run_module("sim.run", FILE, *arguments).stdout)
    assert plan["format"] == "sim-batch-plan/1"
    assert plan["best"] == plan["cuts"][0]
    assert plan["steps_factor"] == plan["tokens_factor"] == 2.0
    assert {"global_batch_size", "steps_factor", "tokens_factor", "time_s"} <= plan["batch_sizes"][0].keys()


def test_critical_batch_by_loss_is_kaplans() -> None:
    assert kaplan_critical_tokens(1.0) == 2.1e8
    assert kaplan_critical_tokens(3.0) / kaplan_critical_tokens(3.0 * 2**0.21) == pytest.approx(2.0)
    command = ("sim.run", FILE, "--plan-batch", "--critical-loss", "2.5", "--json", "-")
    plan = json.loads(run_module(*command).stdout)
    seq_len = load_scenario(FILE).for_training.seq_len
    assert plan["critical_batch_size"] == pytest.approx(kaplan_critical_tokens(2.5) / seq_len)
    both = run_module(*command, "--critical-batch", "9")
    assert both.returncode == 2
    assert "one of them" in both.stderr
