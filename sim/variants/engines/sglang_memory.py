"""The part of a GPU's memory that SGLang gives to weights and cache, by release."""

from __future__ import annotations

import math

from sim.variants.engines.defaults import Defaults, Server
from sim.variants.engines.kernel_facts import PromptGraphs

GIB = 2.0**30
DRAFTS_MIB = {
    "none": 0,
    "text": 0,
    "layer": 2 * 1024,
    "model": 6 * 1024,
}  # kept free for drafts of EAGLE, of STANDALONE
DRAFTS_0510_MIB = DRAFTS_MIB | {"layer": 4 * 1024}


def sglang_05_fraction(server: Server, d: Defaults) -> float:
    """Return what a reserve leaves of the memory (SGLang 0.5.3, srt/server_args.py, _handle_gpu_memory_settings).

    The reserve in MiB: 512 + 1.5 · tokens of a chunk + 2 · largest graph's sequences + 128 · tp · pp; above 60 GiB of
    memory at least 10 GiB. Replicas that share experts (enable_dp_attention) add 3 for each of them and of the graph's
    sequences, above 300 sequences 4.5. Drafts by the model's own layer (EAGLE) add 2 GiB, by a model of their own
    (STANDALONE) 6.

    >>> d = Defaults(max_batch_tokens=8192, graphs_to=256)
    >>> [sglang_05_fraction(Server(80 * GIB, drafts=who), d) for who in ("none", "layer")]
    [0.836, 0.811]
    >>> sglang_05_fraction(Server(80 * GIB, 8, replicas=8), d)
    0.75
    """
    return _fraction_left(server, d, more_mib=DRAFTS_MIB[server.drafts])


def _fraction_left(server: Server, d: Defaults, graphs_mib: float = 0, more_mib: float = 0) -> float:
    """`graphs_mib`: of prompts' graphs; `more_mib`: beside what is at least free."""
    return _without(server, d.max_batch_tokens, graphs_mib + _decode_graphs_mib(server, d), more_mib)


def _without(server: Server, tokens: int, graphs_mib: float, more_mib: float) -> float:
    """Return what a reserve for activations of `tokens` and for graphs leaves."""
    mib = server.memory_bytes / 2**20
    reserved = graphs_mib + 512 + 1.5 * max(tokens, 2048) + 128 * server.ranks
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return max(0.001, round((mib - reserved - more_mib) / mib, 3))  # less than nothing: SGLang does not start


def _decode_graphs_mib(server: Server, d: Defaults) -> float:
    """MiB of graphs of single tokens, with what replicas that share experts add."""
    shared = 0.0 if server.replicas == 1 else (4.5 if d.graphs_to > 300 else 3) * d.graphs_to * server.replicas
    return 2 * d.graphs_to + shared


def _graphs_mib(server: Server, d: Defaults, graphs: PromptGraphs) -> float:
    """MiB of prompts' graphs: 8 for each size, with latent attention 1.5 GiB for all (SGLang 0.5.10 to 0.5.15,
    srt/server_args.py, _handle_gpu_memory_settings; 0.5.20, arg_groups/memory_hook.py, reserve_for_graph_mb)."""
    without = (server.drafts != "none" and not graphs.drafts) or (server.pp > 1 and not graphs.stages)
    if without or (server.replicas > 1 and not graphs.replicas) or (server.latent and not graphs.latent):
        return 0
    return 1536 if server.latent else 8 * len(graphs.sizes(d.max_batch_tokens, False))


def sglang_0510_fraction(server: Server, d: Defaults, graphs: PromptGraphs) -> float:
    """As `sglang_05_fraction`, with 4 GiB for drafts by the model's own layer and room for prompts' graphs (SGLang
    0.5.10, srt/server_args.py, _handle_gpu_memory_settings).

    >>> from sim.variants.engines.graph_sizes import sglang_0510_prompt_sizes
    >>> graphs, d = PromptGraphs(sglang_0510_prompt_sizes), Defaults(max_batch_tokens=8192, graphs_to=256)
    >>> [sglang_0510_fraction(Server(80 * GIB, latent=latent), d, graphs) for latent in (False, True)]
    [0.83, 0.817]
    >>> [sglang_0510_fraction(Server(80 * GIB, pp=pp, drafts=x), d, graphs) for pp, x in ((2, "none"), (1, "layer"))]
    [0.834, 0.786]
    >>> sglang_0510_fraction(Server(80 * GIB, drafts="layer"), d, graphs._replace(drafts=True))
    0.78
    """
    return _fraction_left(server, d, _graphs_mib(server, d, graphs), DRAFTS_0510_MIB[server.drafts])


def sglang_0514_fraction(server: Server, d: Defaults, graphs: PromptGraphs) -> float:
    """As `sglang_0510_fraction`, with nothing for drafts, whose weights and cache are part of the fraction (SGLang
    0.5.14, srt/server_args.py, _handle_gpu_memory_settings; srt/managers/scheduler.py, init_model_worker).

    >>> from sim.variants.engines.graph_sizes import sglang_0510_prompt_sizes
    >>> graphs = PromptGraphs(sglang_0510_prompt_sizes, drafts=True)
    >>> d = Defaults(max_batch_tokens=8192, graphs_to=256)
    >>> sglang_0514_fraction(Server(80 * GIB, drafts="layer"), d, graphs)
    0.83
    """
    return _fraction_left(server, d, _graphs_mib(server, d, graphs))


