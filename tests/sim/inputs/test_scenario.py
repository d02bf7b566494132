"""Scenarios that are right: presets, overrides, defaults, the schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.inputs.overrides import merge
from sim.inputs.parallelism import split_layers
from sim.inputs.scenario import load_mapping, load_scenario, parse_scenario
from sim.simulation import simulate
from tests.sim.small_scenario import SMALL, small
from topology.presets import CLUSTERS, GPUS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_defaults_are_the_contracts(file: Path) -> None:
    s = load_scenario(file)
    assert (s.version, s.name, s.calibration) == (1, "small", "h100-sxm")
    t, p = s.training, s.parallelism
    assert t is not None
    assert (t.micro_batch_size, t.precision, t.param_dtype, t.grad_dtype, t.grad_reduce_dtype) == (
        1,
        "bf16",
        "bf16",
        "fp32",
        "fp32",
    )
    assert (t.optimizer, t.recompute.mode, t.attention, t.cross_entropy) == (
        "adamw",
        "none",
        "fused",
        "unfused",
    )
    assert (t.framework, t.activation_offload) == ("eager", False)
    assert (p.dp, p.tp, p.sp, p.cp, p.pp, p.ep, p.expert_tp, p.zero) == (1, 1, False, 1, 1, 1, 1, 0)
    assert (p.shard_size, p.reshard_after_forward, p.accumulate_unsharded) == (1, True, False)
    assert (p.schedule, p.schedule_memory, p.virtual_stages, p.layers_per_stage) == ("1f1b", 1.0, 1, (32,))
    assert (p.dp_sync, p.bucket_bytes, p.param_gather_overlap) == ("bucketed", 25 * 2**20, True)
    assert (p.cp_method, p.cp_split, p.tp_overlap, p.ep_overlap) == ("ring", "zigzag", "none", False)
    assert (p.ep_dispatch_dtype, p.p2p_overlap, p.p2p_scatter) == ("bf16", False, False)
    assert p.rank_order == "tp-cp-dp-pp"
    assert s.model.max_positions == 4096
    assert s.micro_batches == 64
    assert s.inference is s.distillation is s.faults is None


def test_model_defaults_follow_the_sizes() -> None:
    model = parse_scenario(small()).model
    assert (model.kv_heads, model.head_dim, model.ffn) == (8, 32, 1024)
    assert (model.mlp, model.norm, model.bias, model.positions) == ("gelu", "layernorm", True, "none")
    assert (model.tied_embeddings, model.dropout, model.mtp_layers, model.moe) == (False, 0.0, 0, None)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("parallelism.pp=4", lambda s: s.parallelism.layers_per_stage, (8, 8, 8, 8)),
        ("model.layers=4", lambda s: (s.model.layers, s.model.hidden), (4, 4096)),
        ("model.moe={experts: 8, top_k: 2, ffn: 1024}", lambda s: s.model.moe.experts, 8),
        ("model={preset: gpt2, max_positions: 8192}", lambda s: s.model.max_positions, 8192),
        ("cluster.nodes=3", lambda s: (s.cluster.nodes, s.cluster.name), (3, "dgx-h100")),
        ("cluster.gpu.memory_bytes=96e9", lambda s: (s.cluster.gpu.memory_bytes, s.calibration), (96e9, "h100-sxm")),
        ("cluster.gpu.memory_bytes=96GB", lambda s: s.cluster.gpu.memory_bytes, 96e9),
        ("cluster.gpu=h200-sxm", lambda s: (s.cluster.gpu.memory_bytes, s.calibration), (141 * 2**30, "h200-sxm")),
        ("cluster.inter_node.latency_s=1e-3", lambda s: s.cluster.inter_node.latency_s, 1e-3),
        ("training.recompute=full", lambda s: s.training.recompute.mode, "full"),
        ("training.recompute={mode: full, layers: 8}", lambda s: s.training.recompute.layers, 8),
        ("training.recompute={mode: full, every: 2}", lambda s: s.training.recompute.every, 2),
        ("training.precision=half", lambda s: (s.training.precision, s.training.param_dtype), ("fp16", "fp16")),
        ("training.precision=fp8", lambda s: (s.training.param_dtype, s.parallelism.ep_dispatch_dtype), ("bf16",) * 2),
        ("training.precision=float32", lambda s: s.training.param_dtype, "fp32"),
        ("training.param_dtype=float", lambda s: s.training.param_dtype, "fp32"),
        ("training.grad_dtype=bfloat16", lambda s: s.training.grad_reduce_dtype, "bf16"),
        ("training.seq_len=null", lambda s: s, None),
        ("parallelism.bucket_bytes=1.5 GiB", lambda s: s.parallelism.bucket_bytes, 3 * 2**29),
        ("parallelism.bucket_bytes=1000", lambda s: s.parallelism.bucket_bytes, 1000),
        ("parallelism.layers_per_stage=null", lambda s: s.parallelism.layers_per_stage, (32,)),
        ("parallelism.dp_sync=after_backward", lambda s: s.parallelism.param_gather_overlap, False),
        ("name=other", lambda s: s.name, "other"),
        ("calibration=roofline", lambda s: s.calibration, "roofline"),
        ("faults.stragglers=[{rank: 0, compute_scale: 2}]", lambda s: s.faults.stragglers[0].compute_scale, 2.0),
        ("faults.links=[{between: [node0, node0]}]", lambda s: s.faults.links[0].bandwidth_scale, 0.5),
        ("faults.failures={}", lambda s: s.faults.failures.mtbf_s_per_gpu, 1.8e8),
        ("faults.failures={mtbf_s_per_gpu: 1e8}", lambda s: s.faults.failures.mtbf_s_per_gpu, 1e8),
    ],
)
def test_override(file: Path, override: str, get: Any, value: Any) -> None:
    if value is None:
        with pytest.raises(ValueError, match="seq_len: is required and missing"):
            load_scenario(file, [override])
    else:
        assert get(load_scenario(file, [override])) == value


def test_overrides_apply_in_order_and_reach_into_lists(file: Path) -> None:
    s = load_scenario(
        file,
        [
            "parallelism.pp=2",
            "parallelism.layers_per_stage=[20, 12]",
            "parallelism.layers_per_stage.0=17",
            "parallelism.layers_per_stage.1=15",
            "training.recompute=full",
            "training.recompute.layers=3",
        ],
    )
    assert s.parallelism.layers_per_stage == (17, 15)
    assert s.training is not None
    assert (s.training.recompute.mode, s.training.recompute.layers) == ("full", 3)


def test_null_over_a_preset_means_the_default() -> None:
    s = parse_scenario(small(model={"preset": "mixtral-8x7b", "moe": None, "kv_heads": None}, cluster="dgx-h100"))
    assert s.model.moe is None


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual_stages", "stages", "overlap"),
    [
        ("naive", 2, 1, 2, False),
        ("gpipe", 2, 1, 2, False),
        ("1f1b", 2, 1, 2, False),
        ("interleaved_1f1b", 2, 2, 4, True),
        ("zb_h1", 2, 1, 2, True),
        ("zb_h2", 2, 1, 2, True),
        ("zb_search", 2, 1, 2, True),
        ("zb_v", 2, 2, 4, True),
        ("dualpipe_v", 2, 2, 4, True),
        ("dualpipe", 2, 2, 2, True),
        ("dualpipe", 1, 1, 1, True),
        ("interleaved_1f1b", 1, 1, 1, True),
    ],
)
def test_what_each_schedule_resolves_to(
    schedule: str, pp: int, virtual_stages: int, stages: int, overlap: bool
) -> None:
    p = parse_scenario(small(parallelism={"schedule": schedule, "pp": pp})).parallelism
    assert (p.virtual_stages, len(p.layers_per_stage), p.p2p_overlap) == (virtual_stages, stages, overlap)
    assert sum(p.layers_per_stage) == 8


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 1, (8,)),
        (10, 4, (3, 3, 2, 2)),
        (4, 4, (1, 1, 1, 1)),
        (126, 128, (0, *[1] * 126, 0)),
        (3, 4, (1, 1, 1, 0)),
        (1, 4, (0, 1, 0, 0)),
        (1, 2, (1, 0)),
    ],
)
def test_layers_per_stage(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert split_layers(layers, stages) == expected


@pytest.mark.parametrize(
    ("cluster", "ranks", "nodes"),
    [
        ("dgx-h100", 8, 1),
        ("dgx-h100", 9, 2),
        ("gb200-nvl72", 72, 18),
        ({"gpu": "h100-sxm", "gpus_per_node": 4}, 9, 3),
    ],
)
def test_nodes_follow_from_the_ranks(cluster: Any, ranks: int, nodes: int) -> None:
    data = {**small(parallelism={"dp": ranks}, training={"global_batch_size": ranks}), "cluster": cluster}
    assert parse_scenario(data).cluster.nodes == nodes


def test_full_cluster_description_with_its_defaults() -> None:
    gpu = {
        "memory_bytes": "40GB",
        "memory_bandwidth_bytes_per_s": 1e12,
        "peak_flops_per_s": {"bfloat16": 1e14},
    }
    s = parse_scenario({**small(), "cluster": {"gpu": gpu, "gpus_per_node": 4}})
    assert (s.cluster.nvlink_domain, s.cluster.inter_node.nics_per_node, s.cluster.nodes) == (4, 4, 1)
    assert s.cluster.gpu.peak_flops_per_s == {"bf16": 1e14}
    assert s.calibration == "h100-sxm"
    assert any("no kernels of GPU 'custom' were measured" in warning for warning in s.warnings)


@pytest.mark.parametrize(
    ("cluster", "kind", "gb_per_s", "nvls"),
    [
        ({"gpu": "a100-sxm"}, "nvswitch", 300, 0.0),
        ({"gpu": "a100-sxm-40g", "gpus_per_node": 4}, "nvswitch", 300, 0.0),
        ({"gpu": "b200-sxm"}, "nvswitch", 900, 0.74),
        ({"gpu": "v100"}, "nvlink_mesh", 150, 0.0),
        ({"gpu": "v100", "intra_node": {"kind": "nvswitch"}}, "nvswitch", 150, 0.0),
        ({"gpu": "a100-pcie"}, "pcie", 31.5, 0.0),
        ({"gpu": "h100-sxm", "intra_node": {"kind": "pcie"}}, "pcie", 63, 0.0),
        ({"preset": "dgx-h100", "intra_node": {"kind": "pcie"}}, "pcie", 63, 0.0),
        ({"preset": "dgx-h100", "intra_node": {"bandwidth_bytes_per_s": 200e9}}, "nvswitch", 200, 0.85),
        ({"preset": "gb200-nvl72", "intra_node": {"kind": "nvswitch"}}, "nvswitch", 900, 0.74),
    ],
)
def test_links_in_a_node_that_are_left_out_are_those_of_its_gpus(
    cluster: dict[str, Any], kind: str, gb_per_s: float, nvls: float
) -> None:
    intra = parse_scenario({**small(training={"precision": "fp16"}), "cluster": cluster}).cluster.intra_node
    assert (intra.kind, intra.bandwidth_bytes_per_s / 1e9, intra.nvls_efficiency) == (kind, gb_per_s, nvls)


def test_gpu_overrides_keep_the_other_peaks() -> None:
    gpu = {"preset": "h100-sxm", "peak_flops_per_s": {"fp16": 1e14}}
    s = parse_scenario({**small(), "cluster": {"preset": "dgx-a100", "gpu": gpu}})
    assert s.cluster.gpu.peak_flops_per_s == {**GPUS["h100-sxm"].peak_flops_per_s, "fp16": 1e14}
    assert s.cluster.intra_node == CLUSTERS["dgx-a100"].intra_node


def test_nvlink_domain_stays_the_node() -> None:
    def domain(cluster: dict[str, Any]) -> int:
        return parse_scenario({**small(), "cluster": cluster}).cluster.nvlink_domain

    assert domain({"preset": "dgx-h100", "gpus_per_node": 4}) == 4
    assert domain({"preset": "gb200-nvl72", "gpus_per_node": 2}) == 72


def test_inference_defaults() -> None:
    data = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "inference": {"requests": {"prompt_len": 10, "output_len": 5}},
    }
    s = parse_scenario(data)
    assert s.inference is not None
    assert s.inference.model_dump() == {
        "batching": "continuous",
        "chunked_prefill": True,
        "precision": "bf16",
        "max_running_requests": 256,
        "max_batch_tokens": 8192,
        "max_request_tokens": None,
        "max_prompt_tokens": None,
        "preemption": "recompute",
        "capacity_policy": None,
        "schedule_conservativeness": None,
        "batch_wait": None,
        "balanced_prompts": None,
        "attention": "fused",
        "requests": {
            "prompt_len": 10,
            "output_len": 5,
            "range_ratio": 0.0,
            "count": 1,
            "rate_per_s": None,
            "burstiness": 1.0,
            "exact_rate": False,
            "max_concurrency": None,
            "seed": 0,
        },
        "kv_cache": {
            "layout": "paged",
            "block_tokens": 16,
            "dtype": "bf16",
            "memory_fraction": 0.9,
            "free_fraction": 1.0,
            "memory_bytes": None,
            "max_tokens": None,
            "tiers": None,
        },
        "prefix_cache": "none",
        "cuda_graphs": True,
        "cuda_graph_max_size": None,
        "cuda_graph_sizes": None,
        "quantization": "none",
        "all2all_backend": None,
        "dense_over_replicas": None,
        "head_over_replicas": None,
        "async_scheduling": None,
        "two_batch_overlap": False,
        "stream_interval": 1,
        "router": None,
        "disaggregated": None,
        "speculative": None,
        "autoscaling": None,
        "eplb": None,
        "afd": None,
        "lora": None,
        "sampling": None,
        "weight_offload": None,
        "engine": "bundled",
        "decode_attention": None,
    }
    assert (s.training, s.precision, s.model.max_positions) == (None, "bf16", 15)


def test_files_are_looked_for_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "requests.csv").write_text("arrival_s,prompt_tokens,output_tokens,prefix_id\n")
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 64}'
    )
    (tmp_path / "profile.json").write_text("{}")
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: ./config.json\ncluster: cpu-host\ncalibration: profile.json\n"
        "inference: {precision: fp32, requests: {trace: requests.csv}}\n"
    )
    s = load_scenario(file, ["model.layers=3"])
    assert (s.model.layers, s.model.hidden) == (3, 8)
    (tmp_path / "mine").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "mine" / "config.json")
    assert load_scenario(file, ["model=mine", "model.layers=3"]).model == s.model
    with pytest.raises(InputError, match="no such model preset"):
        load_scenario(file, ["model=''"])
    assert s.calibration == str(tmp_path / "profile.json")
    assert s.inference is not None
    assert s.inference.requests.model_dump() == {"trace": str(tmp_path / "requests.csv"), "max_concurrency": None}


def test_mapping_can_be_varied(file: Path) -> None:
    data = load_mapping(file, ["parallelism.tp=2"])
    s = parse_scenario(merge(data, {"parallelism": {"pp": 4}, "model": {"layers": 8}}))
    assert (s.parallelism.tp, s.parallelism.layers_per_stage) == (2, (2, 2, 2, 2))


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    file = tmp_path / "n.yaml"
    file.write_text(
        "﻿model: {layers: 0_8, hidden: 256, heads: 8, vocab: 1_000, dropout: 1e-1, bias: no}\n"
        "training: {seq_len: 0128, global_batch_size: 32}\ncluster: 'dgx-h100'\n"
    )
    s = load_scenario(file)
    assert s.training is not None
    assert (s.model.layers, s.model.vocab, s.model.dropout, s.model.bias) == (8, 1000, 0.1, False)
    assert s.training.seq_len == 128


def test_scenarios_are_frozen() -> None:
    s = parse_scenario(small())
    with pytest.raises(ValueError, match="frozen"):
        s.model.layers = 3  # type: ignore[misc]


def test_dtype_bytes() -> None:
    assert [dtype_bytes(d) for d in ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")] == [
        4,
        2,
        2,
        1,
        1.03125,
        0.5625,
    ]
    with pytest.raises(ValueError, match="fp12"):
        dtype_bytes("fp12")


def test_loading_needs_no_heavy_import(file: Path) -> None:
    code = (
        "import sys; from sim.inputs.scenario import load_scenario; load_scenario(sys.argv[1]);"
        "print([m for m in ('numpy', 'networkx', 'scipy', 'torch', 'bokeh', 'simpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("framework", "dp", "elements"),
    [("megatron", 8, 40_000_000), ("megatron", 64, 64_000_000), ("megatron_bridge", 64, 128 * 2**20)],
)
def test_megatrons_buckets_grow_with_the_data_parallel_ranks(framework: str, dp: int, elements: int) -> None:
    """Fewer messages than with 25 MiB, of max(40M, 1M dp) gradients (distributed_data_parallel.py: bucket_size)."""
    data = small(
        model={"hidden": 1024},
        training={"framework": framework, "global_batch_size": dp},
        parallelism={"dp": dp, "zero": 1},
    )
    own = parse_scenario(data)
    assert own.parallelism.bucket_bytes == elements * dtype_bytes(own.for_training.grad_reduce_dtype)
    torchs = parse_scenario(small(**{**data, "parallelism": {"dp": dp, "zero": 1, "bucket_bytes": "25MiB"}}))
    few, many = ([x.kind for x in simulate(s, expand=True).timeline.spans()] for s in (own, torchs))
    assert 0 < few.count("REDUCE_SCATTER") < many.count("REDUCE_SCATTER")
