"""What one iteration computes, by the sizes that its price depends on."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sim.serve.scheduling.sequences import Batch


class Load(Struct, frozen=True):
    """What one iteration computes. `prefills`: (chunk, what its last token sees, how many are alike);
    `decode_kv`: tokens seen by all single tokens together; `queries`: tokens of each of `decodes`, drafted ones among
    them, which see the same cache; `pooled`: tokens of the mean replica among those that share experts, 0 where all
    have as many as this one; `adapted` of the tokens have a LoRA adapter, one of `adapters`; `lengths`: the fewest and
    the most tokens that one of `decodes` sees, equal where nobody asks (`IterationCosts.tells_lengths`)."""

    tokens: int
    decodes: int = 0
    decode_kv: int = 0
    prefills: tuple[tuple[int, int, int], ...] = ()
    samples: int = 0
    queries: int = 1
    pooled: int = 0
    adapted: int = 0
    adapters: int = 0
    lengths: tuple[int, int] = (0, 0)

    def later(self, steps: int) -> Load:
        """The same so many iterations later, in each of which all single tokens were joined by one."""
        if not steps:
            return self
        fewest, most = self.lengths
        kv = self.decode_kv + self.decodes * steps
        return replace(self, decode_kv=kv, lengths=(fewest + steps, most + steps) if most else self.lengths)

    @property
    def prompts(self) -> bool:
        """Whether it computes prompts."""
        return bool(self.prefills)

    @property
    def sequences(self) -> int:
        """Sequences that it computes for."""
        count = self.decodes
        for _, _, alike in self.prefills:
            count += alike
        return count


def load_of(batch: Batch, members: int = 0, seen: int = 0, lengths: tuple[int, int] | None = None) -> Load:
    """What an iteration computes, alike prompt chunks together; `members` more single tokens see `seen` in all, between
    the two `lengths` each. Where these are None, nobody asks for them."""
    chunks: dict[tuple[int, int], int] = {}
    decodes = samples = members
    tokens = members + batch.padding
    decode_kv = seen if members else 0
    queries, adapted, adapters = 1, 0, set()
    for sequence, count, sampled, drafted in batch.pieces:
        tokens += count
        if sequence.request.adapter:
            adapted += count
            adapters.add(sequence.request.adapter)
        if sampled:
            samples += 1 + drafted
        if count == 1 or drafted:
            decodes += 1
            decode_kv += sequence.computed + count
            if count > queries:
                queries = count
        else:
            size = count, sequence.computed + count
            chunks[size] = chunks.get(size, 0) + 1
    if lengths is not None:
        own = [x.computed + count for x, count, _, drafted in batch.pieces if count == 1 or drafted]
        own += lengths if members else ()
        lengths = (min(own), max(own)) if own else None
    prefills = tuple([(q, kv, n) for (q, kv), n in chunks.items()])
    return Load(tokens, decodes, decode_kv, prefills, samples, queries, 0, adapted, len(adapters), lengths or (0, 0))
