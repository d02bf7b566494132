"""Shared experts that run beside the exchanges of the routed ones (`training.moe_shared_expert_overlap`).

Megatron-Core gives them a stream of their own (transformer/moe/shared_experts.py: SharedExpertMLP). Its all-to-all
dispatcher issues their first matmul and the activation behind the exchange that takes tokens to their experts, and
their second matmul behind the one home (token_dispatcher.py: `dispatch_postprocess`, `combine_postprocess`); backwards
likewise, since an exchange's node of the graph is made the first to run (`set_tensor_grad_fn_sequence_sr`). Gate and
sum are behind both. That they may still run when an exchange has ended is left out.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import Comm, Item, Program, Wait
from sim.models.operators import Operator

SECOND = "shared_mlp_down"  # and what is before it goes with the first exchange


def beside_exchanges(routed: tuple[Operator, ...], shared: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """The parts of routed experts with the programs of the shared ones beside their exchanges, and what is left."""
    at = next(i for i, p in enumerate(shared) if p.name == SECOND)
    groups = {"dispatch": shared[:at], "combine": shared[at : at + 1]}
    woven = tuple(_with(p, groups[p.name]) if p.name in groups else p for p in routed)
    moved = tuple(replace(p, forward=(), backward=()) for p in shared[: at + 1])
    return (*woven, *moved, *shared[at + 1 :])


def _with(part: Operator, beside: tuple[Operator, ...]) -> Operator:
    forward = tuple(i for p in beside for i in p.forward)
    backward = tuple(i for p in reversed(beside) for i in p.backward)
    return replace(part, forward=_woven(part.forward, forward), backward=_woven(part.backward, backward))


def _woven(program: Program, beside: Program) -> Program:
    """A program whose exchanges are started one behind the other, and waited for when `beside` is done."""
    last = max((n for n, i in enumerate(program) if _exchanges(i)), default=None)
    if last is None:
        return (*program, *beside)
    out: list[Item] = []
    waits: list[Wait] = []
    for n, item in enumerate(program):
        if isinstance(item, Comm) and _exchanges(item):
            item = replace(item, blocking=False, handle=f"{item.name}_beside")
            waits.append(Wait(item.handle, item.phase))
        out.append(item)
        if n == last:
            out += [*beside, *waits]
    return tuple(out)


def _exchanges(item: Item) -> bool:
    return isinstance(item, Comm) and item.kind == "all_to_all" and item.group == "ep"
