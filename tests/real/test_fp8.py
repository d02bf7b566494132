"""8-bit training for real: formats, one linear layer by hand, and ranks against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from calibrate.bundled_model.fp8 import GRADIENT, INPUT, Linear8, quantized, rounded
from calibrate.parallel.memory import SavedBytes
from calibrate.parallel.runner import Runner, make_place
from calibrate.real_steps.runnable import check_runnable
from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.real.conftest import small

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}


RATES = {"fp32": 2e11, "bf16": 2e11, "fp8": 2e11, "nvfp4": 2e11}  # CPUs have no 8-bit matmuls: a rate must be stated
CPU = {"preset": "cpu-host", "gpu": {"preset": "cpu", "peak_flops_per_s": RATES}}


def _eight(parallelism: dict[str, Any], **more: Any) -> dict[str, Any]:
    offload = more.pop("offload", False)
    data = small(parallelism, m=2, **more)
    data["training"] |= {"precision": "fp8", "grad_dtype": "bf16", "activation_offload": offload}
    data["cluster"] = CPU
    return data


CASES = {
    "pp": _eight({"pp": 2, "schedule": "1f1b"}),
    "pp, recomputed": _eight({"pp": 2, "schedule": "gpipe"}, recompute="full", dropout=0.1),
    "dp, llama": _eight({"dp": 2}, attention="fused", **LLAMA),
    "zero 2": _eight({"dp": 2, "zero": 2}),
    "zero 3, offloaded": _eight({"dp": 2, "zero": 3}, offload=True),
}


@pytest.fixture(scope="module")
def proven(prove: Any) -> dict[str, Any]:
    cases = {name: {"scenario": s} for name, s in CASES.items()}
    found: dict[str, Any] = prove(cases | {"in 16 bits": {"scenario": _in_16_bits(CASES["pp"])}}, 2)
    return found


def _in_16_bits(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"training": case["training"] | {"precision": "bf16"}}


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_device_does(proven: dict[str, Any], name: str) -> None:
    assert proven[name]["holds"], proven[name]


def test_the_loss_is_not_that_of_16_bits(proven: dict[str, Any]) -> None:
    """But near: eight bits were really used."""
    eight, sixteen = proven["pp"]["single"], proven["in 16 bits"]["single"]
    assert 1e-6 < abs(eight - sixteen) / sixteen < 1e-2


@pytest.mark.parametrize(("dtype", "bits"), [(INPUT, 3), (GRADIENT, 2)])
def test_rounding(dtype: torch.dtype, bits: int) -> None:
    """To so many bits after the leading one, within half of the last; what 8 bits hold is rounded to itself."""
    torch.manual_seed(0)
    x = torch.randn(1000, dtype=torch.float64) * 37.0
    near = x[x.abs() > x.abs().max() / 64]
    off = ((rounded(x, dtype)[x.abs() > x.abs().max() / 64] - near) / near).abs().max()
    assert 2.0 ** -(bits + 1) * 0.8 < float(off) <= 2.0 ** -(bits + 1)
    assert torch.equal(rounded(rounded(x, dtype), dtype), rounded(x, dtype))
    kept, scale = quantized(x, dtype)
    assert kept.dtype == dtype
    assert torch.finfo(dtype).max / 2 < float((x * scale).abs().max()) <= torch.finfo(dtype).max
    assert torch.equal(rounded(torch.zeros(3), dtype), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_by_hand(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Linear8(8, 4, True, None).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape))
    x, grad = torch.randn(3, 8, dtype=dtype, requires_grad=True), torch.randn(3, 4, dtype=dtype)
    y = layer(x)
    y.backward(grad)
    x8, w8, g8 = (rounded(t.detach(), d) for t, d in ((x, INPUT), (layer.weight, INPUT), (grad, GRADIENT)))
    assert torch.equal(y, F.linear(x8, w8, layer.bias))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert torch.equal(x.grad, g8 @ w8)
    assert torch.equal(layer.weight.grad, g8.t() @ x8)
    assert torch.equal(layer.bias.grad, grad.sum(0))


def test_bytes_saved() -> None:
    """As simulated: a byte for each element of a linear layer's input."""
    case = _eight({}, layers=2, hidden=256, vocab=512, attention="fused")
    case["training"]["seq_len"] = 256
    scenario = parse_scenario(case)
    run = Runner(scenario, make_place(scenario, 0), torch.bfloat16)
    saved = SavedBytes(run).step(lambda: run.gradients(run.batch(0)))
    assert saved == pytest.approx(simulate(scenario).result["memory"][0]["activations"], rel=0.01)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallelism": {"tp": 2}}, "fp8 with tp 2"),
        ({"parallelism": {"pp": 2, "schedule": "zb_h1"}}, "fp8 with schedule zb_h1"),
        ({"training": _eight({})["training"] | {"precision": "nvfp4"}}, "block scales have no emulation on a CPU"),
    ],
)
def test_what_is_refused_says_why(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        check_runnable(parse_scenario(_eight({}) | change), "x.yaml")
