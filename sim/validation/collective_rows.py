"""Rows of measured collectives and messages, priced as a training step prices them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.json_values import is_number
from sim.inputs.parallelism import MAX_RANKS
from sim.inputs.recorded import decided
from sim.prices.rank_prices import LINK_UNCERTAINTY
from sim.validation.prediction import NotSimulated, Predictions, cluster_of, costs_of, spread
from sim.validation.records import Measurement
from topology.collective_kinds import KINDS, bus_factor
from topology.network import Network
from topology.spec import ClusterSpec

_NAMES = {
    "all2all": "all_to_all",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "p2p": "send_recv",
    "sendrecv": "send_recv",
}
_SIZES = {"bytes": ("size_bytes", "message_bytes"), "ranks": ("gpus", "world_size")}
MESSAGES = ("send", "receive")
MAX_BYTES = 10**18


def collective_predictions(row: Measurement, calibration: str | None) -> Predictions:
    """Seconds, and bandwidths by nccl-tests' convention, of `op` over `bytes` and `ranks` (of one node, or `nodes`).

    A profile's measured points count inside a node; the links' closed forms everywhere else.
    """
    row = replace(row, data=_usual_names(row.data))
    data = row.data
    if "bytes" not in data or "ranks" not in data:
        raise NotSimulated("a fitted parameter, not a measured message")
    op = data["op"]
    count, nodes = int(_number(row, "ranks", 1, MAX_RANKS)), int(_number(row, "nodes", 1, MAX_RANKS))
    size = _number(row, "bytes", 0, MAX_BYTES)
    seconds, sigma = _seconds(row, calibration, op, count, nodes, size)
    if row.one_process:  # it launches on one GPU after the other, and waits for all
        seconds = max(seconds, count * costs_of(row, calibration).launch_overhead_s)
    known = {"seconds": spread(seconds, sigma)}
    if seconds:
        known["algorithm_bandwidth_bytes_per_s"] = spread(size / seconds, sigma)
    if seconds and op in KINDS:  # a profile may have operators of other names
        known["bus_bandwidth_bytes_per_s"] = spread(size / seconds * bus_factor(op, count), sigma)
    return {key: value for key, value in known.items() if key in row.measured}


def _number(row: Measurement, key: str, least: int, most: int) -> float:
    found = row.data.get(key, 1)
    if not is_number(found) or not least <= found <= most:
        raise InputError(f"{row.id}: {key}: found {str(found)[:40]}; allowed: {least} to {most:,}")
    return float(found)


def _usual_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the format's own names: sizes under other usual ones, operators in any spelling."""
    found = {name: data[other] for name, others in _SIZES.items() for other in others if other in data}
    op = str(data.get("op")).lower().replace("-", "_")
    decided(data, "dtype")  # a message is bytes
    return found | (data if isinstance(data, dict) else dict(data)) | {"op": _NAMES.get(op, op)}


def _seconds(
    row: Measurement, calibration: str | None, op: str, count: int, nodes: int, size: float
) -> tuple[float, float]:
    cluster = cluster_of(row)
    ranks = _placed(count, nodes, cluster)
    cluster = cluster.model_copy(update={"nodes": max(cluster.nodes, ranks[-1] // cluster.gpus_per_node + 1)})
    network = Network(cluster)
    if op in MESSAGES:
        return network.send(0, ranks[-1], size), LINK_UNCERTAINTY
    if count <= cluster.gpus_per_node and nodes == 1:
        measured = costs_of(row, calibration).collective(op, count, size)
        if measured is not None:
            return measured.seconds, measured.uncertainty
    try:
        return network.collective(op, ranks, size).seconds, LINK_UNCERTAINTY
    except ValueError as error:
        raise NotSimulated(str(error)) from None


def _placed(count: int, nodes: int, cluster: ClusterSpec) -> range | tuple[int, ...]:
    """`count` ranks, node after node; the same number on each of `nodes` where that many were said to be used."""
    per_node = count // nodes
    if nodes == 1 or count % nodes or per_node >= cluster.gpus_per_node:
        return range(count)
    return tuple(node * cluster.gpus_per_node + local for node in range(nodes) for local in range(per_node))
