"""Read the parts of a serving iteration that were measured on a real engine.

They are blocks `serve MODEL | PART a=… b=…` (phase forward) of a profile, which `calibrate.serving.measure` and
`calibrate.imports` write; MODEL has the number of tensor-parallel ranks and, where kernels alone were measured, their
number format. All attention is that of one layer. Parts and their sizes:

- `rest` (tokens): everything except the attention cores and the head, all layers together, messages between ranks
  included; or `dense` (tokens), the same without messages between ranks and without routed experts;
- `head` (tokens whose logits are wanted): output matrix and what follows it (in older profiles a part of `rest`);
- `experts` (tokens, experts that any of them chose): routed experts of one layer, router included; those of a model on
  several ranks are experts that the ranks split (`SPLIT`), those of the same model on one rank are whole;
- `prefill` (chunk, tokens before it) and `decode` (sequences, tokens that each sees): attention cores alone;
- `check4`: as `decode`, where each sequence has four tokens, of which three are drafted;
- `mixed` (chunk, tokens before it, sequences, tokens that each sees): a prompt's and single tokens' attention together;
- `unequal` (chunk, sequences, of which so many see the most tokens, these tokens, those that the others see): likewise
  for sequences of two lengths behind no cached prompt; chunk 0: without a prompt;
- `engine`: the time between two forwards, where it was measured.

Between measured sizes seconds are linear in each size, which is how kernels that read a cache or weights behave; of a
chunk alone they are a power, for its attention grows with its square (`NestedGrid`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from sim.core.errors import InputError
from sim.prices.nested_grid import NestedGrid

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.prices.profile import Profile

_KEY = re.compile(r"(\w+)((?: [a-e]=\d+)+)")
SPLIT = "split_experts"
Points = dict[tuple[int, ...], float]


class PartForm(NamedTuple):
    """How many sizes a part has, in which order they are interpolated (the first is the outermost), and of which of
    them seconds are a power.

    Not all combinations of sizes are measured. Of the outermost size all values should have nearly the same others.
    """

    order: tuple[int, ...]
    power: int | None = None


_BY_TOKENS = PartForm((0,))
_ATTENTION = PartForm((0, 1))
FORMS = {
    "rest": _BY_TOKENS,
    "dense": _BY_TOKENS,
    "head": _BY_TOKENS,
    "engine": _BY_TOKENS,
    "experts": PartForm((1, 0)),
    SPLIT: PartForm((1, 0)),
    "prefill": PartForm((0, 1), power=0),
    "decode": _ATTENTION,
    "mixed": PartForm((2, 0, 3, 1)),
    "unequal": PartForm((0, 1, 2, 3, 4)),
}


def model_key(m: ModelConfig, tp: int = 1, variant: str = "") -> str:
    """Return a name with every size that determines the measured engine's computation on `tp` ranks, in a `variant` of
    number formats (`bf16`, or `bf16-kvfp8` with the cache in fp8)."""
    e = m.moe
    experts = "" if e is None else f" experts={e.top_k}/{e.experts}+{e.shared_experts} of {e.ffn} from {e.dense_layers}"
    experts += "" if e is None or e.latent is None else f" latent={e.latent}"
    # The name has every size that changes a kernel's shape, so the profile of another model is never used.
    return (
        f"serve layers={m.layers} hidden={m.hidden} heads={m.heads} kv_heads={m.kv_heads} head_dim={m.head_dim} "
        f"ffn={m.ffn} vocab={m.vocab} mlp={m.mlp} norm={m.norm}{experts}"
        + (f" tp={tp}" if tp > 1 else "")
        + (f" variant={variant}" if variant else "")
    )


def part_key(m: ModelConfig, part: str, *sizes: int, tp: int = 1, variant: str = "") -> str:
    """Return the name of one measured part in a profile."""
    named = zip("abcde", (*sizes, *(0,) * (2 - len(sizes))), strict=False)
    return f"{model_key(m, tp, variant)} | {part} {' '.join(f'{name}={size}' for name, size in named)}"


def check_part(queries: int) -> str:
    """Return the name of the attention core of sequences with `queries` tokens each, drafted tokens included."""
    return f"check{queries}"


class MeasuredParts(Struct):
    """Hold seconds by part and sizes."""

    points: dict[str, Points]
    grids: dict[str, NestedGrid] = {}
    rates: NestedGrid | None = None  # see `unequal`

    def seconds(self, part: str, *sizes: float) -> float:
        """Return the seconds of a part of these sizes; see the module's docstring."""
        form = FORMS.get(part, _ATTENTION)
        if (grid := self.grids.get(part)) is None:
            rows = {tuple([p[i] for i in form.order]): s for p, s in self.points[part].items()}
            power = None if form.power is None else form.order.index(form.power)
            grid = self.grids[part] = NestedGrid(rows, power)
        return grid.at([sizes[i] for i in form.order])

    @property
    def kernels_alone(self) -> bool:
        """Tell whether messages between ranks and routed experts are no part of what depends on tokens alone."""
        return "dense" in self.points

    def rest(self, tokens: int) -> float:
        """Return the seconds of embedding and all layers for `tokens` tokens, without the attention cores."""
        return self.seconds("dense" if self.kernels_alone else "rest", tokens)

    def head(self, samples: int) -> float:
        """Return the seconds of the head for `samples` tokens; 0 if they are a part of `rest`."""
        return self.seconds("head", samples) if "head" in self.points else 0.0

    def check(self, sequences: int, kv: int, queries: int) -> float:
        """Return the seconds of one layer's attention core where drafted tokens are checked: `queries` tokens of each
        sequence. Where that was not measured, sequences attend one by one, as prompts do."""
        part = check_part(queries)
        if part in self.points:
            return self.seconds(part, sequences, kv)
        return self.seconds("prefill", queries, max(0, kv - queries)) * sequences

    def joint(self, prefills: tuple[tuple[int, int, int], ...], sequences: int, kv: float) -> float:
        """Return the seconds of one layer's attention in one call: of prompt chunks (tokens, those that the last one
        sees, how many are alike) and of `sequences` single tokens that see `kv` each.

        Several chunks are as one of all their tokens that sees as many keys: Σ tokens · (before + tokens / 2). Short
        prompts see fewer than one chunk of their tokens would alone; as much as it would take more behind what it lacks
        (for products are linear in what is cached), they take less.
        """
        if not prefills:
            return self.seconds("decode", sequences, kv)
        chunk = sum([q * alike for q, _, alike in prefills])
        keys = sum([q * alike * (seen - q / 2) for q, seen, alike in prefills])
        before = keys / chunk - chunk / 2
        if before >= 0.0:
            return self._with_prompt(chunk, before, sequences, kv)
        alone = self._with_prompt(chunk, 0.0, sequences, kv)
        longest = max([q for q, _, _ in prefills])
        least = self._with_prompt(longest, 0.0, sequences, kv)
        return max(least, 2.0 * alone - self._with_prompt(chunk, -before, sequences, kv))

    def _with_prompt(self, chunk: int, before: float, sequences: int, kv: float) -> float:
        if not sequences:
            return self.seconds("prefill", chunk, before)
        return self.seconds("mixed", chunk, before, sequences, kv)

    def unequal(self, chunk: int, sequences: int, long: float) -> float:
        """Return how far sequences of unequal length lie between the seconds of as many of their mean length (0) and
        those of their longest (1); 0 where that was not measured. `long`: what part of two lengths has the longer,
        (mean - shortest) / (longest - shortest)."""
        if not self.tells_lengths:
            return 0.0
        if self.rates is None:
            rows = Points()
            for (prompt, n, longer, most, least), seconds in self.points["unequal"].items():
                if not 0 < longer < n:
                    continue  # all are alike
                mean = (longer * most + (n - longer) * least) / n
                at_mean, at_most = (
                    self.seconds("mixed", prompt, 0, n, kv) if prompt else self.seconds("decode", n, kv)
                    for kv in (mean, most)
                )
                if at_most > at_mean:
                    rows[prompt, n, round(1000 * longer / n)] = (seconds - at_mean) / (at_most - at_mean)
            self.rates = NestedGrid(rows)
        return self.rates.at([chunk, sequences, 1000 * long])

    @property
    def mixes(self) -> bool:
        """Tell whether a prompt's attention and single tokens' were measured in one call."""
        return "mixed" in self.points

    @property
    def tells_lengths(self) -> bool:
        """Tell whether sequences of unequal length were measured."""
        return "unequal" in self.points

    @property
    def engine(self) -> float:
        """Return the seconds between two forwards; 0 if they were not measured."""
        return next(iter(self.points.get("engine", {}).values()), 0.0)


