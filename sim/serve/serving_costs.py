"""Seconds of one serving iteration on every pipeline stage.

An iteration is a `Load`: tokens in all, prompt chunks, single tokens with the length of what they see, sequences
that need logits. Its price is the sum of parts that are priced once and kept. Between kept sizes prices are
linear: above 256 tokens sixteen sizes an octave, for decode attention four lengths an octave; a run of decode steps
is therefore exactly the sum of its steps, however it is grouped.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.graph.template import Priced
from sim.inputs.scenario import Scenario
from sim.models.inference import (
    ServingDims,
    decode_attention,
    embedding_tokens,
    experts_dtype,
    head_samples,
    layer_tokens,
    prefill_attention,
    serving_dims,
)
from sim.plan import Plan, make_plan
from sim.prices.costs import REPEAT_UNCERTAINTY, Costs
from sim.prices.kernels import kernel_file
from sim.prices.pricing import Pricing
from sim.prices.profile import Profile
from sim.prices.roofline import ATTENTION_DECODE, MATMULS, MOE_LAYER, Device, shape_bytes, shape_flops
from sim.program import Comm, Compute, Program, Wait
from sim.serve.serving_measured import MeasuredParts, measured_parts
from sim.serve.weight_only import WeightOnly, weight_only
from topology.network import Network

SCALED = (*MATMULS, "attention_forward", ATTENTION_DECODE, MOE_LAYER)
EXACT_TOKENS = 256
FEW_ROWS = 64  # of one expert: less than a tile
Key = tuple[str, int, int, int]
Shares = dict[tuple[str, str, float], float]


class Load(NamedTuple):
    """What one iteration computes. `prefills`: (chunk, what its last token sees, how many are alike);
    `decode_kv`: tokens seen by all single tokens together."""

    tokens: int
    decodes: int = 0
    decode_kv: int = 0
    prefills: tuple[tuple[int, int, int], ...] = ()
    samples: int = 0


class Bill(NamedTuple):
    """Seconds of a program, communication among them, and by (kind, source, uncertainty)."""

    seconds: float
    comm_s: float
    shares: Shares


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What one pipeline rank holds."""

    rank: int
    dense: int
    sparse: int
    embedding: bool
    head: bool


