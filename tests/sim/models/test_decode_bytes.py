"""Bytes that a single token's attention reads, beside closed forms of what the cache keeps for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import asdict

from sim.core.program import Compute
from sim.inputs.scenario import parse_scenario
from sim.models.layers import Attention, layer_specs
from sim.models.layers.beside import Beside
from sim.models.layers.compressed import CompressedAttention
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.indexer import Indexer
from sim.models.layers.latent import LatentAttention
from sim.models.layers.selected_blocks import SelectedBlocksAttention
from sim.models.layers.selective_scan import SelectiveScan
from sim.models.layers.shared_keys import SharedKeysAttention
from sim.models.layers.short_convolution import ShortConvolution
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.layers.state_space import StateSpace
from sim.models.serving.operators import ServingDims
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.stages import attentions_of

ROOT = Path(__file__).parents[3]
LENGTH, BATCH = 65536, 3


def models(folder: Path) -> Iterator[str]:
    """Each family's model of docs/families.yaml, and all shipped ones."""
    for i, family in enumerate(yaml.safe_load((ROOT / "docs" / "families.yaml").read_text())):
        if "config" in family:
            path = folder / str(i) / "config.json"
            path.parent.mkdir()
            path.write_text(json.dumps(family["config"]))
            yield str(path)
    yield from sorted(path.stem for path in (ROOT / "sim" / "presets" / "models").glob("*.yaml"))


def dims_of(model: str, cache: str, **inference: Any) -> ServingDims:
    requests = {"requests": {"prompt_len": 8, "output_len": 8}, "kv_cache": {"dtype": cache}}
    return serving_dims(parse_scenario({"model": model, "cluster": "dgx-h200", "inference": requests | inference}))


def token_bytes(a: Attention, d: ServingDims) -> float:
    """What the cache keeps for one token more of a long sequence: what blocks are counted by."""
    return (a.sequence_bytes(d, 2 * LENGTH) - a.sequence_bytes(d, LENGTH)) / LENGTH


def moved(a: Attention, d: ServingDims, queries: int) -> float:
    """Bytes that kernels of `queries` tokens of each sequence move for one sequence, in the closed form."""
    kept, act = a.sequence_bytes(d, LENGTH), d.act_bytes
    if isinstance(a, Beside):
        return moved(a.attention, d, queries) + moved(a.state_space, d, queries)
    if isinstance(a, StateSpace | SelectiveScan | ShortConvolution):
        return state_moved(a, d, queries)
    if isinstance(a, CompressedAttention):
        entry, own, number = a.entry_bytes(d), 2 * a.heads * a.head_dim * act, 0 if a.rate is None else LENGTH // a.rate
        chosen = number if a.indexer is None else a.indexer.top_k
        index = 0.0 if a.indexer is None else indexed(a.indexer, number, queries, 1.0, 132)
        return index + queries * ((a.window.tokens + chosen) * entry + own)
    if isinstance(a, SparseLatentAttention):
        own, index = a.heads * (2 * a.latent_rank + a.rope_width) * act, 132 if a.selects else 0
        scored = indexed(a.indexer, LENGTH, queries, 1.0, 132) if a.selects else 0.0
        return scored + queries * (a.indexer.top_k * (token_bytes(a, d) - index) + own)
    if isinstance(a, LatentAttention):
        return kept + queries * a.heads * (2 * a.latent_rank + a.rope_width) * act
    assert isinstance(a, GroupedQueryAttention)
    own = queries * a.heads * sum(a.widths) * act
    if isinstance(a, SelectedBlocksAttention):
        x, of_token = a.indexer, a.kv_heads * sum(a.widths) * d.kv_bytes
        keys = LENGTH if x.pools == "scores" else LENGTH // x.block
        assert token_bytes(a, d) == of_token + x.head_dim * act * keys / LENGTH
        operands = x.head_dim * act * (queries * x.heads + keys)
        return operands + queries * (x.top_k + x.beside) * of_token + own
    if isinstance(a, SharedKeysAttention):  # of an earlier layer, in whose cache they are
        assert kept == 0
        kept = GroupedQueryAttention(**asdict(a)).sequence_bytes(d, LENGTH)
    elif a.window is None:
        assert kept == token_bytes(a, d) * LENGTH
    each = a.kv_heads * sum(a.widths) * d.kv_bytes
    return round(kept / each) * each + own


