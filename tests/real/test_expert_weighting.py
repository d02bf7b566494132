"""GELU, fp32 probabilities and the down projection as Megatron-Core writes them: torch's peak is the one counted."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.timings.fused import peak_bytes
from sim.inputs.scenario import parse_scenario
from sim.models.dims import Shard, dims
from sim.models.layers import layer_specs
from sim.models.operators import Operator

ROWS, HIDDEN, FFN = 512, 256, 1024


class Linear(torch.autograd.Function):
    """A linear layer that makes both gradients at once, as Transformer Engine's do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return dy @ weight, dy.t() @ x


def experts() -> list[Operator]:
    """The parts between dispatch and combine of one rank's single expert."""
    model = {
        "layers": 1,
        "hidden": HIDDEN,
        "heads": 2,
        "vocab": 128,
        "bias": False,
        "moe": {"experts": 1, "top_k": 1, "ffn": FFN},
    }
    training = {"seq_len": ROWS, "global_batch_size": 1, "framework": "megatron", "grad_dtype": "bf16"}
    scenario = parse_scenario({"model": model, "training": training, "cluster": "dgx-h100"})
    (layer,) = layer_specs(scenario.model)
    assert layer.mlp is not None
    parts = layer.mlp.train(scenario, dims(scenario), 0, Shard())
    return [p for p in parts if p.name in ("experts_up", "gelu", "expert_weighting", "experts_down")]


def test_peak_of_the_weighting() -> None:
    x, up, down = (
        torch.randn(n, k, dtype=torch.bfloat16, requires_grad=n != ROWS)
        for n, k in ((ROWS, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    )
    probabilities, dy = torch.rand(ROWS, 1, requires_grad=True), torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)

    def both_ways() -> tuple[Tensor, ...]:
        inner = torch.nn.functional.gelu(Linear.apply(x, up))
        out = Linear.apply((inner * probabilities).to(torch.bfloat16), down)
        del inner
        return torch.autograd.grad(out, (up, down, probabilities), dy)

    _, gelu, weighting, last = experts()
    saved = sum(s.bytes for part in (gelu, weighting) for s in part.saved)
    result = dy.numel() * 2  # which the caller still has
    counted = saved + weighting.backward_bytes + 2 * last.expert_params + result
    assert peak_bytes("cpu", both_ways) == counted
