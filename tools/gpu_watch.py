"""Samples a GPU's power and clock while something runs on it (nvidia-ml-py)."""

from __future__ import annotations

import statistics
import threading
import time

SAMPLE_S = 0.02


class Watch:
    """Samples power in W and multiprocessor clock in MHz of GPU 0 until it is stopped."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._samples: list[tuple[float, float, float]] = []  # time, W, MHz
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def limit_w(self) -> float:
        """The power limit."""
        return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu)) / 1e3

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            power = self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3
            clock = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            self._samples.append((time.perf_counter(), power, clock))

    def stop(self, since: float) -> tuple[float, float]:
        """Stop, and return mean power and clock since a time of `time.perf_counter`.

        Raises:
            ValueError: if nothing was sampled since.
        """
        self._stop.set()
        self._thread.join()
        power, clock = zip(*(s[1:] for s in self._samples if s[0] >= since), strict=True)
        return statistics.fmean(power), statistics.fmean(clock)
