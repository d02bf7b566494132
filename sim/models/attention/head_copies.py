"""Copies of queries, keys and values that a framework's attention makes before its kernels, and of their gradients."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Phase, Program
from sim.models.attention.core import Core
from sim.models.attention.score_kernels import scored_bytes
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, keeping, memory_op
from sim.models.precision.casts import cast

Kind = Literal["copy", "permute"]
WIDEST_GROUPED = 256  # numbers of a head


def repeated(d: Dims, own: Core) -> Core:
    """The core of `own`, with a key and value head for each query head where the framework copies them."""
    if own.masked and own.kv_heads == 1 and d.code.broadcasts_keys:
        return own
    copies = own.masked or (d.framework.repeats_fused_keys if d.fused_attention else d.framework.repeats_keys)
    copies = copies or _not_grouped(d, own)
    return replace(own, kv_heads=own.heads, repeats=own.heads // own.kv_heads) if copies else own


def _not_grouped(d: Dims, own: Core) -> bool:
    """Tell whether Transformers copies keys for torch's own function, which would compute wide heads, or values of
    another width, in separate operators (transformers/integrations/sdpa_attention.py, 5.24: `use_gqa_in_sdpa`)."""
    torch_s = d.sees_masks
    return torch_s and not own.head_dim == own.v_head_dim <= WIDEST_GROUPED


def with_repeats(d: Dims, core: Core, part: Operator) -> Operator:
    """The part, with keys and values copied for every query head before it, and with the sum of their gradients behind
    it: as many reads and writes.

    Keys that are still in fp32 (`wide_keys`) are copied in it, and their copies are cast, where rope counts the casts
    of the keys themselves; backward likewise.
    """
    if core.repeats == 1:
        return part
    apart = not d.framework.fuses_chains
    return replace(
        part,
        forward=(
            _repeat(d, core, "attention_repeat", F, apart),
            *_further_casts(d, core, "attention_repeat_cast", F),
            *part.forward,
        ),
        backward=(
            *part.backward,
            *_further_casts(d, core, "attention_backward_repeat_cast", I),
            _repeat(d, core, "attention_backward_repeat", I, False),
        ),
    )


def _heads(d: Dims, core: Core) -> tuple[float, float]:
    """Elements of the keys and the values that the core's kernels read."""
    rows = float(d.batch * core.kv_len * core.kv_heads)
    return rows * core.head_dim, rows * core.v_head_dim


def _repeat(d: Dims, core: Core, name: str, phase: Phase, single: bool) -> Compute:
    """`single`: a copy that torch does not vectorize, since its input is expanded."""
    keys, values = _heads(d, core)
    whole = keys * (FP32_BYTES if core.wide_keys else d.act_bytes) + values * d.act_bytes
    made = memory_op(name, phase, "copy", keys + values, whole * (1 + 1 / core.repeats), d.act, 2)
    return replace(made, single_elements=keys + values) if single else made


def _further_casts(d: Dims, core: Core, name: str, phase: Phase) -> Program:
    if not core.wide_keys or scored_bytes(d) > d.act_bytes:
        return ()
    more = _heads(d, core)[0] * (1 - 1 / core.repeats)
    return (cast(d, name, phase, more, kernels=0, widens=phase is not F),)


def ordered_heads(d: Dims, core: Core, part: Operator, rope: bool, joined: bool) -> Operator:
    """The part, with what its batched matmuls cannot read where it lies copied into heads' order. In a token's row
    heads lie beside each other, and of several sequences torch.matmul wants all heads as one dimension (`reshape`).

    `rope`: rope brings the gradients of queries and keys back to tokens' order by its own copies. `joined`: it made
    queries and keys anew by joining two parts, in heads' order. Copies for each query head are in that order, too.
    Queries and keys that the model's code multiplies in fp32 are cast before, and their gradients behind.
    """
    if d.fused_attention or not d.framework.orders_heads:
        return part
    queries = float(d.batch * core.q_len * core.heads * core.head_dim)
    keys, values = _heads(d, core)
    wide = scored_bytes(d) > d.act_bytes and not core.wide_keys
    ahead, back = _score_casts(d, queries, keys) if wide else ((), ())
    if d.batch > 1:
        alone, size = core.repeats == 1, scored_bytes(d)
        made_anew = joined and not d.code.joins_by_tokens
        kind: Kind = "permute" if d.code.transposes_keys else "copy"
        ahead = (
            *ahead,
            *(() if made_anew else _ordered(d, "attention_order", F, [queries], size)),
            *(_ordered(d, "attention_order_keys", F, [keys], size, kind) if alone and not made_anew else ()),
            *(_ordered(d, "attention_order", F, [values], d.act_bytes) if alone else ()),
        )
        of_heads = [values / core.repeats, *([] if rope else [queries])]
        if d.code.split not in ("select", "heads"):  # whose own copies bring gradients into place
            back = (*back, *_ordered(d, "attention_backward_order", I, of_heads, d.act_bytes))
    return replace(part, forward=(*ahead, *part.forward), backward=(*part.backward, *back))


def output_copied(d: Dims, core: Operator, elements: int) -> Operator:
    """The fused core, where the framework's output of `elements` has the memory order of queries that were made anew,
    head by head: it is kept, and copied for the matmul."""
    if not d.framework.output_follows_queries or not d.fused_attention or d.code.joins_by_tokens:
        return core
    size = elements * d.act_bytes
    copy = replace(memory_op("output_copy", F, "copy", elements, 2 * size, d.act), single_elements=float(elements))
    return replace(keeping(core, "output before its copy", size), forward=(*core.forward, copy))


def _score_casts(d: Dims, queries: float, keys: float) -> tuple[Program, Program]:
    ahead = tuple(cast(d, "attention_scores_cast", F, n, widens=True) for n in (queries, keys))
    return ahead, tuple(cast(d, "attention_backward_scores_cast", I, n) for n in (queries, keys))


def _ordered(d: Dims, name: str, phase: Phase, sizes: list[float], size: float, kind: Kind = "copy") -> Program:
    """Copies of tensors; `sizes`: elements of each, of `size` bytes. Kind permute: neighbours lie in different rows."""
    elements = sum(sizes)
    made = memory_op(name, phase, kind, elements, 2 * elements * size, d.act, len(sizes))
    return (replace(made, single_elements=elements),)
