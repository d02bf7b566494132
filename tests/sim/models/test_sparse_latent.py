"""DeepSeek's sparse attention: published counts, flops and cache by hand, what is sent, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Phase
from sim.inputs.model_input import load_model
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import Shard, dims
from sim.models.flops import model_flops_per_token
from sim.models.layer import layer_block, layer_parts
from sim.models.layers import layer_specs
from sim.models.layers.indexer import scores
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.parameters import count_parameters
from sim.models.source import source_of
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import llama_like
from tests.sim.inputs.test_model_config import DEEPSEEK_V3
from tests.sim.inputs.test_model_families import written

V32 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
SMALL = llama_like(
    layers=2,
    hidden=256,
    heads=8,
    vocab=1024,
    mla={"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    indexer={"heads": 4, "head_dim": 32, "top_k": 128},
)


def training(
    seq_len: int = 1024, parallelism: dict[str, Any] | None = None, model: Any = None, **keys: Any
) -> Scenario:
    keys = {"seq_len": seq_len, "global_batch_size": 1, "framework": "megatron"} | keys
    layout = parallelism or {}
    return parse_scenario(
        {"model": model or SMALL, "training": keys, "parallelism": layout, "cluster": "dgx-h200", "calibration": None}
    )


def attention_of(scenario: Scenario) -> SparseLatentAttention:
    found = layer_specs(scenario.model)[0].attention
    assert isinstance(found, SparseLatentAttention)
    return found


def test_parameters_are_the_published_ones(tmp_path: Path) -> None:
    """685,396,921,376 numbers in DeepSeek-V3.2-Exp's files: beside the model and its prediction layer a second
    embedding and output for that layer, a bias of each expert, a scale of each 128 x 128 of the 8-bit weights.
    """
    m = training(model=written(tmp_path, V32)).model
    assert m.model_copy(update={"max_positions": 0, "trained_positions": 163840}) == load_model("deepseek-v3.2")
    counts = count_parameters(m)
    copies, experts = 2 * m.vocab * m.hidden, 59 * 256

    def scales(rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 128)

    attention = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (8192, 1536), (128, 7168)]
    dense, expert = 3 * scales(18432, 7168), 3 * scales(2048, 7168)
    of_layers = 62 * sum(scales(*size) for size in attention) + 3 * dense + 59 * 257 * expert
    assert counts.total + counts.mtp + copies + experts + of_layers == 685_396_921_376


@pytest.mark.parametrize(
    "change",
    [
        {"first_k_dense_replace": None, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58},
        {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "layer_types": ["indexed_attention"] * 61},
    ],
)
def test_layers_may_be_listed(tmp_path: Path, change: dict[str, Any]) -> None:
    assert training(model=written(tmp_path, V32 | change)).model == training(model=written(tmp_path, V32)).model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": "61"}, r"layers: found '61'"),
        ({"mlp_layer_types": ["sparse", "dense"]}, r"mlp_layer_types: can be simulated: a list of dense layers"),
        ({"mlp_layer_types": 3}, r"mlp_layer_types: can be simulated: a list of dense layers"),
        ({"layer_types": ["full_attention"] * 61}, r"layer_types: can be simulated: a list of indexed_attention"),
        ({"layer_types": 61}, r"layer_types: can be simulated: a list of indexed_attention"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        training(model=written(tmp_path, V32 | change))


def test_flops_are_selected_keys_and_an_indexer_over_all() -> None:
    """By hand for a sequence of 8 with 3 keys selected: 1 + 2 + 3·6 = 21 pairs."""
    model = {**SMALL, "layers": 1, "indexer": {"heads": 4, "head_dim": 32, "top_k": 3}}
    sparse, dense = training(8, model=model).model, training(8, model={**model, "indexer": None}).model
    matrices = 64 * 4 * 32 + 256 * 32 + 256 * 4
    main = 6 * 8 * (48 + 32) * (21 / 8 - 4)
    indexer = 2 * 4 * 32 * 4 + 4 * 4 * 32 * 21 / 8
    found = model_flops_per_token(sparse, 8) - model_flops_per_token(dense, 8)
    assert found == pytest.approx(main + indexer + 4 * matrices)
    assert attention_of(training(8, model=model)).seen_keys(3) is None


def test_a_frozen_indexer_has_no_flops_for_gradients() -> None:
    """By hand as above: 2 for each weight of the indexer's matrices, scores of all keys forward, nothing else."""
    model = {**SMALL, "layers": 1, "indexer": {"heads": 4, "head_dim": 32, "top_k": 3}}
    matrices, scores = 64 * 4 * 32 + 256 * 32 + 256 * 4, 2 * 4 * 32 * 4
    main = 6 * 8 * (48 + 32) * (21 / 8 - 4)
    sparse = source_of(training(8, model=model, indexer="frozen")).flops_per_token(causal_half=True)
    dense = source_of(training(8, model={**model, "indexer": None})).flops_per_token(causal_half=True)
    assert sparse - dense == pytest.approx(main + scores + 2 * matrices)


