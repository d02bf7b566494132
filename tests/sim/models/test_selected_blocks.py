"""Grouped queries over chosen blocks of keys (MiniMax M3, Qwen 4): keys seen, flops and cache by hand, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.flops import matmul_params_per_token, model_flops_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.layers.block_indexer import BlockIndexer
from sim.models.layers.selected_blocks import SelectedBlocksAttention
from sim.models.parameters import count_parameters
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import llama_like

SCORES = {"heads": 2, "head_dim": 32, "top_k": 256, "block": 64, "pools": "scores"}
KEYS = {"heads": 4, "head_dim": 32, "top_k": 256, "block": 16, "pools": "keys"}
MODEL = llama_like(4, 256, 8, 1024) | {
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 512,
    "attention_pattern": ["full", "selected"],
}


def training(own: dict[str, Any], layout: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    run = {"seq_len": 1024, "global_batch_size": 8} | keys
    model = MODEL | {"block_indexer": own}
    return parse_scenario({"model": model, "training": run, "parallelism": layout or {}, "cluster": "dgx-h200"})


def attention_of(s: Scenario, layer: int) -> SelectedBlocksAttention:
    found = layer_specs(s.model)[layer].attention
    assert isinstance(found, SelectedBlocksAttention)
    return found


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 271, 272, 273, 320, 321, 1000, 1024])
@pytest.mark.parametrize("sizes", [SCORES, KEYS])
def test_a_query_sees_the_tokens_of_its_blocks(sizes: dict[str, Any], length: int) -> None:
    x, block, most = BlockIndexer(**sizes), sizes["block"], sizes["top_k"] // sizes["block"]

    def seen(t: int) -> int:
        if sizes["pools"] == "keys":  # whole blocks, and the unfinished one's tokens
            return min(t // block, most) * block + t % block
        others = min((t - 1) // block, most - 1)  # whole ones before the query's own
        return others * block + (t - 1) % block + 1

    assert x.selected(length) == pytest.approx(sum(map(seen, range(1, length + 1))) / length, rel=1e-12)
    assert x.slots(length) >= seen(length)


def test_a_layer_has_an_indexer_s_matrix_and_two_norms_more() -> None:
    s = training(SCORES)
    full, selected = layer_specs(s.model)[:2]
    assert selected.parameters - full.parameters == 256 * (2 + 1) * 32 + 2 * 32
    block = layer_block(s, 1)
    assert (block.params, block.frozen_params) == (full.parameters, selected.parameters - full.parameters)
    assert count_parameters(s.model).total == 2 * (full.parameters + selected.parameters) + 2 * 1024 * 256 + 256


@pytest.mark.parametrize(("sizes", "scored"), [(SCORES, 1024 / 2), (KEYS, 1024 / 16 / 2)])
def test_model_flops_are_those_of_the_keys_seen_and_of_scores(sizes: dict[str, Any], scored: float) -> None:
    s = training(sizes)
    a = attention_of(s, 1)
    own = 12 * 8 * 64 * (2 * 512 + 2 * a.indexer.selected(1024))
    index = 2 * sizes["heads"] * 32 * scored - 4 * a.indexer.matrix(256).elements
    expected = 6 * matmul_params_per_token(s.model) + own + 2 * index
    assert model_flops_per_token(s.model, 1024) == pytest.approx(expected, rel=1e-12)


def test_fewer_keys_cost_less_and_short_sequences_are_dense() -> None:
    def core(**keys: Any) -> list[Compute]:
        forward = layer_block(training(SCORES, framework="megatron", **keys), 1).forward
        return [i for i in forward if isinstance(i, Compute) and i.kind == "attention_forward"]

    scores, sparse = core(seq_len=16384, global_batch_size=1)
    assert (scores.name, sparse.shape) == ("index_scores", (16384 * 2, 1, 1, 4, 256, 64, 64, 0))
    (dense,) = core(seq_len=256)
    assert dense.shape[3:5] == (256, 256)


def test_transformers_masks_what_is_not_chosen() -> None:
    def items(framework: str) -> list[Compute]:
        forward = layer_block(training(SCORES, framework=framework, attention="fused"), 1).forward
        return [i for i in forward if isinstance(i, Compute) and i.name.startswith("attention")]

    (all_pairs,) = (i for i in items("transformers") if i.kind == "attention_forward")
    assert all_pairs.shape[3:] == (1024, 1024, 64, 64, 0)
    assert all_pairs.masked
    assert all_pairs.shape[1] == all_pairs.shape[2]  # torch takes no groups beside a mask


def test_cache_has_a_key_for_each_token_or_for_each_block() -> None:
    keys = {"requests": {"prompt_len": 8, "output_len": 8}}
    for sizes, kept in ((SCORES, 4096), (KEYS, 4096 / 16 + 15)):
        run = {"model": MODEL | {"block_indexer": sizes}, "inference": keys, "cluster": "dgx-h200"}
        s = parse_scenario(run)
        full, selected = (x.attention for x in layer_specs(s.model)[:2])
        assert full is not None
        assert selected is not None
        more = selected.sequence_bytes(serving_dims(s), 4096) - full.sequence_bytes(serving_dims(s), 4096)
        assert more == 32 * 2 * kept


@pytest.mark.parametrize("sizes", [SCORES, KEYS])
def test_a_decoded_token_reads_the_chosen_keys(sizes: dict[str, Any]) -> None:
    keys = {"requests": {"prompt_len": 8, "output_len": 8}}
    s = parse_scenario({"model": MODEL | {"block_indexer": sizes}, "inference": keys, "cluster": "dgx-h200"})
    d, a = serving_dims(s), attention_of(s, 1)
    scored, chosen, core = a.decode(d, 4, 100_000)
    assert (scored.name, chosen.name) == ("index_scores", "index_select")
    assert isinstance(core, Compute)
    assert core.shape[3] == a.indexer.slots(100_000) == 256 + a.indexer.beside
    requests = {"count": 2, "prompt_len": 4096, "output_len": 4}
    run = {"model": MODEL | {"block_indexer": sizes}, "inference": {"requests": requests}, "cluster": "dgx-h200"}
    assert simulate_serving(parse_scenario(run)).end_s > 0


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 4, "sp": True}, {"dp": 4, "zero": 3}, {"pp": 2}])
@pytest.mark.parametrize("sizes", [SCORES, KEYS])
def test_layouts_run(layout: dict[str, Any], sizes: dict[str, Any]) -> None:
    assert simulate(training(sizes, layout)).step_time_s > 0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"attention_pattern": ["full"]}, "attention_pattern"),
        ({"block_indexer": None}, "attention_pattern"),
        ({"block_indexer": SCORES | {"top_k": 100}}, "top_k"),
        ({"block_indexer": SCORES | {"heads": 4}}, "heads"),
        ({"window": 64, "attention_pattern": ["sliding", "selected"]}, "window"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(change: dict[str, Any], key: str) -> None:
    run = {"seq_len": 1024, "global_batch_size": 8}
    with pytest.raises(InputError, match=key):
        parse_scenario({"model": MODEL | {"block_indexer": SCORES} | change, "training": run, "cluster": "dgx-h200"})


@pytest.mark.parametrize(
    ("layout", "keys", "word"),
    [
        ({"cp": 2}, {}, "whole sequences"),
        ({}, {"indexer": "warm_up"}, "needs model.indexer"),
        ({}, {"lora": {"rank": 8}}, "block_indexer"),
        ({}, {"packing": {"lengths": [512, 512]}}, "block_indexer"),
    ],
)
def test_layouts_that_are_not_simulated_are_refused(layout: dict[str, Any], keys: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        training(SCORES, layout, **keys)
