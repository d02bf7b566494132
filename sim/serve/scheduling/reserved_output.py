"""How much of the output that running requests will still write is kept free when another is admitted."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from sim.serve.scheduling.sequences import Sequence

FALLING_STEPS = 600  # SGLang, global_config.py: default_new_token_ratio_decay_steps
LESS_CONSERVATIVE = 0.3  # SGLang, server_args.py: schedule_conservativeness with enable_dp_attention
RETRACT_STEPS = 20  # of tokens for each sequence that SGLang adds to what was decoded; retract_decode_steps


class ReservedOutput(Struct):
    """A share of the remaining output: `first`, which falls to `least` in `FALLING_STEPS` iterations that add tokens
    (SGLang's new_token_ratio, srt/managers/scheduler.py); equal ones stay. Where `SglangScheduler` preempts,
    it rises to what the others have written of their output (schedule_batch.py, retract_decode); an idle server begins
    again."""

    first: float = 0.0
    least: float = 0.0
    begin: float = 0.0
    steps: int = 0  # since `begin`

    @property
    def share(self) -> float:
        """The share now."""
        return max(self.least, self.begin - self.steps * (self.first - self.least) / FALLING_STEPS)

    def of(self, part: float) -> ReservedOutput:
        """So many times the share, as it begins: at first at most all output, and as much of that at least as before
        (SGLang, managers/scheduler.py: init_new_token_ratio, min_new_token_ratio)."""
        first = min(1.0, part * self.first)
        least = first * self.least / self.first if self.first else 0.0
        return ReservedOutput(first, least, first)

    def restart(self) -> None:
        """Begin again with the share `first`."""
        self.begin, self.steps = self.first, 0

    def retracted(self, running: Iterable[Sequence], written: int) -> None:
        """Raise the share after preemptions, to the part of their output that the `running` sequences have written."""
        left = list(running)
        asked = sum([s.request.output_tokens for s in left])
        self.begin, self.steps = min(1.0, (written + RETRACT_STEPS * len(left)) / max(1, asked)), -1
