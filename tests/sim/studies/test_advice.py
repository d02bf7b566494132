"""Advice is what was simulated: what a change is said to gain, a run with that change shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.studies.advice import LEAST_GAIN, Tried, tried_advice
from tests.modules import run_module

FILES = Path(__file__).parents[3] / "scenarios"


def advice(name: str, *overrides: str) -> tuple[float, list[Tried]]:
    """A scenario's step, and what helps."""
    file = FILES / f"{name}.yaml"
    step = simulate(load_scenario(file, overrides), engine="static")
    return step.step_time_s, tried_advice(step, lambda changes: load_scenario(file, [*overrides, *changes]))


@pytest.mark.parametrize("name", ["1f1b_pp8", "dp8"])
def test_each_change_gains_what_is_said(name: str) -> None:
    step_s, found = advice(name)
    assert len(found) >= 2
    assert [t.gain_s for t in found] == sorted((t.gain_s for t in found), reverse=True)
    for tried in found:
        result = simulate(load_scenario(FILES / f"{name}.yaml", tried.changes)).outcome
        assert result.step_time_s == tried.step_time_s == pytest.approx(step_s - tried.gain_s)
        assert result.peak_memory_bytes == pytest.approx(tried.peak_memory_bytes)
        assert result.fits_in_memory
        assert tried.gain > LEAST_GAIN


def test_what_does_not_help_or_fit_is_not_said() -> None:
    """Twice the micro-batch makes this pipeline slower and does not fit; twice the virtual stages does not help."""
    balanced = "parallelism.layers_per_stage=balanced"
    _, found = advice("uneven_pp8", balanced)
    changes = {t.changes for t in found}
    worse = simulate(load_scenario(FILES / "uneven_pp8.yaml", [balanced, "training.micro_batch_size=2"])).outcome
    assert not worse.fits_in_memory
    assert ("training.micro_batch_size=2",) not in changes
    assert not any("layers_per_stage" in key for keys in changes for key in keys)  # balanced already


def test_nothing_is_proposed_twice_that_is_done() -> None:
    _, found = advice("dp8", "training.framework=compiled", "training.cross_entropy=fused", "parallelism.zero=1")
    said = {change for t in found for change in t.changes}
    assert said
    assert not said & {"training.framework=compiled", "training.cross_entropy=fused", "parallelism.zero=1"}


def test_what_the_scenario_has_is_not_said_beside_another_change() -> None:
    _, found = advice(
        "memory_zero_llama8b", "parallelism.zero=3", "training.global_batch_size=16", "training.micro_batch_size=2"
    )
    changes = {t.changes for t in found}
    assert ("training.recompute=full",) in changes
    assert ("parallelism.zero=3", "training.recompute=full") not in changes


@pytest.mark.parametrize(("framework", "tried"), [("megatron", True), ("megatron_bridge", True), ("eager", False)])
def test_graphs_are_tried_where_the_host_is_late_and_the_framework_captures_layers(framework: str, tried: bool) -> None:
    _, found = advice("dp8", "model=llama3.2-3b", "training.seq_len=256", f"training.framework={framework}")
    assert (("training.cuda_graphs=layers",) in {t.changes for t in found}) == tried


@pytest.mark.parametrize("padded", ["true", "false"])
def test_graphs_are_tried_for_experts_only_if_each_takes_a_fixed_number_of_tokens(padded: str) -> None:
    experts = f"model.moe={{experts: 8, top_k: 2, ffn: 512, capacity_factor: 1, pad_to_capacity: {padded}}}"
    short = ("model=llama3.2-1b", experts, "training.seq_len=256", "training.framework=megatron")
    _, found = advice("dp8", *short)
    assert (("training.cuda_graphs=layers",) in {t.changes for t in found}) == (padded == "true")


def test_only_some_layers_are_recomputed_where_not_all_activations_fit() -> None:
    full = ("training.recompute=full", "training.framework=compiled", "training.cross_entropy=fused")
    small = "cluster={preset: dgx-h100, gpu: {preset: h100-sxm, memory_bytes: 28GiB}}"
    step_s, found = advice("sft_lora_llama8b", *full, small)
    some = [t for t in found if t.changes[-1].startswith("training.recompute.layers=")]
    assert some
    assert ("training.recompute=none",) not in {t.changes for t in found}
    fewest = min(some, key=lambda t: int(t.changes[-1].rpartition("=")[2]))
    assert fewest.gain_s == max(t.gain_s for t in some)
    assert all(t.step_time_s < step_s and t.peak_memory_bytes < 28 * 2**30 for t in some)


