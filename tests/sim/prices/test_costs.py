import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.program import EAGER_NORM, BlockRef, Compute, Phase
from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import Coefficients
from sim.prices.interpolation import Surface
from sim.prices.operator_prices import Costs
from sim.prices.profile import BlockPoint, CollectiveTable, PointTable, Profile
from sim.prices.profiles import load_profile
from sim.simulation import simulate
from tests.sim.priced_gemms import BANDWIDTH, COSTS, H100, MEASURED, NOTHING, PEAK, efficiency, gemm, roof, table
from topology.presets import GPUS

SIZES = st.integers(1, 2**17)


def stream(
    moved: float,
    kind: str = "elementwise",
    kernel: str = "",
    kernels: int = 1,
    phase: Phase = Phase.FORWARD,
    dtype: str = "bf16",
) -> Compute:
    return Compute("add", kind, (int(moved),), dtype, moved, moved, phase, kernels, kernel=kernel)


def streams(op: str, bandwidth: float, dtype: str = "bf16") -> PointTable:
    size = np.array([[1 << 12], [1 << 20], [1 << 28]])
    return PointTable(op, dtype, size, size[:, 0] / bandwidth, np.zeros(3), np.ones(3, dtype=np.int64))


def test_a_measured_shape_is_its_measurement() -> None:
    cost = COSTS.compute(gemm(4096, 1024, 256))
    assert cost.source == "measured"
    assert cost.seconds == pytest.approx(roof(4096, 1024, 256) / efficiency(4096, 1024, 256), rel=1e-12)
    assert cost.uncertainty == pytest.approx(0.02)  # its own spread is smaller than what repeats elsewhere


@given(st.tuples(*[st.integers(64, 2**14)] * 3))
def test_between_measured_shapes_the_law_is_met(shape: tuple[int, int, int]) -> None:
    cost = COSTS.compute(gemm(*shape))
    assert cost.source in ("measured", "interpolated")
    assert cost.seconds == pytest.approx(roof(*shape) / efficiency(*shape), rel=0.1)
    assert cost.seconds >= roof(*shape) / 0.9


def test_interpolation_is_surer_than_the_roofline_and_less_sure_than_a_measurement() -> None:
    exact, between = COSTS.compute(gemm(4096, 4096, 4096)), COSTS.compute(gemm(4000, 4100, 5000))
    alone = Costs(NOTHING, H100).compute(gemm(4000, 4100, 5000))
    assert exact.uncertainty <= between.uncertainty < alone.uncertainty == 0.3
    assert alone.source == "roofline"


def test_far_above_the_measured_range_the_edge_efficiency_holds() -> None:
    cost = COSTS.compute(gemm(2**20, 2**14, 2**14))
    assert cost.source == "roofline"
    assert cost.seconds == pytest.approx(roof(2**20, 2**14, 2**14) / efficiency(2**14, 2**14, 2**14), rel=0.01)
    near = COSTS.compute(gemm(2**15, 2**14, 2**14))
    assert near.source == "interpolated"
    assert near.uncertainty < cost.uncertainty


def test_outside_of_every_measured_combination_the_roofline_answers() -> None:
    ends = PointTable(
        "gemm",
        "bf16",
        np.array([(1, 1, 1, 1), (1, 2**16, 2**16, 2**16)]),
        np.array([1e-5, 1.0]),
        np.zeros(2),
        np.ones(2, dtype=np.int64),
    )
    cost = Costs(Profile("p", "t", reference="h100-sxm", points=(ends,)), H100).compute(gemm(256, 256, 256))
    assert cost == Costs(NOTHING, H100).compute(gemm(256, 256, 256))


@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_the_roofline_is_its_formula_and_never_falls_with_size(m: int, n: int, k: int, factor: int) -> None:
    costs = Costs(NOTHING, H100)
    seconds = costs.compute(gemm(m, n, k)).seconds
    assert seconds == pytest.approx(max(roof(m, n, k), H100.launch_overhead_s), rel=1e-12)
    for larger in (gemm(factor * m, n, k), gemm(m, factor * n, k), gemm(m, n, factor * k)):
        assert costs.compute(larger).seconds >= seconds


