"""The part of a GPU's memory that SGLang gives to weights and cache, by release."""

from __future__ import annotations

import math

from sim.serve.engines.graph_sizes import sglang_0510_prompt_sizes
from sim.serve.engines.record import Defaults, Drafts

GIB = 2.0**30


def sglang_05_fraction(memory_bytes: float, ranks: int, d: Defaults, drafts: Drafts, replicas: int = 1) -> float:
    """Return what a reserve leaves of the memory (SGLang 0.5.3, srt/server_args.py, _handle_gpu_memory_settings).

    The reserve in MiB: 512 + 1.5 · tokens of a chunk + 2 · largest graph's sequences + 128 · tp · pp; above 60 GiB of
    memory at least 10 GiB. Replicas that share experts (enable_dp_attention) add 3 for each of them and of the graph's
    sequences, above 300 sequences 4.5. Drafts by the model's own layer (EAGLE) add 2 GiB, by a model of their own
    (STANDALONE) 6.

    >>> d = Defaults(max_batch_tokens=8192, graphs_to=256)
    >>> sglang_05_fraction(80 * GIB, 1, d, "none"), sglang_05_fraction(80 * GIB, 1, d, "layer")
    (0.836, 0.811)
    >>> sglang_05_fraction(80 * GIB, 8, d, "none", 8)
    0.75
    """
    return _fraction_left(memory_bytes, ranks, d, drafts, replicas, 0)


def _fraction_left(
    memory_bytes: float, ranks: int, d: Defaults, drafts: Drafts, replicas: int, graphs_mib: int
) -> float:
    mib = memory_bytes / 2**20
    reserved = graphs_mib + 512 + 1.5 * max(d.max_batch_tokens, 2048) + 2 * d.graphs_to + 128 * ranks
    if replicas > 1:
        reserved += (4.5 if d.graphs_to > 300 else 3) * d.graphs_to * replicas
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    reserved += {"none": 0, "layer": 2 * 1024, "model": 6 * 1024}[drafts]
    return max(0.001, round((mib - reserved) / mib, 3))  # less than nothing: SGLang does not start


def sglang_0510_fraction(memory_bytes: float, ranks: int, d: Defaults, drafts: Drafts, replicas: int = 1) -> float:
    """As `sglang_05_fraction`, with 8 MiB more for each size of prompts' graphs (SGLang 0.5.10, srt/server_args.py, the
    same lines; without drafts, beside which it keeps none).

    >>> sglang_0510_fraction(80 * GIB, 1, Defaults(max_batch_tokens=8192, graphs_to=256), "none")
    0.83
    """
    graphs = 0 if drafts != "none" else 8 * len(sglang_0510_prompt_sizes(d.max_batch_tokens, False))
    return _fraction_left(memory_bytes, ranks, d, drafts, replicas, graphs)


def sglang_046_fraction(memory_bytes: float, ranks: int, d: Defaults, drafts: Drafts, replicas: int = 1) -> float:
    """Return the ranks' default up to 80 GiB; above, all but 13 GiB (SGLang 0.4.6, srt/server_args.py).

    >>> d = Defaults(memory_fraction=0.81)
    >>> [round(sglang_046_fraction(gib * GIB, 8, d, "none"), 3) for gib in (80, 141)]
    [0.81, 0.908]
    """
    gib = memory_bytes / GIB
    return d.memory_fraction if gib <= 80 else (gib - 13) / gib


def sglang_047_fraction(memory_bytes: float, ranks: int, d: Defaults, drafts: Drafts, replicas: int = 1) -> float:
    """Return the part s that the number of ranks decides up to 80 GiB, and s = 0.88 above (SGLang 0.4.7,
    srt/server_args.py).

    Above 96 GiB: s + 48 GiB · (1 - s) / memory, but at most all save 18 GiB (20 with drafts). Above 180,000 MiB: 0.79.

    >>> d = Defaults(memory_fraction=0.88)
    >>> [round(sglang_047_fraction(gib * GIB, 8, d, "none"), 3) for gib in (80, 90, 141, 180)]
    [0.81, 0.88, 0.872, 0.79]
    """
    mib, drafted = memory_bytes / 2**20, drafts != "none"
    by_ranks = next(
        share for most, share in ((1, 0.88), (3, 0.87), (7, 0.85), (15, 0.81), (math.inf, 0.79)) if ranks <= most
    )
    share = by_ranks if mib <= 80 * 1024 else 0.88
    if mib > 180_000:
        return 0.79
    if mib > 96 * 1024:
        return min(share + 48 * 1024 * (1 - share) / mib, (mib - (20 if drafted else 18) * 1024) / mib)
    return share * (0.95 if drafted else 1)


def sglang_048_fraction(memory_bytes: float, ranks: int, d: Defaults, drafts: Drafts, replicas: int = 1) -> float:
    """Return what a reserve leaves of the memory (SGLang 0.5.2, srt/server_args.py).

    The reserve in GiB, by the GPU's memory, with n = tp·pp ranks: 2.8 + n/10 below 35, 9.5 + n/2 below 90, 12 + n/2
    below 160, else 32. Drafts add 2 by the model's own layer and 6 by a model of their own (STANDALONE; not in
    0.5.0rc2).

    >>> sglang_048_fraction(80 * GIB, 1, Defaults(), "none"), sglang_048_fraction(80 * GIB, 8, Defaults(), "layer")
    (0.875, 0.806)
    """
    gib = memory_bytes / GIB
    sizes = ((35, 2.8, 0.1), (90, 9.5, 0.5), (160, 12.0, 0.5), (math.inf, 32.0, 0.0))
    reserved = next(base + ranks * each for below, base, each in sizes if gib < below)
    reserved += {"none": 0, "layer": 2, "model": 6}[drafts]
    return max(0.001, round((gib - reserved) / gib, 3))
