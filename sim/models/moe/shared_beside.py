"""Shared experts that run beside the exchanges of the routed ones (`training.moe_shared_expert_overlap`).

Megatron-Core gives them a stream of their own (transformer/moe/shared_experts.py: SharedExpertMLP). Its dispatchers, of
NCCL's all-to-all and of libraries, issue their first matmul and the activation behind the exchange that takes tokens to
their experts, and their second matmul behind the one home (token_dispatcher.py: `dispatch_postprocess`, or
`token_dispatch` of MoEFlexTokenDispatcher since 0.18, whose shared experts wait for what was issued before it alone;
`combine_postprocess`); backwards likewise, since an exchange's node of the graph is made the first to run
(`set_tensor_grad_fn_sequence_sr`). Gate and sum are behind both. That they may still run when an exchange has ended is
left out.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import Item, Program, Wait, exchanges_tokens
from sim.models.operators import Operator

Operators = tuple[Operator, ...]


def beside_exchanges(
    there: Operator, back: Operator, shared: Operators, second: int
) -> tuple[Operator, Operator, Operators]:
    """The exchanges of routed experts with the programs of the `shared` ones beside them, and what is left of these:
    what they keep, and their gate and sum. `there` takes tokens to their experts, `back` takes them home; `second`: the
    place of the shared experts' second matmul."""
    moved = tuple(replace(p, forward=(), backward=()) for p in shared[: second + 1])
    left = (*moved, *shared[second + 1 :])
    return _with(there, shared[:second]), _with(back, shared[second : second + 1]), left


def _with(part: Operator, beside: tuple[Operator, ...]) -> Operator:
    forward = tuple(i for p in beside for i in p.forward)
    backward = tuple(i for p in reversed(beside) for i in p.backward)
    return replace(part, forward=_woven(part.forward, forward), backward=_woven(part.backward, backward))


def _woven(program: Program, beside: Program) -> Program:
    """A program whose exchanges are started one behind the other, and waited for when `beside` is done."""
    last = max((n for n, i in enumerate(program) if exchanges_tokens(i)), default=None)
    if last is None:
        return (*program, *beside)
    out: list[Item] = []
    waits: list[Wait] = []
    for n, item in enumerate(program):
        if exchanges_tokens(item):
            item = replace(item, blocking=False, handle=f"{item.name}_beside")
            waits.append(Wait(item.handle, item.phase))
        out.append(item)
        if n == last:
            out += [*beside, *waits]
    return tuple(out)
