"""The seconds between one output of a request and its next, counted as iterations end.

An output is what an iteration gives a request: a token, or with drafts those of them that were right and one more,
which a client gets in one piece (vLLM, benchmarks/lib/endpoint_request_func.py, takes the time between two pieces).
"""

from __future__ import annotations

from array import array

from msgspec import Struct, field


def _numbers() -> array[float]:
    return array("d")


class OutputGaps(Struct):
    """Gaps of one replica's requests. Of a request they add up to the time from its first output to its last."""

    seconds: array[float] = field(default_factory=_numbers)
    outputs: list[int] = field(default_factory=list)  # after each of `seconds`
    runs: list[tuple[array[float], int]] = field(default_factory=list)  # ends of iterations, outputs of each
    lost: array[float] = field(default_factory=_numbers)  # of the above, each of one output that was taken back

    def add(self, seconds: float, outputs: int) -> None:
        """Count `outputs` outputs, each `seconds` after its request's previous one."""
        if self.seconds and self.seconds[-1] == seconds:
            self.outputs[-1] += outputs
        else:
            self.seconds.append(seconds)
            self.outputs.append(outputs)
