"""Limits of an engine that a benchmark runs without a server: vLLM's class `LLM`."""

from __future__ import annotations

from sim.convert.settings import Machine, Settings
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source
from sim.variants.engines import ENGINES
from sim.variants.engines.defaults import Server

BENCHMARKS = ("vLLM, throughput", "vLLM, latency")
V1 = (0, 8)
LARGE, SMALL = 16384, 8192  # tokens of an iteration
SMALL_SERVER = 2048


def offline_tokens(s: Settings, machine: Machine, engine: str, benchmark: str) -> int | None:
    """The most tokens of an iteration where no flag says it; None where the server's default holds.

    vLLM since V1 (0.10.2 and 0.33, engine/arg_utils.py, get_batch_defaults): 16,384 on GPUs where its server has more
    than 2,048, else 8,192. `vllm bench throughput --async-engine` has the server's (vllm/benchmarks/throughput.py).
    """
    record = ENGINES[engine]
    stated = {"tokens", "async-engine"} & {*s.values}
    if benchmark not in BENCHMARKS or record.product != "vLLM" or record.since < V1 or stated:
        return None
    gpu = resolve_cluster(machine.cluster, 1, Source(str(s.file), {"cluster": machine.cluster})).gpu
    served = record.defaults_on(gpu.kernel_architecture, Server(gpu.memory_bytes), 0).max_batch_tokens
    return SMALL if served == SMALL_SERVER else LARGE
