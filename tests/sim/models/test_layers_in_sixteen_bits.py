"""First and last layers in 16 bits: they are a 16-bit run's, the others and prediction modules an 8-bit run's."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Block, Comm
from sim.emit import emit
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.output.mtp import mtp_block
from sim.programs.data_parallel import make_data_parallel
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from tests.sim.cases import scenario_with

SEQ, HIDDEN, FFN, LAYERS = 2048, 4096, 14336, 32  # of Llama 3 8B
ENDS: dict[str, Any] = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}


def scenario(model: Any = "llama3-8b", cluster: str = "dgx-b200", layout: Any = None, **training: Any) -> Scenario:
    keys = {"seq_len": SEQ, "global_batch_size": 8, "framework": "megatron", "precision": "mxfp8"} | training
    return scenario_with(keys, layout or {"dp": 8}, model=model, cluster=cluster)


def work(block: Block) -> tuple[object, ...]:
    kept = (block.saved, block.workspace_bytes, block.quantized_bytes)
    return (block.forward, block.backward, *kept, block.forward_peak_bytes, block.backward_peak_bytes)


@pytest.mark.parametrize(
    ("model", "layout", "training"),
    [
        ("llama3-8b", {"tp": 2, "sp": True, "dp": 4}, {}),
        ("llama3-8b", {"cp": 2, "dp": 4}, {"fp8_dot_product_attention": True}),
        ("llama3-8b", {"dp": 8, "zero": 3}, {"framework": "compiled"}),
        ("mixtral-8x7b", {"dp": 8, "ep": 8}, {}),
        ("mixtral-8x7b", {"dp": 8, "ep": 8}, {"fused_experts": True}),
        ("llama3-8b", {"dp": 8}, {"precision": "nvfp4", "framework": "megatron_bridge"}),
    ],
)
def test_each_layer_is_of_a_run_in_its_format(model: str, layout: dict[str, Any], training: dict[str, Any]) -> None:
    some = scenario(model, layout=layout, **training, **ENDS)
    low = scenario(model, layout=layout, **training)
    in_8_bits: dict[str, Any] = {"fp8_dot_product_attention": False, "fused_experts": False}
    wide = scenario(model, layout=layout, **(training | in_8_bits | {"precision": "bf16"}))
    last = some.model.layers - 1
    for layer, of in ((0, wide), (1, low), (last - 2, low), (last - 1, wide), (last, wide)):
        assert work(layer_block(some, layer)) == work(layer_block(of, layer))
    assert work(layer_block(low, 0)) != work(layer_block(wide, 0))


def test_tokens_of_a_16_bit_layer_are_dispatched_in_16_bits() -> None:
    layout = {"dp": 8, "ep": 8, "ep_dispatch_dtype": "fp8"}
    some = scenario("mixtral-8x7b", layout=layout, **ENDS)

    def sent(layer: int) -> float:
        items = layer_block(some, layer).forward
        return next(i.bytes for i in items if isinstance(i, Comm) and i.kind == "all_to_all" and "dispatch" in i.name)

    assert sent(0) == pytest.approx(2 * sent(1), rel=1e-3)  # numbers of tokens go along with them


def test_kept_bytes() -> None:
    """A layer keeps the inputs of three matmuls, 2 h + ffn numbers a token, in 2 bytes or in one. That of the fourth is
    attention's result, which is kept in 2 bytes anyhow. Before Megatron-Core 0.14 it was kept in 8 bits besides. Every
    number of the weights has two copies in 8 bits. A scale of a byte goes to 32 numbers."""
    some, then = scenario(**ENDS), scenario(software_date="2025-08", **ENDS)

    def saved_less(s: Scenario) -> float:
        first, second = (sum(x.bytes for x in layer_block(s, layer).saved) for layer in (0, 1))
        return first - second

    one = 1 + 1 / 32
    assert saved_less(some) == pytest.approx(SEQ * (2 * HIDDEN + FFN) * (2 - one))
    assert saved_less(then) == pytest.approx(SEQ * ((2 * HIDDEN + FFN) * (2 - one) - HIDDEN * one))
    weights = sum(m.elements for m in layer_block(some, 1).matrices)
    assert layer_block(some, 1).quantized_bytes == pytest.approx(2 * one * weights)
    assert layer_block(some, 0).quantized_bytes == 0


def test_prediction_modules_stay_in_8_bits() -> None:
    """Megatron-Core asks for their context without a layer's number."""
    model = {"preset": "llama3-8b", "mtp_layers": 1}
    assert work(mtp_block(scenario(model, **ENDS))) == work(mtp_block(scenario(model)))