def sglang_0515_fraction(server: Server, d: Defaults, graphs: PromptGraphs) -> float:
    """As `sglang_0514_fraction`, for what a pool's server does: one for prompts has no graphs of single tokens, one for
    tokens activations of those that it checks at once, at least 2,048, and no graphs of prompts. DeepEP's buffers take
    2 GiB but of servers for prompts (SGLang 0.5.15, srt/server_args.py, _handle_gpu_memory_settings), and its prompts'
    graphs 1 GiB since 0.5.17 (reserve_for_graph_mb).

    >>> from sim.variants.engines.graph_sizes import sglang_0510_prompt_sizes
    >>> graphs, d = PromptGraphs(sglang_0510_prompt_sizes), Defaults(max_batch_tokens=16384, graphs_to=512)
    >>> [sglang_0515_fraction(Server(180 * GIB, 8, pool=pool), d, graphs) for pool in ("all", "prefill", "decode")]
    [0.85, 0.855, 0.944]
    >>> sglang_0515_fraction(Server(180 * GIB, 8, pool="decode", running=4096, checked=4), d, graphs)
    0.853
    """
    decodes, prompts = server.pool != "prefill", server.pool != "decode"
    own = _decode_graphs_mib(server, d) if decodes else 0.0
    if prompts:
        own += _graphs_mib(server, d, graphs) + (1024 if server.deepep and graphs.replicas else 0)
    tokens = d.max_batch_tokens if prompts else (server.running or d.graphs_to) * server.checked
    return _without(server, tokens, own, 2048 if server.deepep and decodes else 0)


def sglang_0522_fraction(server: Server, d: Defaults, graphs: PromptGraphs) -> float:
    """As `sglang_0515_fraction`, with graphs to the requests that somebody asks for, if these are fewer and nobody asks
    for graphs (SGLang 0.5.22, arg_groups/memory_hook.py, decode_max_bs_is_default).

    >>> from sim.variants.engines.graph_sizes import sglang_0510_prompt_sizes
    >>> graphs, d = PromptGraphs(sglang_0510_prompt_sizes), Defaults(max_batch_tokens=8192, graphs_to=512)
    >>> [sglang_0522_fraction(Server(80 * GIB, 8, running=most), d, graphs) for most in (None, 64)]
    [0.813, 0.824]
    """
    most = server.running if server.graphs_to is None else None
    return sglang_0515_fraction(server, d if most is None else d._replace(graphs_to=min(d.graphs_to, most)), graphs)


def sglang_046_fraction(server: Server, d: Defaults) -> float:
    """Return the ranks' default up to 80 GiB; above, all but 13 GiB (SGLang 0.4.6, srt/server_args.py).

    >>> d = Defaults(memory_fraction=0.81)
    >>> [round(sglang_046_fraction(Server(gib * GIB, 8), d), 3) for gib in (80, 141)]
    [0.81, 0.908]
    """
    gib = server.memory_bytes / GIB
    return d.memory_fraction if gib <= 80 else (gib - 13) / gib


def sglang_047_fraction(server: Server, d: Defaults) -> float:
    """Return the part s that the number of ranks decides up to 80 GiB, and s = 0.88 above (SGLang 0.4.7,
    srt/server_args.py).

    Above 96 GiB: s + 48 GiB · (1 - s) / memory, but at most all save 18 GiB (20 with drafts). Above 180,000 MiB: 0.79.

    >>> d = Defaults(memory_fraction=0.88)
    >>> [round(sglang_047_fraction(Server(gib * GIB, 8), d), 3) for gib in (80, 90, 141, 180)]
    [0.81, 0.88, 0.872, 0.79]
    """
    mib, drafted = server.memory_bytes / 2**20, server.drafts != "none"
    by_ranks = next(
        share for most, share in ((1, 0.88), (3, 0.87), (7, 0.85), (15, 0.81), (math.inf, 0.79)) if server.ranks <= most
    )
    share = by_ranks if mib <= 80 * 1024 else 0.88
    if mib > 180_000:
        return 0.79
    if mib > 96 * 1024:
        return min(share + 48 * 1024 * (1 - share) / mib, (mib - (20 if drafted else 18) * 1024) / mib)
    return share * (0.95 if drafted else 1)


def sglang_048_fraction(server: Server, d: Defaults) -> float:
    """Return what a reserve leaves of the memory (SGLang 0.5.2, srt/server_args.py).

    The reserve in GiB, by the GPU's memory, with n = tp·pp ranks: 2.8 + n/10 below 35, 9.5 + n/2 below 90, 12 + n/2
    below 160, else 32. Drafts add 2 by the model's own layer and 6 by a model of their own (STANDALONE; not in
    0.5.0rc2).

    >>> [sglang_048_fraction(one, Defaults()) for one in (Server(80 * GIB), Server(80 * GIB, 8, drafts="layer"))]
    [0.875, 0.806]
    """
    gib = server.memory_bytes / GIB
    sizes = ((35, 2.8, 0.1), (90, 9.5, 0.5), (160, 12.0, 0.5), (math.inf, 32.0, 0.0))
    reserved = next(base + server.ranks * each for below, base, each in sizes if gib < below)
    reserved += DRAFTS_MIB[server.drafts] / 1024
    return max(0.001, round((gib - reserved) / gib, 3))
