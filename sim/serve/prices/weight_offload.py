"""Weights that lie in host memory and come to the GPU in every iteration.

Every iteration needs all of a stage's layers once, however many tokens it computes, so the offloaded bytes cross the
link between GPU and host once:

    copy = layers · latency + bytes / bandwidth of PCIe or C2C

With `prefetch` layers come while others compute (Sheng et al. 2023, "FlexGen", arXiv 2303.06865, section 3;
ZeRO-Inference of Aminabadi et al. 2022, "DeepSpeed Inference", arXiv 2207.00032). Iterations follow each other, so the
first layers come under the last ones of the iteration before, or under the draft of its tokens (`speculative`), and the
GPU takes the longer of both for an iteration:

    seconds = max(computing + draft, copy)

Without it weights are read as they are used (vLLM's cpu_offload_gb), and seconds = computing + copy + draft. A lone
sequence's token then takes bytes / bandwidth at least, either way. Layers are offloaded whole, from the first on, until
the bytes are reached; the last one in part. Prefetching needs room for two layers on the GPU.

Left out: that an iteration reads only those experts that some token chose; copies of a KV cache on the same link.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.inputs.serving_keys import WeightOffload
from sim.models.layers import LayerSpec
from sim.models.serving.operators import ServingDims
from topology.network import Network


class Streamed(NamedTuple):
    """What one stage streams in every iteration: bytes that lie in host memory, the room that they need on the GPU, and
    what their copies take."""

    host_bytes: float
    room_bytes: float
    copy_s: float
    prefetch: bool

    @property
    def beside_s(self) -> float:
        """Seconds of copies that run beside computing."""
        return self.copy_s if self.prefetch else 0.0

    @property
    def read_s(self) -> float:
        """Seconds for which computing waits for weights that it reads over the link."""
        return self.copy_s - self.beside_s


def layer_weight_bytes(d: ServingDims, spec: LayerSpec) -> float:
    """A layer's weights on one rank, in the formats the scenario keeps them in."""
    own, mlp = spec.served_elements(d), spec.mlp_dims(d)
    linear = own.attention * spec.attention_dims(d).weight_bytes + own.mlp * mlp.weight_bytes
    return linear + own.experts * mlp.expert_weight_bytes + own.rest * d.act_bytes


def streamed_weights(
    offload: WeightOffload, d: ServingDims, specs: tuple[LayerSpec, ...], layers: tuple[int, ...], network: Network
) -> Streamed:
    """Which weights a stage reads from host memory, and how long. It has `layers[i]` layers of kind `specs[i]`."""
    sizes = [layer_weight_bytes(d, spec) for spec in specs]
    all_bytes = sum([n * size for n, size in zip(layers, sizes, strict=True)])
    host_bytes = min(offload.cpu_bytes, all_bytes)
    if not host_bytes:
        return Streamed(0.0, 0.0, 0.0, offload.prefetch)
    pieces = math.ceil(host_bytes / all_bytes * sum(layers))
    latency_s = network.host_copy(0.0)
    copy_s = pieces * latency_s + network.host_copy(host_bytes) - latency_s
    largest = max([size for n, size in zip(layers, sizes, strict=True) if n])
    room = min(host_bytes, 2 * largest) if offload.prefetch else 0.0
    return Streamed(host_bytes, room, copy_s, offload.prefetch)
