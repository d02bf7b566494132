"""Capture of LSTM, GRU and RNN as cuDNN runs them, and their matmuls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, read_program
from sim.models.captured.operators import computes_of, known

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.program_out import write_program  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

STEPS, BATCH, WIDTH, HIDDEN = 6, 4, 8, 16
KINDS = ["LSTM", "GRU", "RNN"]


def captured(folder: Path, kind: str, device: str, autocast: str = "", **how: Any) -> list[CapturedOperator]:
    """Operators of forward and backward of a recurrent layer behind a linear one."""

    def step() -> Step:
        layer = getattr(torch.nn, kind)(WIDTH, HIDDEN, **how)
        model = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), layer])
        x = torch.zeros(STEPS, BATCH, WIDTH)
        rows = layer.num_layers * (2 if layer.bidirectional else 1)
        widths = [layer.proj_size or HIDDEN, *([HIDDEN] if kind == "LSTM" else [])]
        # cuDNN gives gradients of the first state always, a CPU only where they are wanted.
        state = tuple(torch.zeros(rows, BATCH, n, requires_grad=True) for n in widths)

        def loss() -> torch.Tensor:
            out: torch.Tensor = layer(model[0](x), state if kind == "LSTM" else state[0])[0]
            return out.float().sum()

        return Step(model, loss, torch.optim.SGD(model.parameters()), STEPS, BATCH, autocast)

    path = folder / f"{device}.json.gz"
    write_program(path, *record(step, device))
    return [o for o in read_program(path).operators if o.phase in ("forward", "backward")]


def flops(operators: list[CapturedOperator]) -> float:
    return sum(c.flops for op in operators if op.launches for c in computes_of(op) if c.kind == "gemm")


@pytest.mark.parametrize("how", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "four"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_flops_as_the_matmuls_that_a_cpu_runs_one_by_one(
    tmp_path: Path, kind: str, how: dict[str, Any]
) -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # an LSTM too runs step by step
        one_by_one = captured(tmp_path, kind, "cpu", **how)
    on_gpu = captured(tmp_path, kind, "cuda", **how)
    assert flops(on_gpu) == flops(one_by_one) > 0
    assert [op.name for op in on_gpu if "rnn" in op.name] == ["calibrate.rnn", "calibrate.rnn_backward"]
    assert len(one_by_one) > 2 * len(on_gpu)


def test_a_cpus_own_lstm_has_the_same_matmuls(tmp_path: Path) -> None:
    found = captured(tmp_path, "LSTM", "cpu", num_layers=2)
    assert sum("mkldnn_rnn" in op.name for op in found) == 4
    assert flops(found) == flops(captured(tmp_path, "LSTM", "cuda", num_layers=2))


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_multiplied_step_by_step(tmp_path: Path, kind: str) -> None:
    """So a sequence twice as long takes twice as many kernels, not larger ones."""
    forward = next(op for op in captured(tmp_path, kind, "cuda") if op.name == "calibrate.rnn")
    shapes = [c.shape for c in computes_of(forward) if c.kind == "gemm"]
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * HIDDEN
    assert shapes == [(1, STEPS * BATCH, gates, WIDTH), *[(1, BATCH, gates, HIDDEN)] * STEPS]
    assert known(forward.name)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_run_in_16_bits_under_autocast(tmp_path: Path, kind: str) -> None:
    rows = [op for op in captured(tmp_path, kind, "cuda", "bf16") if "rnn" in op.name]
    assert [row.phase for row in rows] == ["forward", "backward"]
    assert {tensor.dtype for row in rows for tensor in row.inputs} == {"bf16"}


def test_a_projected_lstm_multiplies_its_outputs_too(tmp_path: Path) -> None:
    forward = next(op for op in captured(tmp_path, "LSTM", "cuda", proj_size=2) if op.name == "calibrate.rnn")
    wanted = STEPS * BATCH * (4 * HIDDEN * WIDTH + 4 * HIDDEN * 2 + HIDDEN * 2)
    assert sum(c.flops for c in computes_of(forward) if c.kind == "gemm") == 2 * wanted
    assert forward.outputs[0].shape == (STEPS, BATCH, 2)
