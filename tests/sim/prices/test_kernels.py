"""Shipped kernels: what is predicted of points left out, what scales, what a file may hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.operator_kinds import shape_flops
from sim.core.program import Compute, Phase
from sim.core.quantization import TABLE_FORMATS
from sim.prices.attention_speed import AttentionPeak, attention_peak, flash_seconds
from sim.prices.coefficients import AttentionSpeed, Coefficients, PriceOptions
from sim.prices.interpolation import Surface
from sim.prices.kernel_file import kernel_file
from sim.prices.kernel_shapes import Shapes
from sim.prices.kernel_tables import bounds, lookup, make_table
from sim.prices.operator_prices import Costs
from sim.prices.profile import PointTable
from sim.prices.profiles import load_profile
from sim.prices.roofline import Device, shape_bytes
from sim.simulation import simulate
from tests.sim.cases import scenario_with
from topology.presets import GPUS

PEAK = AttentionPeak(1e15, 1e15)

HOME = {"a100": "a100-sxm", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "gb200": "gb200"}
HOME |= {"b300": "b300-sxm", "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000-server"}
SCATTERED = {"l40s": 0.32, "rtx_pro_6000_server": 0.18}  # their clocks follow the power limit from shape to shape


def gemm(m: int, n: int, k: int, dtype: str = "bf16", name: str = "x", out: float | None = None) -> Compute:
    shape = (1, m, n, k)
    moved = shape_bytes("gemm", shape, dtype) if out is None else out
    return Compute(name, "gemm", shape, dtype, shape_flops("gemm", shape), moved, Phase.FORWARD)


@pytest.mark.parametrize("op", ["gemm", "attention_forward"])
@pytest.mark.parametrize("name", HOME)
def test_points_left_out_are_predicted(name: str, op: str) -> None:
    """One in five left out: the median within 4 %, the 95th percentile within 15 %, without NVLink further away."""
    gpu = GPUS[HOME[name]]
    device = Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count)
    points, _ = kernel_file(name).table(op, "bf16")
    rng = np.random.default_rng(1)
    out = rng.random(len(points.seconds)) < 0.2
    kept = PointTable(op, "bf16", points.shapes[~out], points.seconds[~out], points.spread[~out], points.samples[~out])
    table = make_table(op, "bf16", [kept], device, True)
    chosen = rng.permutation(np.flatnonzero(out))[:300]
    roof = bounds(op, list(points.shapes[chosen].T.astype(np.float64)), "bf16", device) + table.floor_s
    errors = []
    for i, bound in zip(chosen, roof, strict=True):
        found = lookup(table, op, tuple(points.shapes[i].tolist()), gpu.sm_count)
        assert found is not None
        errors.append(abs(bound / found[0] / points.seconds[i] - 1))
    assert np.median(errors) < 0.04
    assert np.quantile(errors, 0.95) < SCATTERED.get(name, 0.15)


def test_a_relative_borrows_and_says_so() -> None:
    own, borrowed = (Costs(load_profile(n), GPUS[n]) for n in ("a100-sxm", "v100"))
    a, v = own.compute(gemm(4096, 4096, 4096, "fp16")), borrowed.compute(gemm(4096, 4096, 4096, "fp16"))
    assert v.seconds > 2 * a.seconds  # 125 against 312 Tflop/s
    assert v.source != "measured"
    assert "a100-sxm" in load_profile("v100").source


def test_a_lowered_power_limit_slows_matmuls_alone() -> None:
    profile, full = load_profile("h100-sxm"), GPUS["h100-sxm"]
    low = full.model_copy(update={"power_limit_w": 500.0})
    big = gemm(8192, 8192, 8192)
    stream = Compute("copy", "elementwise", (1 << 28,), "bf16", 1.0, float(1 << 30), Phase.FORWARD)
    ratio = Costs(profile, low).compute(big).seconds / Costs(profile, full).compute(big).seconds
    assert 1.2 < ratio <= 1.41
    assert Costs(profile, low).compute(stream).seconds == Costs(profile, full).compute(stream).seconds


def test_the_same_chip_draws_the_same_watts_on_any_board() -> None:
    """An A100 with 300 W instead of 400 throttles more, a B300 with 1,100 instead of 1,000 less; a V100 is no A100."""

    def step_s(gpu: str, profile: str) -> float:
        return Costs(load_profile(profile), GPUS[gpu]).compute(gemm(8192, 8192, 8192, "fp16")).seconds

    assert 1.2 < step_s("a100-pcie", "a100-pcie") / step_s("a100-sxm", "a100-sxm") <= 1.3334
    assert 1.0 < step_s("b200-sxm", "b200-sxm") / step_s("b300-sxm", "b200-sxm") <= 1.1001
    volta = Costs(load_profile("v100"), GPUS["v100"])  # throttles as an A100 does, each at its own limit
    assert volta.power.limit == 1.0
    assert Costs(load_profile("v100"), GPUS["v100"].model_copy(update={"power_limit_w": 150.0})).power.limit == 0.5
    b200, gb200 = (load_profile(g).coefficients.power_at_peak for g in ("b200-sxm", "gb200"))
    watts = 500 + (b200 - 0.5) * 1000 * 2500 / 2250  # by their peaks in 16 bits
    assert gb200 * GPUS["gb200"].power_limit_w == pytest.approx(watts, rel=0.005)
    b300, gb300 = (load_profile(g).coefficients.power_at_peak for g in ("b300-sxm", "gb300"))
    assert gb300 * GPUS["gb300"].power_limit_w == pytest.approx(watts, rel=0.005)
    assert b300 * GPUS["b300-sxm"].power_limit_w == pytest.approx(b200 * GPUS["b200-sxm"].power_limit_w, rel=0.005)


def test_matmuls_in_8_bits_draw_their_own_power() -> None:
    """A GPU without a figure of 8 bits draws what it draws in 16; newer boards need their relatives' energy a FLOP."""
    b200, matmul = load_profile("b200-sxm"), gemm(8192, 8192, 8192, "fp8")
    alike = replace(b200, coefficients=dataclasses.replace(b200.coefficients, power_at_peak_8_bits=0.0))
    burst = Costs(b200, GPUS["b200-sxm"], PriceOptions(power=False)).compute(matmul).seconds
    used = matmul.flops / (burst * GPUS["b200-sxm"].peak_flops_per_s["fp8"])
    for profile, at_peak in ((b200, b200.coefficients.power_at_peak_8_bits), (alike, b200.coefficients.power_at_peak)):
        found = Costs(profile, GPUS["b200-sxm"]).compute(matmul).seconds
        assert found / burst == pytest.approx(0.5 + (at_peak - 0.5) * used, rel=1e-6)
    assert Costs(alike, GPUS["b200-sxm"]).compute(gemm(8192, 8192, 8192)).seconds == pytest.approx(
        Costs(b200, GPUS["b200-sxm"]).compute(gemm(8192, 8192, 8192)).seconds
    )
    for name, other in (("b300-sxm", "b200-sxm"), ("gb300", "gb200")):
        energies = [
            (load_profile(n).coefficients.power_at_peak_8_bits - 0.5)
            * GPUS[n].power_limit_w
            / GPUS[n].peak_flops_per_s["fp8"]
            for n in (name, other)
        ]
        assert energies[0] == pytest.approx(energies[1], rel=0.01)


