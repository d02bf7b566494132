"""Quantized products: bounds from their definitions, and the order of the published perplexities."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calibrate import quantization as q  # noqa: E402
from calibrate import quantization_torchao as ao  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.serve.prices.dims import serving_dims  # noqa: E402

torch.set_num_threads(1)


def operands(rows: int = 12, k: int = 200, n: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x, w = (torch.randn(size, k, generator=draw, dtype=torch.float64) for size in (rows, n))
    return x, w


@pytest.mark.parametrize(
    ("name", "x_dim", "w_dim"),
    [
        ("absmax", None, None),
        ("row_wise", 1, None),
        ("vector_wise", 1, 1),
    ],
)
def test_errors_stay_within_half_a_step_of_each_operand(name: str, x_dim: int | None, w_dim: int | None) -> None:
    x, w = operands()
    sx, sw = (t.abs().amax() if d is None else t.abs().amax(d, keepdim=True) for t, d in ((x, x_dim), (w, w_dim)))
    sx, sw = sx / 127, (sw / 127).reshape(1, -1)
    bound = (x.abs().sum(1, keepdim=True) * sw + w.abs().sum(1) * sx) / 2 + x.shape[1] * sx * sw / 4
    error = (q.METHODS[name](x, w) - x @ w.T).abs()
    assert (error <= bound * (1 + 1e-9)).all()
    assert error.max() > 0


@pytest.mark.parametrize("name", ["absmax", "row_wise", "vector_wise", "llm_int8", "int8_weight_only"])
def test_integers_up_to_127_are_exact(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-127, 128, (8, 40), generator=draw).double() for _ in range(2))
    x[:, 0] = w[:, 0] = 127
    assert torch.allclose(q.METHODS[name](x, w), x @ w.T, rtol=1e-12)


def test_zero_point_uses_the_whole_range_for_one_sided_values() -> None:
    x, w = operands()
    one_sided = x.abs()
    exact = one_sided @ w.T
    errors = [float((m(one_sided, w) - exact).norm()) for m in (q.absmax, q.zero_point)]
    assert errors[1] < 0.8 * errors[0]


def test_row_scales_do_not_mix_rows() -> None:
    x, w = operands()
    spoiled = x.clone()
    spoiled[0] *= 1000
    assert torch.equal(q.vector_wise(x, w)[1:], q.vector_wise(spoiled, w)[1:])
    assert not torch.equal(q.absmax(x, w)[1:], q.absmax(spoiled, w)[1:])


def test_outlier_features_are_multiplied_exactly() -> None:
    x, w = operands()
    x[:, 3] *= 1000
    exact = x @ w.T
    apart = float((q.llm_int8(x, w) - exact).norm() / exact.norm())
    together = float((q.vector_wise(x, w) - exact).norm() / exact.norm())
    assert apart < together / 50
    only = torch.zeros_like(x)
    only[:, 3] = x[:, 3]
    assert torch.allclose(q.llm_int8(only, w), only @ w.T)


def test_four_bit_groups_bound_the_error_of_each_weight() -> None:
    x, w = torch.eye(200, dtype=torch.float64), operands(k=200)[1]
    back = q.int4_weight_only(x, w).T
    step = (
        torch.cat(
            [
                w[:, :128].abs().amax(1, keepdim=True).expand(-1, 128),
                w[:, 128:].abs().amax(1, keepdim=True).expand(-1, 72),
            ],
            1,
        )
        / 7
    )
    assert ((back - w).abs() <= step / 2 + 1e-12).all()
    assert len({round(float(v), 9) for v in back[0, :128]}) <= 16


def test_fp8_errors_are_relative() -> None:
    """Three bits of mantissa: half a unit in the last place is 1/16."""
    x, w = torch.eye(9, dtype=torch.float32), operands(k=9)[1].float()
    big = w.abs() > 0.01
    error = ((q.fp8(x, w).T - w).abs() / w.abs())[big]
    assert error.max() <= 1 / 16 + 1e-6


@pytest.fixture(scope="module")
def trained() -> list[torch.nn.Module]:
    return q.train(q.make_small(), 200)


def test_planted_outliers_change_nothing_in_exact_arithmetic(trained: list[torch.nn.Module]) -> None:
    held_out = q.text(16, 1)
    planted = q.plant_outliers(trained)
    assert q.perplexity(planted, held_out) == pytest.approx(q.perplexity(trained, held_out), rel=1e-5)
    with torch.no_grad():
        features = planted[1].norm1(planted[0](held_out[:, :-1])).abs().amax((0, 1))
    assert features[:2].min() > 10 * features[2:].max()


def test_training_learned_the_language(trained: list[torch.nn.Module]) -> None:
    assert q.perplexity(trained, q.text(16, 1)) < 0.5 * q.SMALL.vocab


def test_the_published_order(trained: list[torch.nn.Module]) -> None:
    """LLM.int8(), table 1: absmax worst, scales by row and by vector better, zero points better than absmax of the
    same kind, and with outliers apart what full precision gives."""
    planted, held_out = q.plant_outliers(trained), q.text(48, 1)
    p = {name: q.perplexity(q.quantized(planted, m), held_out) for name, m in q.METHODS.items()}
    full = q.perplexity(planted, held_out)
    assert order(p, full), p
    assert p["int8_weight_only"] == pytest.approx(full, rel=1e-2)
    assert p["int4_weight_only"] > p["int8_weight_only"]


@pytest.mark.skipif(not ao.here(), reason=ao.ABSENT)
def test_torchao_agrees_where_it_has_the_format(trained: list[torch.nn.Module]) -> None:
    planted, held_out = q.plant_outliers(trained), q.text(32, 1)
    rows = {r.method: r for r in q.torchao_rows(planted, held_out)}
    same_as = {"torchao_int8_weight_only": "int8_weight_only", "torchao_int8_dynamic": "vector_wise"}
    for name, own in same_as.items():
        perplexity = q.perplexity(q.quantized(planted, q.METHODS[own]), held_out)
        assert rows[name].perplexity == pytest.approx(perplexity, rel=5e-3)
        error = q.product_error(planted, held_out, q.METHODS[own])
        assert rows[name].error == pytest.approx(error, rel=0.1)
    assert rows["torchao_int4_weight_only"].perplexity > rows["torchao_int8_weight_only"].perplexity


def order(p: dict[str, float], full: float) -> bool:
    """Of LLM.int8()'s table 1, and that outliers apart give what full precision gives."""
    return (
        p["absmax"] == max(p[name] for name in p if name != "int4_weight_only")
        and p["absmax"] > 1.05 * full
        and p["absmax"] > p["row_wise"] > p["vector_wise"] > p["zero_point_vector_wise"] > p["llm_int8"]
        and p["absmax"] > p["zero_point"] > p["zero_point_vector_wise"]
        and abs(p["llm_int8"] / full - 1) < 1e-3
        and abs(p["row_wise_decomposed"] / full - 1) < 3e-3
    )


