"""What a script that cannot be captured is told, and what is noted of one that can."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from sim.inputs.script_program import read_rank_program
from sim.traces.program_in import program_recording
from sim.traces.program_prices import ProgramPrices
from tests.calibrate.capture.captured_scripts import run_rank
from tests.calibrate.capture.script_parts import HEAD
from tests.modules import run_module
from topology.presets import CLUSTERS

pytest.importorskip("torch", reason="capturing runs torch's own code")


def run(folder: Path, source: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source, encoding="utf-8")
    words = ("--script", "train.py", "--world-size", "4", "--out", "p", *more)
    return run_module("calibrate.capture", *words, cwd=folder)


UNUSED = """
used = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model = nn.parallel.DistributedDataParallel(used)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
used.forward = used[0].forward
for _ in range(3):
    model(torch.zeros(4, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


STEP = "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (STEP + "for _ in range(3):\n    model(torch.zeros(4, 9)).sum().backward()\n", "train.py:5: RuntimeError"),
        (STEP + "for _ in range(3):\n    n = int((model(torch.zeros(4, 8)) > 0).sum())\n", "train.py:5: ValueError"),
        (STEP + "model(torch.zeros(4, 8)).sum().backward()\noptimizer.step()\n", "ended after 1 optimizer steps"),
        (HEAD + UNUSED, "train.py:12: RuntimeError: a parameter got no gradient"),
        (
            "import torch\nx = torch.nn.Embedding(9, 4, sparse=True)\nx(torch.tensor([1])).sum().backward()\n",
            "train.py:3: NotImplementedError: sparse tensors cannot be captured; leave out sparse=True",
        ),
        ("import torch\nx = torch.nn.LazyLinear(4)\n", "train.py:2: RuntimeError: layers that learn their sizes"),
        (
            "import torch\nx = torch.cuda.CUDAGraph()\n",
            "train.py:2: NotImplementedError: CUDA graphs cannot",
        ),
        ("import sys\nsys.exit(3)\n", "ended with exit code 3 after 0 optimizer steps"),
        ("x = (\n", "SyntaxError"),
    ],
)
def test_what_fails_is_one_message_with_its_line(tmp_path: Path, source: str, said: str) -> None:
    refused_without_a_file(run_rank(tmp_path, source, 4), said, tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos._exit(0)\n", "rank 0 ended its process before its second optimizer step"),
        (HEAD + "dist.recv_object_list([None], src=1)\n", "--ranks: rank 0 waits for an object of rank 1"),
    ],
)
def test_a_rank_that_gives_no_answer_is_one_message(tmp_path: Path, source: str, said: str) -> None:
    refused_without_a_file(run(tmp_path, source), said, tmp_path)


def refused_without_a_file(done: subprocess.CompletedProcess[str], said: str, folder: Path) -> None:
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("p*"))


def test_ranks_that_are_not_there_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, STEP, "--ranks", "0,4")
    assert done.returncode == 2
    assert "--ranks: found '0,4'; allowed: numbers from 0 to 3" in done.stderr


@pytest.mark.parametrize(("head", "noted"), [("", True), (HEAD, False)], ids=["alone", "distributed"])
def test_ranks_that_exchange_nothing_are_noted(tmp_path: Path, head: str, noted: bool) -> None:
    """The capture says so, and a replay of its file."""
    wrap = "model = nn.parallel.DistributedDataParallel(model)\n" if head else ""
    loop = "for _ in range(3):\n    model(torch.zeros(4, 8)).sum().backward()\n    optimizer.step()\n"
    done = run(tmp_path, head + STEP + wrap + loop)
    assert done.returncode == 0, done.stderr
    program = read_rank_program(tmp_path / "p.rank0.json.gz")
    said = program_recording([program], ProgramPrices(CLUSTERS["dgx-h100"])).warnings
    note = "the step has no collective: its 4 ranks exchange no gradients"
    assert (note in done.stderr) is any(note in text for text in said) is noted


STAGES = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
r = dist.get_rank()
model = nn.Linear(64, 64)
stage = PipelineStage(model, r, n, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    schedule.step(torch.randn(8, 64)) if r == 0 else schedule.step(target=torch.randn(8, 64))
    optimizer.step(); optimizer.zero_grad()
"""


def test_stages_that_tell_each_other_their_shapes_are_captured_together(tmp_path: Path) -> None:
    done = run(tmp_path, HEAD + STAGES, "--world-size", "2", "--ranks", "0,1")
    assert done.returncode == 0, done.stderr
    first, last = (read_rank_program(tmp_path / f"p.rank{r}.json.gz").collectives for r in (0, 1))
    micro_batch = 2 * 64 * 4
    assert Counter((c.kind, c.bytes) for c in first) == {("send", micro_batch): 4, ("recv", micro_batch): 4}
    assert Counter((c.kind, c.bytes) for c in last) == {("recv", micro_batch): 4, ("send", micro_batch): 4}
