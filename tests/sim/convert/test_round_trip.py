"""A scenario, the flags that `--emit` writes for it, and the scenario that `stepsim convert` reads from them: both take
the same time and memory, but for keys of which a comment of the flags says that the trainer has another value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.emit import emit
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.shipped import shipped_scenarios
from sim.models.balance import with_balanced_stages
from sim.simulation import simulate
from tests.sim.convert.converting import converted
from tests.sim.convert.test_emitted import EITHER, scenario_for, written

FILES = {"megatron": "x.sh", "torchtitan": "x.toml", "torchtitan-python": "x.py"}
TOLD = {  # keys, and their section
    "tp_overlap": "parallelism",
    "bucket_bytes": "parallelism",
    "zero_grad": "training",
    "loss_chunks": "training",
    "norm_bias": "model",
}
MOE = {"experts": 16, "top_k": 2, "ffn": 512}
SMALL = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "norm": "rmsnorm", "mlp": "swiglu"}


def came_back(tmp_path: Path, before: Scenario, trainer: str, text: str, cluster: str = "dgx-h100") -> Scenario:
    """The scenario that is read from the flags, on the cluster and with the engine of the first."""
    ranks = str(before.parallelism.ranks)
    data, _ = converted(tmp_path, FILES[trainer], text, "--cluster", cluster, "--gpus", ranks)
    of_no_flag = ("cluster", "engine", "calibration", "calibrations")
    return parse_scenario(data).unchecked_copy(update={key: getattr(before, key) for key in of_no_flag})


def as_told(before: Scenario, after: Scenario, text: str) -> Scenario:
    """The first with the trainer's values of keys that the flags' comments name."""
    for key, section in TOLD.items():
        if any(line.startswith(f"# {key} ") for line in text.splitlines()):
            value = getattr(getattr(after, section), key)
            changed = getattr(before, section).model_copy(update={key: value})
            before = before.unchecked_copy(update={section: changed})
    return before


def simulated(scenario: Scenario) -> tuple[float, float]:
    found = simulate(scenario).outcome
    return found.step_time_s, found.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trainer"), EITHER)
def test_shipped_scenarios_that_come_back_take_the_same_time_and_memory(
    tmp_path: Path, name: str, trainer: str
) -> None:
    text = written(name, trainer)
    if text is None:
        return
    before = with_balanced_stages(scenario_for(shipped_scenarios()[name], trainer))
    for key in ("faults", "processes"):
        assert (getattr(before, key) is not None) == (f"# {key} are left out" in text)
    assert (before.training is not None and before.training.tokens is not None) == ("# tokens are left out" in text)
    before = before.unchecked_copy(update={"faults": None, "processes": None})
    after = came_back(tmp_path, before, trainer, text, before.cluster.name)
    assert simulated(after) == pytest.approx(simulated(as_told(before, after, text)), rel=1e-12)


@pytest.mark.parametrize(
    ("model", "training", "layout"),
    [
        ({}, {}, {"tp": 4}),
        ({}, {}, {"tp": 4, "tp_overlap": "wgrad"}),
        ({}, {"framework": "eager"}, {"dp": 2, "zero": 1}),
        ({}, {}, {"tp": 2, "zero": 3}),  # nothing to shard: FSDP's flags are left out
        ({}, {}, {"tp": 2, "zero": 2}),
        ({}, {}, {"dp": 8, "zero": 2}),
        ({}, {"master_weights": "remainders", "optimizer_dtype": "bf16"}, {"dp": 8, "zero": 1}),
        ({}, {}, {"dp": 8, "zero": 2, "param_gather_overlap": False}),
        ({}, {"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_param_gather": True}, {"dp": 8, "zero": 1}),
        ({"moe": MOE}, {}, {"tp": 4, "sp": True, "zero": 1, "dp_sync": "after_backward"}),
        ({"norm": "layernorm", "bias": False}, {}, {"dp": 2}),  # whose norms have biases in Megatron-LM
        ({"moe": {**MOE, "max_nodes_per_token": 1}}, {}, {"cp": 2, "dp": 8, "pp": 4, "ep": 4}),
        (
            {"moe": {**MOE, "max_nodes_per_token": 2}},
            {},
            {"cp": 2, "dp": 8, "pp": 4, "ep": 8, "rank_order": "tp-cp-pp-dp"},  # an ep group over four nodes
        ),
    ],
)
def test_layouts_that_come_back_take_the_same_time_and_memory(
    tmp_path: Path, model: dict[str, Any], training: dict[str, Any], layout: dict[str, Any]
) -> None:
    batch = {"seq_len": 4096, "global_batch_size": 64, "framework": "megatron", **training}
    data = {"model": {**SMALL, **model}, "training": batch, "parallelism": layout, "cluster": "dgx-h100"}
    before = parse_scenario(data)
    text = emit(before, "megatron")
    after = came_back(tmp_path, before, "megatron", text)
    assert simulated(after) == pytest.approx(simulated(as_told(before, after, text)), rel=1e-12)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_loss_in_chunks_comes_back_from_torchtitan_s_python_config(tmp_path: Path, pp: int) -> None:
    """ChunkedLossWrapper of release 0.3.0; its TOML of 2025 has none."""
    training = {"seq_len": 4096, "global_batch_size": 64, "param_dtype": "fp32"}
    training |= {"cross_entropy": "chunked", "loss_chunks": 16}
    layout = {"dp": 8, "zero": 3, "pp": pp, "accumulate_unsharded": pp > 1}
    before = parse_scenario(
        {"model": "llama3.1-8b", "training": training, "parallelism": layout, "cluster": "dgx-h100"}
    )
    text = emit(before, "torchtitan-python")
    assert "num_chunks=16" in text
    after = came_back(tmp_path, before, "torchtitan-python", text)
    assert (after.for_training.cross_entropy, after.for_training.loss_chunks) == ("chunked", 16)
    assert simulated(after) == pytest.approx(simulated(before), rel=1e-12)
    with pytest.raises(InputError, match="torchtitan has no chunked cross-entropy"):
        emit(before, "torchtitan")


def test_fsdp_of_experts_with_several_stages_is_refused() -> None:
    """Experts that tp does not cut have replicas at dp 1, too."""
    layout = {"tp": 4, "sp": True, "pp": 2, "zero": 2}
    training = {"seq_len": 4096, "global_batch_size": 64, "framework": "megatron"}
    data = {"model": {**SMALL, "moe": MOE}, "training": training, "parallelism": layout, "cluster": "dgx-h100"}
    with pytest.raises(InputError, match=r"parallelism\.pp: found 2; Megatron-LM flags for zero 2"):
        emit(parse_scenario(data), "megatron")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 8, "zero": 2, "dp_sync": "after_backward"}, "dp_sync: found after_backward; Megatron-LM reduces"),
        ({"dp": 8, "tp": 2, "pp": 4, "p2p_scatter": True}, "p2p_scatter: found true; Megatron-LM sends whole"),
    ],
)
def test_what_no_flag_of_megatron_says_is_refused(layout: dict[str, Any], said: str) -> None:
    training = {"seq_len": 4096, "global_batch_size": 64, "framework": "megatron"}
    data = {"model": SMALL, "training": training, "parallelism": layout, "cluster": "dgx-h100"}
    with pytest.raises(InputError, match=f"parallelism.{said}"):
        emit(parse_scenario(data), "megatron")


LATE = {"cp": 2, "cp_method": "all_gather", "zero": 3, "dp_sync": "after_backward"}


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({}, r"zero: found 0; torchtitan has FSDP on one shard, too \(zero: 3\)"),
        ({"dp": 4}, r"zero: found 0; torchtitan has FSDP on one shard, too \(zero: 3 with shard_size: 1\)"),
        ({"tp": 8, "sp": True, "zero": 1}, "zero: found 1; torchtitan has FSDP on one shard, too"),
        (LATE, "dp_sync: found after_backward; torchtitan"),
        ({"zero": 3}, ""),
        ({"dp": 4, "zero": 3, "shard_size": 1}, ""),
    ],
)
def test_the_release_in_python_has_fsdp_on_one_shard(tmp_path: Path, layout: dict[str, Any], said: str) -> None:
    """torchtitan 0.3.0: models/llama3/parallelize.py."""
    training = {"seq_len": 4096, "global_batch_size": 64, "param_dtype": "fp32"}
    data = {"model": "llama3-8b", "training": training, "parallelism": layout, "cluster": "dgx-h100"}
    if said:
        with pytest.raises(InputError, match=f"parallelism.{said}"):
            emit(parse_scenario(data), "torchtitan-python")
        return
    gpus = str(layout.get("dp", 1))
    text = emit(parse_scenario(data), "torchtitan-python")
    back, _ = converted(tmp_path, "x.py", text, "--cluster", "dgx-h100", "--gpus", gpus)
    assert (back["parallelism"]["zero"], back["parallelism"].get("shard_size")) == (3, layout.get("shard_size"))


@pytest.mark.parametrize("trainer", ["torchtitan"])
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"zero": 3}, "found 3; torchtitan has FSDP with two shards or more only"),
        ({"dp": 4, "zero": 3, "shard_size": 1}, "found 3; torchtitan has FSDP with two shards or more only"),
        (LATE, "found after_backward; torchtitan"),
        ({"pp": 4}, "found 0; torchtitan computes in fp32 with tp or pp above 1"),
        ({"tp": 8, "sp": True}, "found 0; torchtitan computes in fp32 with tp or pp above 1"),
        ({"tp": 8, "sp": True, "zero": 1}, r"found 1; torchtitan shards everything \(zero: 3\) or nothing"),
        ({"zero": 2}, r"found 2; torchtitan shards everything \(zero: 3\) or nothing"),
    ],
)
def test_what_torchtitan_s_fsdp_does_not_do_is_refused(trainer: str, layout: dict[str, Any], said: str) -> None:
    training = {"seq_len": 4096, "global_batch_size": 64, "param_dtype": "fp32"}
    data = {"model": "llama3-8b", "training": training, "parallelism": layout, "cluster": "dgx-h100"}
    with pytest.raises(InputError, match=f"parallelism.(zero|dp_sync): {said}"):
        emit(parse_scenario(data), trainer)


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("pipeline_parallel_degree = 8", "fp32"),
        ("tensor_parallel_degree = 8", "fp32"),
        ("data_parallel_shard_degree = 8", "bf16"),
        ("pipeline_parallel_degree = 4\ndata_parallel_shard_degree = 2", "bf16"),
        ("context_parallel_degree = 8", "bf16"),
    ],
)
def test_torchtitan_without_fsdp_is_read_as_fp32(tmp_path: Path, lines: str, precision: str) -> None:
    shard = "" if "shard" in lines else "\ndata_parallel_shard_degree = 1"
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\n[parallelism]\n{lines}{shard}\n'
    data, said = converted(tmp_path, "x.toml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["precision"] == precision
    assert ("torchtitan casts to 16 bits under FSDP only" in said) == (precision == "fp32")


@pytest.mark.parametrize("trainer", ["torchtitan", "torchtitan-python"])
def test_all_in_bf16_comes_back_as_torchtitans_dtype(tmp_path: Path, trainer: str) -> None:
    """torchtitan/config/job_config.py, `Training.dtype`: parameters, gradients and moments without fp32 copies."""
    low = {"param_dtype": "bf16", "grad_dtype": "bf16", "optimizer_dtype": "bf16", "master_weights": False}
    sizes: dict[str, Any] = {"seq_len": 8192, "micro_batch_size": 1, "global_batch_size": 8}
    sizes["recompute"] = {"mode": "full", "early_stop": False}  # as release 0.3.0 does
    data: dict[str, Any] = {
        "version": 1,
        "name": "low",
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "training": {**low, **sizes, "grad_reduce_dtype": "fp32"},
        "parallelism": {"dp": 8, "zero": 3},
    }
    before = parse_scenario(data)
    text = emit(before, trainer)
    after = came_back(tmp_path, before, trainer, text)
    assert after.training.master_weights is False
    assert simulated(after) == simulated(as_told(before, after, text))
    del data["training"]["grad_dtype"], data["training"]["master_weights"], data["training"]["optimizer_dtype"]
    with pytest.raises(InputError, match="or all in bf16 without copies"):
        emit(parse_scenario(data), trainer)
