"""Kernels that copy tokens for their experts and add up results, where torch's operators do so, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES
from sim.models.dims import Dims


class IndexedStep(Struct, frozen=True):
    """One step on tokens' way where torch's indexing copies them (`Framework.token_steps`), each operator a kernel.

    `small`: further kernels of each operator that has some, which torch's C++ issues in a loop; `passes`: how many of
    each are passes of a sort by 64 bits. `copy_bytes`: bytes of indices and weights for each copy. `of_copies`,
    `of_tokens`: for each element of the copies or tokens, accesses in the activations' dtype, and further bytes.
    `unvectorized`: how many of the kernels handle the numbers of the copies one by one; `singly`: their accesses, which
    are among these, for each element of the copies and of the tokens.
    """

    kernels: int
    small: tuple[int, ...]
    copy_bytes: float
    of_copies: tuple[float, float] = (0.0, 0.0)
    of_tokens: tuple[float, float] = (0.0, 0.0)
    passes: int = 0
    unvectorized: int = 0
    singly: tuple[float, float] = (0.0, 0.0)

    def moved_bytes(self, copies: float, tokens: float, hidden: int, e: float) -> float:
        """Bytes that the step reads and writes; `e`: bytes of an element in the activations' dtype."""
        each = ((copies, self.of_copies), (tokens, self.of_tokens))
        return copies * self.copy_bytes + sum(n * hidden * (own * e + more) for n, (own, more) in each)

    def singly_bytes(self, copies: float, tokens: float, hidden: int, e: float) -> float:
        """Bytes of these that kernels read and write one number at a time."""
        of_copies, of_tokens = self.singly
        return (copies * of_copies + tokens * of_tokens) * hidden * e


# transformers/integrations/moe.py, grouped_mm_experts_forward, with weights in fp32; indices have 64 bits. Forward:
# experts sorted (24; ten kernels more), a copy's token (16), rows copied by index, weights likewise (16), experts as
# 32-bit integers (12), counted (4), summed up. Home: results times weights in fp32 (e + 4), the order's inverse (8,
# 24), rows put back (8), each token's summed (4) and cast (4; 4 + e).
# Backward of home: the cast (e + 4), the sum's gradient to each copy (4; 4), rows to the experts' order (zeros 4,
# accumulated 12), times results (8 + e) and weights (8), cast (4 + e), and the weights' gradients summed over rows (4).
# Backward of forward: weights' gradients to the tokens' order (4, 16), zeros of tokens (e), in which copies are added
# up (e; 2e). Each accumulation makes and sorts its indices by eight kernels more (torch:
# aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel; a sort takes cub's radix sort by 64 bits); its
# lanes' loads are a warp apart (indexing_backward_kernel), a copy's (e) and, of all copies of a token in a row, the
# token's (2e).
INDEXED = {
    "permute": IndexedStep(7, (10,), 72.0, (1.0, 0.0), (1.0, 0.0), passes=8),
    "unpermute": IndexedStep(6, (), 32.0, (1.0, 16.0), (1.0, 8.0)),
    "unpermute_backward": IndexedStep(8, (8,), 0.0, (2.0, 44.0), (1.0, 8.0)),
    "permute_backward": IndexedStep(4, (8, 8), 20.0, (1.0, 0.0), (3.0, 0.0), unvectorized=1, singly=(1.0, 2.0)),
}
# Where weights and results have one dtype (Qwen2MoeTopKRouter casts its weights; under autocast all have fp32) nothing
# is cast. Home: results times weights (2e), the order's inverse (8, 24), rows put back (2e), each token's sum (e; e).
# Backward: the sum's gradient to each copy (e; e), zeros (e) and accumulated rows (3e), times results (3e) and weights
# (2e), and the weights' gradients summed over rows (e). torch does not vectorize products with one weight a row, and
# copies of a token's gradient (Loops.cuh: gpu_kernel_impl_nocast).
INDEXED_IN_ONE_DTYPE = INDEXED | {
    "unpermute": IndexedStep(5, (), 32.0, (5.0, 0.0), (1.0, 0.0), unvectorized=1, singly=(2.0, 0.0)),
    "unpermute_backward": IndexedStep(6, (8,), 0.0, (11.0, 0.0), (1.0, 0.0), unvectorized=3, singly=(6.0, 0.0)),
}


