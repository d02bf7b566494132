"""What one operator costs while serving: seconds of programs out of a profile's tables, and what weights need to come.

Operators are priced as in training (`sim.prices`), then as serving moves them: weights in fewer bytes, experts with few
tokens, caches that are streamed.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from sim.core.operator_kinds import ATTENTION_DECODE, MATMULS, MOE_LAYER, shape_flops
from sim.core.program import Comm, Compute, Program, Wait
from sim.core.quantization import TABLE_FORMATS
from sim.models.layers.latent import LATENT_HEADS
from sim.models.serving.operators import ServingDims
from sim.prices.price import Priced
from sim.prices.profile import Profile
from sim.prices.rank_prices import Pricing
from sim.prices.reference_gpu import measured_device
from sim.prices.roofline import Device, shape_bytes
from sim.programs.priced_items import Shares
from sim.serve.prices.all_reduce_prices import AllReduces, all_reduces
from sim.serve.prices.host import Host

SCALED = (*MATMULS, "attention_forward", ATTENTION_DECODE, MOE_LAYER)
FEW_ROWS = 64  # of one expert: less than a tile


class PricedProgram(NamedTuple):
    """Seconds of a program, communication among them, and by (kind, source, uncertainty)."""

    seconds: float
    comm_s: float
    shares: Shares


class OperatorPrices(Struct, frozen=True):
    """Prices of programs on one rank. `rank`: whose collectives these are; `slowdown`: how many times as long
    computations take; `own`: all-reduces in the engine's own kernels."""

    pricing: Pricing
    host: Host
    device: Device
    stream_bytes_per_s: float
    act_bytes: float
    rank: int = 0
    slowdown: float = 1.0
    own: AllReduces | None = None

    def priced(self, program: Program) -> PricedProgram:
        """Operators one after another, as kernels on one stream; messages between them, but those that are waited for
        later: of these what computing does not hide."""
        seconds, comm, shares = 0.0, 0.0, Shares()
        under_way: dict[str, tuple[float, Comm, Priced]] = {}
        computed = iter(self._computed([item for item in program if isinstance(item, Compute)]))
        for item in program:
            if isinstance(item, Wait):
                end, item, price = under_way.pop(item.handle)
                price = price._replace(seconds=max(0.0, end - seconds))
                comm += price.seconds
            elif isinstance(item, Comm):
                price = self._comm(item)
                if not item.blocking:
                    under_way[item.handle] = seconds + price.seconds, item, price
                    continue
                comm += price.seconds
            else:
                price = next(computed)
                price = price._replace(seconds=price.seconds * self.slowdown)
            seconds += price.seconds
            share = (item.kind, price.source, price.uncertainty)
            shares[share] = shares.get(share, 0.0) + price.seconds
        return PricedProgram(seconds, comm, shares)

    def _computed(self, operators: list[Compute]) -> list[Priced]:
        """Prices of computations, less what those on a second stream take no longer for than others beside them.

        Of two streams' kernels one set hides the other's launches and the parts of the GPU that it leaves idle, but not
        its bytes and flops: both together take as long as the longer set, and what the shorter one's work takes at the
        bandwidth and peak, at most the sum (an assumption).
        """
        prices = [self._operator(op) for op in operators]
        start = 0
        while start < len(operators):
            beside, end = operators[start].beside, start
            while end < len(operators) and operators[end].beside == beside:
                end += 1
            if beside:
                sets = (start - beside, start), (start, end)
                whole = [sum([price.seconds for price in prices[a:b]]) for a, b in sets]
                work = [sum([self._least_s(op) for op in operators[a:b]]) for a, b in sets]
                longer = whole[1] > whole[0]
                added_s = max(whole) + work[not longer] - whole[0]
                part = min(1.0, added_s / whole[1])
                prices[start:end] = [price._replace(seconds=price.seconds * part) for price in prices[start:end]]
            start = end
        return prices

    def _least_s(self, op: Compute) -> float:
        """What an operator's work takes at least: its flops at the peak or its bytes at the bandwidth of streams."""
        return max(self.device.seconds(op.kind, op.flops, op.bytes, op.dtype), op.bytes / self.stream_bytes_per_s)

    def _comm(self, comm: Comm) -> Priced:
        """A collective; an all-reduce in the engine's own kernel where it has one, and with its ranks' waits."""
        price = self.pricing.comm(comm, self.rank)
        if comm.kind != "all_reduce":
            return price
        own = self.own.price(comm.group, self.rank, comm.bytes, price.seconds) if self.own is not None else None
        price = own or price
        return price._replace(seconds=price.seconds + self.host.times.collective_s)

    def _operator(self, op: Compute) -> Priced:
        """One operator on a healthy rank.

        Tables know a shape in one dtype: where weights or cache are kept in fewer bytes, or one latent serves many
        heads, the operator keeps its shape's efficiency on the roofline of what it really moves (and the table's floor,
        as in `sim.prices.kernel_tables`: fewer bytes shorten no launch). And weights and cache come from device memory:
        published points of small operators, repeated, read them from the L2 cache, which a whole model's do not fit in,
        so no price is below what streaming them takes.
        """
        if op.kind not in SCALED:
            return self.pricing.compute(op)
        here = self.device.seconds(op.kind, op.flops, op.bytes, op.dtype)
        dense = _as_dense(op)
        known = bool(op.kernel) and self.pricing.costs.knows(op)
        if op.kind == ATTENTION_DECODE and op.kernel and not known:
            dense = _as_grouped(op)
        whole = shape_bytes(dense.kind, dense.shape, dense.dtype, TABLE_FORMATS.get(op.kernel) if known else None)
        price = self.pricing.compute(replace(dense, own_bytes=op.bytes < whole))
        if op.sent_tokens:
            price = price._replace(seconds=price.seconds - self._of_others(op))
        if op.kind == MOE_LAYER and op.dtype == "fp8":
            price = price._replace(seconds=price.seconds / self.host.engine.experts_speed)
        streamed = op.bytes
        if op.kind in MATMULS:
            batch, m, n, k = op.shape
            streamed -= batch * m * (n + k) * self.act_bytes
        return price._replace(seconds=max(price.seconds, here, streamed / self.stream_bytes_per_s))

    def _of_others(self, op: Compute) -> float:
        """Seconds that measured experts spend on tokens which an all-to-all would not have sent to their rank.

        A measured rank has all tokens of its ep ranks: it chooses their experts, quantizes and sums up every one, and
        computes 1/ep of the experts. So T(tokens, ep) = rest(tokens) + (T(tokens, 1) - T(tokens, ep)) / (ep - 1). Here
        the rest is that of the copies that were sent, where these are fewer.
        """
        tokens, hidden, ffn, top_k, experts, expert_tp, ep = op.shape
        copies = max(1, tokens * top_k // ep)
        if copies >= tokens:
            return 0.0

        def at(count: int, split: int) -> float:
            shape = count, hidden, ffn, top_k, experts, expert_tp, split
            whole = replace(op, shape=shape, flops=shape_flops(op.kind, shape))
            weight = TABLE_FORMATS.get(op.kernel)
            return self.pricing.compute(replace(whole, bytes=shape_bytes(op.kind, shape, op.dtype, weight))).seconds

        def rest(count: int) -> float:
            return at(count, ep) - (at(count, 1) - at(count, ep)) / (ep - 1)

        return max(0.0, rest(tokens) - rest(copies))


def _as_dense(op: Compute) -> Compute:
    """Experts with a few tokens each: bound by reading weights, so like one product with as many of them as columns."""
    if op.kind != "grouped_gemm" or op.shape[1] >= FEW_ROWS:
        return op
    groups, m, n, k = op.shape
    return replace(op, kind="gemm", shape=(1, m, groups * n, k))


def _as_grouped(op: Compute) -> Compute:
    """Single tokens' attention over a latent cache, where only kernels of grouped queries were measured.

    These were measured to 32 query heads a KV head. Beyond, the measured library reads the cache once for each head,
    which kernels of latent attention do not. So `LATENT_HEADS` heads are asked for, whose efficiency is that of all.
    """
    batch, heads, *rest = op.shape
    return replace(op, kernel="", shape=(batch, min(heads, LATENT_HEADS), *rest))


def operator_prices_of(pricing: Pricing, profile: Profile, dims: ServingDims, host: Host) -> OperatorPrices:
    """Prices of operators on the profile's device, with the engine's formats of weights and its own all-reduces."""
    priced = pricing.costs.profile
    device = measured_device(priced, pricing.plan.scenario.cluster.gpu)
    streamed = device.bandwidth_bytes_per_s * priced.coefficients.streaming_efficiency
    reduces = all_reduces(pricing, host.engine.own_all_reduces)
    return OperatorPrices(pricing, host, device, streamed, dims.act_bytes, own=reduces)
