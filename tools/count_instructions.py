"""Count the instructions of the kernels that torch.compile makes of fused activations.

    python tools/count_instructions.py [--capability 9.0] [--only "swiglu backward"]

Inductor writes Triton kernels for each function, Triton compiles them for a GPU that need not be there, and NVIDIA's
disassembler, which Triton brings along, lists their machine code. Printed for each kernel: all threads' instructions
for each element of the MLP's inner width, which has one number of gate and one of up. `sim.variants.activations`
has these counts.

Functions of `joined` gradients are those of Megatron-Core (core/fusions/fused_bias_swiglu.py, fused_bias_geglu.py,
fused_bias_gelu.py): one matmul gives gate and up, and torch.cat joins their gradients. Inductor then computes each half
for every number of the result and chooses one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import math
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS, WIDTH = 4096, 2560  # any; a width that is no power of two has its usual arithmetic of indices
ELEMENTS = {"pointwise": (1024, 4), "sum": (2048, 8)}  # of a thread block, and its warps: what Inductor tries first
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)\n''', device_str", re.DOTALL)
HEURISTICS = re.compile(r"@triton_heuristics\.\w+\(.*?'signature': \{(.*?)\}.*?\n\)\n(?=@triton\.jit)", re.DOTALL)
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)", re.MULTILINE)
NOT_COUNTED = ("NOP", "BRA")  # those behind a kernel's end
Gated = tuple[Tensor, Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    return F.silu(gate) * up


def swiglu_backward(g: Tensor, gate: Tensor, up: Tensor) -> Gated:
    """Return the gradients of gate and up. Both sigmoids are written out: of one Inductor makes a kernel of its own."""
    return g * torch.sigmoid(gate) * (1 + gate * (1 - torch.sigmoid(gate))) * up, g * F.silu(gate)


def swiglu_autograd(g: Tensor, gate: Tensor, up: Tensor) -> Gated:
    """Return the gradients of gate and up by torch's derivatives."""
    return torch.ops.aten.silu_backward(g * up, gate), g * F.silu(gate)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) · up, by GELU's tanh form."""
    return gelu(gate) * up


def geglu_backward(g: Tensor, gate: Tensor, up: Tensor) -> Gated:
    """Return the gradients of gate and up. Of the one tanh Inductor makes a kernel of its own."""
    t = _tanh(gate)
    return g * up * _slope(gate, t), g * (gate * 0.5 * (1.0 + t))


def geglu_autograd(g: Tensor, gate: Tensor, up: Tensor) -> Gated:
    """Return the gradients of gate and up by torch's derivatives."""
    of_gate = torch.ops.aten.gelu_backward(g * up, gate, approximate="tanh")
    return of_gate, g * F.gelu(gate, approximate="tanh")


def quick_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate · sigmoid(1.702 · gate) · (up + 1)."""
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def quick_geglu_backward(g: Tensor, gate: Tensor, up: Tensor) -> Gated:
    """Return the gradients of gate and up."""
    s = torch.sigmoid(1.702 * gate)
    return g * s * (1 + 1.702 * gate * (1 - s)) * (up + 1), g * gate * s


def gelu(x: Tensor) -> Tensor:
    """Return GELU's tanh form."""
    return x * 0.5 * (1.0 + _tanh(x))


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x."""
    return g * _slope(x, _tanh(x))


def _tanh(x: Tensor) -> Tensor:
    return torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))


def _slope(x: Tensor, t: Tensor) -> Tensor:
    return 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)


# Forward, the backward as Megatron-Core writes it, and the one that autograd makes.
GATED = {
    "swiglu": (swiglu, swiglu_backward, swiglu_autograd),
    "geglu": (geglu, geglu_backward, geglu_autograd),
    "quick_geglu": (quick_geglu, quick_geglu_backward, quick_geglu_backward),
}


def cases() -> Iterator[tuple[str, Callable[..., object], tuple[Tensor, ...]]]:
    """Return functions with their inputs: g, gate, up [tokens, width], both [tokens, 2 width], weight [tokens, 1]."""
    g, gate, up = (torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(3))
    both, weight, bias = torch.cat((gate, up), -1), torch.rand(TOKENS, 1), gate[0].clone()
    for name, (ahead, back, by_autograd) in GATED.items():

        def joined(g: Tensor, y: Tensor, back: Callable[..., Gated] = back) -> Tensor:
            return torch.cat(back(g, *y.chunk(2, -1)), -1)

        def weighted(y: Tensor, w: Tensor, ahead: Callable[..., Tensor] = ahead) -> Tensor:
            return (ahead(*y.chunk(2, -1)) * w).to(y.dtype)

        def weighted_back(
            g: Tensor, y: Tensor, w: Tensor, ahead: Any = ahead, joined: Any = joined
        ) -> tuple[Tensor, Tensor]:
            of_weight = (ahead(*y.chunk(2, -1)) * g.to(w.dtype)).sum(-1, keepdim=True)
            return joined(g * w, y).to(y.dtype), of_weight

        yield name, ahead, (gate, up)
        yield f"{name} backward", by_autograd, (g, gate, up)
        yield f"{name} backward, joined", joined, (g, both)
        yield f"{name}, weighted", weighted, (both, weight)
        yield f"{name} backward, weighted", weighted_back, (g, both, weight)
    yield "gelu with bias", lambda y, b: gelu(y + b), (gate, bias)
    yield "gelu with bias, backward", lambda g, y, b: gelu_backward(g, y + b), (g, gate, bias)


class _NoDriver:
    """Stand for a GPU's driver, which Triton asks for its target."""

    def __init__(self, target: object) -> None:
        self.target = target

    def get_current_target(self) -> object:
        """Return the GPU to compile for."""
        return self.target

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_: 0