def test_a_step_waits_for_the_slowest_of_its_gpus_under_the_power_limit() -> None:
    costs = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"])
    assert costs.pace(1) == 1.0
    assert costs.pace(8) == pytest.approx(1 + 0.015 * 1.42, abs=3e-4)  # the expected largest of eight: 1.42
    assert costs.pace(8) < costs.pace(1024) < 1.06
    big, small = gemm(8192, 8192, 8192), gemm(8, 8192, 8192)
    assert costs.compute(big, costs.pace(8)).seconds / costs.compute(big).seconds == pytest.approx(costs.pace(8))
    assert costs.compute(small, costs.pace(8)) == costs.compute(small)  # bound by memory: nothing is limited
    assert Costs(load_profile("a100-sxm"), GPUS["a100-sxm"]).pace(8) == 1.0


def test_large_messages_within_a_b200_node_follow_the_published_lines() -> None:
    """SimuMax's all-gather on 8 B200: 7/8 of the bytes at 650.8 GB/s, 9.18 us a hop, 23.1 us."""
    costs = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"])
    for size in (64 << 20, 8 << 30):
        found = costs.collective("all_gather", 8, float(size))
        assert found is not None
        line_s = size * 7 / 8 / 650.849e9 + 7 * 9.1828e-6 + 23.1049e-6
        assert found.seconds == pytest.approx(line_s, rel=1e-3)
    least = costs.collective("all_gather", 8, 1024.0)
    assert least is not None
    assert least.seconds < 20e-6