def measured_parts(profile: Profile, m: ModelConfig, tp: int = 1, variant: str = "") -> MeasuredParts | None:
    """Return the profile's parts for this model on `tp` ranks; None if one is missing."""
    models = measured_models(profile)
    found = dict(models.get(model_key(m, tp, variant), {}))
    if tp > 1:
        if "experts" in found:
            found[SPLIT] = found.pop("experts")
        # Whole experts are the same kernels on any number of ranks.
        found |= {k: v for k, v in models.get(model_key(m, 1, variant), {}).items() if k == "experts"}
    # With a missing part an iteration would be half measured and half modelled.
    complete = {"prefill", "decode"} <= found.keys() and ("dense" in found or {"rest", "engine"} <= found.keys())
    return MeasuredParts(found) if complete else None


@lru_cache(maxsize=4)
def measured_models(profile: Profile) -> dict[str, dict[str, Points]]:
    """Return the measured parts of all models, layouts and formats of a profile, by `model_key`."""
    models: dict[str, dict[str, Points]] = {}
    for block in profile.blocks:
        model, _, named = block.key.partition(" | ")
        if not model.startswith("serve ") or (match := _KEY.fullmatch(named)) is None:
            continue
        sizes, wanted = match[2].split(), len(FORMS.get(match[1], _ATTENTION).order)
        if len(sizes) < wanted:
            where = f"profile {profile.name!r}: blocks: {match[1]}"
            raise InputError(f"{where}: found {len(sizes)} sizes ({match[2].strip()}); allowed: {wanted}")
        part = models.setdefault(model, {}).setdefault(match[1], {})
        part[tuple([int(size[2:]) for size in sizes[:wanted]])] = block.seconds
    return models