@pytest.mark.parametrize("broken", ["no outliers", "no decomposition", "scales of the whole tensor"])
def test_the_published_order_can_fail(trained: list[torch.nn.Module], broken: str) -> None:
    """Without outliers there is nothing to tell apart; without what makes a method, it falls out of its place."""
    planted = trained if broken == "no outliers" else q.plant_outliers(trained)
    methods = dict(q.METHODS)
    if broken == "no decomposition":
        methods["llm_int8"] = q.vector_wise
    if broken == "scales of the whole tensor":
        methods["vector_wise"] = methods["row_wise"] = q.absmax
    held_out = q.text(48, 1)
    p = {name: q.perplexity(q.quantized(planted, m), held_out) for name, m in methods.items()}
    assert not order(p, q.perplexity(planted, held_out))


@pytest.mark.parametrize("mode", ["int8_weight_only", "int4_weight_only", "fp8", "llm_int8"])
def test_the_simulator_counts_the_same_bits(mode: str) -> None:
    scenario = parse_scenario(
        {
            "model": "llama3-8b",
            "cluster": "dgx-h100",
            "inference": {"requests": {"prompt_len": 8, "output_len": 8}, "quantization": mode},
        }
    )
    assert serving_dims(scenario).weight_bytes * 8 == q.WEIGHT_BITS[mode]


def test_zero_points_beside_outliers_apart() -> None:
    """Zeropoint LLM.int8(), the last row of the paper's table 1: no worse than absmax on one-sided values."""
    x, w = operands()
    x, w = x.abs(), w.abs()
    x[:, 3] *= 1000
    exact = x @ w.T
    errors = [float((q.METHODS[m](x, w) - exact).norm()) for m in ("llm_int8", "llm_int8_zero_point")]
    assert errors[1] < 0.8 * errors[0]