def test_fsdp_gathers_their_matrices_in_16_bits() -> None:
    """torchao's tensorwise recipe casts the shards of the layers that it converts."""
    training: dict[str, Any] = {"precision": "fp8", "framework": "compiled"}
    s = scenario(cluster="dgx-h100", layout={"dp": 8, "zero": 3}, **training, **ENDS)
    dp = make_data_parallel(make_plan(s))

    def gathered(layer: int) -> tuple[float, Block]:
        block = layer_block(s, layer)
        (comm,) = dp.gather_block(block, next(iter(block.forward)).phase, "w")
        return comm.bytes, block

    wide, block = gathered(0)
    low, _ = gathered(1)
    assert wide == 2 * block.params
    assert low == wide - sum(m.elements for m in block.matrices)


def test_the_step_has_layers_of_both_sorts() -> None:
    """Each 16-bit layer takes longer by as much, wherever it is; all layers in 16 bits are a 16-bit step's layers."""

    def seconds(**training: Any) -> float:
        model = {"preset": "llama3-8b", "layers": 8}
        return simulate(scenario(model, layout={"dp": 1}, global_batch_size=1, **training)).step_time_s

    one, two = (seconds(num_layers_at_end_in_bf16=n) - seconds() for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.02)
    assert seconds(**ENDS) - seconds() == pytest.approx(3 * one, rel=0.02)
    every = seconds(num_layers_at_start_in_bf16=8)
    assert every == pytest.approx(seconds(precision="bf16"), rel=1e-3)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"precision": "bf16"}, "found 1; needs training.precision fp8, mxfp8 or nvfp4"),
        ({"precision": "fp8", "fp8_recipe": "delayed"}, "found 1; needs an fp8_recipe other than delayed"),
        ({"num_layers_at_start_in_bf16": 33}, r"found 33; must be at most model.layers \(32\)"),
    ],
)
def test_what_is_refused(training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"training\.num_layers_at_start_in_bf16: {words}"):
        scenario(**(ENDS | training))


def test_sizes_that_a_16_bit_layer_does_not_change() -> None:
    assert dims(scenario(**ENDS)) == dims(scenario())


def test_flags_of_trainers() -> None:
    """Megatron-LM counts layers at both ends, 1 by default; torchtitan's filter has names that are parts of names."""
    megatron: dict[str, Any] = {"precision": "fp8", "fp8_recipe": "blockwise", "num_layers_at_end_in_bf16": 2}
    text = emit(scenario(cluster="dgx-h100", **megatron), "megatron")
    said = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 2"
    assert said in " ".join(text.replace("\\", "").split())
    with pytest.raises(InputError, match=r"parallelism\.pp: found 2; Megatron-LM keeps at most .* = 16 layers"):
        emit(scenario(layout={"pp": 2}, **megatron | {"num_layers_at_end_in_bf16": 17}), "megatron")
    layout = {"dp": 8, "zero": 3, "param_gather_dtype": "bf16"}
    titan: dict[str, Any] = {
        "framework": "compiled",
        "param_dtype": "fp32",
        "cross_entropy": "fused",
        "grad_reduce_dtype": "fp32",
    }
    for precision, table in (("fp8", "float8"), ("mxfp8", "mx")):
        some = scenario(layout=layout, model="llama3.1-8b", precision=precision, **titan, **ENDS)
        linear = tomllib.loads(emit(some, "torchtitan"))["quantize"]["linear"]
        assert linear == {table: {"filter_fqns": ["output", "layers.0.", "layers.30.", "layers.31."]}}


@pytest.mark.parametrize(("precision", "leaves"), [("nvfp4", True), ("mxfp8", False)])
def test_four_bits_leave_prediction_modules_out(precision: str, leaves: bool) -> None:
    """core/transformer/multi_token_prediction.py enters a context of 8 bits alone."""
    low, wide = (scenario("deepseek-v3", layout={"dp": 8, "ep": 8}, precision=p) for p in (precision, "bf16"))
    assert (work(mtp_block(low)) == work(mtp_block(wide))) == leaves
    assert mtp_block(low).in_sixteen_bits == leaves
