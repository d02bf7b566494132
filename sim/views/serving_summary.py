"""The summary of a serving workload: latencies and throughput, the cache, memory, certainty, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.core.units import count, counted, n_bytes, percent, seconds
from sim.views.headline import Number
from sim.views.serving_plots import promise_words
from sim.views.summary import print_summary
from sim.views.terminal import Terminal, words_table

if TYPE_CHECKING:
    from sim.serve.results.records import ScalingUse, ServingResult
    from sim.studies.promised_latencies import Promise


KEPT_SHOWN = 1.01  # bytes of the cache over those of running sequences


def print_serving(
    result: ServingResult, terminal: Terminal, more: Sequence[Number], promises: Sequence[Promise], within: float | None
) -> None:
    """Print a serving result for a person; `more` follows the headline. `within`: the part of requests that keep all
    `promises` by themselves."""
    if result.does_not_start is not None:  # what follows would be said of a server that nobody has
        print_summary(result, terminal)
        return
    print_summary(result, terminal, more=more)
    limits = [(f"limit {p.text}", promise_words(p, result)) for p in promises]
    if within is not None:
        limits.append(("within", f"{percent(within)} of requests keep every limit by themselves"))
    terminal.print()
    terminal.print_table(words_table([*cache_lines(result), *limits]))


def cache_lines(result: ServingResult) -> list[tuple[str, str]]:
    """Return what there is to say about the workload and its cache, as (name, value)."""
    since_first_s = result.requests / result.requests_per_s if result.requests_per_s else result.duration_s
    served = (
        f"{counted(result.requests, 'request')}, {counted(result.output_tokens, 'output token')} in "
        f"{seconds(since_first_s)} ({result.requests_per_s:.3g} requests/s), "
        f"{counted(result.iterations, 'iteration')}"
    )
    used = [*_cache_used(result), *_found_again(result), *_beside_the_cache(result)]
    return [("served", served), *used, *_between_replicas(result), *_drafted(result)]


def _cache_used(result: ServingResult) -> list[tuple[str, str]]:
    """Return the cache's size, how full it was, and what did not fit."""
    kv = result.kv_cache
    cache = (
        f"{kv.layout}, {counted(kv.blocks, 'block')} of {counted(kv.block_tokens, 'token')}, "
        f"{n_bytes(kv.bytes_per_token)} a token and GPU"
    )
    used = (
        f"at most {counted(kv.blocks_used, 'block')} ({percent(kv.blocks_used / max(1, kv.blocks))}), "
        f"{percent(kv.waste)} of them empty; {counted(kv.running_max, 'sequence')} at once at most"
    )
    kept = max(row.kv_cache or 0.0 for row in result.memory)  # prefixes that no sequence reads count, too
    if result.pools is None and kept > kv.blocks_used * kv.block_tokens * kv.bytes_per_token * KEPT_SHOWN:
        used += f"; {n_bytes(kept)} with prefixes kept for later requests"
    lines = [("cache", cache), ("in use", used)]
    if kv.preemptions:
        swapped = f", {n_bytes(kv.swapped_bytes)} a GPU to the host and back" if kv.swapped_bytes else ""
        lost = f"{counted(kv.preemptions, 'time')}, {counted(kv.recomputed_tokens, 'token')} lost{swapped}"
        lines.append(("preempted", lost))
    return lines


def _found_again(result: ServingResult) -> list[tuple[str, str]]:
    """Return what prompts found in the cache and its tiers."""
    found = result.kv_cache if result.pools is None else result.pools[0].kv_cache  # by the pool that computes prompts
    lines = []
    if found.prefix_hit_tokens:
        host = found.loaded_bytes and not found.tiers  # each tier has a line of its own
        loaded = f"; {n_bytes(found.loaded_bytes)} from the host" if host else ""
        lines.append(("prefix cache", f"{percent(found.prefix_hit_rate)} of prompt tokens found{loaded}"))
    for t in found.tiers or ():
        back = f"{counted(t.hit_tokens, 'token')} came back in {seconds(t.load_s)}"
        down = f"{n_bytes(t.stored_bytes)} went down in {seconds(t.store_s)}"
        lines.append((f"tier {t.name}", f"{back}; {down}, room for {counted(t.capacity_tokens, 'token')}"))
    return lines


def _beside_the_cache(result: ServingResult) -> list[tuple[str, str]]:
    """Return what became of adapters, of weights in host memory and of replicas that start and stop."""
    lines = []
    if (lora := result.lora) is not None:
        held = f"{count(lora.adapters)} used, {count(lora.places)} on a GPU at once, {n_bytes(lora.adapter_bytes)} each"
        loads = f"{counted(lora.loads, 'load')} in {seconds(lora.load_s)}"
        lines.append(("adapters", f"{held}; {lora.distinct_mean:.3g} in an iteration; {loads}"))
    if (away := result.weight_offload) is not None:
        copied = f"copied in {seconds(away.copy_s)} an iteration"
        lines.append(("weights", f"{n_bytes(away.host_bytes)} in host memory, {copied}"))
    scaled = [("autoscaling", result.autoscaling)]
    if result.pools is not None:
        scaled = [(f"{pool.name} on", pool.autoscaling) for pool in result.pools]
    return lines + [(name, _scaled(use)) for name, use in scaled if use is not None]


def _scaled(use: ScalingUse) -> str:
    """Return how many replicas were on."""
    mean = f"{use.replicas_mean:.3g} replicas in the mean, {use.replicas_max} at most"
    changed = f"{counted(use.starts, 'start')}, {counted(use.stops, 'stop')}"
    return f"{mean}; {changed}; {use.gpu_hours:.3g} GPU hours ({use.gpu_hours_always_on:.3g} with all on)"


def _between_replicas(result: ServingResult) -> list[tuple[str, str]]:
    """Pools of a disaggregated workload, and what moved between them."""
    lines = [
        (p.name, f"{p.replicas} × tp {p.gpus // p.replicas}, which compute {percent(p.busy_share)} of the time")
        for p in result.pools or ()
    ]
    moved = result.transfers
    if moved is not None:
        each = f"{seconds(moved.transfer_s.p50)} each in the median, after waiting {seconds(moved.wait_s.mean)}"
        lines.append(("transfers", f"{counted(moved.count, 'computed prompt')}, {each} in the mean for a link in use"))
    return lines


def _drafted(result: ServingResult) -> list[tuple[str, str]]:
    """Return what became of drafted tokens."""
    use = result.speculation
    if use is None or not use.drafted_tokens:
        return []
    share = percent(use.accepted_tokens / use.drafted_tokens)
    each = f"{use.tokens_per_verification:.3g} tokens a check ({use.expected_tokens_per_verification:.3g} expected)"
    return [("drafts", f"{counted(use.drafted_tokens, 'token')}, {share} accepted; {each}")]