def indexed(x: Indexer, keys: int, queries: int, element: float, key_bytes: float) -> float:
    """Index queries, and the cached keys once for two queries."""
    return queries * x.heads * x.head_dim * element + keys * key_bytes * ((queries + 1) // 2)


def state_moved(a: StateSpace | SelectiveScan | ShortConvolution, d: ServingDims, queries: int) -> float:
    """The state read once and written after each token; inputs of the convolution read and written; the token's own
    numbers."""
    if isinstance(a, ShortConvolution):
        return queries * 2 * a.conv_kernel * a.width(1) * d.act_bytes
    width = a.convolved(1) if isinstance(a, StateSpace) else a.channels(1)
    inputs = max(0, a.conv_kernel - 1) * width * d.act_bytes
    own = (2 if isinstance(a, StateSpace) else 5) * width * d.act_bytes
    windows = 2 * max(1, a.conv_kernel) * width * d.act_bytes
    return (1 + queries) * (a.sequence_bytes(d, 1) - inputs) + queries * (windows + own)


def kernels(a: Attention, d: ServingDims, queries: int) -> float:
    """Bytes of the program's kernels for a sequence, without matmuls' weights and the scores themselves."""
    items = a.decode(d, BATCH, LENGTH, queries)
    found = [i for i in items if isinstance(i, Compute) and i.kind != "gemm" and i.name != "index_select"]
    total = sum(i.bytes for i in found) / BATCH
    scored = [i for i in items if isinstance(i, Compute) and i.name == "index_scores"]
    return total - sum(written(a, queries) for _ in scored)


def written(a: Attention, queries: int) -> float:
    """Scores in 32 bits."""
    if isinstance(a, SelectedBlocksAttention):
        x = a.indexer
        if x.pools == "keys":
            return 4.0 * queries * -(-((LENGTH - queries + 1) // x.block + LENGTH // x.block) // 2)
        return 4.0 * (queries * LENGTH - queries * (queries - 1) / 2) * x.heads / x.block
    if isinstance(a, CompressedAttention):
        assert a.rate is not None
        return 4.0 * queries * -(-((LENGTH - queries + 1) // a.rate + LENGTH // a.rate) // 2)
    return 4.0 * (queries * LENGTH - queries * (queries - 1) / 2)


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_a_decode_reads_what_the_cache_keeps(cache: str, tmp_path: Path) -> None:
    """Of every kind of attention, one token and drafted ones: full, windows, latent, selected, states, shared keys."""
    checked: set[Attention] = set()
    for model in models(tmp_path):
        d = dims_of(model, cache)
        for a in attentions_of(layer_specs(d.model)):
            if a in checked:
                continue
            checked.add(a)
            for queries in (1, 2, 5):
                assert kernels(a, d, queries) == pytest.approx(moved(a, d, queries), rel=1e-12), (model, queries)
    assert len({type(a) for a in checked}) == 10


def test_a_chunk_behind_a_long_prompt_is_scored_against_all_of_it() -> None:
    """The last 1,000 of 100,000 tokens see between 24,750 and 25,000 of DeepSeek V4's keys, one for each 4 tokens."""
    d = dims_of("deepseek-v4-flash", "bf16")
    (a,) = (a for a in attentions_of(layer_specs(d.model)) if isinstance(a, CompressedAttention) and a.indexer)
    scores = next(i for i in a.prefill(d, 1, 1000, 100_000) if isinstance(i, Compute) and i.name == "index_scores")
    assert a.indexer is not None
    assert scores.flops == pytest.approx(2 * a.indexer.heads * a.indexer.head_dim * 1000 * 24_875, rel=1e-3)
