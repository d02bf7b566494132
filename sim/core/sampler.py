"""How a serving engine chooses tokens out of logits: a fact of each engine, and what its kernels move and hold.

A vocabulary's logits are many: 256 sequences of a vocabulary of 128,256 have 131 MB of them in fp32, and each kernel of
a sampler reads or writes them once or more. What to choose is asked for by `inference.sampling`; without it the largest
logit is taken.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# How logits outside of top-k and top-p are left out. `sort`: torch's sort of each row, a running sum, and a scatter
# back. `pivots`: a Triton kernel that finds the smallest logit to keep by bisection (arXiv 2602.01518). `rejection`:
# FlashInfer's kernels, which mask top-k and draw again while a token outside of top-p comes; `rejection_at_once`: both
# limits are checked at each draw.
Filters = Literal["sort", "pivots", "rejection", "rejection_at_once"]
# How a token is drawn without such limits, or once they are applied. `exponential`: the largest of the probabilities
# divided by exponential noise. `multinomial`: torch.multinomial, the same with checks of its input. `gumbel`: one
# kernel adds noise to the logits and takes the largest.
Draws = Literal["exponential", "multinomial", "gumbel"]
# How penalties find the tokens that came before. `bins`: counts of each iteration anew, in int64. `counts`: kept on the
# GPU, one kernel. `matrix`: a penalty for each logit, kept on the GPU.
Penalties = Literal["bins", "counts", "matrix"]
# How log probabilities of the chosen token and of the likeliest ones are found. `all`: log-softmax of all logits,
# torch's top-k of it, and the chosen token's rank. `few`: torch's top-k of the logits, then kernels for these tokens
# alone. `probabilities`: as `all` without ranks; of a drawn token the logarithm of what it was drawn from.
Logprobs = Literal["all", "few", "probabilities"]

PIVOT_ROWS = 8  # vLLM, v1/sample/ops/topk_topp_sampler.py: fewer rows are sorted
SEGMENTS = 128  # ATen/native/cuda/SortStable.cu, launch_stable_sort_kernel: as many rows are sorted each by itself
# Bytes that torch's sort holds for each logit beside it: the sorted ones and their indices (12); of fewer rows, two
# copies of index and row (16), keys (4) and the radix sort's other half (12); of more, indices (8) and that half (12).
SORTED_BYTES, FEW_ROWS_BYTES, MANY_ROWS_BYTES = 12.0, 32.0, 20.0
FILTERED_BYTES = 8.0  # that all other ways hold: two tensors of probabilities, noise or masked logits


class Sampler(NamedTuple):
    """An engine's sampler.

    `copies`: logits are copied to fp32 always, where tokens are drawn, or never. `filters`, `draws` and
    `penalties`: see these types; `filters` None: of this engine, the choice of the largest logit alone is simulated.
    `probabilities`: softmax and log-softmax of all logits are computed in any case. `checks_nan`: as TensorRT-LLM draws
    with FlashInfer's kernels: logits are divided by any temperature, with top-p alone in the softmax's kernel, top-k
    alone is a mask, too, and what is drawn from is searched for NaN. `penalties` None: it has none. `logprobs` None:
    how it finds them was not read. `masks_copy`: what a grammar forbids is masked in the fp32 copy.
    """

    copies: Literal["always", "draws", "never"] = "never"
    filters: Filters | None = None
    draws: Draws = "exponential"
    penalties: Penalties | None = "counts"
    probabilities: bool = False
    checks_nan: bool = False
    logprobs: Logprobs | None = None
    masks_copy: bool = False

    def sorts(self, rows: int) -> bool:
        """Tell whether top-p sorts the logits of a batch of `rows` sequences."""
        return self.filters == "sort" or (self.filters == "pivots" and rows < PIVOT_ROWS)

    def held_bytes(self, rows: int) -> float:
        """Bytes for each logit that drawing tokens of `rows` sequences holds, beyond the logits and their fp32 copy."""
        if self.filters is None:
            return 0.0
        if not self.sorts(rows):
            return FILTERED_BYTES
        return SORTED_BYTES + (FEW_ROWS_BYTES if rows < SEGMENTS else MANY_ROWS_BYTES)
