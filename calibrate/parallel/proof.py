"""Proves before timing that the parallel run's loss and gradients equal one device's on the same global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import gradient
from calibrate.bundled_model.model import Build, Head, make_blocks
from calibrate.parallel.model_parallel import whole_model
from calibrate.parallel.runner import Runner, seed_dropout, sum_over_ranks
from calibrate.parallel.samples import make_batch
from sim.inputs.scenario import Scenario

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LONGEST = 1024  # tokens of a sequence on a GPU, as fp32 attention with grouped queries keeps all probabilities


@dataclass(frozen=True, slots=True)
class Proof:
    """Hold the results of one device and of the ranks.

    `difference`: the largest difference of gradients, relative to each tensor's largest element.
    """

    single_loss: float
    parallel_loss: float
    difference: float
    worst: str
    tolerance: float

    @property
    def holds(self) -> bool:
        """Tell whether loss and gradients agree within the tolerance; false for NaN."""
        loss = abs(self.parallel_loss - self.single_loss) <= self.tolerance * abs(self.single_loss)
        return loss and self.difference <= self.tolerance


def single_device(
    scenario: Scenario, batch: Tensor, dtype: torch.dtype, device: str, blocks: Sequence[nn.Module] = ()
) -> tuple[float, dict[str, Tensor]]:
    """Compute loss and gradients of the whole model by plain autograd, micro-batch after micro-batch.

    The model is new unless `blocks` are given. Gradients are named `block number.parameter`.
    """
    m, t = whole_model(scenario), scenario.for_training
    blocks = blocks or make_blocks(m, t, range(m.layers + 2), Build(device, dtype))
    pieces = batch.split(t.micro_batch_size)
    total = 0.0
    for i, piece in enumerate(pieces):
        x = piece[:, :-1]
        for number, block in enumerate(blocks):
            if m.dropout > 0:
                seed_dropout(number, i)
            x = block(x, piece[:, 1:]) if isinstance(block, Head) else block(x)
        loss = x / len(pieces)
        loss.backward()
        total += float(loss.detach())
    grads = {
        f"{n}.{k}": p.new_zeros(p.shape) if p.grad is None else p.grad
        for n, b in enumerate(blocks)
        for k, p in b.named_parameters()
    }
    return total, grads


def prove(runner: Runner, sabotage: bool = False) -> Proof:
    """Compare one step's loss and all gradients of all ranks with one device's. Collective.

    `sabotage` first changes one gradient of this rank, to show that the comparison can fail. Gradients are zero
    afterwards.
    """
    scenario = runner.scenario
    runner.zero_gradients()
    runner.zero_losses()
    runner.gradients(runner.batch(0))
    loss = sum_over_ranks([runner.loss()])[0]
    if sabotage:
        gradient(runner.owned()[0]).view(-1)[0] += 1.0
    single, expected = single_device(scenario, make_batch(scenario, 0, runner.device), runner.dtype, runner.device)
    difference, worst = _worst(runner, expected)
    if dist.is_initialized():
        found: list[tuple[float, str]] = [(0.0, "")] * dist.get_world_size()
        dist.all_gather_object(found, (difference, worst))
        difference, worst = max(found, key=lambda f: (f[0] != f[0], f[0]))
    runner.zero_gradients()
    runner.zero_losses()
    return Proof(single, loss, difference, worst, TOLERANCE.get(runner.dtype, 3e-2))


def to_prove(scenario: Scenario, device: str) -> Scenario:
    """Return the scenario for the proof: on a GPU sequences have at most `LONGEST` tokens."""
    t = scenario.training
    assert t is not None
    if device == "cpu" or t.seq_len <= LONGEST:
        return scenario
    return scenario.unchecked_copy(update={"training": t.model_copy(update={"seq_len": LONGEST})})


def _worst(runner: Runner, expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of this rank's gradients, and where; NaN counts as the largest."""
    found = []
    for s, stage in runner.stages.items():
        grads = runner.data[s].whole_gradients()
        for number, block in zip(runner.numbers[s], stage.blocks, strict=True):
            kind = type(block).__name__.lower()
            for name, p in block.named_parameters():
                want = runner.place.model.expected(block, name, expected[f"{number}.{name}"])
                scale = float(want.abs().max()) or 1.0
                off = float((grads[id(p)] - want).abs().max()) / scale
                place = f"rank {runner.place.rank}, block {number} ({kind}) {name}"
                found.append((off, place))
    return max(found, key=lambda f: (f[0] != f[0], f[0]))