def test_limits_of_the_roofline() -> None:
    costs = Costs(NOTHING, H100)
    assert costs.compute(gemm(2**14, 2**14, 2**14)).seconds == pytest.approx(2.0 * 2**42 / PEAK)
    assert costs.compute(gemm(1, 2**14, 2**14)).seconds == pytest.approx(2.0 * 2**28 / BANDWIDTH, rel=1e-3)
    assert costs.compute(stream(2**30)).seconds == 2**30 / BANDWIDTH
    assert costs.compute(stream(64, kernels=7)).seconds == 7 * H100.launch_overhead_s
    assert costs.compute(stream(64, kernels=0)).seconds == 64 / BANDWIDTH


def test_coefficients_replace_the_gpu_s_launch_and_add_what_nothing_hides() -> None:
    profile = Profile(
        "p",
        "t",
        coefficients=Coefficients(launch_overhead_s=1e-6, kernel_gap_s=3e-6),
    )
    costs = Costs(profile, H100)
    assert costs.compute(stream(64)).seconds == pytest.approx(4e-6)
    assert costs.compute(stream(2**30, kernels=2)).seconds == pytest.approx(2**30 / BANDWIDTH + 6e-6)


def test_a_machine_of_faster_matmuls_is_faster_in_nothing_else() -> None:
    faster = Costs(replace(MEASURED, coefficients=Coefficients(matmul_speed=1.25)), H100)
    for m in (4096, 5000):
        assert faster.compute(gemm(m, 1024, 256)).seconds == pytest.approx(
            COSTS.compute(gemm(m, 1024, 256)).seconds / 1.25
        )
    assert faster.compute(stream(1e9)) == COSTS.compute(stream(1e9))


ODD = gemm(4096, 1001, 256)  # between points, all of which have even widths


def test_an_odd_vocabulary_s_matmuls_are_slower_and_less_sure() -> None:
    costs = Costs(replace(MEASURED, coefficients=Coefficients(unaligned_matmul_slowdown=2.0)), H100)
    fast = replace(ODD, flops=10 * ODD.flops)  # as if the fast kernels reached most of the peak
    even, odd = costs.compute(fast), costs.compute(replace(fast, alignment=1))
    assert odd.seconds == 2.0 * even.seconds
    assert odd.uncertainty > 0.2 > even.uncertainty
    assert even.seconds < costs.compute(replace(fast, alignment=2)).seconds < odd.seconds
    slow = costs.compute(replace(ODD, alignment=1))  # far from the peak anyway
    assert slow.seconds == costs.compute(ODD).seconds


def test_an_odd_vocabulary_s_matmuls_are_slower_where_nobody_measured_them_too() -> None:
    fast = replace(ODD, flops=10 * ODD.flops)
    odd = replace(fast, alignment=1)
    assert COSTS.compute(odd).seconds == 2.0 * COSTS.compute(fast).seconds
    host = Costs(MEASURED, GPUS["cpu"])
    assert host.compute(odd).seconds == host.compute(fast).seconds


def test_a_point_of_an_odd_width_itself_has_its_slowdown() -> None:
    points = PointTable("gemm", "bf16", np.array([ODD.shape]), np.array([0.5]), np.array([0.01]), np.array([9]))
    costs = Costs(replace(MEASURED, points=(*MEASURED.points, points)), H100)
    assert costs.compute(replace(ODD, alignment=1)).seconds == 0.5


def test_a_machine_s_own_peaks_replace_the_data_sheet_s() -> None:
    profile = Profile(
        "p",
        "t",
        coefficients=Coefficients(peak_flops_per_s={"bf16": PEAK / 10}, memory_bandwidth_bytes_per_s=BANDWIDTH / 4),
    )
    costs = Costs(profile, H100)
    assert costs.compute(gemm(2**14, 2**14, 2**14)).seconds == pytest.approx(20.0 * 2**42 / PEAK)
    assert costs.compute(stream(2**30)).seconds == pytest.approx(4 * 2**30 / BANDWIDTH)


