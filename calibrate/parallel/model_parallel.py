"""Tensor, context and expert parallelism together: turns whole blocks into this rank's parts of them.

It also knows which tokens are this rank's, the shape of messages between stages, which gradients are only a part of a
sum, which parameters other ranks hold too, and where this rank's parameters lie in the whole model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.attention_dropout import DroppedAttention
from calibrate.bundled_model.dropout import Share
from calibrate.bundled_model.latent import WholeLinear
from calibrate.bundled_model.model import Embedding, Experts, Head, Layer, Router
from calibrate.bundled_model.norm import Norm
from calibrate.bundled_model.rotation import Constants
from calibrate.parallel.comm import Group, Tape
from calibrate.parallel.context import ContextAttention, own_positions
from calibrate.parallel.expert import ExpertParallel
from calibrate.parallel.expert_tensor import biases_counted_before
from calibrate.parallel.loss_scale import square_sum
from calibrate.parallel.tensor import ColumnLinear, RowLinear, VocabularyEmbedding, VocabularyHead, cut_layer
from calibrate.parallel.tensor_split import TensorSplit
from calibrate.parallel.zero import Sharding
from sim.inputs.model_config import ModelConfig
from sim.inputs.scenario import Scenario
from sim.ranks.plan import Plan

OwnGradient = Callable[[nn.Parameter, int], Tensor]  # a rank's part of a gradient from a row on, flat


def whole_model(scenario: Scenario) -> ModelConfig:
    """Return the model that all ranks together hold, with a vocabulary padded so that tp divides it."""
    return scenario.model.model_copy(update={"vocab": scenario.model.padded_vocab(scenario.parallelism.tp)})


class ModelParallel:
    """This rank's place among those that compute a micro-batch together.

    Its creation is collective, as it makes process groups.
    """

    def __init__(self, plan: Plan, rank: int, device: str) -> None:
        self.scenario = s = plan.scenario
        self.tape, self.device = Tape(device), device
        self.tp, self.cp, self.ep = (self._group(plan, name, rank) for name in ("tp", "cp", "ep"))
        self.expert_tp = self._group(plan, "expert_tp", rank)
        if s.parallelism.ep_overlap and self.ep.size > 1:
            self.ep = replace(self.ep, second=self._group(plan, "ep", rank).process_group)
        p, t, moe = s.parallelism, s.for_training, s.model.moe is not None
        self.expert_group = self._group(plan, "expert_dp", rank).process_group if moe else None
        self.expert_sharding = self._expert_sharding(plan, rank) if moe and p.zero else Sharding()
        self.copies = max(1, p.tp // s.model.kv_heads)  # tp ranks with the same KV heads
        self.copies_group = self._copies_group(plan, rank)
        self.sequence = p.sp and p.tp > 1
        late, chunked = p.tp_overlap == "wgrad", p.tp_overlap == "full"
        self.cut_over_tp = TensorSplit(self.tp, self.sequence, t.micro_batch_size, late, chunked)
        self.split = "contiguous" if p.cp_method == "all_to_all" else p.cp_split
        self.positions = own_positions(t.seq_len, p.cp, self.cp.index, self.split).to(device)
        starts = torch.arange(t.micro_batch_size, device=device)[:, None] * t.seq_len
        numbers = (starts + self.positions).view(-1)  # this rank's token numbers in the micro-batch
        self.numbers = numbers.chunk(p.tp)[self.tp.index] if self.sequence else numbers
        self.tokens = self._tokens(s) if self.sequence or p.cp > 1 else None

    def _tokens(self, s: Scenario) -> Share:
        """Return this rank's tokens as a part of a micro-batch's activations [b, s, h]."""
        t, h = s.for_training, s.model.hidden
        return Share((t.micro_batch_size, t.seq_len, h), lambda whole: whole.view(-1, h)[self.numbers])

    def _group(self, plan: Plan, name: str, rank: int) -> Group:
        if name in ("ep", "expert_tp") and plan.scenario.model.moe is None:
            return Group(name, (rank,), 0, None, self.tape)
        every = sorted({tuple(plan.group(name, r)) for r in range(plan.scenario.parallelism.ranks)})
        own = next(g for g in every if rank in g)
        return Group(name, own, own.index(rank), _make(every, rank), self.tape)

    def _expert_sharding(self, plan: Plan, rank: int) -> Sharding:
        group, replicas = (self._group(plan, name, rank) for name in ("expert_shard", "expert_replica"))
        return Sharding(group.process_group, group.size, group.index, replicas.process_group)

    def _copies_group(self, plan: Plan, rank: int) -> dist.ProcessGroup | None:
        ranks = [plan.group("tp", r) for r in range(plan.scenario.parallelism.ranks)]
        runs = {tuple(g[i : i + self.copies]) for g in ranks for i in range(0, len(g), self.copies)}
        return _make(sorted(runs), rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of messages between stages: [b, own tokens, h], or [own rows, h] under sequence parallelism."""
        m, t = self.scenario.model, self.scenario.for_training
        if self.sequence:
            return (len(self.numbers), m.hidden)
        return (t.micro_batch_size, len(self.positions), m.hidden)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Take this rank's positions: [..., s] → [..., own tokens]."""
        return x if self.cp.size == 1 else x[..., self.positions].contiguous()

    def cut(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return this rank's parts of whole blocks, which must not be used afterwards."""
        shared: dict[int, Constants] = {}  # layers that share constants still share them afterwards
        out = [self._cut(b, shared) for b in blocks]
        if self.scenario.model.tied_embeddings:  # a cut embedding has another parameter
            for head in (b for b in out if isinstance(b, Head)):
                for first in (b for b in out if isinstance(b, Embedding)):
                    head.output.weight = first.weight
        return out

    def _cut(self, block: nn.Module, shared: dict[int, Constants]) -> nn.Module:
        if isinstance(block, Embedding):
            alone = self.tp.size == self.cp.size == 1
            at = self.numbers % self.scenario.for_training.seq_len if self.sequence else self.positions
            return block if alone else VocabularyEmbedding(block, self.cut_over_tp, at, self.tokens)
        if isinstance(block, Head):
            return VocabularyHead(block, self.cut_over_tp) if self.tp.size > 1 else block
        assert isinstance(block, Layer)
        block.tokens = self.tokens
        if self.tp.size > 1:
            cut_layer(block, self.scenario.model, self.cut_over_tp)
        if self.cp.size > 1:
            dropped = block.core.dropped if isinstance(block.core, DroppedAttention) else None
            block.core = ContextAttention(self.cp, self.scenario.parallelism.cp_method, self.split, dropped)
            block.constants = shared.setdefault(id(block.constants), _at(block.constants, self.positions))
        if isinstance(block.moe, Experts):
            block.moe = ExpertParallel(block.moe, self.ep, self.expert_tp, self.numbers)
        return block

    def expected(self, block: nn.Module, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor of the shape of parameter `name`."""
        owner, _, leaf = name.rpartition(".")
        part = getattr(block.get_submodule(owner), "part", None)
        return whole if part is None else part(leaf, whole)

    def sum_partial(self, blocks: Sequence[nn.Module], own: OwnGradient) -> None:
        """Sum the gradients of which each tp rank has only its tokens' or heads' share.

        Under sequence parallelism these are all parameters that every tp rank holds whole; they are summed in one
        message, as in Megatron-LM's finalize_model_grads. KV heads that several ranks hold are summed over these ranks.
        Under ZeRO a rank sums its shard, which is the same part on all tp ranks.
        """
        shares = [own(p, 0) for p in self._whole(blocks)] if self.sequence else []
        if sum(g.numel() for g in shares):
            flat = torch.cat(shares)
            dist.all_reduce(flat, group=self.tp.process_group)
            for g, part in zip(shares, flat.split([g.numel() for g in shares]), strict=True):
                g.copy_(part)
        for g in self._copied(blocks, own):
            if g.numel():
                dist.all_reduce(g, group=self.copies_group)

    def square_correction(self, blocks: Sequence[nn.Module], own: OwnGradient, shards: int) -> Tensor:
        """Return what to add to this rank's sum of squares of gradients, so that each parameter counts once.

        The sum runs over the ranks along tp, pp and the `shards` of ZeRO. Parameters that an earlier tp rank counts are
        subtracted, and experts of other ranks are added.
        """
        twice = [own(p, 0) for p in self._whole(blocks)] if self.tp.index else []
        twice += self._copied(blocks, own) if self.tp.index % self.copies else []
        out = -_squares(twice, self.device)
        experts = expert_modules(blocks)
        if experts:
            mine = _squares([own(p, 0) for x in experts for p in x.parameters()], self.device)
            counted = biases_counted_before(experts, self.expert_tp)
            every = mine - _squares([own(p, 0) for p in counted], self.device)
            for group in (self.expert_sharding.group, self.ep.process_group, self.expert_tp.process_group):
                if group is not None:
                    dist.all_reduce(every, group=group)
            out += every / (self.tp.size * shards) - mine
        return out

    def _whole(self, blocks: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
        """Yield the parameters that every tp rank holds whole."""
        if self.tp.size == 1:
            return
        for module in (x for b in blocks for x in b.modules()):
            if isinstance(module, Norm | Router | WholeLinear):
                yield from module.parameters()
            elif isinstance(module, RowLinear) and module.bias is not None:
                yield module.bias
            elif isinstance(module, VocabularyEmbedding) and module.positions is not None:
                yield module.positions

    def _copied(self, blocks: Iterable[nn.Module], own: OwnGradient) -> list[Tensor]:
        """Return the gradients of key and value heads that other tp ranks hold too."""
        layers = (x for b in blocks for x in b.modules() if isinstance(x, ColumnLinear) and x.copies > 1)
        return [own(p, x.copied) for x in layers for p in x.parameters()]


def _make(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Make process groups and return the one of `rank`; None if `rank` is alone. Collective."""
    own: dist.ProcessGroup | None = None
    for members in groups:
        if len(members) > 1:
            made: Any = dist.new_group(list(members))  # torch returns a number for groups without this rank
            own = made if rank in members else own
    return own


def _at(c: Constants, positions: Tensor) -> Constants:
    return replace(c, cos=c.cos[positions], sin=c.sin[positions])


def _squares(gradients: Sequence[Tensor], device: str) -> Tensor:
    wide = gradients and gradients[0].dtype == torch.float64
    zero = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
    return sum((square_sum(g) for g in gradients), zero)


def expert_modules(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the experts in `blocks`, whose gradients are summed over other ranks than all others."""
    mixtures = [b.moe for b in blocks if isinstance(b, Layer)]
    return [e for moe in mixtures if isinstance(moe, Experts | ExpertParallel) for e in moe.experts.values()]


def dense_modules(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of `blocks` without the experts."""
    out: list[nn.Module] = []
    for b in blocks:
        if isinstance(b, Layer) and isinstance(b.moe, Experts | ExpertParallel):
            out += [child for name, child in b.named_children() if name != "moe"] + [b.moe.router]
        else:
            out.append(b)
    return out
