"""The section `zero_optimization` of DeepSpeed's JSON as keys of a scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted


@pytest.mark.parametrize(
    ("sections", "reduced", "bucket", "gather"),
    [
        ('"bf16": {"enabled": true}', None, 2 * 10**8, 2 * 10**7),
        ('"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}', "bf16", 2 * 10**8, 2 * 10**7),
        ('"bf16": {"enabled": true}, "communication_data_type": "fp32"', "fp32", 4 * 10**8, 2 * 10**7),
        ('"fp16": {"enabled": true}, "communication_data_type": "bf16"', "bf16", 2 * 10**8, 2 * 10**7),
        ('"steps_per_print": 10', None, 4 * 10**8, 4 * 10**7),
    ],
)
def test_buckets_are_elements_of_what_is_sent(
    tmp_path: Path, sections: str, reduced: str | None, bucket: int, gather: int
) -> None:
    """Gradients that add up in fp32 are sent in 16 bits (runtime/engine.py: communication_data_type)."""
    zero = '{"stage": 3, "reduce_bucket_size": 1e8, "stage3_prefetch_bucket_size": 1e7}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, {sections}, "zero_optimization": {zero}}}'
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "2048")
    data, said = converted(tmp_path, "ds.json", text, *options)
    assert data["training"].get("grad_reduce_dtype") == reduced
    assert (data["parallelism"]["bucket_bytes"], data["parallelism"]["gather_bucket_bytes"]) == (bucket, gather)
    assert "not expressed" not in said


def test_what_zero_keeps_in_another_way_is_named(tmp_path: Path) -> None:
    zero = '{"stage": 3, "stage3_param_persistence_threshold": 1e6, "contiguous_gradients": false}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "zero_optimization": {zero}}}'
    options = ("--cluster", "dgx-h100", "--gpus", "8", "--seq-len", "512", "--model")
    small, large = (converted(tmp_path, "ds.json", text, *options, model)[1] for model in ("gpt2", "llama3-8b"))
    kept = "zero_optimization.stage3_param_persistence_threshold: tensors of up to 1,000,000 elements stay whole"
    assert kept in small
    assert kept not in large
    assert "contiguous_gradients: false is not simulated" in large


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        (
            '"stage": 1, "reduce_scatter": false',
            "reduce_scatter: false all-reduces buckets, as is simulated; the simulated step also joins",
        ),
        (
            '"stage": 3, "reduce_scatter": false',
            "reduce_scatter: false is not simulated; gradients are reduce-scattered",
        ),
        (
            '"stage": 2, "offload_optimizer": {"device": "cpu"}',
            "round_robin_gradients: false is not simulated; all ranks copy",
        ),
        ('"stage": 2, "offload_optimizer": {"device": "cpu"}, "round_robin_gradients": true', ""),
        ('"stage": 3, "offload_optimizer": {"device": "cpu"}', ""),
        ('"stage": 2, "round_robin_gradients": false, "load_from_fp32_weights": false', ""),
        ('"stage": 0, "overlap_comm": true, "reduce_bucket_size": 1000, "reduce_scatter": false', ""),
    ],
)
def test_what_deepspeed_reduces_and_copies_otherwise_is_named(tmp_path: Path, zero: str, said: str) -> None:
    """runtime/zero/stage_1_and_2.py and stage3.py of 0.19.8; nothing reads the last without ZeRO (engine.py)."""
    text = f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "zero_optimization": {{{zero}}}}}'
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "2048")
    data, found = converted(tmp_path, "ds.json", text, *options)
    assert said in found
    assert ("zero_optimization" in found) is bool(said)
    if data["parallelism"]["zero"] == 0:
        assert data["parallelism"]["dp_sync"] == "after_backward"
        assert "bucket_bytes" not in data["parallelism"]


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ('"sub_group_size": 1e12', "sub_group_size: the default of 1,000,000,000 is simulated"),
        ('"sub_group_size": 1e9', ""),
        (
            '"stage3_prefetch_bucket_size": 0',
            "stage3_prefetch_bucket_size: 0 is not simulated; parameters are gathered",
        ),
    ],
)
def test_numbers_of_zero_3_that_are_not_simulated_are_named(tmp_path: Path, zero: str, said: str) -> None:
    text = f"""{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "wall_clock_breakdown": true,
      "zero_optimization": {{"stage": 3, {zero}}}}}"""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "2048")
    found = converted(tmp_path, "ds.json", text, *options)[1]
    assert said in found
    assert ("zero_optimization" in found) is bool(said)
    assert "not expressed here: wall_clock_breakdown" in found  # whose timers wait for the GPU


def test_zero_plus_plus_is_read(tmp_path: Path) -> None:
    zero = (
        '{"stage": 3, "zero_quantized_weights": true, "zero_hpz_partition_size": 8, "zero_quantized_gradients": true}'
    )
    text = f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "zero_optimization": {zero}}}'
    options = ("--cluster", "dgx-h100", "--gpus", "16", "--model", "llama3-8b", "--seq-len", "4096")
    data, said = converted(tmp_path, "ds.json", text, *options)
    own = {"param_gather_dtype": "int8", "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}
    assert {key: data["parallelism"].get(key) for key in own} == own
    assert "zero_" not in said.partition("version:")[0]
    assert "not expressed here" not in said
    data, said = converted(tmp_path, "ds.json", text.replace('"stage": 3', '"stage": 2'), *options)
    assert "param_gather_dtype" not in data["parallelism"]


def test_mics_is_hybrid_sharding(tmp_path: Path) -> None:
    zero = '{"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": false}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "zero_optimization": {zero}}}'
    options = ("--cluster", "dgx-h100", "--gpus", "16", "--model", "llama3-8b", "--seq-len", "4096")
    data, said = converted(tmp_path, "ds.json", text, *options)
    assert (data["parallelism"]["shard_size"], data["parallelism"]["all_reduce_once"]) == (8, True)
    assert "not expressed here" not in said


def test_names_that_deepspeed_reads_without_their_stage(tmp_path: Path) -> None:
    """runtime/zero/config.py: fields with an alias, and `populate_by_name` in runtime/config_utils.py."""
    zero = {"stage": 3, "prefetch_bucket_size": 1000, "max_live_parameters": 0, "max_reuse_distance": 10**9}
    text = json.dumps({"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    options = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3-8b", "--seq-len", "4096")
    data, said = converted(tmp_path, "ds.json", text, *options)
    assert data["parallelism"]["gather_bucket_bytes"] == 2000
    assert "zero_optimization.stage3_max_live_parameters: the default of 1,000,000,000 is simulated" in said
    assert "not expressed" not in said


ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("changes", "found", "said"),
    [
        ({}, True, ""),
        (
            {"offload_optimizer": {"device": "none"}},
            None,
            "to cpu is not simulated without offload_optimizer on the cpu",
        ),
        ({"stage": 2}, None, "offload_param: offloading to cpu is not simulated"),
        ({"zero_quantized_weights": True}, None, "with ZeRO++ parameters are simulated on the GPU"),
    ],
)
def test_parameters_on_the_host_need_the_optimizer_there(
    tmp_path: Path, changes: dict[str, Any], found: bool | None, said: str
) -> None:
    config: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **ON_HOST, **changes}}
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--seq-len", "4096", "--gpus", "16")
    data, notes = converted(tmp_path, "ds.json", json.dumps(config), *options)
    assert data["training"].get("parameter_offload") == found
    assert (said in notes) if said else ("offload_param" not in notes)
