"""Kernels of norms and activations written in separate operators: as many as torch dispatches for Transformers' own
modules, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

from sim.models.activations import ACTIVATIONS
from sim.models.elementwise import layer_norm_in_fp32, rms_norm_eager

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

WIDTH = 64
NO_KERNELS = ("view", "expand", "detach", "ones_like", "alias", "unsqueeze", "lift_fresh", "empty", "t.default")


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Count operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.count += not any(part in name for part in NO_KERNELS)
        return func(*args, **(kwargs or {}))


def kernels_of(module: Any, dtype: Any) -> tuple[int, int]:
    module = module.to(dtype)
    x = torch.randn(2, 8, WIDTH, dtype=dtype, requires_grad=True)
    with Kernels() as forward:
        y = module(x)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    return forward.count, backward.count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("cohere.modeling_cohere.CohereLayerNorm", lambda e: layer_norm_in_fp32(e, True)),
        ("olmo.modeling_olmo.OlmoLayerNorm", lambda e: layer_norm_in_fp32(e, False)),
        ("llama.modeling_llama.LlamaRMSNorm", lambda e: rms_norm_eager(e)),
        ("olmo2.modeling_olmo2.Olmo2RMSNorm", lambda e: rms_norm_eager(e, "fp32")),
        ("nanochat.modeling_nanochat.NanoChatRMSNorm", lambda e: rms_norm_eager(e, "none")),
    ],
)
def test_a_norm_launches_as_many_kernels(name: str, rules: Any, dtype: str) -> None:
    module, made = name.rsplit(".", 1)
    own = getattr(__import__(f"transformers.models.{module}", fromlist=[made]), made)
    sized = own() if made == "NanoChatRMSNorm" else own(WIDTH)
    forward, backward = kernels_of(sized, getattr(torch, dtype))
    t = rules(4.0 if dtype == "float32" else 2.0)
    # A mean's and a square root's few numbers, and casts of the weight, are one kernel more or less.
    assert t.forward_kernels == pytest.approx(forward, abs=2)
    assert t.backward_kernels == pytest.approx(backward, abs=4)


@pytest.mark.parametrize(("name", "activation"), [("gelu_new", "NewGELUActivation"), ("xielu", "XIELUActivation")])
def test_an_activation_launches_as_many_kernels(name: str, activation: str) -> None:
    forward, backward = kernels_of(getattr(transformers.activations, activation)(), torch.float32)
    passes = ACTIVATIONS[name].eager
    of_parameters = 8 if name == "xielu" else 0  # softplus of its two numbers and the like
    assert passes.forward_kernels == pytest.approx(forward - of_parameters // 2, abs=2)
    assert passes.backward_kernels == pytest.approx(backward - of_parameters, abs=4)
