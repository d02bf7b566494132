"""8- and 4-bit recipes: bytes an element against closed forms, what is kept and gathered, which matmuls are slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Program
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.linear import linear
from sim.models.operators import Linear, Operator
from sim.models.output.mtp import mtp_block
from sim.models.precision.quantizing import passing_weight_bytes, quantized_weight_bytes
from sim.prices.operator_prices import Costs
from sim.programs.data_parallel import make_data_parallel
from sim.ranks.plan import make_plan
from sim.validation.prediction import profile_named
from sim.validation.stated import with_stated
from sim.variants.frameworks.records import FRAMEWORKS
from sim.variants.recipes import RECIPES, recipe_of
from tests.record_tables import recipe_table
from tests.sim.cases import scenario_with

M, K, N = 2048, 4096, 512


def scenario(
    cluster: str = "dgx-h100", layout: dict[str, Any] | None = None, model: Any = "llama3-8b", **training: Any
) -> Scenario:
    return scenario_with(
        {"seq_len": M, "global_batch_size": 8, "precision": "fp8", **training}, layout, model=model, cluster=cluster
    )


def layer(mode: str = "row", **changes: Any) -> Operator:
    return linear(dims(scenario(**changes)), Linear("x", M, K, (N,), mode=mode))


def cast_bytes(program: Program, *ends: str) -> float:
    names = {f"x{end}" for end in ends}
    return sum(i.bytes for i in program if isinstance(i, Compute) and i.name in names)


def moved(part: Operator) -> tuple[float, float, float]:
    """Bytes an element that quantize input, output's gradient and weight in a forward and a backward."""
    both = (*part.forward, *part.backward)
    return (
        cast_bytes(both, "_cast", "_cast_again") / (M * K),
        cast_bytes(both, "_grad_cast", "_grad_cast_again") / (M * N),
        cast_bytes(both, "_weight_cast", "_weight_cast_again") / (K * N),
    )


@pytest.mark.parametrize(("recipe", "activation", "weight"), [("tensorwise", 6, 8), ("rowwise", 8, 10)])
def test_torchao_moves_what_its_own_roofline_counts(recipe: str, activation: int, weight: int) -> None:
    """torchao/testing/training/roofline_utils.py: tensorwise 2 + (2 + 2), weights 2 + 3 + 3; rowwise 5 + 3, weights
    3 + 4 + 3."""
    found = moved(layer(framework="compiled", fp8_recipe=recipe))
    assert found == (activation, activation, weight)


@pytest.mark.parametrize(
    ("cluster", "training", "activation"),
    [
        ("dgx-h100", {"fp8_recipe": "delayed"}, 2 + 2),
        ("dgx-h100", {"fp8_recipe": "tensorwise"}, 2 + 2 + 2),
        ("dgx-h100", {"fp8_recipe": "blockwise"}, 2 + 2 * (1 + 4 / 128)),
        ("dgx-b200", {"fp8_recipe": "delayed"}, 2 + 1),
        ("dgx-b200", {"fp8_recipe": "tensorwise"}, 2 + 2 + 1),
        ("dgx-b200", {"precision": "mxfp8"}, 2 + 2 * (1 + 1 / 32)),
        ("dgx-b200", {"precision": "nvfp4"}, 2 * 2 + 2 * (1 / 2 + 1 / 16)),
        ("dgx-b200", {"precision": "nvfp4", "software_date": "2026-03"}, 3 * 2 + 2 * (1 / 2 + 1 / 16)),
    ],
)
def test_transformer_engine_moves(cluster: str, training: dict[str, Any], activation: float) -> None:
    """A largest value that is no step's before is one more read; before Transformer Engine fused it, a Hadamard
    transform another; Blackwell needs no transpose of what has one scale."""
    found = moved(layer(cluster=cluster, framework="megatron", **training))
    assert found[:2] == (activation, activation)


