"""The head: final norm, output projection over the vocabulary, cross-entropy, all split over tensor-parallel
ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import ALIGNED, Block, BlockKind, Compute, Item, ModelPart, Phase, Program, Saved
from sim.models.activation_memory.recompute import as_block, keep_all
from sim.models.dims import Dims, dims
from sim.models.embedding import table_elements
from sim.models.host_waits import after_loss_check
from sim.models.layer import shape_key
from sim.models.linear import linear
from sim.models.lora import frozen
from sim.models.norm import stream_norm
from sim.models.operators import F, I, Linear, Operator, collective, memory_op, of_part
from sim.models.output.chunked_loss import chunked_output, looped_output
from sim.models.output.log_softmax import backward_kernels, forward_kernels
from sim.models.output.preference import pair_loss, score_part, scores_rewards
from sim.models.output.tiled_loss import tiled_output
from sim.models.streams.hyper_connections import last_sum
from sim.models.torch_kernels.softmax_rows import torch_softmax
from sim.variants.frameworks.parts import UnfusedLoss

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

WITHOUT_LOGITS = ("chunked", "tiled")  # losses for which those of all tokens never exist at once


def head_block(scenario: Scenario) -> Block:
    """Final norm (unless a stage before has it: `final_norm_block`), `[tokens, hidden] x [hidden, vocab / tp]`, loss.

    With tied embeddings `params` leaves the output matrix out; a stage that holds the head but not the
    embedding has its own copy: add `tied_params`.
    """
    d = dims(scenario)
    parts = head_parts(scenario, d)
    if d.lora is not None:
        parts = tuple(p if p.frozen else frozen(p) for p in parts)
    key = (
        f"head {shape_key(scenario.model, d)} vocab={d.vocabulary_of(scenario.model) * d.tp} "
        f"loss={scenario.for_training.cross_entropy}"
        + (f" in {chunks}" if (chunks := scenario.for_training.loss_chunks) is not None else "")
        + (" and the teacher's" if learns_logits(scenario) else "")
        + (f" over pairs, {pairs}" if (pairs := scenario.for_training.pair_loss) is not None else "")
        + (" frozen" if d.lora else "")
    )
    alone = scenario.parallelism.mtp_apart is None
    return as_block("head", BlockKind.HEAD, key if alone else "", parts, keep_all(parts))


def final_norm_block(scenario: Scenario) -> Block:
    """The final norm by itself, behind the last layer: modules for multi-token prediction on a stage of their own need
    its result before the head does."""
    parts = final_norm_parts(scenario, dims(scenario))
    return as_block("final norm", BlockKind.NORM, "", parts, keep_all(parts))


def copied_table_params(scenario: Scenario) -> int:
    """Elements of the embedding matrix of which several stages of a pipeline hold one, by tensor-parallel part; else 0.

    The output is tied to it, or a module for multi-token prediction looks up tokens on another stage than the first
    (Megatron-LM, core/models/gpt/gpt_model.py: `mtp_process` makes an embedding there). Their gradients are summed.
    """
    return max(tied_params(scenario), table_elements(scenario) if scenario.model.mtp_layers else 0)


def tied_params(scenario: Scenario) -> int:
    """Elements of the matrix that embedding and output share on one rank; 0 where they are not tied."""
    return table_elements(scenario) if scenario.model.tied_embeddings and not scores_rewards(scenario) else 0


def head_parts(scenario: Scenario, d: Dims) -> tuple[Operator, ...]:
    """The head's operators in forward order, with what it learns from a teacher."""
    norms = final_norm_parts(scenario, d) if scenario.parallelism.mtp_apart is None else ()
    parts = (*norms, *output_parts(scenario, d))
    return (*parts, *of_part(ModelPart.HEAD, [soft_loss(scenario, d)])) if learns_logits(scenario) else parts


def final_norm_parts(scenario: Scenario, d: Dims) -> tuple[Operator, ...]:
    """The sum of the streams, and the final norm (none behind gated streams)."""
    norms = () if d.streams.gated else (stream_norm(scenario.model, d.of_stream, "final_norm"),)
    return of_part(ModelPart.NORM, (*last_sum(d), *norms))


