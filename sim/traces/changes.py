"""Describe what a replay changes: device, network, data-parallel degree, single kernels, single ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct, field

from sim.core.collectives import COLLECTIVES, POINT_TO_POINT
from sim.core.errors import InputError
from sim.inputs.input_source import nearest
from sim.traces.recording import Node, Recording
from topology.collective_kinds import bus_factor
from topology.network import Network
from topology.node_parts import gpu_by_name
from topology.presets import CLUSTERS, GPUS
from topology.spec import GpuSpec

# Names of kernels that arithmetic limits; memory is assumed to limit all others. Inductor's generated kernels
# (triton_poi_…, _red_, _per_) are named after the operators fused into them and contain no matmul; its templates
# (triton_tem_fused_mm) do.
MATMUL = re.compile(
    r"^(?!triton_(?:poi|red|per)_).*(?:gemm|cutlass|xmma|nvjet|flash|fmha|attention|matmul|conv(?!ert)|addmm"
    r"|triton_tem_|aten::(?:b?mm|linear))",
    re.I | re.S,
)
MAX_PATTERN = 200
SEARCHED = 2000  # characters of a name that patterns are looked for in
LONGEST = 5  # names that a message shows


class Change(Struct, frozen=True):
    """Hold the changes of a replay. The default changes nothing."""

    kernels: tuple[tuple[re.Pattern[str], float], ...] = ()  # factor on the seconds of nodes whose name matches
    gpu_ratio: float = 1.0  # speed of the new device ÷ the recorded one's
    gpus: tuple[GpuSpec, GpuSpec] | None = None  # the recorded GPU and the new one
    network_scale: float = 1.0  # speed of the new links ÷ the recorded ones'
    network: Network | None = None  # if given, prices every transfer whose ranks and bytes are known
    dp: tuple[frozenset[str], int, int] | None = None  # process groups, their recorded size, their new size
    stragglers: dict[int, float] = field(default_factory=dict)  # factor on the compute seconds of a rank
    single: dict[tuple[int, str], float] = field(default_factory=dict)  # factor on a rank's kernels of one name
    transfers: dict[tuple[str, float, tuple[int, ...]], float] = field(default_factory=dict)  # by kind, bytes, ranks

    def compute(self, node: Node) -> float:
        """Return the factor on a node's own seconds."""
        scale = 1.0
        if node.compute:
            scale = self.stragglers.get(node.rank, 1.0) / self.gpu_ratio
            scale *= self.single.get((node.rank, node.name), 1.0)
            if self.gpus is not None:
                scale *= _device_ratio(node.name, *self.gpus)
        return self._named(node, scale)

    def transfer_s(self, node: Node, seconds: float) -> float:
        """Return the seconds of a transfer that took `seconds` from its last member's arrival on."""
        message = node.message
        assert message is not None
        ranks, size = message.ranks, message.bytes
        if self.dp is not None and message.group in self.dp[0]:
            _, old, new = self.dp
            seconds *= bus_factor_ratio(message.kind, old, new)
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            ranks = tuple(ranks[0] + i * stride for i in range(new)) if ranks else ()
        if self.network is not None and ranks and (size or message.kind == "barrier"):
            seconds = _priced(self.network, message.kind, ranks, size)
        seconds *= self.transfers.get((message.kind, size, message.ranks), 1.0)
        return self._named(node, seconds / self.network_scale)

    def _named(self, node: Node, value: float) -> float:
        for pattern, scale in self.kernels:
            if pattern.search(node.name[:SEARCHED]):
                value *= scale
        return value


def bus_factor_ratio(kind: str, old: int, new: int) -> float:
    """Return the factor by which a bandwidth-bound collective grows with its ranks: nccl-tests' 2(n-1)/n and others.

    >>> bus_factor_ratio("all_reduce", 2, 4)
    1.5
    """
    if kind not in COLLECTIVES or new == old or old == 1:
        return 1.0
    return bus_factor(kind, new) / bus_factor(kind, old) if new > 1 else 0.0