def kernels_of(function: Callable[..., object], inputs: tuple[Tensor, ...]) -> list[tuple[str, str]]:
    """Return name and source of each Triton kernel that Inductor makes of a function."""
    import torch._inductor.config as inductor
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []
    torch._dynamo.reset()
    with (
        inductor.patch(cpu_backend="triton", force_pointwise_cat=True, force_disable_caches=True, compile_threads=1),
        mock.patch.object(GraphLowering, "save_output_code", texts.append),
        contextlib.suppress(Exception),  # the kernels cannot run here, which is known once they are written
    ):
        torch.compile(function, dynamic=False)(*inputs)
    return [kernel for text in texts for kernel in KERNEL.findall(text)]


def instructions(name: str, source: str, target: Any, folder: Path) -> float:
    """Return the instructions of all threads for each element of the inner width."""
    import triton
    from triton.compiler import ASTSource

    elements, warps = ELEMENTS["sum" if "_red_" in name else "pointwise"]
    blocks = {"XBLOCK": 1 if "_red_" in name else elements, "R0_BLOCK": elements}
    found = HEURISTICS.search(source)
    assert found is not None, source
    signature = dict(re.findall(r"'(\w+)': '([^']+)'", found.group(1)))
    path = folder / f"{name}.py"
    path.write_text(HEURISTICS.sub("", source).replace("triton_helpers.set_driver_to_cpu()", ""))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n not in blocks}
    sizes = {n: blocks[n] for n in signature if n in blocks}
    made: Any = triton.compile(
        ASTSource(getattr(module, name), signature, sizes, aligned), target=target, options={"num_warps": warps}
    )
    binary = folder / f"{name}.cubin"
    binary.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    listed = subprocess.run([tool, "-c", binary], capture_output=True, text=True, check=True).stdout
    counted = [op for op in INSTRUCTION.findall(listed) if not op.startswith(NOT_COUNTED)]
    handled = math.prod(int(size) for size in re.findall(r"^    (?:xnumel|r0_numel) = (\d+)$", source, re.MULTILINE))
    return len(counted) * 32 * warps / elements * handled / (TOKENS * WIDTH)


def main() -> None:
    """Print the counts."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", default="9.0", help="compute capability of the GPU (default: 9.0)")
    parser.add_argument("--only", default="", metavar="NAME", help="functions whose name begins so (default: all)")
    args = parser.parse_args()
    capability = int(args.capability.replace(".", ""))
    logging.disable(logging.ERROR)  # that the kernels cannot run here
    warnings.simplefilter("ignore")
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(_NoDriver(target))
    with tempfile.TemporaryDirectory() as folder:
        for name, function, inputs in cases():
            if not name.startswith(args.only):
                continue
            counts = [instructions(*kernel, target, Path(folder)) for kernel in kernels_of(function, inputs)]
            print(f"{name:34s} {', '.join(f'{count:.1f}' for count in counts)}")


if __name__ == "__main__":
    main()
