"""What a clock asks of the prices of a replica's iterations."""

from __future__ import annotations

from typing import Protocol

from sim.serve.costs import Load


class Prices(Protocol):
    """`sim.serve.costs.IterationCosts` and what stands around it: slow ranks, a draft beside the model."""

    @property
    def stages(self) -> tuple[object, ...]:
        """Pipeline stages."""
        ...

    def stage_seconds(self, load: Load) -> tuple[float, ...]:
        """Seconds of an iteration on every stage."""
        ...

    def decode_run(self, decodes: int, first_kv: int, steps: int) -> list[float]:
        """Seconds of `steps` iterations of `decodes` single tokens on one stage, the first seeing `first_kv` in all."""
        ...

    def send_s(self, stage: int, tokens: int) -> float:
        """Seconds to hand an iteration of so many tokens from a stage to the next."""
        ...
