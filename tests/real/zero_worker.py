"""What `test_zero.py` runs on each rank: states and peaks, three steps, and torch's DDP and FSDP2 as references."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.model import Build, Head, make_blocks
from calibrate.parallel.memory import allocated_peak, storages
from calibrate.parallel.proof import single_device
from calibrate.parallel.runner import CLIP_NORM, LEARNING_RATE, Runner, make_place
from calibrate.parallel.samples import make_batch
from sim.inputs.scenario import Scenario, parse_scenario
from tests.real.ranks import find_on_this_rank, from_all_ranks

STEPS = 3


def _states(run: Runner) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states that this rank keeps between steps."""
    params = [*run.parameters(), *run.owned()]
    grads = [p.grad for p in params if p.grad is not None]
    states = [v for p in run.owned() for v in run.optimizer.state[p].values() if v.numel() > 1]
    return {
        "parameters": sum(storages(params).values()),
        "gradients": sum(storages(grads).values()),
        "optimizer": sum(storages(states).values()),
    }


def _memory(scenario: Scenario, rank: int) -> dict[str, Any]:
    """States and peak of one fp32 step in the steady state."""
    run = Runner(scenario, make_place(scenario, rank), torch.float32)
    batch = run.batch(0)
    for _ in range(2):
        run.step(batch)
    return {"states": _states(run), "peak": allocated_peak(run, lambda: run.step(batch))}


def _three_steps(scenario: Scenario, rank: int) -> dict[str, Any]:
    """The largest difference of parameters from those of one device, after three steps with clipping."""
    run = Runner(scenario, make_place(scenario, rank), torch.float64)
    batches = [make_batch(scenario, i) for i in range(STEPS)]
    for i in range(STEPS):
        run.step(run.batch(i))
    expected, moved = _single_steps(scenario, batches)
    worst = 0.0
    for s, stage in run.stages.items():
        found = run.data[s].whole_parameters()
        for number, block in zip(run.numbers[s], stage.blocks, strict=True):
            for name, p in block.named_parameters():
                worst = max(worst, float((found[id(p)] - expected[f"{number}.{name}"]).abs().max()))
    return {"worst": worst, "moved": moved}


def _single_steps(scenario: Scenario, batches: list[Tensor]) -> tuple[dict[str, Tensor], float]:
    m = scenario.model
    blocks = make_blocks(m, scenario.training, range(m.layers + 2), Build("cpu", torch.float64))
    named = {f"{n}.{k}": p for n, b in enumerate(blocks) for k, p in b.named_parameters()}
    before = {k: p.detach().clone() for k, p in named.items()}
    params = list({id(p): p for p in named.values()}.values())
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    for batch in batches:
        optimizer.zero_grad()
        single_device(scenario, batch, torch.float64, "cpu", blocks)
        square = sum(float(p.grad.square().sum()) for p in params)
        for p in params:
            p.grad.mul_(min(1.0, CLIP_NORM / (square**0.5 + 1e-6)))
        optimizer.step()
    moved = max(float((p.detach() - before[k]).abs().max()) for k, p in named.items())
    return {k: p.detach() for k, p in named.items()}, moved


class _Whole(nn.Module):
    """The model as one module: mean loss of a micro-batch."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        m = scenario.model
        blocks = make_blocks(m, scenario.training, range(m.layers + 2), Build("cpu", torch.float64))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, piece: Tensor) -> Tensor:
        x = piece[:, :-1]
        for block in self.blocks:
            x = block(x, piece[:, 1:]) if isinstance(block, Head) else block(x)
        return x


def _references(scenario: Scenario, rank: int) -> dict[str, float]:
    """The largest difference of our gradients from those of torch's DDP and FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    run = Runner(scenario, make_place(scenario, rank), torch.float64)
    own = run.batch(0)
    run.gradients(own)
    ours = run.data[0].whole_gradients()
    names = {
        f"{n}.{k}": ours[id(p)]
        for n, b in zip(run.numbers[0], run.stages[0].blocks, strict=True)
        for k, p in b.named_parameters()
    }
    ddp = DistributedDataParallel(_Whole(scenario))
    (sum(ddp(piece) for piece in own.split(1)) / len(own)).backward()
    out = {"ddp": _largest(names, {k: p.grad for k, p in ddp.module.blocks.named_parameters()})}
    sharded, mesh = _Whole(scenario), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    (sum(sharded(piece) for piece in own.split(1)) / len(own)).backward()
    out["fsdp2"] = _largest(names, {k: p.grad.full_tensor() for k, p in sharded.blocks.named_parameters()})
    return out


def _largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in ours)


def _find(name: str, case: dict[str, Any], rank: int) -> list[Any]:
    """A case's work, from all ranks."""
    work = {"memory": _memory, "three steps": _three_steps, "references": _references}[case["what"]]
    return from_all_ranks(work(parse_scenario(case["scenario"], name), rank))


if __name__ == "__main__":
    find_on_this_rank(_find, *sys.argv[1:])