def test_fp32_accumulation_costs_part_of_its_traffic() -> None:
    costs = Costs(load_profile("a100-sxm"), GPUS["a100-sxm"])
    shape = (1, 8192, 8192, 1024)
    plain = shape_bytes("gemm", shape, "bf16")
    more = costs.compute(gemm(8192, 8192, 1024, out=plain + 6 * 8192 * 8192)).seconds
    less = costs.compute(gemm(8192, 8192, 1024)).seconds
    whole = 6 * 8192**2 / GPUS["a100-sxm"].memory_bandwidth_bytes_per_s
    assert 0.25 * whole < more - less < 0.75 * whole


def grouped(groups: int, m: int, n: int, k: int, phase: Phase, gradient_bytes: float = 8.0) -> Compute:
    """One stage of a grouped linear layer; the weight's gradient is added to a sum kept in fp32, read and written."""
    shape = (groups, n, k, m) if phase is Phase.WEIGHT_GRAD else (groups, m, n, k)
    weights = groups * n * k
    moved = 2.0 * groups * m * (n + k) + (gradient_bytes if phase is Phase.WEIGHT_GRAD else 2.0) * weights
    return Compute("experts", "grouped_gemm", shape, "bf16", 2.0 * groups * m * n * k, moved, phase)


def test_a_grouped_weight_gradient_pays_its_sums_traffic() -> None:
    """256 experts of 128 rows, 4096 x 7168 (DeepSeek-V3): 60 GB for fp32 sums, 7.5 ms at B200's 8 TB/s, measured 11."""
    costs, bandwidth = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"]), 8e12
    fp32, bf16 = (costs.compute(grouped(256, 128, 4096, 7168, Phase.WEIGHT_GRAD, b)).seconds for b in (8.0, 4.0))
    traffic_s = 8.0 * 256 * 4096 * 7168 / bandwidth
    assert traffic_s < fp32 < 2 * traffic_s
    assert fp32 - bf16 > 0.5 * traffic_s
    assert fp32 == pytest.approx(0.01104, rel=0.10)
    assert bf16 == pytest.approx(0.00604, rel=0.10)


