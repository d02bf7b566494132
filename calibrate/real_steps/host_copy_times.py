"""Times copies of offloaded activations to host memory and back, by themselves, for the paired calibration."""

from __future__ import annotations

import torch

from calibrate.parallel.runner import Runner
from calibrate.real_steps.gradient_times import Timed

REPEATS = 3


def time_copies(runner: Runner) -> list[Timed]:
    """Time each kind and size of copy that the last step made; nothing without offload."""
    stream, out = runner.host_stream, list[Timed]()
    for kind, size in sorted({(c.kind, c.bytes) for c in stream.copies if c.bytes}):
        device = torch.zeros(size, dtype=torch.uint8, device=runner.device)
        for number in range(REPEATS):
            start = runner.pipeline.now()
            if kind == "offload":
                stream.copy([device], None)()
            else:
                (host,) = stream.copy([device], None)()
                start = runner.pipeline.now()
                stream.copy([host], [device])()
            out.append(Timed(kind, 1, runner.place.rank, number, size, start, runner.pipeline.now()))
    return out
