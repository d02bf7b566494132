"""The numbers of a result that every view opens with, and the parts of a result that several of them read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.views.units import count, n_bytes, percent, rate, seconds

Result = Mapping[str, Any]
SHOWN = 1e-4  # of the step: smaller losses are left to the JSON
PIPELINE_BUBBLE = "Pipeline bubble"
LINK_NAMES = {"domain": "links inside domains", "nic": "NICs", "spine": "links above leaves", "host": "PCIe"}


class Number(NamedTuple):
    """A headline: `mood` is good, bad or nothing."""

    name: str
    value: str
    note: str = ""
    mood: str = ""


def headline(result: Result) -> list[Number]:
    """Step time, throughput, MFU, bubble, communication and memory; for serving its latencies."""
    return [*_step(result), *_serving(result), *_peak(result)]


def _step(result: Result) -> list[Number]:
    step = float(result.get("step_time_s") or 0.0)
    if not step:
        return []
    low, high = result.get("step_time_interval_s") or (step, step)
    flops = rate(float(result.get("model_flops_per_s_per_gpu") or 0.0), "FLOP/s")
    exposed = float(result.get("exposed_comm_s") or 0.0)
    return [
        Number("Step time", seconds(step), f"90 %: {seconds(low)} – {seconds(high)}"),
        Number(
            "Tokens/s per GPU",
            count(result.get("tokens_per_s_per_gpu") or 0.0),
            f"{count(result.get('tokens_per_s') or 0.0)} in all",
        ),
        Number("MFU", percent(result.get("mfu") or 0.0), f"HFU {percent(result.get('hfu') or 0.0)}, {flops}"),
        Number(
            bubble_name(result),
            percent(result.get("bubble_fraction") or 0.0),
            f"of the step; idle ÷ busy {result.get('bubble_ratio') or 0.0:.3f}",
        ),
        Number("Exposed communication", seconds(exposed), f"{percent(exposed / step)} of the step"),
        *_contention(result, step),
    ]


def bubble_name(result: Result) -> str:
    """What idle time within the passes is: of a pipeline its bubble; else ranks wait for each other at collectives."""
    layout = result.get("scenario", {}).get("parallelism") or {}
    return PIPELINE_BUBBLE if int(layout.get("pp") or 1) > 1 else "Waiting for ranks"


def _contention(result: Result, step: float) -> list[Number]:
    """What sharing links costs the step, where that shows."""
    found = result.get("contention") or {}
    lost = float(found.get("lost_s") or 0.0)
    if lost < SHOWN * step:
        return []
    where = ", ".join(LINK_NAMES.get(name, name) for name in found.get("links", ()))
    return [Number("Shared links", seconds(lost), f"{percent(lost / step)} of the step lost on {where}")]


def _serving(result: Result) -> list[Number]:
    numbers = []
    for key, name in (
        ("request_latency_s", "Request latency"),
        ("time_to_first_token_s", "Time to first token"),
        ("time_per_output_token_s", "Time per output token"),
    ):
        if key in result:
            p = result[key]
            numbers.append(Number(name, seconds(p["p50"]), f"median; p90 {seconds(p['p90'])}, p99 {seconds(p['p99'])}"))
    if "output_tokens_per_s" in result:
        numbers.append(Number("Output tokens/s", count(result["output_tokens_per_s"])))
    return numbers


def _peak(result: Result) -> list[Number]:
    peak, limit = float(result.get("peak_memory_bytes") or 0.0), memory_limit_bytes(result)
    if not peak:
        return []
    fits = result.get("fits_in_memory", True)
    return [
        Number(
            "Peak memory",
            n_bytes(peak),
            ("✓ fits" if fits else "✗ does not fit")
            + (f", {percent(peak / limit)} of {n_bytes(limit)}" if limit else ""),
            "good" if fits else "bad",
        )
    ]


def layout_line(result: Result) -> str:
    """The scenario in one line: model, layout, batch, cluster."""
    scenario = result.get("scenario", {})
    layout, training = scenario.get("parallelism") or {}, scenario.get("training") or {}
    model, cluster = scenario.get("model") or {}, scenario.get("cluster") or {}
    words = []
    if isinstance(model, Mapping) and model.get("layers"):
        words.append(f"{model['layers']} layers of {model.get('hidden')}")
    degrees = [f"{k} {layout[k]}" for k in ("tp", "cp", "pp", "dp", "ep") if int(layout.get(k) or 1) > 1]
    words += degrees or ["one device"]
    words += ["sp"] * bool(layout.get("sp"))
    inference = scenario.get("inference") or {}
    if int(layout.get("pp") or 1) > 1 and not inference:
        words.append(str(layout.get("schedule")))
    if layout.get("zero"):
        words.append(f"ZeRO-{layout['zero']}")
    if training:
        words.append(
            f"batch {training.get('global_batch_size')} × {count(training.get('seq_len', 0))} tokens "
            f"in micro-batches of {training.get('micro_batch_size')}"
        )
        words.append(str(training.get("precision")))
    if inference:
        words.append(f"{inference.get('batching')} batching")
        quantized = inference.get("quantization")
        words.append(str(inference.get("precision") if quantized in (None, "none") else quantized))
    gpu = cluster.get("gpu") if isinstance(cluster, Mapping) else None
    if isinstance(gpu, Mapping) and gpu.get("name"):
        words.append(f"{gpu['name']}, {cluster.get('gpus_per_node')} to a node")
    return " · ".join(words)


def rank_seconds(entry: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of an entry of a result's `ranks`: seconds computing, in exposed communication, idle in the bubble."""

    def first(*keys: str) -> float:
        return float(next((entry[k] for k in keys if k in entry), 0.0))

    return first("compute_s", "busy_s"), first("exposed_comm_s"), first("bubble_s")


def shares_of(provenance: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the step's time by source of cost, wherever in `provenance` they stand."""
    shares = provenance.get("shares", provenance)
    return {k: float(v) for k, v in shares.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def memory_limit_bytes(result: Result) -> float:
    """The device's memory as the resolved scenario states it; 0 where it does not."""
    cluster = result.get("scenario", {}).get("cluster")
    gpu = cluster.get("gpu") if isinstance(cluster, Mapping) else None
    return float(gpu.get("memory_bytes") or 0.0) if isinstance(gpu, Mapping) else 0.0