def test_a_norm_quantizes_what_it_makes() -> None:
    """Transformer Engine's norm writes 8 bits by itself, or since 2.8 at least knows the largest value."""
    for recipe, before, after in (("delayed", 4, 2), ("tensorwise", 6, 4), ("blockwise", 4 + 1 / 16, 4 + 1 / 16)):
        for mode, wanted in (("row", before), ("column", after)):
            part = layer(mode, framework="megatron", fp8_recipe=recipe)
            assert cast_bytes(part.forward, "_cast") == wanted * M * K
    before_2_8 = layer("column", framework="megatron", fp8_recipe="tensorwise", software_date="2025-09")
    assert cast_bytes(before_2_8.forward, "_cast") == 6 * M * K
    assert moved(layer("column", framework="compiled", fp8_recipe="tensorwise"))[0] == 6


def test_weights_are_quantized_once_a_step_where_they_are_kept() -> None:
    """With 8 micro-batches an eighth in each; torchao quantizes in each of them."""
    part = layer(framework="megatron", fp8_recipe="delayed")
    assert cast_bytes(part.forward, "_weight_cast") == 4 * K * N / 8
    assert cast_bytes(layer(framework="compiled", fp8_recipe="tensorwise").forward, "_weight_cast") == 5 * K * N


@pytest.mark.parametrize(("framework", "batches"), [("megatron", 8), ("compiled", 1)])
def test_a_weight_that_is_quantized_once_a_step_costs_host_and_device_once(framework: str, batches: int) -> None:
    """A step of 8 micro-batches takes for it what one micro-batch would alone, and not 8 starts of a small kernel."""
    s = scenario(framework=framework, fp8_recipe="tensorwise")
    costs = Costs(profile_named("h100-sxm"), s.cluster.gpu)

    def cast(batch: int) -> Compute:
        part = layer(framework=framework, fp8_recipe="tensorwise", global_batch_size=batch)
        return next(i for i in part.forward if isinstance(i, Compute) and i.name == "x_weight_cast")

    many, one = cast(8), cast(1)
    assert costs.host_s(many) == pytest.approx(costs.host_s(one) / batches)
    assert costs.compute(many).seconds == pytest.approx(costs.compute(one).seconds / batches)


def test_transformer_engine_quantizes_experts_weights_one_by_one() -> None:
    """Its GroupedLinear asks for the workspace of each expert's weight; what is quantized takes as many launches."""
    s = scenario(layout={"ep": 8, "dp": 8}, model="mixtral-8x7b", framework="megatron", fp8_recipe="tensorwise")
    whole = scenario(model="mixtral-8x7b", framework="megatron", fp8_recipe="tensorwise")

    def kernels(of: Scenario) -> int:
        return next(
            i.kernels
            for i in layer_block(of, 0).forward
            if isinstance(i, Compute) and i.name == "experts_up_weight_cast"
        )

    assert kernels(s) == 2
    assert kernels(whole) == 8 * 2


@pytest.mark.parametrize(
    ("framework", "recipe", "kept", "weights"),
    [
        ("megatron", "delayed", 1, 2),
        ("megatron", "tensorwise", 1, 2),
        ("megatron", "blockwise", 1 + 4 / 128, 2 * (1 + 4 / 128**2)),
        ("compiled", "tensorwise", 1, 0),
        ("compiled", "rowwise", 2, 0),
    ],
)
def test_what_is_kept(framework: str, recipe: str, kept: float, weights: float) -> None:
    """The input in 8 bits with its scales, or in 16 where the backward wants other scales; weights in both orders."""
    d = dims(scenario(framework=framework, fp8_recipe=recipe))
    part = linear(d, Linear("x", M, K, (N,)))
    assert [s.bytes for s in part.saved] == [kept * M * K]
    assert quantized_weight_bytes(d, [part]) == weights * K * N
    assert passing_weight_bytes(d, [part, part]) == (0 if weights else K * N)  # one matrix at a time


