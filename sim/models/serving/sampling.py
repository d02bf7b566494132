"""Kernels with which serving engines choose a token out of each row of logits (`sim.core.sampler.Sampler`).

Bytes are for each logit, of 4 bytes; a row is a sequence's logits. They were read in vLLM (v1/sample, v1/worker/gpu/
sample), SGLang (srt/layers/sampler.py), TensorRT-LLM (_torch/pyexecutor/sampling_utils_flashinfer.py), torch
(ATen/native/cuda/SortStable.cu, Distributions.cpp) and FlashInfer (include/flashinfer/sampling.cuh). All ranks of
tensor parallelism choose out of all logits. Assumption: each kernel streams at the bandwidth that the profile has for
elementwise ones, also a sort's and those that have a block of threads for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program
from sim.core.sampler import SEGMENTS, Sampler
from sim.models.operators import F, memory_op
from sim.models.torch_kernels.softmax_rows import torch_softmax

if TYPE_CHECKING:
    from sim.inputs.serving_keys import Sampling

IN_PLACE, SOFTMAX, DIVIDE, READ = 8.0, 8.0, 12.0, 4.0  # each reads or writes 4 bytes a tensor
MASK = 5.0 + 9.0  # a comparison writes a byte; where it holds, logits are overwritten in place
# Sort of fewer rows than SEGMENTS, all as one array: index and row are written (8), four passes of 8 bits over keys of
# 4 bytes and values of 8 (4 + 4 · 24), one over rows (24), and both results (24). Of more: indices (8), six passes of
# 6 bits, each of which reads keys before (6 · 28).
SORT_FEW, SORT_MANY = 8.0 + 100.0 + 24.0 + 24.0, 8.0 + 6 * 28.0
SORT_KERNELS_FEW, SORT_KERNELS_MANY = 9, 13
SCATTER = 8.0 + 16.0  # a copy, then logits and indices read and logits written
TOP_K = 5 * READ + MASK  # torch.topk: four passes that count digits and one that gathers
FOUND_KERNELS = 2  # of torch.topk, after the passes: what was found is gathered and sorted
PIVOTS_TOP_K, PIVOTS_TOP_P = READ + IN_PLACE, 2 * READ + IN_PLACE  # the search itself is among few logits
REJECTION = 1.5 * READ  # of a draw: half of a row until the token is found, and a row for what is more likely
BINS = 2 * 17.0 + 10.0 + 2 * DIVIDE + 17.0  # two counts with masks; repetition; frequency; presence
BINS_KERNELS = 11
COUNTS = 12.0  # logits read and written, and what is kept beside them read
NAN_CHECK, NAN_CHECK_KERNELS = READ + 1.0 + 1.0, 4  # torch.isnan writes a byte, torch.any reads it; not, assert
MULTINOMIAL_CHECKS = 3 * READ  # the largest, the smallest and the sum
MASK_BITS = 1 / 8  # bytes for each logit of a mask of tokens that a grammar forbids


def chosen_tokens(sampler: Sampler, asked: Sampling | None, rows: int, vocab: int, size: float, act: str) -> Program:
    """Kernels that choose a token out of each of `rows` rows of `vocab` logits, which have `size` bytes.

    `asked` None: the largest logit of each row.
    """
    logits = rows * vocab
    drawn = asked is not None and asked.temperature > 0
    penalized = asked is not None and asked.repetition_penalty != 1
    copied = sampler.copies == "always" or (sampler.copies == "draws" and asked is not None and _processed(asked))
    out = list(_masked(asked, logits, FP32_BYTES if sampler.masks_copy else size, act))
    out += _log_probabilities(sampler, asked, rows, vocab, size, act)
    if copied and size < FP32_BYTES:
        out.append(memory_op("logits_fp32", F, "cast", logits, logits * (size + FP32_BYTES), act))
        size = FP32_BYTES
    if penalized:
        moved, kernels = (BINS, BINS_KERNELS) if sampler.penalties == "bins" else (COUNTS, 1)
        out.append(memory_op("penalties", F, "elementwise", logits, logits * moved, act, kernels))
    if sampler.probabilities:
        out += [_pass("temperature", logits, IN_PLACE), _softmax("softmax", rows, vocab)]
        out.append(_softmax("log_softmax", rows, vocab))
    if asked is None or not drawn:
        return *out, memory_op("sample", F, "softmax", logits, logits * size, act)
    return (*out, *_drawn(sampler, asked, rows, vocab, size))


def _masked(asked: Sampling | None, logits: int, size: float, act: str) -> Iterator[Compute]:
    """Overwrite the logits of tokens that a grammar forbids. A bit is read for each logit, and all are taken as written
    (xgrammar, kernels/apply_token_bitmask_inplace_triton.py; vLLM, v1/worker/gpu/structured_outputs.py)."""
    if asked is not None and asked.structured_outputs:
        yield memory_op("grammar_mask", F, "elementwise", logits, logits * (MASK_BITS + size), act)


def _log_probabilities(
    sampler: Sampler, asked: Sampling | None, rows: int, vocab: int, size: float, act: str
) -> Iterator[Compute]:
    """Log probabilities of the chosen tokens and of the likeliest ones.

    `all`: vLLM, v1/sample/sampler.py: `logits.log_softmax(dim=-1, dtype=torch.float32)` (torch casts bf16 first),
    `torch.topk` and, compiled to one kernel, `batched_count_greater_than`. `few`: v1/worker/gpu/sample/logprob.py:
    `torch.topk` of the logits as they are; a kernel reads each row twice, for the largest and the sum; another counts.
    `probabilities`: SGLang, srt/layers/sampler.py: log_softmax of logits that are not drawn from, else torch.log of
    the probabilities; both are clamped in place.
    """
    if asked is None or asked.logprobs is None or sampler.logprobs is None:
        return
    logits, likeliest = rows * vocab, asked.logprobs > 0
    if sampler.logprobs == "few":
        yield from _top_k(logits, size, act) if likeliest else ()
        yield memory_op("token_logprobs", F, "elementwise", logits, logits * 2 * size, act)
        yield memory_op("token_ranks", F, "elementwise", logits, logits * size, act)
        return
    if sampler.logprobs == "all" and size < FP32_BYTES:
        yield memory_op("logprobs_fp32", F, "cast", logits, logits * (size + FP32_BYTES), act)
    if sampler.logprobs == "all" or not asked.temperature:
        yield _softmax("logprobs", rows, vocab)
    else:
        yield _pass("logprobs", logits, IN_PLACE)
    if sampler.logprobs == "probabilities":
        yield _pass("clamp", logits, IN_PLACE)
    yield from _top_k(logits, FP32_BYTES, "fp32") if likeliest else ()
    if sampler.logprobs == "all":
        yield _pass("token_ranks", logits, READ)


def _top_k(logits: int, size: float, dtype: str) -> Iterator[Compute]:
    """torch.topk (ATen/native/cuda/TensorTopK.cu, multi-block: eight bits of a value in a pass), and its gather."""
    passes = int(size)
    yield memory_op("top_k", F, "elementwise", logits, logits * (passes + 1) * size, dtype, passes + FOUND_KERNELS)


def _processed(asked: Sampling) -> bool:
    """Whether anything changes the logits before a token is drawn (vLLM, v1/worker/gpu/sample/states.py)."""
    filtered = asked.top_k is not None or asked.top_p < 1 or asked.temperature != 1
    return asked.repetition_penalty != 1 or (asked.temperature > 0 and filtered)


def _drawn(sampler: Sampler, asked: Sampling, rows: int, vocab: int, size: float) -> Iterator[Compute]:
    """Temperature, limits and the draw."""
    logits = rows * vocab
    limited = asked.top_k is not None or asked.top_p < 1
    divides = sampler.draws != "gumbel" or asked.temperature != 1
    if sampler.checks_nan:
        divides = asked.top_k is not None or not limited
    if not sampler.probabilities and divides:
        yield _pass("temperature", logits, IN_PLACE)
    if sampler.checks_nan:
        yield _pass("nan_check", logits, NAN_CHECK, NAN_CHECK_KERNELS)
    if limited and sampler.filters in ("rejection", "rejection_at_once"):
        yield from _rejected(sampler, asked, rows, vocab)
        return
    if limited:
        yield from _filtered(sampler, asked, rows, vocab)
    if sampler.draws == "gumbel":
        yield _pass("sample", logits, size)
        return
    if not sampler.probabilities:
        yield _softmax("softmax", rows, vocab)
    if sampler.draws == "multinomial":
        yield _pass("probabilities", logits, IN_PLACE)  # written over the logits
        yield _pass("checks", logits, MULTINOMIAL_CHECKS, 3)
    yield _pass("noise", logits, READ)
    yield _pass("divide", logits, DIVIDE)
    yield _pass("sample", logits, READ)


def _rejected(sampler: Sampler, asked: Sampling, rows: int, vocab: int) -> Iterator[Compute]:
    """FlashInfer's kernels. A draw is kept with a probability of at least top-p, so about 1 ÷ top-p are made; with a
    top-k alone, one."""
    logits = rows * vocab
    masks = asked.top_k is not None and (asked.top_p < 1 or sampler.checks_nan)
    if sampler.filters == "rejection" and masks:
        yield _pass("top_k_mask", logits, IN_PLACE)
    yield _softmax("softmax", rows, vocab)
    if sampler.draws == "multinomial":
        yield _pass("probabilities", logits, IN_PLACE)
    yield _pass("sample", logits, REJECTION / asked.top_p)


def _filtered(sampler: Sampler, asked: Sampling, rows: int, vocab: int) -> Iterator[Compute]:
    """Logits outside of the limits become minus infinity."""
    logits = rows * vocab
    if not sampler.sorts(rows):
        yield _pass("limits", logits, PIVOTS_TOP_P if asked.top_k is None else PIVOTS_TOP_K)
        return
    if asked.top_p == 1 and not sampler.probabilities:
        yield _pass("top_k", logits, TOP_K, 7)
        return
    few = rows < SEGMENTS
    yield _pass("sort", logits, SORT_FEW if few else SORT_MANY, SORT_KERNELS_FEW if few else SORT_KERNELS_MANY)
    if asked.top_k is not None:
        yield _pass("top_k", logits, MASK, 2)
    if asked.top_p < 1:
        yield _softmax("sorted_softmax", rows, vocab)
        yield _pass("running_sum", logits, IN_PLACE)
        yield _pass("top_p", logits, MASK, 2)
    yield _pass("unsort", logits, SCATTER, 2)


def _pass(name: str, logits: int, moved: float, kernels: int = 1) -> Compute:
    return memory_op(name, F, "elementwise", logits, logits * moved, "fp32", kernels)


def _softmax(name: str, rows: int, vocab: int) -> Compute:
    logits = rows * vocab
    return memory_op(name, F, "softmax", logits, logits * SOFTMAX, "fp32", kernel=torch_softmax(vocab, FP32_BYTES))