def test_kernels_take_as_many_flops_as_they_say() -> None:
    scenario = training()
    d, a = dims(scenario), attention_of(scenario)
    parts = {p.name: p for p in layer_parts(scenario, d, 0, Shard())}
    (core,) = parts["attention"].forward
    assert isinstance(core, Compute)
    assert core.flops == 2 * 1024 * 8 * 128 * (80 + 64)  # all 128 places of a token, in the width of the latent
    scores = next(i for i in parts["indexer"].forward if isinstance(i, Compute) and i.name == "index_scores")
    assert scores.flops == 2 * 4 * 32 * 1024 * 1025 / 2
    gradients = next(i for i in parts["indexer"].backward if i.name == "index_scores_wgrad")
    assert isinstance(gradients, Compute)
    assert gradients.flops == 6 * 1024 * 128 * 4 * 32
    assert all(i.phase is Phase.WEIGHT_GRAD for i in parts["indexer"].backward)
    # absorbed, the up-projection of keys and values takes as many flops as expanded
    up = 64 * 8 * (32 + 32)
    assert sum(parts[n].params for n in ("query_absorb", "value_expand")) == up
    absorbed = [i.flops for n in ("query_absorb", "value_expand") for i in parts[n].forward if isinstance(i, Compute)]
    assert sum(absorbed) == 2 * 1024 * up
    assert sum(p.params for p in parts.values()) == layer_specs(scenario.model)[0].parameters
    assert a.indexer.selected(1024) == pytest.approx(sum(min(i, 128) for i in range(1, 1025)) / 1024)


def test_a_sequence_within_the_selection_is_dense_attention_with_an_indexer() -> None:
    scenario, plain = training(128), training(128, model={**SMALL, "indexer": None})
    sparse = [p for p in layer_parts(scenario, dims(scenario), 0, Shard()) if p.name != "indexer"]
    assert tuple(sparse) == layer_parts(plain, dims(plain), 0, Shard())


def test_long_sequences_gain_on_dense_attention() -> None:
    sizes = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    model = {**SMALL, "hidden": 7168, "heads": 128, "layers": 1, "mla": {**sizes, "v_head_dim": 128}}
    gains = []
    for length in (4096, 16384, 65536):
        indexers = ({"heads": 64, "head_dim": 128, "top_k": 2048}, None)
        sparse, dense = (simulate(training(length, model={**model, "indexer": x})).step_time_s for x in indexers)
        gains.append(dense / sparse)
    assert gains[0] < 1 < gains[2]
    assert gains == sorted(gains)


def serving(**inference: Any) -> Scenario:
    requests = {"requests": {"count": 2, "prompt_len": 4000, "output_len": 8}}
    return parse_scenario({"model": SMALL, "inference": requests | inference, "cluster": "dgx-h200"})


def test_the_cache_holds_latents_and_the_indexers_keys(tmp_path: Path) -> None:
    """132 bytes of DeepSeek's index key; 656 of its 8-bit latent (FlashMLA), 1,152 in 16 bits."""
    requests = {"requests": {"count": 1, "prompt_len": 4096, "output_len": 8}}
    for cache, latent in ({}, 1152), ({"kv_cache": {"dtype": "fp8"}}, 656):
        s = parse_scenario({"model": written(tmp_path, V32), "inference": requests | cache, "cluster": "dgx-h200"})
        assert attention_of(s).sequence_bytes(serving_dims(s), 10) == 10 * (latent + 132)
    small = simulate_serving(serving())
    assert small.capacity.token_bytes[0] == 2 * ((64 + 16) * 2 + 32 + 4)


def test_a_decode_reads_the_selected_latents_and_scores_all_keys() -> None:
    s = serving()
    d, a = serving_dims(s), attention_of(serving())
    at = {length: {i.name: i for i in a.decode(d, 4, length) if isinstance(i, Compute)} for length in (2000, 4000)}
    assert at[2000]["attention"] == at[4000]["attention"]
    assert at[4000]["index_scores"].flops == 2 * at[2000]["index_scores"].flops == 2 * 4 * 4 * 32 * 4000
    assert at[4000]["index_scores"].dtype == "fp8"


def test_a_decode_s_scores_are_bound_by_reading_the_keys() -> None:
    """A tile has the heads of one token as its rows, so that a single query leaves no row of it empty: 64 sequences
    have fewer flops a byte than an H200 computes while it reads one."""
    s = parse_scenario({"model": "deepseek-v3.2", "cluster": "dgx-h200", "inference": serving().inference.model_dump()})
    costs = iteration_costs(s, load_profile(s.calibration))
    indexer = attention_of(s).indexer
    kernel, _ = scores(indexer, (64, 1, 32768), "fp8", key_bytes=indexer.key_read_bytes(1))
    read_s = kernel.bytes / s.cluster.gpu.memory_bandwidth_bytes_per_s
    assert read_s < costs.prices.priced((kernel,)).seconds < 1.5 * read_s


