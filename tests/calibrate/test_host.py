"""What the host takes to issue a model's kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calibrate.parallel.comm import Clock, Tape  # noqa: E402
from calibrate.records import Constant  # noqa: E402
from calibrate.timings.host import LAYERS, host, kernels, narrow  # noqa: E402
from calibrate.timings.matmuls import launch_cases  # noqa: E402
from calibrate.timings.timing import Bench  # noqa: E402


def test_kernels_are_those_of_the_simulated_layers() -> None:
    each, rest = divmod(kernels(narrow()) - kernels(narrow(2)), LAYERS - 2)
    assert rest == 0
    assert 25 <= each <= 45, "a GPT layer is some ten operators forward and twice as many backward"


def test_a_cpu_s_own_time_is_what_a_model_adds_to_each_kernel() -> None:
    """On a GPU the host runs beside the kernels, and its optimizer is timed as well."""
    assert [c.key for c in launch_cases(Bench("cpu", True, 0.01))] == ["launch", "host"]
    (found,) = host(Bench("cpu", True, 0.01))
    assert isinstance(found, Constant)
    assert found.name == "operator_in_model_s"
    assert 1e-7 < found.value < 1.0


def test_a_tape_on_a_gpu_writes_no_events_outside_of_a_rehearsal() -> None:
    tape = Tape("cuda")
    assert tape.now() == Clock(0, 0)
    assert not tape.events
    if not torch.cuda.is_available():
        tape.rehearsing = True
        with pytest.raises((RuntimeError, AssertionError)):
            tape.now()