def test_what_does_not_fit_is_made_to_fit() -> None:
    step_s, found = advice("memory_zero_llama8b")
    assert {t.part for t in found} == {"memory"}
    assert ("parallelism.zero=3",) in {t.changes for t in found}
    for tried in found:
        assert simulate(load_scenario(FILES / "memory_zero_llama8b.yaml", tried.changes)).outcome.fits_in_memory
    assert any(t.step_time_s > step_s for t in found)  # at a price


def test_experts_are_advised_as_their_layout_allows() -> None:
    options = [
        "training.seq_len=512",
        "training.framework=eager",
        "parallelism={}",
        "parallelism.dp=8",
        "parallelism.ep=8",
    ]
    file = FILES / "moe_mixtral.yaml"
    step = simulate(load_scenario(file, options), engine="static")
    found = tried_advice(step, lambda changes: load_scenario(file, [*options, *changes]))
    assert ("parallelism.ep_overlap=true",) in [t.changes for t in found]  # one rank runs micro-batches in pairs


def test_hiding_exchanges_that_quick_links_make_short_is_advised_against() -> None:
    """A pair's gradient leaves with the pair, so the chain of stages is as long as its pairs."""
    quick = "cluster={preset: gb200-nvl72, intra_node: {bandwidth_bytes_per_s: 9.0e+13, latency_s: 1.0e-9}}"
    layout = "parallelism={ep: 2, dp: 2, pp: 4, schedule: dualpipe, ep_overlap: true}"
    options = ["training.global_batch_size=16", "model={preset: mixtral-8x7b, layers: 16}", layout, quick]
    options += ["calibration=roofline", "training.seq_len=4096"]
    file = FILES / "moe_mixtral.yaml"
    step = simulate(load_scenario(file, options), engine="static")
    found = tried_advice(step, lambda changes: load_scenario(file, [*options, *changes]))
    off = next(t for t in found if t.changes == ("parallelism.ep_overlap=false",))
    assert off.gain > 0.01


def test_terminal_and_json_say_the_same(tmp_path: Path) -> None:
    ran = run_module("sim.run", FILES / "dp8.yaml", "--advise", "--json", tmp_path / "step.json")
    assert ran.returncode == 0, ran.stderr
    written = json.loads((tmp_path / "step.json").read_text("utf-8"))["advice"]
    assert written == [t.to_json() for t in advice("dp8")[1]]
    for row in written:
        assert " ".join(row["changes"]) in " ".join(ran.stdout.split())
    silent = run_module("sim.run", FILES / "dp8.yaml", "--no-advise")
    assert "--set" not in silent.stdout


def test_a_change_names_no_key_that_the_scenario_has_already() -> None:
    layout = ("parallelism.tp=4", "parallelism.dp=2", "parallelism.sp=true", "training.framework=megatron")
    _, found = advice("dp8", "model=llama3-8b", "training.global_batch_size=32", *layout)
    said = {change for t in found for change in t.changes}
    assert {"parallelism.tp_overlap=wgrad", "parallelism.tp_overlap=full"} <= said
    assert "parallelism.sp=true" not in said


def test_a_long_step_says_where_to_ask() -> None:
    """Nothing is tried unasked for a step of many tasks."""
    long = run_module("sim.run", FILES / "dualpipe_deepseek_v3.yaml").stdout
    assert "--advise simulates changes that might shorten it" in long
    scenario = str(FILES / "dualpipe_deepseek_v3.yaml")
    short = ["--set", "training.global_batch_size=8192", "--set", "training.recompute=none"]
    hint = "--advise simulates changes that might make it fit"
    assert hint in run_module("sim.run", scenario, *short).stdout
    assert hint not in run_module("sim.run", scenario, *short, "--no-advise").stdout


@pytest.mark.parametrize(
    ("framework", "name"), [("eager", "compiled"), ("transformers", "transformers_compiled"), ("megatron", "")]
)
def test_torch_compile_is_proposed_where_the_trainer_has_a_flag_for_it(framework: str, name: str) -> None:
    """Megatron under torch.compile would be another trainer: nobody changes it to shorten a step."""
    _, found = advice("dp8", "training.seq_len=1024", f"training.framework={framework}")
    said = [change for t in found for change in t.changes if change.startswith("training.framework=")]
    assert said == ([f"training.framework={name}"] if name else [])
