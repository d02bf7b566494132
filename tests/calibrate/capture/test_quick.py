"""A capture once: the matmuls of two linear layers, forward and backward, and their optimizer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.modules import run_module

pytest.importorskip("torch", reason="capturing runs torch's own code")

SOURCE = """
import torch
from calibrate.capture import Step

def step():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    x = torch.zeros(32, 64)
    return Step(model, lambda: model(x).square().mean(), torch.optim.AdamW(model.parameters(), fused=True), 32, 1)
"""


def test_a_step_is_captured(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    done = run_module("calibrate.capture", "mine:step", "--out", "p.json.gz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    program = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))
    names = [program["tables"]["names"][i] for i in program["operators"]["name"]]
    assert names.count("aten.addmm") == 2
    assert names.count("aten.mm") == 3  # both weights, and the second layer's input: the first one's needs no gradient
    assert sum("adamw" in name for name in names) == 1