def test_grouped_matmuls_fall_to_one_matmul_and_to_a_launch_a_group() -> None:
    costs = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"])
    one = costs.compute(gemm(8192, 4096, 4096)).seconds
    assert costs.compute(grouped(1, 8192, 4096, 4096, Phase.FORWARD)).seconds == pytest.approx(one, rel=0.01)
    few, many = (costs.compute(grouped(g, 8192 // g, 4096, 4096, Phase.FORWARD)).seconds for g in (4, 64))
    assert one < few < many
    launch_s = costs.coefficients.group_launch_s
    assert launch_s > 0
    assert costs.compute(grouped(512, 16, 256, 256, Phase.FORWARD)).seconds == pytest.approx(512 * launch_s)


def test_fused_attention_waves_and_length() -> None:
    def seconds(heads: int, length: int, kind: str = "attention_forward") -> float:
        shape = (1, heads, heads, length, length, 128, 128, 1)
        op = Compute("attention", kind, shape, "bf16", shape_flops(kind, shape), 0.0, Phase.FORWARD)
        found = flash_seconds(op, GPUS["h100-sxm"], PEAK, Coefficients(attention={"attention": usual}))
        assert found is not None
        return found

    usual = AttentionSpeed(efficiency_128=0.5, ramp_tokens=100.0, backward_share=0.8)
    assert seconds(64, 8192) < 8 * seconds(8, 8192)  # few heads leave multiprocessors idle
    assert 3.5 < seconds(64, 16384) / seconds(64, 8192) < 4  # longer rows pay their ends once
    assert seconds(64, 8192, "attention_backward") / seconds(64, 8192) == pytest.approx(2.5 / 0.8, rel=0.01)
    shape = (1, 8, 8, 128, 128, 128, 128, 1)
    op = Compute("attention", "attention_forward", shape, "bf16", 1.0, 0.0, Phase.FORWARD)
    assert flash_seconds(op, GPUS["h100-sxm"], PEAK, Coefficients()) is None


def test_grouped_queries_sums_are_a_pass_over_gradients_of_all_query_heads() -> None:
    def seconds(kv_heads: int, kind: str, sums: bool) -> float:
        usual = AttentionSpeed(efficiency_128=0.5, group_sums=sums)
        coefficients = Coefficients(memory_efficiency=0.8, attention={"attention": usual})
        shape = (2, 16, kv_heads, 1024, 65536, 128, 128, 1)
        op = Compute("attention", kind, shape, "bf16", shape_flops(kind, shape), 0.0, Phase.FORWARD)
        found = flash_seconds(op, GPUS["h100-sxm"], PEAK, coefficients)
        assert found is not None
        return found

    bandwidth = 0.8 * GPUS["h100-sxm"].memory_bandwidth_bytes_per_s
    more = seconds(1, "attention_backward", True) - seconds(1, "attention_backward", False)
    assert more == pytest.approx(2 * 65536 * 256 * 17 * 2 / bandwidth)  # 16 heads read, one written, 2 bytes each
    assert seconds(16, "attention_backward", True) == seconds(16, "attention_backward", False)
    assert seconds(1, "attention_forward", True) == seconds(1, "attention_forward", False)
    assert load_profile("h100-sxm").coefficients.attention["attention"].group_sums
    assert not load_profile("b200-sxm").coefficients.attention["attention"].group_sums  # cuDNN sums inside, measured so


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize("length", [4096, 8192])
def test_attention_of_few_heads_loses_as_much_as_it_does_where_it_was_measured(gpu: str, length: int) -> None:
    home, (table, _) = HOME[gpu], kernel_file(gpu).table("attention_forward", "bf16")
    measured: dict[int, list[float]] = {}
    for shape, seconds in zip(table.shapes.tolist(), table.seconds, strict=True):
        if shape[0] == 1 and shape[3:7] == [length, length, 128, 128]:
            measured.setdefault(shape[1], []).append(seconds)
    profile = load_profile(home)

    def per_head(heads: int) -> float:
        """Seconds of one head, beside what it takes among 64: measured by predicted."""
        shape = (1, heads, heads, length, length, 128, 128, 1)
        op = Compute(
            "attention", "attention_forward", shape, "bf16", shape_flops("attention_forward", shape), 0.0, Phase.FORWARD
        )
        found = flash_seconds(op, GPUS[home], PEAK, profile.coefficients)
        assert found is not None
        return float(np.median(measured[heads])) / found

    for heads in (4, 8, 16, 32):
        assert 0.7 < per_head(heads) / per_head(64) < 1.2


@pytest.mark.parametrize("gpu", ["h100-sxm", "b200-sxm", "gb200"])
def test_short_attention_of_many_heads_streams_its_operands(gpu: str) -> None:
    """4,096 heads of 128 queries: at the peak 17 us on an H100, moving q, k, v and the result at its bandwidth 160."""
    spec, costs = GPUS[gpu], Costs(load_profile(gpu), GPUS[gpu])
    for kind in ("attention_forward", "attention_backward"):
        for length, dim in ((128, 128), (192, 64)):
            shape = (32, 128, 128, length, length, dim, dim, 1)
            moved = shape_bytes(kind, shape, "bf16")
            op = Compute("core", kind, shape, "bf16", shape_flops(kind, shape), moved, Phase.FORWARD, kernel="megatron")
            assert costs.compute(op).seconds > moved / (0.85 * spec.memory_bandwidth_bytes_per_s)


@pytest.mark.parametrize("name", HOME)
def test_no_decode_reads_its_cache_faster_than_memory(name: str) -> None:
    costs, spec = Costs(load_profile(HOME[name]), GPUS[HOME[name]]), GPUS[HOME[name]]
    for batch, heads, kv_heads, length in ((16, 32, 8, 32768), (64, 32, 8, 8192), (64, 64, 8, 4096), (4, 8, 4, 131072)):
        shape = (batch, heads, kv_heads, length, 128)
        flops, moved = shape_flops("attention_decode", shape), shape_bytes("attention_decode", shape, "bf16")
        op = Compute("x", "attention_decode", shape, "bf16", flops, moved, Phase.FORWARD)
        assert costs.compute(op).seconds > 1.04 * moved / spec.memory_bandwidth_bytes_per_s


def test_an_8_or_4_bit_product_has_its_16_bit_result_in_its_points() -> None:
    """A serving framework's linear layer leaves 16 bits: no second byte is paid for again, a sum kept in fp32 is."""
    costs, (m, n, k) = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"]), (8192, 6144, 4096)
    for dtype in ("fp8", "nvfp4"):
        operands = shape_bytes("gemm", (1, m, n, k), dtype) * (m * k + k * n) / (m * k + k * n + m * n)
        alone, in_16_bits, summed = (
            costs.compute(gemm(m, n, k, dtype, out=operands + size * m * n)).seconds for size in (0.0, 2.0, 8.0)
        )
        assert in_16_bits == alone
        assert summed - in_16_bits == pytest.approx(1.1 * 6 * m * n / 8e12, rel=0.01)


def test_microscaled_products_have_the_efficiency_that_their_shape_has_in_8_bits() -> None:
    costs = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"])
    for size in (512, 2048, 8192):
        plain, scaled = (costs.compute(gemm(size, size, size, d)).seconds for d in ("fp8", "mxfp8"))
        assert plain <= scaled < 1.1 * plain


def test_shapes_kept_by_the_sizes_that_occur_are_the_same_shapes() -> None:
    rows = np.array([[1, 8, 0], [2, 8, 1], [1, 16, 0], [1, 8, 0]])
    shapes = Shapes.of(rows)
    assert np.array_equal(np.column_stack(shapes.columns()), rows)
    assert np.array_equal(np.column_stack(shapes.columns(np.array([2, 1]))), rows[[2, 1]])
    assert [shapes.last(x) for x in ((1, 8, 0), (2, 8, 1), (2, 16, 0), (3, 8, 0))] == [3, 1, None, None]


def test_the_roofline_of_many_shapes_is_that_of_each() -> None:
    gpu, file = GPUS["h100-sxm"], kernel_file("h100")
    device = Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count)
    for op, dtype, source in file.tables:
        rows = file.table(op, dtype, source)[0].shapes[::97]
        kind, _, form = op.partition(":")
        if kind == "attention_forward":
            rows[::2, -1], rows[::3, 3] = 0, 9  # neither causal nor as long as its keys
        weight = TABLE_FORMATS.get(form)
        each = [device.shape_seconds(kind, tuple(row), dtype, weight) for row in rows.tolist()]
        assert bounds(kind, list(rows.T.astype(np.float64)), dtype, device, weight).tolist() == each


def test_kernel_files_are_plain_columns() -> None:
    tables = {table[:2] for table in kernel_file("h100").tables}
    assert {("gemm", "bf16"), ("gemm", "fp8"), ("attention_forward", "bf16"), ("attention_decode", "bf16")} <= tables
    for name in ("../h100", "../kernels/h100", "h100.safetensors", "", "x" * 400, "a\0b"):
        with pytest.raises(InputError, match="allowed: a100"):
            kernel_file(name)


@pytest.mark.parametrize(
    ("gpu", "style", "kernel"),
    [
        ("h100-sxm", "megatron", "cudnn"),
        ("h200-sxm", "megatron", "cudnn"),
        ("a100-sxm", "megatron", "flash2"),
        ("a100-sxm", "torch", "flash2"),
        ("h100-sxm", "torch", "cudnn"),
    ],
)
def test_a_style_attends_with_the_kernel_that_its_framework_picks(gpu: str, style: str, kernel: str) -> None:
    costs = Costs(load_profile(gpu), GPUS[gpu])
    shape = (1, 32, 8, 8192, 8192, 128, 128, 1)
    flops = shape_flops("attention_backward", shape)

    def seconds(kernel: str) -> float:
        op = Compute("x", "attention_backward", shape, "bf16", flops, 0.0, Phase.INPUT_GRAD, 3, kernel=kernel)
        return costs.compute(op).seconds

    assert seconds(style) == seconds(kernel) < seconds("")


def test_megatron_attends_with_the_usual_kernel_where_a_profile_has_no_other() -> None:
    costs = Costs(load_profile("b200-sxm"), GPUS["b200-sxm"])
    shape = (1, 32, 8, 8192, 8192, 128, 128, 1)
    flops = shape_flops("attention_forward", shape)
    ops = [
        Compute("x", "attention_forward", shape, "bf16", flops, 0.0, Phase.FORWARD, kernel=kernel)
        for kernel in ("", "megatron", "torch")
    ]
    assert len({costs.compute(op) for op in ops}) == 1


def test_compiled_kernels_are_not_issued_more_slowly_than_eager_ones() -> None:
    costs = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
    op = gemm(64, 64, 64)
    eager, compiled, megatron = (
        simulate(
            scenario_with(
                {"seq_len": 256, "global_batch_size": 1, "precision": "bf16", "framework": style},
                {"dp": 1},
                model="gpt2-124m",
            )
        ).step_time_s
        for style in ("eager", "compiled", "megatron")
    )
    assert compiled < eager  # bound by the host: fewer kernels, each as costly
    assert costs.host_s(op, plain=True) < costs.host_s(op)
    assert compiled < megatron


@pytest.mark.parametrize(("kind", "measured_flops_per_s"), [("forward", 35.1e12), ("backward", 28.2e12)])
def test_attention_in_fp32_multiplies_in_tf32_as_measured(kind: str, measured_flops_per_s: float) -> None:
    """An H200, 32 heads of 2,048 tokens (scenarios/cuda/h200.json). By the peak of fp32 it would take twice as long."""
    gpu, op = GPUS["h200-sxm"], f"attention_{kind}"
    shape = (1, 32, 32, 2048, 2048, 128, 128, 1)
    flops = shape_flops(op, shape)
    compute = Compute(op, op, shape, "fp32", flops, shape_bytes(op, shape, "fp32"), Phase.FORWARD)
    seconds = Costs(load_profile("h200-sxm"), gpu).compute(compute).seconds
    assert 1.0 < flops / seconds / measured_flops_per_s < 1.3


@pytest.mark.parametrize("gpu", ["h100-sxm", "b200-sxm"])
def test_an_indexers_scores_in_8_bits_reach_their_part_of_the_peak_of_8_bits(gpu: str) -> None:
    """deep_gemm.fp8_mqa_logits was measured in 8 bits; long rows, so that neither start nor end counts."""
    shape, profile = (1, 32, 1, 65536, 65536, 128, 128, 1), load_profile(gpu)
    flops = shape_flops("attention_forward", shape)
    moved = shape_bytes("attention_forward", shape, "fp8")
    op = Compute("s", "attention_forward", shape, "fp8", flops, moved, Phase.FORWARD, kernel="mqa_logits")
    reached = profile.coefficients.attention["mqa_logits"].efficiency_128
    bare = replace(profile, coefficients=dataclasses.replace(profile.coefficients, power_at_peak=0.0))
    found = flops / Costs(bare, GPUS[gpu]).compute(op).seconds / GPUS[gpu].peak_flops_per_s["fp8"]
    assert found == pytest.approx(reached, rel=0.05)


@pytest.mark.parametrize(("gpu", "share"), [("h200-sxm", 494.7 / 67 / 3), ("mi300x", 1.0), ("v100", 1.0)])
def test_attention_in_fp32_has_the_peak_of_fp32_where_its_kernel_has_no_tf32(gpu: str, share: float) -> None:
    """MI300X has tf32, but AOTriton's kernels multiply fp32 as fp32."""
    spec = GPUS[gpu]
    peak = attention_peak(Device.of(spec), "fp32", "tf32" in spec.peak_flops_per_s and spec.chip.rounds_fp32)
    assert peak == pytest.approx((spec.peak_flops_per_s["fp32"] * share,) * 2)


def test_points_that_are_equally_far_are_chosen_alike_on_every_processor() -> None:
    """Processors differ in the last digit of a logarithm, and in the order that a partition leaves."""
    sizes = [(m, n, k) for m in range(0, 20, 2) for n in range(0, 20, 2) for k in range(0, 20, 2)]
    points = np.array(sizes, dtype=np.float64)
    rng = np.random.default_rng(3)
    efficiency = rng.normal(size=len(points))
    last_digits = points * (1 + 2e-16 * rng.integers(-1, 2, points.shape))
    for query in ((9.0, 9.0, 9.0), (8.0, 9.0, 3.0), (1.0, 1.0, 18.0)):
        found = [Surface(x, efficiency, 0.1).at(query) for x in (points, last_digits)]
        assert found[0] == pytest.approx(found[1], rel=1e-9)
