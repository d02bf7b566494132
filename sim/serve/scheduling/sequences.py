"""What a scheduler deals with: requests on their way, what an iteration does for each, and counts for the result."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from sim.serve.requests import Request


class Sequence(Struct, eq=False):
    """A request on its way. `computed` tokens are in the cache, `private` blocks are its own, `shared` of the tokens
    lie in its prefix's blocks, `swapped` are in the host's memory since it was preempted. `arrival_s`: when it was
    sent, which is later than its request's where too many others were under way."""

    request: Request
    index: int
    arrival_s: float = -1.0
    computed: int = 0
    generated: int = 0
    private: int = 0
    shared: int = 0
    swapped: int = 0
    reserved: int = 0  # blocks of its own once it has all its tokens
    remote: int = 0  # tokens that another replica has computed and holds, or will
    again: int = 0  # the last ones of these, which are computed again
    own_from: int = 0  # blocks of its prefix before those of its own that it left in the cache
    lost: int = 0  # tokens that were computed when it was preempted
    order: int = 0  # among those admitted: who runs and has a larger one is younger
    running: bool = False
    in_flight: bool = False
    reads: int | None = None  # blocks of its prefix that stay for it; None where it reads none and extends none
    ready_s: float = 0.0  # when its prefix, or all of its cache, has come from the host's memory
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    last_output_s: float = -1.0  # when it last got tokens; `output_before_s`: the time before that
    output_before_s: float = -1.0
    finish_s: float = -1.0
    first_after_s: float = 0.0  # from `first_token_s` until its client has it
    last_after_s: float = 0.0  # from `finish_s` until its client has its last token
    preemptions: int = 0

    def __post_init__(self) -> None:
        if self.arrival_s < 0:
            self.arrival_s = self.request.arrival_s

    @property
    def sent_s(self) -> float:
        """When its client has its last token."""
        return self.finish_s + self.last_after_s

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.request.prompt_tokens + self.generated - self.computed

    def next_lacks(self, block: int) -> int | None:
        """Blocks of so many tokens, none or one, that it lacks for its next token; None where its prompt is not
        computed. For a layout that is paged: in a contiguous one its blocks have room for all its tokens."""
        r, computed = self.request, self.computed
        if not self.running or not self.generated or r.prompt_tokens + self.generated - computed != 1:
            return None
        return 0 if computed < self.private * block + self.shared else 1

    @property
    def prompts(self) -> bool:
        """Whether its prompt, or what it has to compute again, is not computed."""
        return not self.generated or self.request.prompt_tokens + self.generated - self.computed > 1


class Piece(NamedTuple):
    """What an iteration does for one sequence. `drafted` of the tokens may turn out to be wrong."""

    sequence: Sequence
    tokens: int
    samples: bool
    drafted: int = 0


class Batch(NamedTuple):
    """One iteration. `ready_s`: when the blocks that it took over have been copied away. `prompts`: so many of its
    pieces, the first ones, were put together before tokens were looked at; `prompts_alone`: it adds no token to
    sequences whose prompts are computed; `padding`: tokens that it computes for nothing."""

    pieces: tuple[Piece, ...]
    ready_s: float = 0.0
    prompts: int = 0
    prompts_alone: bool = False
    padding: int = 0


class Counts(Struct):
    """What happened, for the result."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # of admitted requests, each time they are admitted for the first time
    hit_tokens: int = 0
    loaded_tokens: int = 0
    stored_tokens: int = 0
    late_tokens: int = 0  # computed for sequences that had ended
    swapped_tokens: int = 0  # out; as many come in again
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0  # of one sequence's drafted tokens each


class Limits(Struct):
    """`batch_sequences`: of one iteration, where an engine sees to it that every pipeline stage finds sequences."""

    running: int
    batch_tokens: int
    batch_sequences: int