def test_fsdp_gathers_matrices_in_8_bits() -> None:
    """torchao's `enable_fsdp_float8_all_gather`: a layer's matrices in 8 bits, cast on each shard; norms in 16."""
    layout: dict[str, Any] = {"dp": 8, "zero": 3}

    def gathered(**training: Any) -> tuple[float, float, float]:
        s = scenario(layout=layout, framework="compiled", **training)
        block, dp = layer_block(s, 0), make_data_parallel(make_plan(s))
        (comm,) = dp.gather_block(block, next(iter(block.forward)).phase, "w")
        matrices = sum(m.elements for m in block.matrices)
        casts = (i for i in block.forward if isinstance(i, Compute) and i.name == "attention_out_weight_cast")
        return comm.bytes, 2.0 * block.held_params - matrices, next(casts).bytes

    size, in_8_bits, cast = gathered(fp8_recipe="tensorwise")
    assert size == in_8_bits
    assert cast == 5 * 4096 * 4096 / 8
    layout["param_gather_dtype"] = "fp8"
    assert gathered(fp8_recipe="tensorwise") == (size, in_8_bits, cast)
    with pytest.raises(InputError, match=r"parallelism\.param_gather_dtype: found 'fp8'; needs zero 3"):
        gathered(fp8_recipe="rowwise")
    layout["param_gather_dtype"] = "bf16"
    size, in_8_bits, cast = gathered(fp8_recipe="tensorwise")
    assert size > 1.9 * in_8_bits
    assert cast == 5 * 4096 * 4096
    del layout["param_gather_dtype"]
    size, in_8_bits, cast = gathered(fp8_recipe="rowwise")
    assert size > 1.9 * in_8_bits
    assert cast == 3 * 4096 * 4096


def test_what_is_quantized_after_it_arrives_is_waited_for() -> None:
    """Async tensor parallelism cuts up a gather of the matmul's own operand, not one of what is cast first.

    The other seven ranks' rows come two at a time (`sim.models.copied_chunks`).
    """
    layout = {"tp": 8, "sp": True, "tp_overlap": "full"}

    def gathers(**training: Any) -> list[Comm]:
        program = layer_block(scenario(layout=layout, framework="compiled", **training), 0).forward
        return [i for i in program if isinstance(i, Comm) and i.name.startswith("qkv_gather")]

    whole, cut = M * 4096 * 1.0, gathers(fp8_recipe="tensorwise")
    assert [g.bytes for g in cut] == pytest.approx([whole * ranks / 7 for ranks in (2, 2, 2, 1)])
    assert not any(g.blocking for g in cut)
    assert [(g.bytes, g.blocking) for g in gathers(fp8_recipe="rowwise")] == [(2 * whole, True)]
    assert [g.bytes for g in gathers(precision="bf16")] == pytest.approx([2 * g.bytes for g in cut])


def test_one_scale_is_transposed_after_the_gather_on_hopper() -> None:
    layout = {"tp": 8, "sp": True}
    for cluster, recipe, wanted in (("h100", "delayed", 2), ("b200", "delayed", 0), ("h100", "blockwise", 0)):
        s = scenario(f"dgx-{cluster}", layout, framework="megatron", fp8_recipe=recipe)
        program = linear(dims(s), Linear("x", M, K, (N,), mode="column")).backward
        assert cast_bytes(program, "_transpose") == wanted * M * K


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_other_matmuls_have_a_speed_of_their_own(recipe: str) -> None:
    """Rows of scales: CUTLASS's share of cuBLAS's speed, gradients too; blocks: measured; else gradients a quarter."""
    s = scenario(framework="compiled" if recipe == "rowwise" else "megatron", fp8_recipe=recipe)
    usual = scenario(framework="megatron", fp8_recipe="delayed")
    costs = Costs(profile_named("h100-sxm"), s.cluster.gpu)
    slower = costs.coefficients.matmul_slowdown_of[recipe]

    def seconds(of: Scenario, name: str) -> float:
        part = linear(dims(of), Linear("x", 256, K, (N,)))
        return next(costs.compute(i).seconds for i in (*part.forward, *part.backward) if i.name == name)  # type: ignore

    assert seconds(s, "x") == pytest.approx(slower * seconds(usual, "x"))
    assert seconds(s, "x_dgrad") == pytest.approx(slower / 1.25 * seconds(usual, "x_dgrad"))


