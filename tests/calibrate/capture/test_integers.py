"""Integers of a script for a GPU: kernels where they lie there, none on the host, and no old values after a write."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from sim.inputs.program_file import CapturedOperator
from sim.inputs.script_program import What, read_rank_program
from tests.calibrate.capture.captured_scripts import run_rank

pytest.importorskip("torch", reason="capturing runs torch's own code")

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
model = nn.Linear(64, 64).to("cuda")
gate = nn.Linear(64, 8).to("cuda")
optimizer = torch.optim.AdamW([*model.parameters(), *gate.parameters()])
for step in range(3):
    x = torch.randn(128, 64, device="cuda")
    chosen = gate(x).topk(2, -1)[1]
"""
LOSS = """
    loss = model(x).square().mean() + gate(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
COUNTED = {  # each writes what a router chose into integers that were known
    "one_hot": "rows = x[torch.where(F.one_hot(chosen, 8).permute(2, 1, 0)[3])[1]]",
    "scatter_add_": (
        "counts = torch.zeros(8, dtype=torch.long, device='cuda').scatter_add_(0, chosen.flatten(), "
        "torch.ones(256, dtype=torch.long, device='cuda')); rows = x.repeat(2, 1).split(counts.tolist())"
    ),
    "index_put": "y = torch.zeros(8, dtype=torch.bool, device='cuda'); y[chosen[:, 0]] = True; rows = x[:8][y]",
}


def run(folder: Path, line: str, balanced: bool = False) -> subprocess.CompletedProcess[str]:
    return run_rank(folder, HEAD + f"    {line}\n" + LOSS, 1, balanced)


def operators(folder: Path) -> tuple[CapturedOperator, ...]:
    return read_rank_program(folder / "p.rank0.json.gz").program.operators


@pytest.mark.parametrize("case", COUNTED)
def test_what_a_router_chose_is_unknown_also_where_it_is_written_into_zeros(tmp_path: Path, case: str) -> None:
    done = run(tmp_path, COUNTED[case])
    assert done.returncode == 2
    assert "train.py:9" in done.stderr
    assert "--routing balanced" in done.stderr


def test_experts_have_their_rows_if_choices_are_balanced(tmp_path: Path) -> None:
    assert not run(tmp_path, COUNTED["one_hot"], balanced=True).returncode
    taken = [o.outputs[0].shape for o in operators(tmp_path) if o.name == "aten.index" and o.phase == "forward"]
    assert taken == [(32, 64)]  # of 256 choices among 8 experts
    waits = Counter(e.what for e in read_rank_program(tmp_path / "p.rank0.json.gz").entries)[What.HOST_WAIT]
    assert waits == 1  # for the places of what is true


def test_integers_on_the_gpu_are_kernels_and_those_on_the_host_are_not(tmp_path: Path) -> None:
    line = (
        "i = torch.arange(128, device='cuda'); seen = (i[:, None] >= i) & (i[:, None] - i < 16); "
        "own = (torch.arange(77) + 1).tolist(); n = int(i[3]); rows = seen.sum()"
    )
    assert not run(tmp_path, line).returncode
    launched = Counter(o.name for o in operators(tmp_path) if o.launches)
    made = [o.outputs[0].shape for o in operators(tmp_path) if o.name == "aten.arange"]
    assert made == [(128,)]
    assert [launched[f"aten.{name}"] for name in ("ge", "sub", "lt", "bitwise_and")] == [1, 1, 1, 1]
    program = read_rank_program(tmp_path / "p.rank0.json.gz")
    assert Counter(e.what for e in program.entries)[What.HOST_WAIT] == 1  # to read one of the GPU's


def test_integers_are_changed_once(tmp_path: Path) -> None:
    line = (
        "i = torch.zeros(3, dtype=torch.long, device='cuda'); own = torch.zeros(3, dtype=torch.long); "
        "i += 1; own += 1; rows = x[: int(i.sum() + own.sum())].square()"
    )
    assert not run(tmp_path, line).returncode
    assert next(o.outputs[0].shape for o in operators(tmp_path) if o.name == "aten.pow") == (6, 64)


def test_an_optimizer_counts_its_steps_on_the_host(tmp_path: Path) -> None:
    assert not run(tmp_path, "pass").returncode
    counts = [o for o in operators(tmp_path) if o.name == "aten._foreach_add_" and o.outputs[0].shape == ()]
    assert [o.launches for o in counts] == [0]


def test_a_mask_of_blocks_is_made_for_the_gpu(tmp_path: Path) -> None:
    line = (
        "from torch.nn.attention.flex_attention import create_block_mask; "
        "mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device='cuda')"
    )
    assert not run(tmp_path, line).returncode


def test_graphed_callables_are_captured_as_what_they_call(tmp_path: Path) -> None:
    done = run(tmp_path, "model = torch.cuda.make_graphed_callables(model, (x,)) if step == 0 else model")
    assert not done.returncode
    assert done.stderr.count("note: make_graphed_callables") == 1
    assert sum(o.name == "aten.addmm" for o in operators(tmp_path)) == 3  # the gate's twice
