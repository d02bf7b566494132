"""Experts whose rows depend on a router's choices: captured with balanced choices, refused without."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.script_program import What, read_rank_program
from tests.modules import run_module

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402
from calibrate.capture.values.known_values import UNKNOWN  # noqa: E402

TOKENS, HIDDEN, EXPERTS, TOP_K, INNER = 120, 64, 8, 3, 32


class Layer(nn.Module):
    """A router and its experts; `way` computes them as some trainer's code does."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.gate = way, nn.Linear(HIDDEN, EXPERTS, bias=False)
        both = [(nn.Linear(HIDDEN, INNER, False), nn.SiLU(), nn.Linear(INNER, HIDDEN, False)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(nn.Sequential(*one) for one in both)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def each(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Compute rows that are sorted by expert."""
        return torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(counts), strict=True)])


def deepseek(layer: Any, x: Tensor) -> Tensor:
    """Sigmoid, the best groups of experts, counts on the host, `where` (DeepSeek-V3, inference/model.py)."""
    scores = layer.gate(x).sigmoid()
    groups = scores.view(TOKENS, 4, -1)
    best = groups.topk(2, -1)[0].sum(-1).topk(2, -1)[1]
    outside = scores.new_ones(TOKENS, 4, dtype=torch.bool).scatter_(1, best, False)
    chosen = groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1).topk(TOP_K, -1)[1]
    weights = scores.gather(1, chosen)
    y = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for i, expert in enumerate(layer.experts):
        if counts[i]:
            token, place = torch.where(chosen == i)
            y[token] += expert(x[token]) * weights[token, place, None]
    return y


def transformers(layer: Any, x: Tensor) -> Tensor:
    """A loop over experts that any token chose (Transformers' eager experts)."""
    weights, chosen = layer.gate(x).softmax(-1).topk(TOP_K)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    y = torch.zeros_like(x)
    for one in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, token = torch.where(mask[one[0]])
        y.index_add_(0, token, layer.experts[int(one[0])](x[token]) * weights[token, place, None])
    return y


def megatron(layer: Any, x: Tensor) -> Tensor:
    """A map of tokens and experts, whose true places are selected (Megatron-Core's moe_utils.py: `permute`)."""
    logits = layer.gate(x)
    weights, chosen = logits.softmax(-1).topk(TOP_K)
    probabilities = torch.zeros_like(logits).scatter(1, chosen, weights)
    routed = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
    by_expert = routed.T.contiguous()
    tokens = torch.arange(TOKENS).unsqueeze(0).expand(EXPERTS, -1).masked_select(by_expert)
    rows = layer.each(x.index_select(0, tokens), routed.sum(0).long().tolist())
    rows = rows * probabilities.T.contiguous().masked_select(by_expert)[:, None]
    return torch.zeros_like(x).scatter_add(0, tokens[:, None].expand(-1, HIDDEN), rows)


def torchtitan(layer: Any, x: Tensor) -> Tensor:
    """Copies sorted by expert, a histogram of integers (torchtitan/models/moe)."""
    weights, chosen = layer.gate(x).sigmoid().topk(TOP_K)
    counts = torch.histc(chosen.view(-1), bins=EXPERTS, min=0, max=EXPERTS)
    order = torch.argsort(chosen.view(-1), stable=True)
    rows = layer.each(x[order // TOP_K], counts.tolist()) * weights.view(-1)[order, None]
    return torch.zeros_like(x).index_add(0, order // TOP_K, rows)


def switch(layer: Any, x: Tensor) -> Tensor:
    """One expert for each token, by masks (Transformers' SwitchTransformersSparseMLP)."""
    probabilities = layer.gate(x).softmax(-1)
    mask = F.one_hot(probabilities.argmax(-1), EXPERTS)
    y = x.clone()
    for i, expert in enumerate(layer.experts):
        routed = mask[:, i].bool()
        if routed.any():
            y[routed] = expert(x[routed])
    return y * probabilities.max(-1)[0][:, None]


def step_of(way: Callable[[Any, Tensor], Tensor]) -> Callable[[], Step]:
    def step() -> Step:
        model, x = nn.Sequential(Layer(way)), torch.zeros(TOKENS, HIDDEN, requires_grad=True)
        return Step(model, lambda: model(x).square().mean(), torch.optim.AdamW(model.parameters()), TOKENS, 1)

    return step


@pytest.mark.parametrize("way", [deepseek, transformers, megatron, torchtitan, switch])
def test_balanced_choices_give_each_expert_its_share(way: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(UNKNOWN):
        record(step_of(way))
    step, recorder = record(step_of(way), balanced=True)
    shapes = [(*r.inputs[0][0][1], r.inputs[1][0][1][1]) for r in recorder.rows if r.name == "aten.mm"]
    copies = TOKENS * (1 if way is switch else TOP_K)
    assert sum(2 * m * k * n for m, k, n in shapes) == 6 * HIDDEN * (TOKENS * EXPERTS + copies * 2 * INNER)
    assert shapes.count((copies // EXPERTS, HIDDEN, INNER)) == 2 * EXPERTS  # one forward, one backward
    assert step.facts["routing"] == "balanced"


EXPERT_PARALLEL = """
import torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl")
n, E, K, H = dist.get_world_size(), 16, 4, 64
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, came, sent):
        ctx.splits = came, sent
        out = x.new_empty(sum(came), H)
        dist.all_to_all_single(out, x.contiguous(), came, sent)
        return out
    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad, *ctx.splits[::-1]), None, None
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E), nn.ModuleList(nn.Linear(H, H) for _ in range(E // n))
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(K)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=E)
        came, of_all = torch.empty_like(counts), counts.new_empty(n * E)
        dist.all_to_all_single(came, counts)
        dist.all_gather_into_tensor(of_all, counts)
        assert of_all.sum().item() == n * len(order)
        sent, received = counts.view(n, -1).sum(1).tolist(), came.view(n, -1).sum(1).tolist()
        rows = Exchange.apply(x[order // K], received, sent)
        rows = rows.split(came.view(n, -1).sum(0).tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        rows = Exchange.apply(rows, sent, received) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // K, rows)
model = nn.Sequential(nn.Linear(H, H), Moe()).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(128, H, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_module("calibrate.capture", *words, "--out", "p", cwd=folder)


def test_a_script_with_expert_parallelism_exchanges_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXPERT_PARALLEL, encoding="utf-8")
    script = ("--script", "train.py", "--world-size", "4")
    done = run(tmp_path, *script)
    assert done.returncode == 2
    assert "train.py:" in done.stderr
    assert "--routing balanced" in done.stderr
    done = run(tmp_path, *script, "--routing", "balanced")
    assert done.returncode == 0, done.stderr
    rank = read_rank_program(tmp_path / "p.rank0.json.gz")
    copies = 128 * 4 * 64 * 4  # tokens, experts of each, width, bytes
    assert [c.bytes for c in rank.collectives if c.kind == "all_to_all"] == [16 * 8, *[copies] * 4]
    assert sum(e.what == What.HOST_WAIT for e in rank.entries) >= 3


COUNTS = """
import torch
m = torch.nn.Linear(8, 8).cuda()
o = torch.optim.SGD(m.parameters(), lr=0.1)
y = m(torch.randn(4, 8, device="cuda"))
{choice}
k = int((y > 0).sum())
"""


@pytest.mark.parametrize(
    ("choice", "words", "helps"),
    [("", (), False), ("y.topk(2)", (), True), ("y.topk(2)", ("--routing", "balanced"), False)],
)
def test_routing_is_named_only_where_it_may_help(
    choice: str, words: tuple[str, ...], helps: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(COUNTS.format(choice=choice), encoding="utf-8")
    done = run(tmp_path, "--script", "train.py", "--world-size", "1", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: train.py:7: ")
    assert len(done.stderr.splitlines()) == 1
    assert ("--routing balanced" in done.stderr) is helps


def test_one_message_where_a_function_of_ones_own_reads_a_value(tmp_path: Path) -> None:
    """Also where torch has loaded triton, whose extension lists at exit what it thinks was leaked."""
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    done = run(tmp_path, "mine:step")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "mine.py:7: the code reads a tensor's value" in done.stderr
    assert "--routing" not in done.stderr


OWN = """
import torch
from calibrate.capture import Step
def step():
    model, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    def loss():
        return model(x).sum() if int((model(x) > 0).sum()) else x.sum()
    return Step(model, loss, torch.optim.AdamW(model.parameters()), seq_len=4, micro_batch_size=1)
"""


def test_a_compiled_step_has_no_choices_to_make(tmp_path: Path) -> None:
    done = run(tmp_path, "x:y", "--compile", "--routing", "balanced")
    assert done.returncode == 2
    assert "--compile: cannot be given with --routing" in done.stderr