@pytest.mark.parametrize(("gpu", "dtype"), [("v100", "bf16"), ("a100-sxm", "fp8"), ("h100-sxm", "nvfp4")])
def test_a_dtype_without_units_is_refused(gpu: str, dtype: str) -> None:
    with pytest.raises(InputError, match=rf"peak_flops_per_s: {gpu} has no rate for {dtype}; it has .*fp32"):
        Costs(NOTHING, GPUS[gpu]).compute(gemm(64, 64, 64, dtype=dtype))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_search"])
def test_what_cannot_be_priced_is_no_fault_of_the_schedule_that_asks_for_times(schedule: str) -> None:
    scenario = {
        "model": {"preset": "deepseek-v2", "layers": 4},
        "cluster": {
            "gpu": {"memory_bytes": 8e10, "memory_bandwidth_bytes_per_s": 2e12, "peak_flops_per_s": {"fp16": 3e14}}
        },
        "training": {"seq_len": 512, "global_batch_size": 8, "precision": "fp16"},
        "parallelism": {"pp": 2, "schedule": schedule},
    }
    with pytest.raises(InputError, match=r"^cluster\.gpu\.peak_flops_per_s: custom has no rate for fp32"):
        simulate(parse_scenario(scenario))


@pytest.mark.parametrize(("gpu", "times"), [("tpu-v5p", 6.0), ("h100-sxm", PEAK / H100.peak_flops_per_s["fp32"])])
def test_fp32_is_not_tf32_and_takes_six_products_in_bf16_without_a_peak_of_its_own(gpu: str, times: float) -> None:
    one, two = (Costs(NOTHING, GPUS[gpu]).compute(gemm(2**13, 2**13, 2**13, dtype=d)).seconds for d in ("fp32", "bf16"))
    assert one / two == pytest.approx(times)


@pytest.mark.parametrize("cluster", ["tpu-v5p-torus", "gaudi3-node"])
def test_a_step_in_fp32_runs_where_six_products_in_bf16_make_one(cluster: str) -> None:
    training = {"seq_len": 512, "global_batch_size": 8, "precision": "fp32"}
    result = simulate(parse_scenario({"model": "llama3.2-1b", "cluster": cluster, "training": training})).outcome
    gpu, use = result.scenario.cluster.gpu, result.utilization
    assert use.model_flops_per_s_per_gpu / use.mfu == pytest.approx(gpu.peak_flops_per_s["bf16"] / 6)


@pytest.mark.parametrize("op", [gemm(4096, 4096, 4096), gemm(5000, 3000, 2000), gemm(1, 4096, 4096)])
@pytest.mark.parametrize("profile", [MEASURED, NOTHING])
def test_a_gpu_twice_as_fast_takes_half_as_long(profile: Profile, op: Compute) -> None:
    twice = H100.model_copy(
        update={
            "peak_flops_per_s": {d: 2 * v for d, v in H100.peak_flops_per_s.items()},
            "memory_bandwidth_bytes_per_s": 2 * BANDWIDTH,
            "launch_overhead_s": H100.launch_overhead_s / 2,
        }
    )
    one, two = Costs(profile, H100).compute(op), Costs(profile, twice).compute(op)
    assert two.seconds == pytest.approx(one.seconds / 2)
    assert two.source != "measured"


def test_a_profile_of_an_unknown_reference_is_refused() -> None:
    with pytest.raises(InputError, match=r"reference: found 'h1000'; allowed: .*h100-sxm"):
        Costs(Profile("p", "t", reference="h1000"), H100)


def test_gradients_use_their_own_layout_s_points_first() -> None:
    both = Profile("p", "t", reference="h100-sxm", points=(table(), table("gemm_weight_grad", seconds_scale=2.0)))
    costs = Costs(both, H100)
    forward = costs.compute(gemm(1024, 1024, 1024))
    weight = costs.compute(gemm(1024, 1024, 1024, phase=Phase.WEIGHT_GRAD))
    inputs = costs.compute(gemm(1024, 1024, 1024, phase=Phase.INPUT_GRAD))
    assert weight.seconds == pytest.approx(2 * forward.seconds)
    assert weight.source == "measured"
    assert inputs.seconds == pytest.approx(forward.seconds)
    assert inputs.source == "interpolated"
    assert inputs.uncertainty > forward.uncertainty