@dataclass(slots=True)
class IterationCosts:
    """Prices of iterations under one scenario and profile; see `stage_seconds`."""

    plan: Plan
    pricing: Pricing
    dims: ServingDims
    stages: tuple[StageLayers, ...]
    overhead_s: float  # of the engine's own work between iterations, where it was measured
    device: Device
    stream_bytes_per_s: float
    formats: WeightOnly | None = None
    measured: MeasuredParts | None = None
    bills: dict[Key, Bill] = field(default_factory=dict)
    used: dict[Key, float] = field(default_factory=dict)
    rank: int = 0  # whose collectives these are
    slowdown: float = 1.0  # how many times as long computations take

    def stage_seconds(self, load: Load) -> tuple[float, ...]:
        """Seconds of the iteration on every stage, messages between stages apart."""
        moe = self.plan.scenario.model.moe is not None
        dense = self._tokens("dense", load.tokens) if any(s.dense for s in self.stages) else 0.0
        sparse = self._tokens("sparse", load.tokens) if moe else 0.0
        attention = self._attention(load)
        out = []
        for s in self.stages:
            seconds = s.dense * dense + s.sparse * sparse + (s.dense + s.sparse) * attention
            if s.embedding:
                seconds += self.overhead_s + self._tokens("embedding", load.tokens)
            if s.head and load.samples:
                seconds += self._tokens("head", load.samples)
            out.append(seconds)
        return tuple(out)

    def decode_run(self, decodes: int, first_kv: int, steps: int) -> NDArray[np.float64]:
        """Seconds of `steps` iterations of `decodes` single tokens on one stage, the first seeing `first_kv` in all."""
        base = self.stage_seconds(Load(decodes, 0, 0, (), decodes))[0]
        means = first_kv / decodes + np.arange(steps, dtype=np.float64)
        knots = _lengths_around(float(means[0]), float(means[-1]))
        layers = self.stages[0].dense + self.stages[0].sparse
        at = np.array([self._bill(("decode", decodes, k, 0)).seconds for k in knots])
        return np.asarray(base + layers * np.interp(means, knots, at))

    def note_decode_run(self, decodes: int, first_kv: int, steps: int) -> None:
        """Count a run's prices among those that the result reports, all steps as its middle one."""
        self.note(Load(decodes, decodes, first_kv + decodes * (steps // 2), (), decodes), float(steps))

    def note(self, load: Load, times: float = 1.0) -> None:
        """Count an iteration's prices among those that the result reports."""
        used = self.used
        dense, sparse = sum(s.dense for s in self.stages), sum(s.sparse for s in self.stages)
        layers = dense + sparse
        for name, count in (("dense", dense), ("sparse", sparse), ("embedding", 1)):
            if count:
                key = (name, _sizes_around(load.tokens)[0], 0, 0)
                used[key] = used.get(key, 0.0) + times * count
        for key, part in _prefill_parts(load):
            used[key] = used.get(key, 0.0) + times * layers * part
        if load.decodes:
            key = ("decode", load.decodes, _lengths_around(load.decode_kv / load.decodes)[0], 0)
            used[key] = used.get(key, 0.0) + times * layers
        if load.samples:
            key = ("head", _sizes_around(load.samples)[0], 0, 0)
            used[key] = used.get(key, 0.0) + times

    def shares(self) -> Shares:
        """Seconds of everything noted, by (operator kind, source, uncertainty)."""
        total: Shares = {}
        for key, times in self.used.items():
            for sort, seconds in self._bill(key).shares.items():
                total[sort] = total.get(sort, 0.0) + times * seconds
        return total

    def comm_share(self) -> float:
        """Communication's part of everything noted."""
        bills = [(self._bill(key), times) for key, times in self.used.items()]
        seconds = sum(b.seconds * times for b, times in bills)
        return sum(b.comm_s * times for b, times in bills) / seconds if seconds > 0 else 0.0

    def send_s(self, stage: int, tokens: int) -> float:
        """Seconds to hand the residual stream of `tokens` from a stage to the next."""
        size = tokens * self.dims.model.hidden * self.dims.act_bytes
        return self.pricing.send(self.stages[stage].rank, self.stages[stage + 1].rank, size).seconds

    def _tokens(self, name: str, tokens: int) -> float:
        low, high, share = _sizes_around(tokens)
        first = self._bill((name, low, 0, 0)).seconds
        return first if share == 0.0 else first + share * (self._bill((name, high, 0, 0)).seconds - first)

    def _attention(self, load: Load) -> float:
        seconds = sum(self._bill(key).seconds * part for key, part in _prefill_parts(load))
        if load.decodes:
            mean = load.decode_kv / load.decodes
            knots = _lengths_around(mean)
            at = [self._bill(("decode", load.decodes, k, 0)).seconds for k in knots]
            seconds += float(np.interp(mean, knots, at))
        return seconds

    def _bill(self, key: Key) -> Bill:
        found = self.bills.get(key)
        if found is None:
            found = self.bills[key] = self._priced(self._program(key)) if self.measured is None else self._known(key)
        return found

    def _known(self, key: Key) -> Bill:
        """The same out of a real engine's measured parts, which hold embedding and head in those of the layers."""
        assert self.measured is not None
        name, a, b, alike = key
        seconds = 0.0
        if name in ("prefill", "decode"):
            seconds = self.measured.core(name, a, b) * (alike if name == "prefill" else 1)
        elif name in ("dense", "sparse"):
            seconds = self.measured.rest(a) / self.dims.model.layers
        seconds *= self.slowdown
        return Bill(seconds, 0.0, {(name, "measured", REPEAT_UNCERTAINTY): seconds})

    def _program(self, key: Key) -> Program:
        name, a, b, c = key
        if name == "prefill":
            return prefill_attention(self.dims, c, a, b)
        if name == "decode":
            return decode_attention(self.dims, a, b)
        if name == "embedding":
            return embedding_tokens(self.dims, a)
        if name == "head":
            return head_samples(self.dims, a)
        return layer_tokens(self.dims, name == "sparse", a)

    def _priced(self, program: Program) -> Bill:
        """Operators and messages one after another, as kernels on one stream."""
        seconds, comm, shares = 0.0, 0.0, Shares()
        for item in program:
            if isinstance(item, Wait):
                continue
            if isinstance(item, Comm):
                price = self.pricing.comm(item, self.rank)
                comm += price.seconds
            else:
                price = self._operator(item)
                price = price._replace(seconds=price.seconds * self.slowdown)
            seconds += price.seconds
            sort = (item.kind, price.source, price.uncertainty)
            shares[sort] = shares.get(sort, 0.0) + price.seconds
        return Bill(seconds, comm, shares)

    def _operator(self, op: Compute) -> Priced:
        """One operator on a healthy rank.

        Tables know a shape in one dtype: where weights or cache are kept in fewer bytes, or one latent serves many
        heads, the operator keeps its shape's efficiency on the roofline of what it really moves. And weights and cache
        come from device memory: published points of small operators, repeated, read them from the L2 cache, which a
        whole model's do not fit in, so no price is below what streaming them takes.
        """
        if op.kind not in SCALED:
            return self.pricing.compute(op)
        here = self.device.seconds(op.kind, op.flops, op.bytes, op.dtype)
        price = self._converted(op)
        if price is None:
            known = _as_known(op)
            price = self.pricing.compute(known)
            if op.bytes < known.bytes:
                there = self.device.shape_seconds(known.kind, known.shape, known.dtype)
                price = price._replace(seconds=price.seconds * here / there)
        streamed = op.bytes
        if op.kind in MATMULS:
            batch, m, n, k = op.shape
            streamed -= batch * m * (n + k) * self.dims.act_bytes
        return price._replace(seconds=max(price.seconds, here, streamed / self.stream_bytes_per_s))

    def _converted(self, op: Compute) -> Priced | None:
        """A product with 8- or 4-bit weights out of measured ones, where the profile has them."""
        if self.formats is None or op.kind != "gemm" or op.shape[0] > 1:
            return None
        _, m, n, k = op.shape
        fewer = op.dtype == "int8" or op.bytes < shape_bytes(op.kind, op.shape, op.dtype)
        found = self.formats.at(m, n, k) if fewer else None
        return None if found is None else Priced(found[0], "interpolated", found[1])


def _prefill_parts(load: Load) -> list[tuple[Key, float]]:
    """Attention of prompt chunks, which are one kernel however their lengths differ (vLLM: flash_attn_varlen_func):
    each takes its part of what as many alike take as have the iteration's prompt tokens.

    >>> _prefill_parts(Load(128, prefills=((32, 32, 4),)))
    [(('prefill', 32, 32, 4), 1.0)]
    >>> _prefill_parts(Load(128, prefills=((32, 32, 2), (64, 64, 1))))
    [(('prefill', 32, 32, 4), 0.5), (('prefill', 64, 64, 2), 0.5)]
    """
    tokens = sum(q * alike for q, _, alike in load.prefills)
    sizes = [(q, kv, alike, round(tokens / q)) for q, kv, alike in load.prefills]
    return [(("prefill", q, kv, n), alike / n) for q, kv, alike, n in sizes]


def _as_known(op: Compute) -> Compute:
    """The operator whose price is asked for: of the same shape, with all that it moves in its own dtype."""
    dense = _as_dense(op)
    usual = shape_bytes(dense.kind, dense.shape, dense.dtype)
    return dense if dense.bytes >= usual else replace(dense, bytes=usual, flops=shape_flops(dense.kind, dense.shape))


def _as_dense(op: Compute) -> Compute:
    """Experts with a few tokens each: bound by reading weights, so like one product with as many of them as columns."""
    if op.kind != "grouped_gemm" or op.shape[1] >= FEW_ROWS:
        return op
    groups, m, n, k = op.shape
    return replace(op, kind="gemm", shape=(1, m, groups * n, k))


def iteration_costs(scenario: Scenario, profile: Profile) -> IterationCosts:
    """Prices for `scenario` out of `profile`."""
    plan = make_plan(scenario)
    kept = {name: c for name, c in profile.coefficients.items() if name != "group_launch_s"}  # experts share a launch
    costs = Costs(replace(profile, coefficients=kept), scenario.cluster.gpu)
    gpu = scenario.cluster.gpu
    peaks = {d: costs.coefficient(f"peak_{d}_flops_per_s", peak) for d, peak in gpu.peak_flops_per_s.items()}
    bandwidth = costs.coefficient("memory_bandwidth_bytes_per_s", gpu.memory_bandwidth_bytes_per_s)
    parts = measured_parts(profile, scenario.model) if scenario.parallelism.ranks == 1 else None
    dims, device = serving_dims(scenario), Device(gpu.name, peaks, bandwidth)
    dims = replace(dims, one_kernel=_experts_measured(profile, dims))
    formats = weight_only(profile, dims.quantization, dims.weight_bytes, device)
    engine_s = 0.0 if parts is None else parts.engine
    return IterationCosts(
        plan, Pricing(plan, costs, Network(scenario.cluster)), dims, _stages(plan), engine_s, device,
        bandwidth * costs.coefficient("memory_efficiency", 1.0), formats, parts,
    )  # fmt: skip


def _experts_measured(profile: Profile, dims: ServingDims) -> bool:
    """Whether the profile has whole layers of experts in their format."""
    dtype = experts_dtype(dims)
    alike = {"fp16": "bf16", "mxfp8": "fp8"}.get(dtype, dtype)
    return bool(profile.kernels) and (MOE_LAYER, alike) in kernel_file(profile.kernels).tables


def _stages(plan: Plan) -> tuple[StageLayers, ...]:
    """Parts dealt to pipeline ranks in turn; serving runs a rank's parts one after another."""
    pp, model = plan.scenario.parallelism.pp, plan.scenario.model
    out = []
    for i in range(pp):
        parts = plan.parts[i::pp]
        layers = [n for part in parts for n in part.layers]
        sparse = sum(model.is_moe_layer(n) for n in layers)
        first, last = any(p.embedding for p in parts), any(p.head for p in parts)
        out.append(StageLayers(i * plan.mesh.strides["pp"], len(layers) - sparse, sparse, first, last))
    return tuple(out)


def _sizes_around(tokens: int) -> tuple[int, int, float]:
    """The kept sizes below and above a number of tokens, and how far it is between them.

    >>> _sizes_around(200), _sizes_around(1000), _sizes_around(1024)
    ((200, 200, 0.0), (992, 1024, 0.25), (1024, 1024, 0.0))
    """
    if tokens <= EXACT_TOKENS:
        return tokens, tokens, 0.0
    step = 1 << (tokens.bit_length() - 5)  # sixteen in an octave
    low = tokens // step * step
    return (low, low, 0.0) if low == tokens else (low, low + step, (tokens - low) / step)


_LENGTHS = tuple(sorted({round(2 ** (i / 4)) for i in range(4 * 40)}))


def _lengths_around(first: float, last: float | None = None) -> tuple[int, ...]:
    """The kept lengths that enclose first … last.

    >>> _lengths_around(100), _lengths_around(8), _lengths_around(100, 130)
    ((91, 108), (8, 10), (91, 108, 128, 152))
    """
    low = max(0, bisect_right(_LENGTHS, first) - 1)
    high = bisect_right(_LENGTHS, first if last is None else last)
    return _LENGTHS[low : high + 1]
