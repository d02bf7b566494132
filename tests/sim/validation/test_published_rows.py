"""Rows that anybody's table may hold: every operator of the format, sizes under usual names, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.prices.kernel_file import kernel_file
from sim.prices.operator_prices import Costs
from sim.validation import fused_prices
from sim.validation.fused_prices import fused_costs
from sim.validation.fused_rows import fused_kernel
from sim.validation.kernel_rows import total
from sim.validation.matmul_rows import MATMUL_ROWS
from sim.validation.predict import predict
from sim.validation.prediction import NotSimulated, Prediction, costs_of
from sim.validation.records import Measurement
from sim.validation.tables import read_table

PUBLISHED = Path(__file__).parents[3] / "scenarios" / "published"
SIZES = {
    "rows": 4096,
    "hidden": 4096,
    "vocab": 32_000,
    "batch": 2,
    "seq_len": 2048,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "kv_len": 4096,
    "intermediate_size": 11_008,
    "m": 512,
    "n": 4096,
    "k": 2048,
    "groups": 8,
}
OPS = (
    "gemm",
    "grouped_gemm",
    "attention_forward",
    "attention_backward",
    "attention_forward_backward",
    "attention_decode",
    "rms_norm",
    "layer_norm",
    "swiglu",
    "cross_entropy",
    "softmax",
    "rope",
    "gelu",
    "embedding",
    "fused_linear_cross_entropy",
)


def seconds(kind: str, scenario: dict[str, Any], measured: str = "seconds", **data: Any) -> Prediction:
    row = Measurement("t", kind, "r", "g", scenario, {measured: 1.0}, data)
    return predict(row)[0][measured]


@pytest.mark.parametrize("gpu", ["a100-sxm", "h100-sxm", "b200-sxm", "gb300", "v100"])
@pytest.mark.parametrize("op", OPS)
def test_every_operator_has_a_time_that_grows_with_its_size(op: str, gpu: str) -> None:
    scenario = {"calibration": gpu}
    larger = SIZES | {name: 4 * SIZES[name] for name in ("rows", "groups" if op == "grouped_gemm" else "batch")}
    small = seconds("kernel", scenario, op=op, dtype="fp16", **SIZES)
    large = seconds("kernel", scenario, op=op, dtype="fp16", **larger)
    assert 0 < small.low < small.value < small.high
    assert 1.5 * small.value < large.value < 6 * small.value


def test_decode_reads_the_cache_once_at_the_bandwidth() -> None:
    found = seconds(
        "kernel", {"calibration": "h100-sxm"}, op="attention_decode", dtype="bf16", **(SIZES | {"batch": 64})
    )
    cache_bytes = 2 * 64 * 8 * 4096 * 128 * 2
    assert 0.5 < cache_bytes / 3.35e12 / found.value < 1.0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"])
def test_a_cluster_alone_names_the_profile(op: str) -> None:
    row = {"op": op, "bytes": 1 << 28, "ranks": 4}
    by_cluster = seconds("collective", {"cluster": "dgx-h100"}, **row)
    assert by_cluster == seconds("collective", {"cluster": "dgx-h100", "calibration": "h100-sxm"}, **row)


def test_bandwidths_follow_from_the_seconds() -> None:
    scenario, row = {"cluster": "dgx-a100"}, {"op": "all_reduce", "bytes": 1 << 28, "ranks": 8}
    time_s = seconds("collective", scenario, **row).value
    assert seconds("collective", scenario, "algorithm_bandwidth_bytes_per_s", **row).value == (1 << 28) / time_s
    bus = seconds("collective", scenario, "bus_bandwidth_bytes_per_s", **row).value
    assert bus == pytest.approx((1 << 28) / time_s * 2 * 7 / 8)


def test_other_names_of_collectives_and_their_sizes() -> None:
    own = seconds("collective", {"cluster": "dgx-h100"}, op="reduce_scatter", bytes=1 << 28, ranks=8)
    for op in ("ReduceScatter", "reduce-scatter", "reducescatter"):
        assert seconds("collective", {"cluster": "dgx-h100"}, op=op, size_bytes=1 << 28, gpus=8) == own


def test_ranks_lie_on_as_many_nodes_as_the_row_says() -> None:
    scenario, row = {"cluster": "dgx-a100"}, {"op": "all_gather", "bytes": 1 << 28, "ranks": 4}
    assert seconds("collective", scenario, nodes=2, **row).value > 2 * seconds("collective", scenario, **row).value


@pytest.mark.parametrize(
    ("op", "missing"),
    [("gemm", "n"), ("attention_forward", "heads"), ("rms_norm", "hidden"), ("grouped_gemm", "groups")],
)
def test_a_size_that_is_missing_is_named(op: str, missing: str) -> None:
    sizes = {k: v for k, v in SIZES.items() if k != missing}
    with pytest.raises(InputError, match=f"{op}: .*(not given|found None)"):
        seconds("kernel", {"calibration": "a100-sxm"}, op=op, dtype="fp16", **sizes)


H100 = {"calibration": "h100-sxm"}
BYTES_PER_S = 0.85 * 2.04e12  # what a streaming kernel reaches of an A100's memory


@pytest.mark.parametrize(
    ("row", "accesses"),
    [
        ({"op": "swiglu", "rows": 8192, "hidden": 4096}, 3 * 8192 * 4096),
        ({"op": "geglu", "rows": 8192, "intermediate_size": 4096, "pass": "full"}, 8 * 8192 * 4096),
        ({"op": "geglu", "rows": 8192, "hidden": 4096, "provider": "torch"}, 5 * 8192 * 4096),
        ({"op": "softmax", "rows": 8192, "hidden": 4096}, 2 * 8192 * 4096),
        ({"op": "softmax", "rows": 8192, "vocab": 4096, "hidden": 64}, 2 * 8192 * 4096),
        ({"op": "silu", "elements": 1 << 25, "pass": "backward"}, 3 << 25),
        ({"op": "RMSNorm", "num_tokens": 8192, "hidden_dim": 4096}, 2 * 8192 * 4096),
        ({"op": "rope", "batch": 2, "seq_len": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}, 2 * 8192 * 40 * 128),
    ],
    ids=lambda value: value["op"] if isinstance(value, dict) else "",
)
def test_usual_names_and_shapes_stream_what_they_say(row: dict[str, Any], accesses: int) -> None:
    found = seconds("kernel", {"calibration": "a100-sxm"}, dtype="bf16", **{"provider": "triton"} | row).value
    assert found == pytest.approx(2 * accesses / BYTES_PER_S + 2e-6, rel=0.01)


def test_an_mlp_has_its_matmuls_and_an_activation_has_none() -> None:
    row = {"op": "swiglu", "rows": 8192, "hidden": 4096, "dtype": "bf16", "provider": "liger"}
    assert seconds("kernel", H100, **row, intermediate_size=11_008).value > 20 * seconds("kernel", H100, **row).value


@pytest.mark.parametrize(("provider", "error"), [("huggingface", 0.17), ("liger", 0.30)])
def test_fused_kernels_with_matmuls_operator_by_operator_are_near_those_measured(provider: str, error: float) -> None:
    """On an A100, whose profile has points of them: priced without these, as on GPUs that nobody measured."""
    for row in read_table(PUBLISHED / "liger_kernels.json").rows:
        if row.data["op"] in MATMUL_ROWS and row.data["provider"] == provider and row.measured.get("seconds"):
            costs = costs_of(row)
            items = fused_kernel(row.data["op"], row.data, measured=())
            assert len(items) > 1 or row.data["pass"] == "forward"
            assert total([costs.compute(i) for i in items]).value == pytest.approx(row.measured["seconds"], error)


def test_points_of_another_gpu_are_borrowed_by_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's layer norm, measured on two: each GPU's larger rows by the other's points; too short without any."""
    rows = [
        r
        for r in read_table(PUBLISHED / "liger_kernels.json").rows
        if r.group.startswith("layer_norm huggingface forward") and r.data["N"] > 1024
    ]
    assert len({row.data["gpu"] for row in rows}) == 2
    for row in rows:
        own, measured = costs_of(row), row.measured["seconds"]
        bare = Costs(replace(own.profile, points=()), own.gpu)
        monkeypatch.setattr(fused_prices, "LENDERS", [x for x in ("h100-sxm", "a100-sxm") if x != own.gpu.name])
        assert total(fused_costs("layer_norm", row.data, bare)).value == pytest.approx(measured, rel=0.12)
        monkeypatch.setattr(fused_prices, "LENDERS", ())
        assert total(fused_costs("layer_norm", row.data, bare)).value < 0.75 * measured


