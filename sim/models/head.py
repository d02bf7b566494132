"""The head: final norm, output projection over the vocabulary, cross-entropy, all split over tensor-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.models.chunked_loss import chunked_output
from sim.models.dims import Dims, dims
from sim.models.elementwise import norm
from sim.models.embedding import table_elements
from sim.models.layer import shape_key
from sim.models.linear import linear
from sim.models.lora import frozen
from sim.models.operators import F, I, Linear, Part, collective, memory_op
from sim.models.recompute import as_block, keep_all
from sim.program import Block, Item, Phase, Saved

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario, Training

FP32_BYTES = 4.0
ALIGNED = 8  # elements of 16 bits that tensor cores load at once (cuBLAS's alignment of 16 bytes)


def head_block(scenario: Scenario) -> Block:
    """Final norm, `[tokens, hidden] x [hidden, vocab / tp]`, loss.

    With tied embeddings `params` leaves the output matrix out; a stage that holds the head but not the
    embedding has its own copy: add `tied_params`.
    """
    d = dims(scenario)
    parts = head_parts(scenario, d)
    if d.lora is not None:
        parts = tuple(p if p.frozen else frozen(p) for p in parts)
    key = (
        f"head {shape_key(scenario, d)} vocab={scenario.model.padded_vocab(d.tp)} "
        f"loss={_training(scenario).cross_entropy}"
        + (" and the teacher's" if learns_logits(scenario) else "")
        + (" frozen" if d.lora else "")
    )
    return as_block("head", key, parts, keep_all(parts))


def tied_params(scenario: Scenario) -> int:
    """Elements of the matrix that embedding and output share on one rank; 0 where they are not tied."""
    return table_elements(scenario) if scenario.model.tied_embeddings else 0


def head_parts(scenario: Scenario, d: Dims) -> tuple[Part, ...]:
    """The head's operators in forward order, with what it learns from a teacher."""
    parts = hard_head_parts(scenario, d)
    return (*parts, soft_loss(scenario, d)) if learns_logits(scenario) else parts


def hard_head_parts(scenario: Scenario, d: Dims) -> tuple[Part, Part, Part]:
    """Final norm, output projection, the loss against the text's next token."""
    m = scenario.model
    vocab = m.padded_vocab(d.tp) // d.tp
    # the output projection runs in 16 bits even where the layers' matmuls are quantized
    plain = replace(d, linear=d.act, linear_bytes=d.act_bytes)
    # without tensor parallelism frameworks take an odd vocabulary as it is, and its matmuls leave the fast kernels
    name = "output_unaligned" if d.tp == 1 and m.vocab % ALIGNED else "output"
    output = linear(
        plain,
        Linear(name, "head", d.tokens, d.hidden, (vocab,), "column", save_input=d.style != "compiled"),
    )
    chunked = _training(scenario).cross_entropy == "chunked"
    if chunked:
        output = chunked_output(d, name, vocab)
    elif d.style == "megatron":  # its own output layer hands autograd an empty gradient of the matrix's shape
        output = replace(output, backward_bytes=output.backward_bytes + d.act_bytes * vocab * d.hidden)
    if m.tied_embeddings:
        output = replace(output, params=0, frozen=0)
    final = norm(d, "final_norm", m.norm, d.rows, d.hidden, m.bias)
    kept = tuple(s._replace(part="head") for s in final.saved)
    loss = Part("cross_entropy") if chunked else cross_entropy(scenario, d, vocab)
    return replace(final, saved=kept), output, loss


def cross_entropy(scenario: Scenario, d: Dims, vocab: int) -> Part:
    """Loss over `vocab` logits a token on this rank; its all-reduces over tp are of one fp32 number a token.

    Unfused: logits to fp32 (e+4), maximum (4), subtract (8), exponential (8), sum (4), divide (8), of which
    the fp32 softmax stays: 4·s·b·v/t (Korthikanti 2022, section 4.3); backward subtracts one at the target,
    scales (8) and converts (4+e); torch's own writes a dense gradient of the loss before (4) and reads it
    back. Transient: that and the logits' own gradient, 2·tokens·vocab·4. Megatron's works in place, so that beside the
    fp32 logits, which become the softmax and then the gradient, there are only the 16-bit ones, or their gradient: 6
    bytes a logit at the most for torch's 12 (core/tensor_parallel/cross_entropy.py). Fused: logits read twice, gradient
    written over them (3e), later scaled in place (2e).
    """
    n, e = float(d.tokens * vocab), d.act_bytes
    fused = _training(scenario).cross_entropy == "fused"
    forward: list[Item] = []
    if fused:
        forward.append(memory_op("cross_entropy", F, "cross_entropy", n, 3 * e * n, d.act, 2))
        forward += _reductions(d, 1)
        backward = memory_op("cross_entropy_backward", I, "cross_entropy", n, 2 * e * n, d.act, 1)
        saved = Saved("head", "logits gradient", e * n, False)
        return Part("cross_entropy", tuple(forward), (backward,), (saved,), forward_bytes=0.0, backward_bytes=0.0)
    copy = 0.0 if e == FP32_BYTES else e + FP32_BYTES
    compiled, megatron = d.style == "compiled", d.style == "megatron"
    moved = (e + e + 4 if compiled else copy + 32) * n
    kernels = (3, 1) if compiled else (6, 2) if megatron else (7, 4)
    forward.append(memory_op("cross_entropy", F, "cross_entropy", n, moved, d.act, kernels[0]))
    forward += [*_per_token(d, F), *_reductions(d, 3)]
    back = (4 + e if compiled else (8 if megatron else 16) + copy) * n
    backward = memory_op("cross_entropy_backward", I, "cross_entropy", n, back, d.act, kernels[1])
    saved = Saved("head", "log-softmax in fp32", FP32_BYTES * n, False)
    held = (e + (FP32_BYTES if copy else 0.0), 2 * FP32_BYTES)
    if megatron:
        held = (e, e) if copy else (0.0, 0.0)
    return Part(
        "cross_entropy",
        tuple(forward),
        (*_per_token(d, I), backward),
        (saved,),
        forward_bytes=held[0] * n,
        backward_bytes=held[1] * n,
    )


