"""How many kernels Inductor makes of rope and of norms on queries and keys, as vLLM writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sim.serve.engines import ENGINES

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, warnings, torch
from tools.count_instructions import _NoDriver, kernels_of
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
logging.disable(logging.ERROR)
warnings.simplefilter("ignore")
driver.set_active(_NoDriver(GPUTarget("cuda", 90, 32)))
HEADS, KV_HEADS, WIDTH, TOKENS = 16, 2, 128, 96

def norm(x, weight):  # vLLM, model_executor/layers/layernorm.py: forward_native
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

def rope(x, cos, sin):  # layers/rotary_embedding/common.py: ApplyRotaryEmb.forward_static
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

def made(normed):
    def function(qkv, positions, cache, query_weight, key_weight):
        q, k, _ = qkv.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], -1)
        q, k = q.view(TOKENS, HEADS, WIDTH), k.view(TOKENS, KV_HEADS, WIDTH)
        if normed:
            q, k = norm(q, query_weight), norm(k, key_weight)
        cos, sin = (half.unsqueeze(-2) for half in cache.index_select(0, positions).chunk(2, -1))
        return rope(q, cos, sin), rope(k, cos, sin)
    return function

def some(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)

inputs = some(TOKENS, (HEADS + 2 * KV_HEADS) * WIDTH), torch.arange(TOKENS), some(4096, WIDTH), some(WIDTH), some(WIDTH)
print(*[len(kernels_of(made(normed), inputs)) for normed in (False, True)])
"""


def test_inductor_makes_a_kernel_for_each_tensors_rope_and_for_each_norms_sum() -> None:
    """Before combo_kernels, which join those of queries and keys."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    own = ENGINES["vllm-0.11"].rope_kernels
    assert done.stdout.split() == [str(own.rope), str(own.normed)]
    joined = ENGINES["vllm-0.14"].rope_kernels
    assert (2 * joined.rope, 2 * joined.normed) == (own.rope, own.normed)