def test_a_batch_is_priced_as_one_product_with_as_many_tiles() -> None:
    cost = COSTS.compute(gemm(1024, 1024, 1024, batch=16))
    expected = 16 * roof(1024, 1024, 1024) / efficiency(16 * 1024, 1024, 1024)
    assert cost.seconds == pytest.approx(expected, rel=0.02)
    assert cost.uncertainty >= 0.15


def test_16_bit_formats_share_their_points_and_others_do_not() -> None:
    assert COSTS.compute(gemm(1024, 1024, 1024, dtype="fp16")).source == "measured"
    assert COSTS.compute(gemm(1024, 1024, 1024, dtype="fp8")).source == "roofline"


def test_what_is_bound_by_memory_is_looked_up_by_kernel_then_phase_then_kind() -> None:
    profile = Profile(
        "p",
        "t",
        reference="h100-sxm",
        points=(
            streams("elementwise", 2e12),
            streams("elementwise_input_grad", 1.5e12),
            streams("elementwise:gelu", 1e12),
        ),
    )
    costs = Costs(profile, H100)
    assert costs.compute(stream(1 << 20)).seconds == pytest.approx((1 << 20) / 2e12)
    assert costs.compute(stream(1 << 20, phase=Phase.INPUT_GRAD)).seconds == pytest.approx((1 << 20) / 1.5e12)
    assert costs.compute(stream(1 << 20, kernel="gelu")).seconds == pytest.approx((1 << 20) / 1e12)
    assert costs.compute(stream(3 << 20, kernels=3, kernel="gelu")) == pytest.approx(
        costs.compute(stream(1 << 20, kernel="gelu"))._replace(seconds=(3 << 20) / 1e12)
    )
    assert costs.compute(stream(1 << 20, kind="norm")).source == "roofline"
    assert costs.compute(stream(1 << 20, dtype="fp32")).source == "measured"  # only bytes matter


def test_blocks() -> None:
    points = (BlockPoint("layer", "forward", 0, 2e-3, 0.1), BlockPoint("layer", "backward", 1, 3e-3, 0.0))
    profile = Profile("p", "t", blocks=points)
    costs = Costs(profile, H100)
    assert costs.block("layer", "forward") == (2e-3, "measured", pytest.approx(0.14826))
    assert costs.block("layer", "backward", 1) == (3e-3, "measured", 0.02)
    assert costs.block("layer", "backward") is None
    assert costs.block("", "forward") is None
    block = Compute("x", "block", (), "", 0.0, 0.0, Phase.FORWARD, block=BlockRef("layer", "forward"))
    assert costs.compute(block).seconds == 2e-3
    with pytest.raises(ValueError, match="no block 'layer', weight_grad"):
        costs.compute(replace(block, block=BlockRef("layer", "weight_grad")))


ALPHA, BETA = 1e-5, 1e-10
SIZE = np.array([2.0**i for i in range(10, 27, 2)])
NODE = Costs(
    Profile(
        "p",
        "t",
        collectives=(CollectiveTable("all_reduce", 4, SIZE, ALPHA + BETA * SIZE, np.full(len(SIZE), 0.01)),),
    ),
    H100,
)


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_collectives_never_get_faster_with_size(a: float, b: float) -> None:
    small, large = (NODE.collective("all_reduce", 4, x) for x in sorted((a, b)))
    assert small is not None
    assert large is not None
    assert small.seconds <= large.seconds * (1 + 1e-12)


def test_collectives() -> None:
    exact = NODE.collective("all_reduce", 4, 2.0**20)
    assert exact == (ALPHA + BETA * 2**20, "measured", 0.02)
    between, above, below = (NODE.collective("all_reduce", 4, x) for x in (3e6, 2.0**32, 8.0))
    assert between is not None
    assert above is not None
    assert below is not None
    assert between.seconds == pytest.approx(ALPHA + BETA * 3e6, rel=0.02)
    assert above.seconds == pytest.approx(ALPHA + BETA * 2**32, rel=1e-9)
    assert below.seconds == ALPHA + BETA * 1024
    assert {between.source, above.source, below.source} == {"interpolated"}
    assert NODE.collective("all_reduce", 2, 8.0) is None
    assert NODE.collective("all_gather", 4, 8.0) is None