def test_a_framework_has_a_recipe_of_its_own() -> None:
    own = {"megatron": "delayed", "megatron_bridge": "tensorwise", "compiled": "tensorwise", "composer": "delayed"}
    for name, wanted in own.items():
        recipe = recipe_of(scenario(framework=name).for_training)
        assert recipe is not None
        assert recipe.name == wanted
    assert {f.fp8_recipe for f in FRAMEWORKS.values()} <= {name for _, name in RECIPES}
    assert recipe_of(scenario(precision="bf16").for_training) is None


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"framework": "compiled", "fp8_recipe": "delayed"}, "found 'delayed'.* tensorwise, rowwise"),
        ({"framework": "megatron", "fp8_recipe": "rowwise"}, "found 'rowwise'.* delayed, tensorwise, blockwise"),
        ({"framework": "megatron", "fp8_recipe": "mxfp8"}, "blockwise; it goes with training.precision mxfp8"),
        ({"precision": "bf16", "fp8_recipe": "delayed"}, "precision bf16 nothing is scaled"),
    ],
)
def test_a_recipe_that_nobody_runs_is_refused(training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"training\.fp8_recipe: .*{words}"):
        scenario(**training)


def test_a_table_names_a_recipe_in_its_rows_names() -> None:
    for row, wanted in (
        ("8B_compile_rowwise_asynctp", "rowwise"),
        ("H100_8B_fp8-cs_n8", "tensorwise"),
        ("x_fp8", None),
    ):
        assert with_stated({}, "", {"id": row}).get("fp8_recipe") == wanted
    assert with_stated({"fp8_recipe": "delayed"}, "", {"id": "a_rowwise"})["fp8_recipe"] == "delayed"


def test_the_page_has_the_records() -> None:
    page = Path(__file__).parents[3] / "docs" / "number_formats.md"
    assert recipe_table() in page.read_text(encoding="utf-8")


def test_a_cast_that_looks_for_each_blocks_largest_value_is_slower() -> None:
    """By its own measured share of the bandwidth; other casts by the plain one's."""

    def share(recipe: str) -> float:
        s = scenario(framework="megatron", fp8_recipe=recipe)
        part = linear(dims(s), Linear("x", 1 << 16, K, (N,)))
        cast = next(i for i in part.forward if isinstance(i, Compute) and i.name == "x_cast")
        seconds = Costs(profile_named("h100-sxm"), s.cluster.gpu).compute(cast).seconds
        return cast.bytes / (seconds - 2e-6 * cast.kernels) / s.cluster.gpu.memory_bandwidth_bytes_per_s

    assert share("blockwise") == pytest.approx(0.52)
    assert share("delayed") == pytest.approx(0.92)
    assert share("tensorwise") == pytest.approx(0.92)


@pytest.mark.parametrize(("recipe", "copies"), [("rowwise", 2), ("tensorwise", 3)])
def test_attentions_result_is_kept_once_in_16_bits(recipe: str, copies: float) -> None:
    """Its backward reads 16 bits, which a projection that keeps them has; one that keeps 8 has these beside."""
    block = layer_block(scenario(framework="compiled", fp8_recipe=recipe), 0)
    kept = [s.bytes for s in block.saved if s.name in ("output", "attention_out input")]
    assert sum(kept) == copies * M * 4096


def test_a_prediction_module_holds_a_passing_copy_as_a_layer_does() -> None:
    """torchao's 8-bit copy of the largest matrix, of an expansion by 14,336."""
    model = {"preset": "llama3-8b", "mtp_layers": 1}
    low, high = (scenario(framework="compiled", precision=p, model=model) for p in ("fp8", "bf16"))
    copy = layer_block(low, 31).workspace_bytes - layer_block(high, 31).workspace_bytes
    assert copy >= 4096 * 14336
    assert mtp_block(low).workspace_bytes - mtp_block(high).workspace_bytes == copy
