"""Limits of an engine that a benchmark runs without a server: vLLM's class `LLM`, and TensorRT-LLM's `trtllm-bench`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.convert.settings import Machine, Settings
from sim.core.dtypes import dtype_bytes
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.serving_formats import cache_dtype, linear_format
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
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


BENCH = "TensorRT-LLM"
BYTES = {"fp8": 1.0, "nvfp4": 0.5}  # of a weight; the others have 2
MOST_SEQUENCES, MOST_TOKENS = 4096, 32768  # before they are rounded
STEPS = (((256, 32), (1024, 128), (math.inf, 256)), ((4096, 256), (8192, 512), (math.inf, 1024)))  # below, multiple of
LEAST = 64, 2048
KEYS = "max_running_requests", "max_batch_tokens"


def bench_limits(
    file: str, model: Any, cluster: Any, layout: Mapping[str, Any], inference: Mapping[str, Any]
) -> dict[str, int]:
    """What trtllm-bench sets for requests of these lengths where no flag says it.

    tensorrt_llm/bench/build/tuning.py, calc_engine_setting and finetune_setting; bench/benchmark/utils/general.py,
    get_settings: with prompts computed whole at least as many tokens as the longest prompt and all sequences have. Not
    modelled: layers that keep a state, whose sequences take more.
    """
    sections = {"model": model, "cluster": cluster, "parallelism": dict(layout), "inference": dict(inference)}
    scenario = parse_scenario(sections, file)
    i, requests = scenario.for_serving, inference["requests"]
    prompt, output = requests["prompt_len"], requests["output_len"]
    sequences = min(_fitting(scenario, prompt + output), MOST_SEQUENCES) / scenario.parallelism.pp
    tokens = min(sequences * (1 + prompt / output), MOST_TOKENS)
    running, batch = (_rounded(n, k) for k, n in enumerate((sequences, tokens)))
    batch = batch if i.chunked_prefill else max(batch, prompt + running)
    return {key: inference.get(key, n) for key, n in zip(KEYS, (running, batch), strict=True)}


def _fitting(scenario: Scenario, tokens: int) -> float:
    """Sequences of so many tokens whose cache finds room, as trtllm-bench estimates it."""
    m, p, i, gpu = scenario.model, scenario.parallelism, scenario.for_serving, scenario.cluster.gpu
    ranks, gpus = p.tp * p.dp, p.tp * p.dp * p.pp
    heads = max(ranks, m.heads if m.mla is not None else m.kv_heads)
    width = m.hidden // m.heads if m.mla is not None else m.head_dim
    attending = sum(spec.attention is not None for spec in layer_specs(m))
    cached = dtype_bytes(i.kv_cache.dtype or cache_dtype(i, gpu, m))
    weights = count_parameters(m).total * BYTES.get(linear_format(i, gpu.peak_flops_per_s)[0], 2.0)
    room = (gpu.memory_bytes * gpu.memory_shown * gpus - weights) * i.kv_cache.free_fraction
    return max(1.0, room / (2 * attending * heads * width * cached * tokens))


def _rounded(number: float, which: int) -> int:
    """Up to a multiple that grows with the number."""
    step = next(step for below, step in STEPS[which] if number < below)
    return max(LEAST[which], step * math.ceil(number / step))