def reference_parts(scenario: Scenario, d: Dims) -> tuple[Operator, ...]:
    """The head of a frozen reference: the labels' log-probabilities, and nothing that a trainer does with a loss."""
    return (*final_norm_parts(scenario, d), *of_part(ModelPart.HEAD, _scored(scenario, d)))


def output_parts(scenario: Scenario, d: Dims) -> tuple[Operator, ...]:
    """Output projection, the loss against the text's next token, or over pairs of texts."""
    pairs = scenario.for_training.pair_loss
    if pairs == "reward":
        return of_part(ModelPart.HEAD, [score_part(d), pair_loss(d, pairs)])
    output, loss = _scored(scenario, d)
    vocab = d.vocabulary_of(scenario.model)
    d, vocab = (d, vocab) if scenario.for_training.cross_entropy in WITHOUT_LOGITS else _of_loss(d, vocab)
    loss = replace(loss, forward=(*loss.forward, *_metric_losses(d, vocab), *after_loss_check(d)))
    parts = [output, loss]
    if pairs == "orpo":
        parts.append(_chosen_texts(scenario, d, vocab))
    if pairs is not None:
        parts.append(pair_loss(d, pairs))
    return of_part(ModelPart.HEAD, parts)


def _chosen_texts(scenario: Scenario, d: Dims, vocab: int) -> Operator:
    """The cross-entropy of the chosen half, of which TRL copies the logits, beside both halves' log-probabilities; its
    gradient is added to theirs. The means of both halves' logits are metrics (trl/experimental/orpo)."""
    half = replace(d, tokens=d.tokens // 2)
    part = cross_entropy(half, vocab, scenario.for_training.cross_entropy)
    n, e = float(half.tokens * vocab), d.act_bytes
    copy = memory_op("chosen_logits_copy", F, "copy", n, 2 * e * n, d.act)
    means = memory_op("logits_means", F, "elementwise", 2 * n, 2 * e * n, d.act, 2)
    added = memory_op("chosen_gradient_sum", I, "elementwise", n, 3 * e * n, d.act)
    return replace(part, forward=(copy, *part.forward, means), backward=(*part.backward, added))


def _scored(scenario: Scenario, d: Dims) -> tuple[Operator, Operator]:
    """Output projection, and each label's log-probability, which the loss against the next token is made of."""
    m = scenario.model
    vocab = d.vocabulary_of(m)
    # The output projection runs in 16 bits even where the layers' matmuls are quantized, unless Megatron-Core is told
    # otherwise (transformer_config.py: fp8_output_proj; core/transformer/mxfp8_output_proj.py).
    quantized = scenario.for_training.fp8_output_proj
    plain = d if quantized else replace(d, linear=d.act, linear_bytes=d.act_bytes, recipe=None, few_bits=False)
    if d.framework.sequence.copied_chunks:  # torchtitan compiles layers alone (`apply_compile`)
        plain = replace(plain, tp_overlap="none")
    # the matmuls of an odd vocabulary that the framework takes as it is leave the fast kernels
    alignment = math.gcd(vocab, ALIGNED)
    aligned = alignment == ALIGNED
    name = "output" if aligned else "output_unaligned"
    output = linear(
        plain,
        Linear(name, d.tokens, d.hidden, (vocab,), "column", m.head_bias),
    )
    kernel, chunks = scenario.for_training.cross_entropy, scenario.for_training.loss_chunks
    if kernel == "chunked" and chunks is not None:
        output = looped_output(d, name, vocab, chunks, lambda sizes: cross_entropy(sizes, vocab))
    elif kernel == "chunked":
        output = chunked_output(d, name, vocab)
    elif kernel == "tiled":
        output = tiled_output(d, name, vocab)
    elif d.framework.accumulates_in_matmul:  # autograd is handed an empty gradient of the matrix's shape
        output = replace(output, backward_bytes=output.backward_bytes + d.act_bytes * vocab * d.hidden)
    if m.tied_embeddings:
        output = replace(output, params=0, frozen=0)
    output = output if aligned else _unaligned(output, alignment)
    if kernel in WITHOUT_LOGITS:
        return output, Operator("cross_entropy")
    output = _gathered(d, output, vocab)
    d, vocab = _of_loss(d, vocab)
    loss = cross_entropy(d, vocab, kernel)
    widened = _widened_logits(d, vocab) if kernel in ("unfused", "native") else ()
    loss = replace(loss, forward=(*loss.forward, *widened))
    if m.logit_softcap is not None and kernel in ("unfused", "native"):
        output = _capped(d, output, vocab)
    return output, loss


def _gathers_logits(d: Dims) -> bool:
    return d.framework.gathers_logits and d.tp > 1


def _of_loss(d: Dims, vocab: int) -> tuple[Dims, int]:
    """The sizes of the loss on one rank and the entries of the vocabulary that it has there, of `vocab` a rank."""
    return (replace(d, tp=1), vocab * d.tp) if _gathers_logits(d) else (d, vocab)


def _gathered(d: Dims, part: Operator, vocab: int) -> Operator:
    """The output matrix, and if ranks of tp gather its logits, [tokens, tp · vocab], a kernel that joins those of all
    (torch/distributed/_functional_collectives.py: `all_gather_tensor`, `_maybe_view_chunk_cat`); backward each rank
    takes its own part of the gradient, and sends nothing."""
    if not _gathers_logits(d):
        return part
    n = float(d.tokens * vocab * d.tp)
    gather = collective("logits_all_gather", "all_gather", n * d.act_bytes, F)
    join = memory_op("logits_join", F, "copy", n, 2 * n * d.act_bytes, d.act, kernel="cat")
    held = part.forward_bytes + 2 * n * d.act_bytes  # gathered, and joined
    return replace(part, forward=(*part.forward, gather, join), forward_bytes=held)


def _capped(d: Dims, part: Operator, vocab: int) -> Operator:
    """The output matrix with c·tanh(logits / c) behind it (Gemma 2, arXiv 2408.00118, section 2): division, tanh and
    product, two accesses each, the tanh kept; backward product (2), tanh (3), division (2). One pass where a
    compiler joins chains. Fused and chunked losses do it on the way (Liger's `softcap`).
    """
    n, e = float(d.tokens * vocab), d.act_bytes
    (ahead, kernels), back = ((2, 1), (3, 1)) if d.framework.fuses_chains else ((6, 3), (7, 3))
    cap = memory_op("logit_softcap", F, "elementwise", n, ahead * e * n, d.act, kernels)
    uncap = memory_op("logit_softcap_backward", I, "elementwise", n, back[0] * e * n, d.act, back[1])
    saved = (*part.saved, Saved("capped logits' tanh", e * n))
    return replace(part, forward=(*part.forward, cap), backward=(uncap, *part.backward), saved=saved)


def _unaligned(part: Operator, alignment: int) -> Operator:
    """The part with its matmuls off the fast kernels."""

    def slow(program: Program) -> Program:
        return tuple(
            replace(i, alignment=alignment) if isinstance(i, Compute) and i.kind == "gemm" else i for i in program
        )

    return replace(part, forward=slow(part.forward), backward=slow(part.backward))


def cross_entropy(d: Dims, vocab: int, kernel: str = "unfused") -> Operator:
    """Loss over `vocab` logits a token on this rank; its all-reduces over tp are of one fp32 number a token.

    Unfused: logits to fp32 (e+4), maximum (4), subtract (8), exponential (8), sum (4), divide (8), of which
    the fp32 softmax stays: 4·s·b·v/t (Korthikanti 2022, section 4.3); backward subtracts one at the target,
    scales (8) and converts (4+e); torch's own writes a dense gradient of the loss before (4) and reads it back.
    Where a rank has all logits, torch's forward is one kernel (`log_softmax`), and these bytes only name the points of
    a profile that measured the loss as a whole. Transient: the dense gradient and the logits' own,
    2·tokens·vocab·4. Megatron's works in place, so that beside the fp32 logits, which become the softmax and then the
    gradient, there are only the 16-bit ones, or their gradient: 6
    bytes a logit at the most for torch's 12 (core/tensor_parallel/cross_entropy.py). nanotron's holds the fp32 logits
    while it makes the softmax, 8 a logit, and only then works in place. Megatron's in compiled parts (native) moves 16
    bytes in place of 32, but makes the gradient from a copy of the softmax. Compiled by itself: logits read once (e),
    and kept; backward reads them and writes their gradient (2e). Fused: logits read twice, gradient written over them
    (3e), later scaled in place (2e).
    """
    n, e = float(d.tokens * vocab), d.act_bytes
    forward: list[Item] = []
    if kernel == "fused":
        forward.append(memory_op("cross_entropy", F, "cross_entropy", n, 3 * e * n, d.act, 2))
        forward += _reductions(d, 1)
        backward = memory_op("cross_entropy_backward", I, "cross_entropy", n, 2 * e * n, d.act, 1)
        saved = Saved("logits gradient", e * n)
        return Operator("cross_entropy", tuple(forward), (backward,), (saved,), forward_bytes=0.0, backward_bytes=0.0)
    native = d.framework.native_loss if kernel == "native" else None
    loss = d.framework.loss if native is None else native
    copy = 0.0 if e == FP32_BYTES else e + FP32_BYTES
    moved = ((copy if loss.copies else 0.0) + loss.reads * e + loss.forward_bytes) * n
    whole = loss.log_softmax and d.tp == 1
    found = memory_op("cross_entropy", F, "cross_entropy", n, moved, d.act, loss.forward_kernels)
    forward.append(replace(found, runs=forward_kernels(d, vocab, loss.forward_kernels) if whole else ()))
    forward += [*_per_token(d, F, loss.forward_token_kernels), *_reductions(d, loss.reductions)]
    zeros = 2 * e if d.framework.returns_logits else 0.0  # written, and read by the kernel that adds to them
    back = (loss.backward_bytes + loss.backward_reads * e + zeros + (copy if loss.copies else e)) * n
    backward = memory_op(
        "cross_entropy_backward", I, "cross_entropy", n, back, d.act, loss.backward_kernels + bool(zeros)
    )
    if whole:
        backward = replace(backward, runs=backward_kernels(d, vocab, backward.kernels, zeros * n))
    kept_logits = loss.keeps == "logits"
    saved = Saved("logits", e * n) if kept_logits else Saved("log-softmax in fp32", FP32_BYTES * n)
    held = (0.0, e + zeros / 2) if kept_logits else _held_beside_softmax(loss, d, e)
    return Operator(
        "cross_entropy",
        tuple(forward),
        (*_per_token(d, I, loss.backward_token_kernels), backward),
        (saved,),
        forward_bytes=held[0] * n,
        backward_bytes=held[1] * n,
    )


def _widened_logits(d: Dims, vocab: int) -> tuple[Item, ...]:
    """The fp32 copy of the logits that a model under autocast returns (`Framework.widens_logits`)."""
    if not (d.framework.widens_logits and d.returns_wide):
        return ()
    n = float(d.tokens * vocab)
    return (memory_op("returned_logits", F, "cast", n, (d.act_bytes + FP32_BYTES) * n, d.act),)


def _metric_losses(d: Dims, vocab: int) -> tuple[Item, ...]:
    """Torch's cross-entropy of the 16-bit logits, once for each metric: a copy in fp32, and their log-softmax.

    The trainer computes them behind the backward; here they stand before it, which takes the same time.
    """
    n, times = float(d.tokens * vocab), d.framework.metric_losses
    if not times:
        return ()
    copy = memory_op("metric_logits", F, "cast", n * times, (d.act_bytes + FP32_BYTES) * n * times, d.act, times)
    kernel = torch_softmax(vocab, FP32_BYTES)
    softmax = memory_op("metric_losses", F, "softmax", n * times, 2 * FP32_BYTES * n * times, "fp32", times, kernel)
    return (copy, softmax) if d.act_bytes < FP32_BYTES else (softmax,)


def _held_beside_softmax(loss: UnfusedLoss, d: Dims, e: float) -> tuple[float, float]:
    """Bytes a logit beside the fp32 log-softmax, in the forward and in the backward; e: those of a logit."""
    narrow = e if e < FP32_BYTES else 0.0  # the logits, or their gradient, in 16 bits
    if loss.overwrites == "logits":
        return narrow, narrow
    if loss.overwrites == "copy":
        return narrow, narrow + FP32_BYTES
    if loss.overwrites == "softmax":
        return float(FP32_BYTES), narrow
    tensors = loss.split_tensors if d.tp > 1 else 2
    return e + FP32_BYTES * (tensors - (1 if narrow else 2)), FP32_BYTES * tensors


def stranded_logits_bytes(scenario: Scenario) -> float:
    """Memory of the 16-bit logits, freed before torch's loss peaks and of no use to it.

    torch keeps large segments apart (c10/cuda/CUDACachingAllocator.cpp: what exceeds 10 MiB gets one of its own). The
    fp32 copy's serves the loss's gradient, the logits' own is half as large as what log-softmax's backward asks for
    (of a loss that overwrites its softmax: as what the softmax asks for).
    """
    t, d = scenario.for_training, dims(scenario)
    loss = d.framework.loss
    replaced = loss.keeps == "softmax" and loss.overwrites != "logits"
    apart = t.cross_entropy == "unfused" and replaced and d.act_bytes < FP32_BYTES and not scores_rewards(scenario)
    return d.act_bytes * d.tokens * _of_loss(d, d.vocabulary_of(scenario.model))[1] if apart else 0.0


def _per_token(d: Dims, phase: Phase, kernels: int) -> list[Item]:
    """Kernels of the loss on one number a token: next to no time for a GPU, but not for its host."""
    if not kernels:
        return []
    moved = kernels * 2 * FP32_BYTES * d.tokens
    return [memory_op("cross_entropy_per_token", phase, "elementwise", d.tokens, moved, "fp32", kernels)]


def learns_logits(scenario: Scenario) -> bool:
    """Tell whether the loss also compares the student's distribution with a teacher's."""
    return scenario.distillation is not None and scenario.distillation.mode == "logits"


def soft_loss(scenario: Scenario, d: Dims) -> Operator:
    """T² times the divergence of the softened distributions (Hinton 2015, arXiv 1503.02531, section 2), beside the hard
    loss, over this rank's part of the vocabulary.

    Unfused, fp32, bytes a logit: the teacher's to fp32 (e+4), both by T (16), log-softmax (16), the teacher's
    probabilities (8), difference, product and sum (12); kept for backward are the student's log-softmax and the
    teacher's probabilities. Backward: difference of two distributions (12), by T (8), sum with the hard loss's
    gradient (12). Fused: both logits read twice, the gradient written onto the hard loss's (5e).
    """
    d, vocab = _of_loss(d, d.vocabulary_of(scenario.model))
    n, e = float(d.tokens * vocab), d.act_bytes
    fused = scenario.for_training.cross_entropy == "fused"
    name, moved = "distillation_loss", (5 * e if fused else 56.0 + e) * n
    forward: list[Item] = [memory_op(name, F, "cross_entropy", n, moved, d.act, 2 if fused else 10)]
    forward += _reductions(d, 1 if fused else 3)
    if fused:
        return Operator(name, tuple(forward), (), (), forward_bytes=e * n, backward_bytes=0.0)
    backward = memory_op(f"{name}_backward", I, "cross_entropy", n, 32.0 * n, d.act, 3)
    saved = Saved("softened distributions in fp32", 2 * FP32_BYTES * n)
    held = (e + 2 * FP32_BYTES) * n  # the teacher's logits, what is divided and summed
    return Operator(name, tuple(forward), (backward,), (saved,), forward_bytes=held, backward_bytes=2 * FP32_BYTES * n)


def _reductions(d: Dims, count: int) -> list[Item]:
    """The loss's reductions over the vocabulary's shards: maximum, target logit, sum of exponentials.

    `count`: how many messages they take: 3; 2, of which the second has both sums; or 1, an all-gather of all three by a
    fused loss.
    """
    if d.tp == 1:
        return []
    size = d.tokens * FP32_BYTES
    names = ("maximum", "target", "sum")
    if count == 1:
        gather = collective("loss_statistics_all_gather", "all_gather", 3 * size * d.tp, F)
        return [replace(gather, of_loss=True)]
    sizes = [size, 2 * size] if count == 2 else [size] * count
    sums = [
        collective(f"loss_{name}_all_reduce", "all_reduce", each, F) for name, each in zip(names, sizes, strict=False)
    ]
    return [replace(c, of_loss=True) for c in sums]