def test_context_parallelism_gathers_latents_and_index_keys() -> None:
    """Forward (80 + 32) numbers a token, backward the latents again and both gradients."""
    s = training(1024, {"cp": 2, "cp_method": "all_gather"})
    block = layer_block(s, 0)
    sent = {i.name: (i.kind, i.bytes) for p in (block.forward, block.backward) for i in p if isinstance(i, Comm)}
    assert sent == {
        "index_key_gather": ("all_gather", 1024 * 32 * 2),
        "latent_gather": ("all_gather", 1024 * 80 * 2),
        "latent_regather": ("all_gather", 1024 * 80 * 2),
        "latent_grad_scatter": ("reduce_scatter", 1024 * 80 * 2),
        "index_key_grad_scatter": ("reduce_scatter", 1024 * 32 * 2),
    }
    # of all ranks the indexer's pairs are those of the whole sequence
    whole = 2 * 4 * 32 * 1024 * 1025 / 2
    for split in ("contiguous", "zigzag", "striped"):
        layout = {"cp": 2, "cp_method": "all_gather", "cp_split": split}
        blocks = [layer_block(training(1024, layout), 0, Shard(cp_rank=rank)) for rank in range(2)]
        scores = [i.flops for b in blocks for i in b.forward if isinstance(i, Compute) and i.name == "index_scores"]
        assert sum(scores) == pytest.approx(whole, rel=1.0 / 1024 if split == "striped" else 1e-6)


def test_striped_queries_choose_among_all_keys() -> None:
    """Each rank's last query sees 256 keys, more than the 128 that it may select."""
    s = training(256, {"cp": 2, "cp_method": "all_gather", "cp_split": "striped"})
    block = layer_block(s, 0)
    assert "index_select" in {i.name for i in block.forward}
    assert {t.name: t.bytes for t in block.saved}["selected keys"] == 128 * 128 * 4


@pytest.mark.parametrize("sp", [False, True])
def test_gradients_of_latents_are_summed_over_tp(sp: bool) -> None:
    """(64 + 16) numbers a token: an all-reduce, or the reduce-scatter that answers the gather."""
    block = layer_block(training(1024, {"tp": 2, "sp": sp}), 0)
    sent = {i.name: (i.kind, i.bytes) for p in (block.forward, block.backward) for i in p if isinstance(i, Comm)}
    size = 1024 * 80 * 2
    gathered = {"latent_tp_gather": ("all_gather", size), "latent_tp_grad_scatter": ("reduce_scatter", size)}
    wanted = gathered if sp else {"latent_tp_grad_all_reduce": ("all_reduce", size)}
    assert {name: one for name, one in sent.items() if name.startswith("latent_")} == wanted


def test_what_is_made_of_latents_can_be_made_again() -> None:
    """Megatron's module mla_up_proj: the core's queries are not kept, the indexer's are."""
    recompute = {"mode": "selective", "modules": ["mla_up_proj"]}
    kept, some = (
        {t.name: t.bytes for t in layer_block(training(**x), 0).saved} for x in ({}, {"recompute": recompute})
    )
    assert set(kept) - set(some) >= {"query"}
    assert {"index queries", "index keys", "selected keys", "output"} <= set(some)
    assert kept["query"] == 1024 * 8 * 80 * 2


def test_a_warm_up_trains_indexers_alone() -> None:
    s, plain = training(indexer="warm_up"), training()
    one, indexer = layer_block(s, 0), attention_of(s).indexer
    trained = sum(m.parameters for m in indexer.matrices(256, 64)) + indexer.norm_parameters
    assert (one.params, one.frozen_params) == (trained, layer_block(plain, 0).params - trained)
    assert {i.phase for i in one.backward} == {Phase.WEIGHT_GRAD}
    warm, usual = simulate(s).outcome, simulate(plain).outcome
    assert warm.memory[0].optimizer == 2 * trained * 12
    assert warm.memory[0].parameters == usual.memory[0].parameters
    assert warm.step_time_s < usual.step_time_s


def test_a_frozen_indexer_has_no_backward() -> None:
    s = training(indexer="frozen")
    assert not [i for i in layer_block(s, 0).backward if i.name.startswith("index")]
    assert layer_block(s, 0).frozen_params > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallelism": {"cp": 2}}, r"parallelism\.cp_method: found 'ring'; with model\.indexer only all_gather"),
        ({"indexer": "warm_up", "parallelism": {"pp": 2}}, r"training\.indexer: found 'warm_up'; simulated only at pp"),
        ({"model": {**SMALL, "indexer": None}, "indexer": "frozen"}, r"found 'frozen'; needs model\.indexer"),
        (
            {"model": {**SMALL, "mla": None}},
            r"model\.indexer: found an indexer; its queries come from mla\.q_lora_rank",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        training(**change)
