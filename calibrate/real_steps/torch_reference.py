"""Runs a scenario with torch's own parallelism: DDP, FSDP2, DTensor's tensor and sequence parallelism, pipelining.

The scenario decides which one runs: `pp` torch.distributed.pipelining with the schedule of that name, `tp` DTensor
plans, `zero` 2 and 3 FSDP2, `dp` DistributedDataParallel. Only one runs at a time, and a scenario for which torch has
none is refused. Torch's context parallelism needs an attention kernel that CPUs lack.

Differences from the bundled implementation: docs/torch_reference.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from calibrate.bundled_model.model import Build, make_blocks
from calibrate.bundled_model.torch_model import (
    TorchEmbedding,
    TorchHead,
    TorchLayer,
    TorchStage,
    bundled_gradients,
    mean_loss,
)
from calibrate.parallel.model_parallel import whole_model
from calibrate.parallel.runner import CLIP_NORM, LEARNING_RATE, Runner
from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.inputs.trainer_names import TITAN_SCHEDULES

SCHEDULES = TITAN_SCHEDULES | {"zb_h1": "InterleavedZeroBubble"}  # torchtitan runs all of torch's but this one


def which(scenario: Scenario) -> str:
    """Return the name of torch's implementation of a scenario's parallelism."""
    p = scenario.parallelism
    if p.pp > 1:
        return f"torch.distributed.pipelining, {SCHEDULES.get(p.schedule, p.schedule)}"
    if p.tp > 1:
        return "torch.distributed.tensor, " + ("sequence parallel" if p.sp else "tensor parallel")
    return "FSDP2 (fully_shard)" if p.zero >= 2 else "DistributedDataParallel"


def check(scenario: Scenario, where: str) -> None:
    """Check that torch has an implementation of the scenario's parallelism.

    Raises:
        InputError: names the key that prevents it.
    """
    p, m, t = scenario.parallelism, scenario.model, scenario.for_training
    one = [name for name, size in (("dp", p.dp), ("tp", p.tp), ("pp", p.pp)) if size > 1]
    found = [
        ("parallelism", " and ".join(one) or "one rank", len(one) != 1),
        ("parallelism.cp", p.cp, p.cp > 1),
        ("parallelism.zero", p.zero, p.zero == 1 or (p.zero > 0 and p.dp == 1)),
        ("parallelism.shard_size", p.shard_size, p.zero > 0 and p.sharded_over[0] < p.dp),
        ("parallelism.schedule", p.schedule, p.pp > 1 and p.schedule not in SCHEDULES),
        ("model", "experts, tied embeddings or dropout", bool(m.moe or m.tied_embeddings or m.dropout)),
        ("model.mla", "latent attention", m.mla is not None),
        ("model.kv_heads", m.kv_heads, m.kv_heads % p.tp != 0),
        ("training.precision", t.precision, t.precision != "fp32"),
        ("training.recompute", t.recompute.mode, t.recompute.mode != "none"),
        ("training.activation_offload", t.activation_offload, t.activation_offload),
    ]
    for key, value, refused in found:
        if refused:
            allowed = "one of dp (zero 0, 2, 3), tp (sp too), pp " + f"({', '.join(SCHEDULES)})"
            rest = "a dense fp32 model without dropout, tied embeddings and recomputation"
            raise InputError(f"{where}: {key}: found {value}; --torch can run: {allowed}; {rest}")


class TorchReference:
    """One rank of a scenario under torch's own parallelism. Its creation is collective."""

    def __init__(self, scenario: Scenario, runner: Runner) -> None:
        self.scenario, self.runner = scenario, runner
        self.parts = self._parts()
        p = scenario.parallelism
        self.micro_batch: Callable[[Tensor], Tensor]
        self.schedule: Any = None
        if p.pp > 1:
            self.schedule = self._pipelining()
        elif p.tp > 1:
            self.module: Any = _tensor_parallel(self.parts[0], p.tp, p.sp, runner.device)
        elif p.zero >= 2:
            self.module = _fsdp2(self.parts[0], p.dp, p.zero == 3 and p.reshard_after_forward, runner.device)
        else:
            self.module = nn.parallel.DistributedDataParallel(self.parts[0], bucket_cap_mb=p.bucket_bytes / 2**20)
        self.parameters = [q for part in self.parts for q in part.parameters()]
        kinds = [[q for q in self.parameters if isinstance(q, DTensor) is cut] for cut in (True, False)]
        groups = [{"params": kind} for kind in kinds if kind]  # fused AdamW takes no mixture of both
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def _parts(self) -> list[TorchStage]:
        m, r = whole_model(self.scenario), self.runner
        build = Build(r.device, r.dtype)
        training = self.scenario.for_training
        return [TorchStage(make_blocks(m, training, numbers, build), numbers, m) for numbers in r.numbers.values()]

    def _pipelining(self) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        r = self.runner
        stages = [
            PipelineStage(part, s, len(r.schedule.rank_of_stage), torch.device(r.device))
            for s, part in zip(r.numbers, self.parts, strict=True)
        ]
        kind = get_schedule_class(SCHEDULES[self.scenario.parallelism.schedule])
        several = issubclass(kind, PipelineScheduleMulti)
        return kind(stages if several else stages[0], r.micro_batches, loss_fn=mean_loss)

    def gradients(self, batch: Tensor) -> float:
        """Run forward and backward of this rank's batch; gradients are in `.grad`. Returns its mean loss, or 0."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens, targets = self.runner.micro_batch_tokens(batch)
        if self.schedule is not None:
            return self._pipelined(tokens.flatten(0, 1), targets.flatten(0, 1))
        total, m = 0.0, len(tokens)
        for i, (x, y) in enumerate(zip(tokens, targets, strict=True)):
            with self._synchronizing(i == m - 1):
                loss = mean_loss(self.module(x), y) / m
                loss.backward()
            total += float(loss.detach())
        return total

    def _synchronizing(self, last: bool) -> Any:
        """Reduce gradients only in the last micro-batch, as DDP's own `no_sync` does."""
        ddp = isinstance(self.module, nn.parallel.DistributedDataParallel)
        return nullcontext() if last or not ddp else self.module.no_sync()

    def _pipelined(self, tokens: Tensor, targets: Tensor) -> float:
        first = any(0 in part.numbers for part in self.parts)
        last = any(self.scenario.model.layers + 1 in part.numbers for part in self.parts)
        losses: list[Tensor] = []
        given = (tokens,) if first else ()
        self.schedule.step(*given, **({"target": targets, "losses": losses} if last else {}))
        return float(torch.stack(losses).mean()) if losses else 0.0

    def step(self, batch: Tensor) -> float:
        """Run a training step: gradients, clipping by the norm over all ranks, AdamW. Returns the loss."""
        loss = self.gradients(batch)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        square = _square_sum(grads)
        if self.schedule is not None:
            dist.all_reduce(square)
        scale = (CLIP_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for g in grads:
            (g.to_local() if isinstance(g, DTensor) else g).mul_(scale)
        self.optimizer.step()
        return loss

    def named_gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients of this rank's stages under the bundled model's names. Collective."""
        return {k: g for part in self.parts for k, g in bundled_gradients(part).items()}


def _square_sum(grads: list[Tensor]) -> Tensor:
    """Return the sum of squares of this rank's gradients, of DTensors with all ranks' parts. Collective."""
    cut = [g for g in grads if isinstance(g, DTensor)]
    whole = [g for g in grads if not isinstance(g, DTensor)]
    squares = [torch.nn.utils.get_total_norm(found).square() for found in (cut, whole) if found]
    return torch.stack([s.full_tensor() if isinstance(s, DTensor) else s for s in squares]).sum()


def largest_difference(reference: TorchReference, single: dict[str, Tensor]) -> float:
    """Return torch's largest difference from one device's gradients, relative to each tensor's largest. Collective."""
    found = reference.named_gradients()
    worst = max(float((g - single[k]).abs().max() / single[k].abs().max()) for k, g in found.items())
    out = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(out, dist.ReduceOp.MAX)
    return float(out)


def time_both(reference: TorchReference, pairs: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of a bundled step and of torch's step after it, until the last rank's end. Collective."""
    runner = reference.runner
    for number in range(pairs + 1):
        batch = runner.batch(number)
        seconds = []
        for step in (runner.step, reference.step):
            dist.barrier()
            begin = time.perf_counter()
            step(batch)
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        if number:  # the first pair warms up
            yield seconds[0], seconds[1]


def _fsdp2(whole: TorchStage, ranks: int, reshard: bool, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (ranks,))
    for block in whole.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(whole, mesh=mesh, reshard_after_forward=reshard)
    return whole


def _tensor_parallel(whole: TorchStage, ranks: int, sp: bool, device: str) -> nn.Module:
    """Split a stage as torchtitan's models do (parallelize.py): by columns, by rows, and the vocabulary over the ranks.

    With `sp` norms and residual sums are split over the tokens.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device, (ranks,))
    between: Any = Shard(1) if sp else Replicate()
    for block in whole.blocks:
        plan: dict[str, Any] = {}
        if isinstance(block, TorchEmbedding):
            names = ["tokens"] + (["positions"] if block.positions is not None else [])
            plan = {n: RowwiseParallel(input_layouts=Replicate(), output_layouts=between) for n in names}
        elif isinstance(block, TorchHead):
            plan = {"output": ColwiseParallel(input_layouts=between, output_layouts=Replicate())}
            plan |= {"norm": SequenceParallel()} if sp else {}
        elif isinstance(block, TorchLayer):
            columns = ["attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate"]
            plan = {n: ColwiseParallel() for n in columns if n != "mlp.gate" or block.mlp.gate is not None}
            plan |= {n: RowwiseParallel(output_layouts=between) for n in ("attention.proj", "mlp.down")}
            if sp:
                gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
                plan |= {n: SequenceParallel() for n in ("norm1", "norm2")}
                plan |= dict.fromkeys(("attention", "mlp"), gathered)
        parallelize_module(block, mesh, plan)
    return whole
