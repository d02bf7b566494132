"""1F1B over v stages per rank, dealt to the ranks in turn.

A stage takes N micro-batches in a row, then the rank's next stage takes the same ones: N = p is Megatron-LM's order,
depth-first; N = m is breadth-first; a last group that m leaves is smaller (Llama Team 2024, arXiv 2407.21783, section
3.3.2 and fig. 6). Rank r begins with (v−1)·N + 2·(p−1−r) forwards (Megatron-LM, `schedules.py`,
`get_pp_rank_microbatches`), then runs a forward and a backward in turn.

Bubble ratio (p−1)/(v·m) where all groups are whole and N ≥ p. In flight, in stages of 1/v of a rank's layers:
(v−1)·N + 2·(p−1−r) + 1 for m > N; with N = p 1 + (p−1)/(p·v) times the activations of 1F1B on rank 0. Without a group m
must be a multiple of p.

Megatron-LM refuses groups smaller than p, for ranks can wait for each other: a forward of a rank's later stage comes
before a backward that the forward's own input waits for. Here such lists are run dry, and where all ranks are stuck,
the first rank whose next forward has its input takes it before its backward. Some rank always can: forwards wait for
forwards alone, in one order.

Without overlap (`p2p_overlap: false`) a rank exchanges the messages of a forward and of the backward after it at once:
with both neighbours, both ways, and waits for all (Megatron-LM, `schedules.py`,
`send_forward_backward_recv_forward_backward`). With groups of p micro-batches every message then meets its receiver.

In pairs each forward of the steady phase runs at once with the backward that would follow it, so that each hides the
other's expert exchanges. A rank then leads by one forward more: else the last rank's backward would be that of the very
forward beside it. Groups of p alone (Megatron-LM, `combined_1f1b.py` and `get_pp_rank_microbatches`,
`overlap_moe_expert_parallel_comm`).

Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2 and fig. 4 (bottom), and Megatron-LM's order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

from sim.core.actions import Action, Entry, Kind, Overlap, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import actions, looped


def interleaved_1f1b(p: int, m: int, v: int, group: int | None = None) -> Schedule:
    """Groups of `group` micro-batches (None: p) go through a rank's first stage, then through its second, ..."""
    size = min(group or p, m)
    firsts = range(0, m, size)
    ranks = [_Rank(p, m, v, r, size, firsts) for r in range(p)]
    whole = size >= p and (m % size == 0 or m % size >= p)  # what Megatron-LM takes
    lists = [rank.alternating() for rank in ranks] if whole else _run_dry(ranks, p * v)
    joint = tuple(rank.steady for rank in ranks) if size == p and m % p == 0 else ()
    return looped("interleaved_1f1b", p, m, lists, v, joint)


def interleaved_in_pairs(p: int, m: int, v: int) -> Schedule:
    """Groups of p micro-batches, with the forward and the backward of each steady step as one pair."""
    ranks = [_Rank(p, m, v, r, p, range(0, m, p), more=1).pairs() for r in range(p)]
    return looped("interleaved_1f1b", p, m, ranks, v)


class _Rank:
    """A rank's forwards and its backwards, which take its stages from last to first, and how many forwards lead."""

    def __init__(self, p: int, m: int, v: int, r: int, size: int, firsts: range, more: int = 0) -> None:
        stages = range(r, v * p, p)
        groups = [range(first, min(first + size, m)) for first in firsts]

        def columns(order: range) -> tuple[list[int], list[int]]:
            taken = [(stage, i) for group in groups for stage in order for i in group]
            return [stage for stage, _ in taken], [i for _, i in taken]

        forward, backward = columns(stages), columns(stages[::-1])
        self.forwards = actions(forward[0], Kind.F, forward[1])
        self.backwards = actions(backward[0], Kind.B, backward[1])
        self.lead = min(m * v, (v - 1) * size + 2 * (p - 1 - r) + more)

    @property
    def steady(self) -> range:
        """Places in `alternating`'s list of the forwards that a backward follows in turn."""
        return range(self.lead, 2 * len(self.forwards) - self.lead, 2)

    def alternating(self) -> list[Action]:
        """The list: `lead` forwards, then a forward and a backward in turn, then backwards."""
        steady = chain.from_iterable(zip(self.forwards[self.lead :], self.backwards, strict=False))
        return [*self.forwards[: self.lead], *steady, *self.backwards[len(self.forwards) - self.lead :]]

    def pairs(self) -> list[Entry]:
        """Return `alternating`'s list with each forward and the backward after it as one entry."""
        steady = map(Overlap, self.forwards[self.lead :], self.backwards)
        return [*self.forwards[: self.lead], *steady, *self.backwards[len(self.forwards) - self.lead :]]


def _run_dry(ranks: list[_Rank], stages: int) -> list[list[Action]]:
    """The ranks' lists as they run, with messages that take no time; see the file's head for what stuck ranks do."""
    lists: list[list[Action]] = [[] for _ in ranks]
    done: set[Action] = set()
    forwards, backwards, each = [0] * len(ranks), [0] * len(ranks), len(ranks[0].forwards)

    def ready(action: Action) -> bool:
        stage, kind, i = action
        if kind is Kind.F:
            return stage == 0 or Action(stage - 1, Kind.F, i) in done
        return Action(stage, Kind.F, i) in done and (stage == stages - 1 or Action(stage + 1, Kind.B, i) in done)

    def take(r: int, action: Action) -> None:
        done.add(action)
        lists[r].append(action)
        counts = forwards if action.kind is Kind.F else backwards
        counts[r] += 1

    while True:
        moved = False
        for r, rank in enumerate(ranks):
            while (action := _next(rank, forwards[r], backwards[r])) and ready(action):
                take(r, action)
                moved = True
        if moved:
            continue
        if len(done) == 2 * each * len(ranks):
            return lists
        left = [(r, rank.forwards[n]) for r, (rank, n) in enumerate(zip(ranks, forwards, strict=True)) if n < each]
        take(*next((r, action) for r, action in left if ready(action)))


def _next(rank: _Rank, forwards: int, backwards: int) -> Action | None:
    """Return what the rank would run now: forwards until `lead` and one are ahead of its backwards, then a backward."""
    if forwards < len(rank.forwards) and forwards - backwards <= rank.lead:
        return rank.forwards[forwards]
    return rank.backwards[backwards] if backwards < len(rank.backwards) else None


def _in_groups(group: int) -> Callable[[int, int, int], Schedule]:
    return partial(interleaved_1f1b, group=group)


FORM = ScheduleForm(
    "interleaved_1f1b",
    interleaved_1f1b,
    least_stages=2,
    micro_batches_multiple=lambda p: p,
    fewest_micro_batches=lambda p: p,
    in_groups_of=_in_groups,
    in_pairs=interleaved_in_pairs,
)