def _priced(network: Network, kind: str, ranks: tuple[int, ...], size: float) -> float:
    if kind in POINT_TO_POINT:
        return network.send(ranks[0], ranks[-1], size)
    if kind == "barrier":
        kind, size = "all_reduce", 4.0
    return network.collective(kind, ranks, size).seconds


def _device_ratio(name: str, old: GpuSpec, new: GpuSpec) -> float:
    if not MATMUL.search(name[:SEARCHED]):
        return old.memory_bandwidth_bytes_per_s / new.memory_bandwidth_bytes_per_s
    dtype = "bf16" if "bf16" in old.peak_flops_per_s and "bf16" in new.peak_flops_per_s else "fp16"
    return old.peak_flops_per_s.get(dtype, 1.0) / new.peak_flops_per_s.get(dtype, 1.0)


def parse_scales(
    texts: Sequence[str], option: str, what: str = "NAME", example: str = "gemm=0.5"
) -> list[tuple[str, float]]:
    """Parse `NAME=FACTOR` options; a message says `what` the name is, and shows the `example`.

    Raises:
        InputError: if the factor is missing, no number, not finite or not above 0.
    """
    out = []
    for text in texts:
        name, equals, factor = text.rpartition("=")
        try:
            value = float(factor)
        except ValueError:
            value = -1.0
        if not equals or not name or not 0 < value <= 1e9:
            allowed = f"{what}=FACTOR with a factor above 0, e.g. {example}"
            raise InputError(f"{option}: found '{text[:100]}'; must be {allowed}")
        out.append((name, value))
    return out