def test_megatrons_rows_without_a_dtype_are_bf16() -> None:
    row = {"op": "megatron_swiglu", "provider": "liger", "S": 4096, "B": 4, "ffn_local": 4096}
    assert seconds("kernel", H100, **row) == seconds("kernel", H100, **row, dtype="bf16")
    assert seconds("kernel", H100, **row).value > 3 * 2 * 4096 * 4 * 4096 / 3.35e12  # no faster than the memory


@pytest.mark.parametrize(("op", "sweeps"), [("adamw", 7), ("adam", 7), ("sgd", 3)])
def test_optimizers_sweep_over_their_tensors(op: str, sweeps: int) -> None:
    fp32 = seconds("kernel", H100, op=op, elements=1e9).value
    assert 0.6 < sweeps * 4e9 / 3.35e12 / fp32 < 0.9
    assert seconds("kernel", H100, op=op, elements=1e9, dtype="bf16").value == pytest.approx(fp32 / 2, rel=0.01)


def test_other_names_of_matmuls_and_attention() -> None:
    sizes = {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16"}
    own = seconds("kernel", H100, op="gemm", **sizes)
    assert seconds("kernel", H100, op="matmul", **sizes) == own
    rate = seconds("kernel", H100, "flops_per_s", op="gemm", **sizes)
    assert rate == pytest.approx([2 * 4096**3 / s for s in (own.value, own.high, own.low)])
    mine = {"batch_size": 2, "num_heads": 32, "num_kv_heads": 8, "headdim": 128, "seqlen": 4096, "causal": True}
    own = {"batch": 2, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq_len": 4096, "causal": True}
    for which, short in (("forward", "fwd"), ("backward", "bwd")):
        found = seconds("kernel", H100, op="attention", dtype="bf16", **mine, **{"pass": short})
        assert found == seconds("kernel", H100, op=f"attention_{which}", dtype="bf16", **own)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"op": "rms_norm", "rows": 8192, "hidden": -4096}, "rms_norm: hidden: found -4096; allowed: a number above 0"),
        ({"op": "swiglu", "rows": 8192}, "swiglu: ffn: not given; allowed: a number under one of"),
        ({"op": "rope", "rows": 8192, "heads": 8}, "rope: head_dim: not given"),
        ({"op": "silu", "elements": 8, "dtype": "fp12"}, "silu: dtype: dtype 'fp12' is unknown; allowed: fp32"),
        ({"op": "gemm", "m": 8, "n": 8, "k": 8, "out_dtype": "x"}, "gemm: out_dtype: dtype 'x' is unknown"),
        ({"op": "silu", "elements": 8, "pass": "third"}, "silu: pass: found 'third'; allowed: forward, backward, full"),
        ({"op": "moe_layer", "model": 3}, "moe_layer: model: found 3; allowed: a mapping"),
        ({"op": "adamw", "elements": "all"}, "adamw: elements: found all; allowed: a number above 0"),
        ({"op": "gemm", "m": 8, "n": 8, "k": 8, "batch": 0}, "gemm: batch: found 0; allowed: a whole number above 0"),
        (
            {"op": "attention", "batch": 1, "heads": 8, "head_dim": 64, "seq_len": 512, "kv_heads": True},
            "kv_heads: found True",
        ),
    ],
)
def test_sizes_that_make_no_sense_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        seconds("kernel", H100, **{"dtype": "bf16"} | row)


