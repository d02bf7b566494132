"""Times every ATen operator of a real step, by name and phase, below autograd as captures record them."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from calibrate.capture.gpu.composites import explicit_calls_of
from calibrate.capture.gpu.in_place import InPlace
from calibrate.capture.recorder import NO_OPERATOR, describe, launches

Key = tuple[str, str]  # operator and phase
VIEWS = "views and allocations"


class OperatorTimes(TorchDispatchMode):
    """Records the seconds and the number of each operator: on a CPU CPU time, on a GPU time between events.

    `phase` is set by the caller to forward, backward, clip or optimizer.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.phase = device, "forward"
        self.in_place = InPlace()
        self.counts: Counter[Key] = Counter()
        self._cpu: dict[Key, float] = defaultdict(float)
        self._gpu: list[tuple[Key, torch.cuda.Event, torch.cuda.Event]] = []

    def seconds(self) -> dict[Key, float]:
        """Return the seconds of each operator and phase so far."""
        found = dict(self._cpu)
        if self._gpu:
            torch.cuda.synchronize()
        for key, begin, end in self._gpu:
            found[key] = found.get(key, 0.0) + begin.elapsed_time(end) * 1e-3
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, took = kwargs or {}, 0.0
        func = self.in_place.form(func, args)
        if calls := explicit_calls_of(func):
            with self:
                return calls(*args, **kwargs)
        if self.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = func(*args, **kwargs)
            end.record()
        else:
            start = time.process_time()
            out = func(*args, **kwargs)
            took = time.process_time() - start
        self.in_place.ran(func, out)
        name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
        if name.startswith(NO_OPERATOR):
            return out
        tensors = [
            [(describe(x), x.untyped_storage()._cdata) for x in tree_leaves(t) if isinstance(x, torch.Tensor)]
            for t in ((args, kwargs), out)
        ]
        key = (name if launches(func, name, *tensors) else VIEWS, self.phase)
        self.counts[key] += 1
        if self.device == "cuda":
            self._gpu.append((key, begin, end))
        else:
            self._cpu[key] += took
        return out


def operator_times(device: str, steps: int, run: Callable[[OperatorTimes], None]) -> list[dict[str, Any]]:
    """Return each operator's median seconds over `steps` runs, longest first, as a measured run lists them."""
    samples: dict[Key, list[float]] = defaultdict(list)
    counts: Counter[Key] = Counter()
    for _ in range(steps):
        times = OperatorTimes(device)
        with times:
            run(times)
        counts = times.counts
        for key, seconds in times.seconds().items():
            samples[key].append(seconds)
    rows = sorted(((statistics.median(s), key) for key, s in samples.items()), reverse=True)
    return [{"operator": k[0], "phase": k[1], "seconds": s, "count": counts[k]} for s, k in rows]