def kernel_scales(texts: Sequence[str]) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Parse `--scale-kernels 'REGEX=FACTOR'`.

    Raises:
        InputError: for a bad factor or a pattern that is no regular expression.
    """
    out = []
    for pattern, factor in parse_scales(texts, "--scale-kernels"):
        try:
            if len(pattern) > MAX_PATTERN:
                raise re.error(f"longer than {MAX_PATTERN} characters")
            out.append((re.compile(pattern), factor))
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(f"--scale-kernels: '{pattern[:80]}' is no regular expression: {error}") from None
    return tuple(out)


def check_names(recording: Recording, kernels: Sequence[tuple[re.Pattern[str], float]]) -> None:
    """Raise InputError for a pattern that no operator, kernel or transfer of the traces has; name the longest ones."""
    for pattern, _ in kernels:
        if not any(pattern.search(node.name[:SEARCHED]) for node in recording.nodes):
            length_ns = Counter[str]()
            for node in recording.nodes:
                length_ns[node.name[:60]] += node.end_ns - node.start_ns
            longest = ", ".join(name for name, _ in length_ns.most_common(LONGEST))
            raise InputError(f"--scale-kernels: '{pattern.pattern}' matches nothing; the longest here are {longest}")


def straggler_scales(texts: Sequence[str], ranks: Sequence[int]) -> dict[int, float]:
    """Parse `--straggler RANK=FACTOR`.

    Raises:
        InputError: for a bad factor or a rank that has no trace.
    """
    out = {}
    for rank, factor in parse_scales(texts, "--straggler", "RANK", "3=1.3"):
        if not rank.isascii() or not rank.isdigit() or len(rank) > 9 or int(rank) not in ranks:
            shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
            raise InputError(f"--straggler: found rank '{rank[:40]}'; there are traces of ranks {shown}")
        out[int(rank)] = factor
    return out


def gpu_pair(text: str, recorded: str) -> tuple[GpuSpec, GpuSpec]:
    """Parse `--gpu NAME` or `--gpu FROM=TO`: the presets of the recorded device and of the new one.

    Raises:
        InputError: for an unknown name, or if the recorded device is no preset.
    """
    before, equals, after = text.rpartition("=")
    before = before if equals else gpu_by_name(recorded) or ""
    for name in (after, before):
        if name not in GPUS:
            none = "the traces name no GPU (the profiler records one with ProfilerActivity.CUDA)"
            device = f"the traces' device '{recorded}' is no preset" if recorded else none
            other = "a100-sxm" if after == "h100-sxm" else "h100-sxm"
            say = f"{device}; say --gpu FROM={after} with the recorded one, such as --gpu {other}={after}"
            no_such = f"unknown GPU '{name[:60]}'{nearest(name, GPUS)} (`stepsim clusters` lists them)"
            found = no_such if name else say
            raise InputError(f"--gpu: {found}")
    return GPUS[before], GPUS[after]


def network_of(preset: str, ranks: int) -> Network:
    """Return the network of a cluster preset with enough nodes for the ranks.

    Raises:
        InputError: for an unknown preset.
    """
    if preset not in CLUSTERS:
        from sim.inputs.cluster_names import no_such_cluster

        raise InputError(f"--cluster: found '{preset[:60]}'; {no_such_cluster(preset)}")
    spec = CLUSTERS[preset]
    return Network(spec.model_copy(update={"nodes": max(spec.nodes, -(-ranks // spec.gpus_per_node))}))


def dp_change(recording: Recording, dp: int, group: str | None) -> tuple[frozenset[str], int, int]:
    """Return the process groups that `--dp` changes: the named one, or the one that reduces most bytes, and equal ones.

    Raises:
        InputError: if no traced group reduces gradients, or the named one does not exist.
    """
    sizes, members = _reducing(recording)
    known = ", ".join(f"'{g}'" for g in sorted(sizes))
    if group is not None and group not in sizes:
        raise InputError(f"--dp-group: found '{group[:60]}'; groups that reduce are: {known or 'none'}")
    chosen = group if group is not None else max(sizes, key=lambda g: sizes[g], default=None)
    if chosen is None or len(members[chosen]) < 2:
        raise InputError("--dp: the traces hold no all-reduce or reduce-scatter over a known group of ranks")
    alike = frozenset(g for g in sizes if g == chosen or _alike(members[g], members[chosen]))
    return alike, len(members[chosen]), dp


def _reducing(recording: Recording) -> tuple[dict[str, float], dict[str, tuple[int, ...]]]:
    """Return the bytes that each process group reduces, summed over traced ranks, and the group's ranks."""
    sizes: dict[str, float] = {}
    members: dict[str, tuple[int, ...]] = {}
    for node in recording.nodes:
        m = node.message
        if m is not None and m.kind in ("all_reduce", "reduce_scatter"):
            sizes[m.group] = sizes.get(m.group, 0.0) + m.bytes
            members[m.group] = max(members.get(m.group, ()), m.ranks, key=len)
    return sizes, members


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Tell whether two groups may be of one dimension of a layout: no common rank, equal distances between ranks.

    >>> _alike((0, 2), (1, 3)), _alike((0, 2), (1, 2)), _alike((0, 2), (2, 4))
    (True, False, False)
    """
    if not one or not other or set(one) & set(other):
        return False
    return [rank - one[0] for rank in one] == [rank - other[0] for rank in other]


def doubts(recording: Recording, change: Change) -> list[str]:
    """Return notes on a change.

    They name groups that `--dp` leaves out, traces without transfers, transfers without bytes, and kernels that stand
    for many.
    """
    out = []
    if change.dp is not None:
        sizes, members = _reducing(recording)
        others = sorted(g for g in sizes if g not in change.dp[0] and len(members[g]) > 1)
        if others:
            first, shown = min(change.dp[0]), ", ".join(f"'{g}'" for g in others[:8])
            out.append(
                f"--dp: changes the groups like '{first}' (ranks {', '.join(map(str, members[first][:8]))}); others "
                f"reduce too, of which --dp-group takes one: {shown}"
            )
    messages = [n.message for n in recording.nodes if n.message is not None]
    if not messages and (change.network is not None or change.network_scale != 1.0):
        option = "--cluster" if change.network is not None else "--network-scale"
        out.append(f"{option}: the traces hold no collective and no message, so it changes nothing")
    sizeless = sum(not m.bytes and m.kind != "barrier" for m in messages)
    if sizeless and change.network is not None:
        out.append(f"--cluster: the traces do not say the bytes of {sizeless} transfers, which keep their seconds")
    runs = sum(n.compute and n.operators > 1 for n in recording.nodes) if change.gpus is not None else 0
    if runs:
        out.append(
            f"--gpu: {runs} computations stand for several operators each (A … B); their first and last names "
            "decide whether peak FLOP/s or memory bandwidth scales them"
        )
    return out