def test_steps_by_other_names() -> None:
    scenario = {"model": "gpt2", "training": {"seq_len": 512, "global_batch_size": 16}, "cluster": "dgx-a100"}
    keys = (
        "step_time_s",
        "iteration_time_s",
        "samples_per_s",
        "tokens_per_s",
        "peak_memory_bytes",
        "max_allocated_bytes",
    )
    row = Measurement("t", "training_step", "r", "g", scenario, dict.fromkeys(keys, 1.0), {})
    found = {key: value.value for key, value in predict(row)[0].items()}
    assert found["step_time_s"] == found["iteration_time_s"]
    assert found["samples_per_s"] == pytest.approx(16 / found["step_time_s"]) == found["tokens_per_s"] / 512
    assert found["max_allocated_bytes"] == found["peak_memory_bytes"]


def test_an_operator_that_is_not_known_is_said_to_be() -> None:
    with pytest.raises(NotSimulated, match="sort"):
        seconds("kernel", {"calibration": "a100-sxm"}, op="sort", dtype="fp16", **SIZES)


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_bare_matmuls_and_attention_are_the_points_of_the_profile(gpu: str) -> None:
    """Short bursts of a serving library: no power limit, no training kernels; a layer's pass has both."""
    scenario = {"calibration": {"a100": "a100-sxm", "h100": "h100-sxm", "b200": "b200-sxm"}[gpu]}
    for op in ("gemm", "attention_forward"):
        points, _ = kernel_file(gpu).table(op, "bf16")
        largest = int(np.argmax(points.seconds))
        shape = points.shapes[largest].tolist()
        names = ("m", "n", "k") if op == "gemm" else ("heads", "kv_heads", "seq_len")
        row = dict(zip(names, shape[1:4], strict=True))
        if op == "attention_forward":
            row |= {"batch": shape[0], "head_dim": shape[5], "causal": True}
        bare = seconds("kernel", scenario, op=op, dtype="bf16", **row).value
        assert bare == pytest.approx(points.seconds[largest], rel=1e-6)
        in_training = {"layout": "TN"} if op == "gemm" else {"impl": "attention"}
        ratio = seconds("kernel", scenario, op=op, dtype="bf16", **row, **in_training).value / bare
        assert ratio >= 1.0 if op == "gemm" else ratio != 1.0
        assert ratio > 1.1 or (gpu, op) != ("b200", "gemm")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bytes", "many"),
        ("bytes", -1),
        ("bytes", 1e300),
        ("ranks", 0),
        ("ranks", True),
        ("nodes", "two"),
        ("nodes", 0),
    ],
)
def test_a_collective_row_names_what_is_wrong_with_it(key: str, value: object) -> None:
    data: dict[str, Any] = {"op": "all_reduce", "bytes": 1024, "ranks": 8, "nodes": 1, key: value}
    with pytest.raises(InputError, match=rf"^r: {key}: found .*; allowed: [01] to 1"):
        seconds("collective", {"cluster": "dgx-h100"}, **data)