# torchtitan 0.3.0, under torch.compile: models/common/token_dispatcher.py. Home: copies sorted (24; ten kernels more),
# a copy's token and weight (24), rows copied. Back: zeros of tokens, results times weights (e; e); ops/scatter_add.py
# copies the zeros and adds rows up by `index_put_with_sort_kernel`. Backward of that: rows gathered, times weights, and
# with results summed over a row; backward of home: zeros of tokens, in which copies are added up.
# Arrivals (`_permute`): places of rows in seven kernels (32), rows copied; `_unpermute` puts them back; backward the
# same, but that rows are added to zeros (torch/_inductor/utils.py: from Hopper on without a sort).
TITAN = {
    "permute": IndexedStep(3, (10,), 48.0, (1.0, 0.0), (1.0, 0.0), passes=8),
    "unpermute": IndexedStep(4, (8,), 12.0, (3.0, 0.0), (5.0, 0.0), unvectorized=1, singly=(1.0, 2.0)),
    "unpermute_backward": IndexedStep(3, (), 12.0, (5.0, 0.0), (1.0, 0.0)),
    "permute_backward": IndexedStep(2, (), 8.0, (1.0, 0.0), (3.0, 0.0)),
    "sort_chunks": IndexedStep(8, (), 32.0, (2.0, 0.0)),
    "unsort_chunks": IndexedStep(1, (), 8.0, (2.0, 0.0)),
    "unsort_chunks_backward": IndexedStep(1, (), 8.0, (2.0, 0.0)),
    "sort_chunks_backward": IndexedStep(2, (), 8.0, (4.0, 0.0)),
}
# torchtitan 0.2.1 and 0.2.2, in which models/moe/moe.py, MoE.forward, is not compiled
# (models/llama4/infra/parallelize.py: apply_compile), nor what FSDP and expert parallelism do around the experts. Home
# as above, in four kernels. Back: zeros of copies (e), rows put into them (2e), their fp32 copy (e + 4), a product of
# matrices with the weights (4; 4), cast (4 + e). Backward: cast (e + 4), both matrices' gradients (4 + 4; 4 + 4), cast
# (4 + e), rows looked up (2e); backward of home as above, by a sort. Arrivals (models/moe/utils.py: `_permute`, with
# one rank, too): places of rows in ten kernels (12), a row of zeros joined (2e), rows copied (2e); `_unpermute` puts
# them back (2e) and cuts that row off, whose backward copies into zeros (3e) before rows are looked up (2e); copies are
# added to zeros (e; 3e).
TITAN_2025 = {
    "permute": IndexedStep(4, (10,), 64.0, (1.0, 0.0), (1.0, 0.0), passes=8),
    "unpermute": IndexedStep(5, (), 12.0, (4.0, 8.0), (1.0, 8.0)),
    "unpermute_backward": IndexedStep(5, (), 12.0, (3.0, 12.0), (1.0, 12.0)),
    "permute_backward": IndexedStep(2, (8,), 8.0, (1.0, 0.0), (3.0, 0.0), unvectorized=1, singly=(1.0, 2.0)),
    "sort_chunks": IndexedStep(12, (), 12.0, (4.0, 0.0)),
    "unsort_chunks": IndexedStep(1, (), 8.0, (2.0, 0.0)),
    "unsort_chunks_backward": IndexedStep(3, (), 8.0, (5.0, 0.0)),
    "sort_chunks_backward": IndexedStep(2, (8,), 8.0, (4.0, 0.0), unvectorized=1, singly=(3.0, 0.0)),
}


class TokenSteps(NamedTuple):
    """Hold how a framework copies tokens by torch's operators.

    `steps`: by name; `in_one_dtype`: where weights and results have one dtype, if that differs. `result_bytes`: of a
    number of an expert's result, as it is kept for the gradient of its weight; 0: in the activations' dtype.
    `fills_rows`: rows are copied to fill up each expert's even if one rank has all experts. `sorts_biases`: a bias's
    gradient is summed by a sort of rows. `fuses_sums`: two gradients of experts' input are added up where the copies'
    are. `in_parts`: of a layer with experts torch.compile has parts, around which torch's checkpoint is.
    """

    steps: Mapping[str, IndexedStep]
    in_one_dtype: Mapping[str, IndexedStep] | None = None
    result_bytes: float = 0.0
    fills_rows: bool = False
    sorts_biases: bool = False
    fuses_sums: bool = False
    in_parts: bool = False

    def of(self, d: Dims) -> Mapping[str, IndexedStep]:
        """The steps for these sizes."""
        one_dtype = d.code.casts_router_weights or d.act_bytes == FP32_BYTES
        return self.in_one_dtype if one_dtype and self.in_one_dtype is not None else self.steps


# By `Framework.token_steps`.
TOKEN_STEPS: Mapping[str, TokenSteps] = {
    "transformers": TokenSteps(INDEXED, INDEXED_IN_ONE_DTYPE, sorts_biases=True),
    "torchtitan": TokenSteps(TITAN, fuses_sums=True),
    "torchtitan_2025": TokenSteps(TITAN_2025, result_bytes=FP32_BYTES, fills_rows=True, in_parts=True),
}


def token_steps(d: Dims) -> TokenSteps | None:
    """Return how the framework copies tokens by torch's operators; None if by kernels of its own."""
    return TOKEN_STEPS.get(d.framework.token_steps)


def checkpointed_in_parts(d: Dims) -> bool:
    """Tell whether torch's checkpoint runs a layer with experts again, not the graph of a compiled backward."""
    steps = token_steps(d)
    return steps is not None and steps.in_parts