def stranded_logits_bytes(scenario: Scenario) -> float:
    """Memory of the 16-bit logits, freed before torch's loss peaks and of no use to it.

    torch keeps large segments apart (c10/cuda/CUDACachingAllocator.cpp: what exceeds 10 MiB gets one of its own). The
    fp32 copy's serves the loss's gradient, the logits' own is half as large as what log-softmax's backward asks for.
    """
    t, d = _training(scenario), dims(scenario)
    apart = t.cross_entropy == "unfused" and d.style != "megatron" and d.act_bytes < FP32_BYTES
    return d.act_bytes * d.tokens * scenario.model.padded_vocab(d.tp) / d.tp if apart else 0.0


def _per_token(d: Dims, phase: Phase) -> list[Item]:
    """What Megatron's loss launches on one number a token: next to no time for a GPU, but not for its host.

    Forward: targets' mask (3), their place in this shard (4), their logits (4), logarithm and difference (2), mean over
    the text's mask and over replicas (6); backward: the target's one subtracted (6), the mean's gradient (3)
    (megatron/mpu/cross_entropy.py, `loss_func` in pretrain_gpt.py).
    """
    if d.style != "megatron":
        return []
    kernels = 19 if phase is F else 9
    moved = kernels * 2 * FP32_BYTES * d.tokens
    return [memory_op("cross_entropy_per_token", phase, "elementwise", d.tokens, moved, "fp32", kernels)]


def learns_logits(scenario: Scenario) -> bool:
    """Whether the loss also compares the student's distribution with a teacher's."""
    return scenario.distillation is not None and scenario.distillation.mode == "logits"


def soft_loss(scenario: Scenario, d: Dims) -> Part:
    """T² times the divergence of the softened distributions (Hinton 2015, arXiv 1503.02531, section 2), beside the hard
    loss, over this rank's part of the vocabulary.

    Unfused, fp32, bytes a logit: the teacher's to fp32 (e+4), both by T (16), log-softmax (16), the teacher's
    probabilities (8), difference, product and sum (12); kept for backward are the student's log-softmax and the
    teacher's probabilities. Backward: difference of two distributions (12), by T (8), sum with the hard loss's
    gradient (12). Fused: both logits read twice, the gradient written onto the hard loss's (5e).
    """
    n, e = float(d.tokens * scenario.model.padded_vocab(d.tp) // d.tp), d.act_bytes
    fused = _training(scenario).cross_entropy == "fused"
    name, moved = "distillation_loss", (5 * e if fused else 56.0 + e) * n
    forward: list[Item] = [memory_op(name, F, "cross_entropy", n, moved, d.act, 2 if fused else 10)]
    forward += _reductions(d, 1 if fused else 3)
    if fused:
        return Part(name, tuple(forward), (), (), forward_bytes=e * n, backward_bytes=0.0)
    backward = memory_op(f"{name}_backward", I, "cross_entropy", n, 32.0 * n, d.act, 3)
    saved = Saved("head", "softened distributions in fp32", 2 * FP32_BYTES * n, False)
    held = (e + 2 * FP32_BYTES) * n  # the teacher's logits, what is divided and summed
    return Part(name, tuple(forward), (backward,), (saved,), forward_bytes=held, backward_bytes=2 * FP32_BYTES * n)


def _reductions(d: Dims, count: int) -> list[Item]:
    """Maximum, target logit and sum of exponentials over the vocabulary's shards; one message when fused."""
    if d.tp == 1:
        return []
    size = d.tokens * FP32_BYTES
    names = ("maximum", "target", "sum")
    if count == 1:
        return [collective("loss_statistics_all_gather", "all_gather", 3 * size * d.tp, F)]
    return [collective(f"loss_{name}_all_reduce", "all_reduce", size, F) for name in names[:count]]


def _training(scenario: Scenario) -> Training:
    assert scenario.training is not None
    return scenario.training
