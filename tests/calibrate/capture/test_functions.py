"""What is wrong with a function of one's own, or with the step that it returns, is one message that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture.command import main  # noqa: E402

HEAD = """
import torch
from calibrate.capture import Step
from torch.optim import SGD, LBFGS
model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
def mean(): return model(x).mean()
def trains():
    loss = mean()
    loss.backward()
    return mean()
def step(loss=mean, optimizer=None, seq_len=2, micro_batch_size=1, **more):
    return Step(model, loss, optimizer or SGD(model.parameters()), seq_len, micro_batch_size, **more)
def on_gpu():
    there = model.cuda()
    return Step(there, lambda: there(torch.randn(2, 4, device="cuda")).mean(), SGD(there.parameters()), 2, 1)
"""
WRONG = {  # what the function returns, and what the message says
    "step(lambda: None)": "Step.loss: returned None; must return the loss, a tensor with one element",
    "step(lambda: mean().item())": "must return the loss, a tensor with one element",
    "step(lambda: (mean(), 1))": "Step.loss: returned a tuple; must return the loss",
    "step(lambda: model(x))": "Step.loss: returned a tensor [2, 4]; must return the loss",
    "step(lambda: mean().detach())": "must return the loss before detach",
    "step(trains)": "Step.loss: runs a backward itself; must return the loss, whose backward is captured",
    "step(seq_len=0)": "Step.seq_len: found 0; must be a whole number of tokens, at least 1",
    "step(micro_batch_size=1.5)": "Step.micro_batch_size: found 1.5; must be a whole number",
    "step(autocast='int8')": "Step.autocast: found 'int8'; must be bf16, fp16",
    "step(clip_grad_norm=-1)": "Step.clip_grad_norm: found -1; must be a number above 0",
    "step(optimizer='adamw')": "Step.optimizer: found 'adamw'; must be a torch.optim.Optimizer",
    "step(optimizer=LBFGS(model.parameters()))": "Step.optimizer: found LBFGS; it runs the forward itself",
    "Step(3, mean, None, 2, 1)": "Step.model: found 3; must be a torch.nn.Module",
    "step(lambda: mean() + model(x).detach().numpy().sum())": "turns a tensor into a NumPy array",
    "on_gpu()": "the code names a GPU, and a capture has none",
}


def captured(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str) -> tuple[int, str]:
    """Capture `module:made`; return exit code and what is printed."""
    (folder / f"{module}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    done = CliRunner().invoke(main, [f"{module}:made", "--out", "p.json.gz"])
    return done.exit_code, done.output


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_step_that_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    returned, said = list(WRONG.items())[number]
    name = f"step_{number}"  # a module is imported once
    code, printed = captured(tmp_path, monkeypatch, name, f"{HEAD}\ndef made(): return {returned}\n")
    assert (code, said in printed, name in printed) == (2, True, True), printed
    assert not (tmp_path / "p.json.gz").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = (", "no_module_0.py:1: SyntaxError"), ("import nothing_such", "no_module_1.py:1: ModuleNotFoundError")],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    code, printed = captured(tmp_path, monkeypatch, said.partition(".")[0], text)
    assert (code, said in printed) == (2, True), printed


def test_a_dtype_may_be_spelled_as_torch_spells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = captured(tmp_path, monkeypatch, "spelled", f"{HEAD}\ndef made(): return step(autocast='bfloat16')")
    assert code == 0, printed