def test_equal_operators_are_priced_once() -> None:
    costs = Costs(MEASURED, H100)
    assert costs.compute(gemm(5000, 300, 700)) is costs.compute(gemm(5000, 300, 700))


def test_zero_work_costs_a_launch() -> None:
    assert COSTS.compute(gemm(0, 64, 64)).seconds == H100.launch_overhead_s
    assert math.isfinite(COSTS.compute(stream(0)).seconds)


def test_an_rms_norm_in_separate_kernels_is_priced_by_such_kernels() -> None:
    sizes, ones = np.array([[2**22], [2**24], [2**26]]), np.ones(3)
    tables = tuple(
        PointTable(op, "bf16", sizes, np.array([1.0, 4.0, 16.0]) * s, 0.0 * ones, ones.astype(np.int64))
        for op, s in (("norm", 1e-6), ("norm_eager", 3e-6))
    )
    costs = Costs(Profile("x", "", points=tables), GPUS["h200-sxm"])
    fused, several, chain = (
        Compute("norm", "norm", (), "bf16", 1.0, k * 2.0**24, Phase.FORWARD, k, kernel=kernel)
        for k, kernel in ((1, ""), (4, ""), (8, EAGER_NORM))
    )
    assert costs.compute(fused).seconds == pytest.approx(4e-6)
    assert costs.compute(several).seconds == pytest.approx(4 * 4e-6), "a fused norm may be several kernels"
    assert costs.compute(chain).seconds == pytest.approx(8 * 12e-6)


def test_a_loop_in_a_library_is_one_call_of_a_module() -> None:
    """A CPU's modules and autograd work once for each call, however many kernels the library then runs."""
    costs = Costs(Profile("x", "", coefficients=Coefficients(operator_in_model_s=1e-3)), H100)
    plain = Compute("add", "elementwise", (1,), "bf16", 1.0, 2.0, Phase.FORWARD, 8)
    bare = Costs(Profile("x", ""), H100)
    calls = (plain, replace(plain, looped=True), replace(plain, one_call=True), replace(plain, within_call=True))
    added = [costs.compute(op).seconds - bare.compute(op).seconds for op in calls]
    assert added == pytest.approx([8e-3, 1e-3, 1e-3, 0.0])


def test_a_grouped_matmul_pays_for_its_module_once() -> None:
    """It is priced as one matmul of all rows and the traffic of the other weights; what is added is added to both."""
    experts = Compute("experts", "grouped_gemm", (4, 64, 128, 256), "bf16", 2.0**23, 1e6, Phase.FORWARD)
    looped, bare = replace(experts, kernels=4, looped=True), Costs(Profile("x", ""), H100)
    costs = Costs(Profile("x", "", coefficients=Coefficients(operator_in_model_s=1e-3)), H100)
    added = [costs.compute(op).seconds - bare.compute(op).seconds for op in (experts, looped)]
    assert added == pytest.approx([1e-3, 1e-3])


@pytest.mark.parametrize("ranks", [2, 3, 8, 512, 16384, 10_000_000])
def test_the_slowest_of_many_gpus_by_bloms_approximation(ranks: int) -> None:
    costs = Costs(load_profile("h100-sxm"), H100)
    expected = statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    spread = costs.coefficients.power_spread
    assert spread > 0
    assert costs.pace(ranks) == pytest.approx(1 + spread * expected, rel=1e-12)


def test_a_hint_of_what_stays_changes_no_answer() -> None:
    """Points close in the steady dimensions are looked at first; what decides stays the nearest of all."""
    draw = np.random.default_rng(3)
    points = draw.integers(0, 24, (6000, 4)) / 2.0  # many ties
    heights = draw.normal(size=6000)
    plain, hinted = Surface(points, heights, 0.1), Surface(points, heights, 0.1, steady=(2, 3))
    for pair in draw.uniform(0.0, 12.0, (4, 2)):
        for first in draw.uniform(-1.0, 13.0, (40, 2)):
            query = [*first, *pair]
            assert hinted.at(query) == pytest.approx(plain.at(query), rel=1e-9)
