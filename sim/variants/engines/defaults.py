"""What serving engines set by themselves, and the servers that this depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

MAX_PREFILL_TOKENS = 16384  # SGLang, server_args.py, max_prefill_tokens

ServerPool = Literal["all", "prefill", "decode"]
Drafts = Literal["none", "layer", "model", "text"]  # nobody drafts, the model's layer, another, no model


class Defaults(NamedTuple):
    """What an engine sets by itself where nobody does: keys of `inference`, and the largest batch of single tokens for
    which it keeps a CUDA graph (0: no graphs). `takes_all`: limits that somebody states would leave no memory for
    weights and cache; `memory_fraction` is then what its own limits leave."""

    max_running_requests: int = 256
    max_batch_tokens: int = 8192
    block_tokens: int = 16
    memory_fraction: float = 0.9
    free_fraction: float = 1.0
    prefix_cache: str = "none"
    chunked_prefill: bool = True
    graphs_to: int = 0
    takes_all: bool = False


class Server(NamedTuple):
    """What an engine's own defaults depend on beside the GPU's architecture: the GPU's bytes of memory, tensor-parallel
    ranks and pipeline stages, replicas that share experts, who drafts tokens, whether attention is latent, the largest
    batch with a CUDA graph that somebody asks for (None: nobody does), of which pool it is, whether DeepEP is, whose
    code the model has (`model.code`), the tokens and the requests of all replicas that somebody asks for (None: nobody
    does), and the tokens that a sequence checks."""

    memory_bytes: float
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    drafts: Drafts = "none"
    latent: bool = False
    graphs_to: int | None = None
    pool: ServerPool = "all"
    deepep: bool = False
    code: str | None = None
    tokens: int | None = None
    running: int | None = None
    checked: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of one replica: tensor-parallel ranks of all pipeline stages."""
        return self.tp * self.pp


class Case(NamedTuple):
    """Other defaults (`changes`), where all of this holds: GPUs have at least `memory_bytes` and no architecture in
    `but`, there are at least `tp` tensor-parallel ranks, requests may have at least `positions`, tokens are drafted if
    `drafting`, and the model has this `code` (None: any)."""

    changes: Mapping[str, Any]
    memory_bytes: float = 0.0
    but: tuple[str, ...] = ()
    tp: int = 1
    positions: int = 0
    drafting: bool = False
    code: str | None = None
