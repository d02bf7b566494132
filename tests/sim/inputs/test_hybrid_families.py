"""Families whose layers carry a state, and parallel blocks: parameters, states in serving, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.flops import matmul_params_per_token, model_flops_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.cache.layer_groups import CacheGroups
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.inputs.test_model_families import GEMMA3_1B, written

# `parameters`: those of Transformers 5.23's model of that config, built on the meta device
CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "hybrid_configs.json").read_text())
MAMBA2 = CONFIGS["mamba2_2.7b"]["config"]
ONE_KIND = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "norm": "rmsnorm", "bias": False}
STATES = {"heads": 16, "head_dim": 64, "state": 32, "chunk": 64}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = load_model(written(tmp_path, CONFIGS[name]["config"]))
    assert count_parameters(model).total == CONFIGS[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("jamba_v0.1", "expert_layer_period", 0),
        ("jamba_v0.1", "attn_layer_offset", []),
        ("kimi_linear_48b", "linear_attn_config", "abc"),
        ("nemotron_h_8b", "hybrid_override_pattern", 3),
        ("qwen3_next_80b", "full_attention_interval", None),
    ],
)
def test_a_value_that_cannot_be_computed_with_is_refused(tmp_path: Path, name: str, key: str, value: object) -> None:
    path = written(tmp_path, CONFIGS[name]["config"] | {key: value})
    family = CONFIGS[name]["config"]["model_type"]
    with pytest.raises(InputError, match=f"has a value that model_type {family} does not allow"):
        load_model(path)


@pytest.mark.parametrize("key", ["mtp_hybrid_override_pattern", "n_group", "n_shared_experts"])
def test_what_nemotron_asks_for_beyond_the_simulated_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match=f"{key}: found 2; only"):
        load_model(written(tmp_path, CONFIGS["nemotron3_nano_30b"]["config"] | {key: 2}))


def test_nemotron_s_layers_of_further_tokens_have_the_names_of_transformers_5_24(tmp_path: Path) -> None:
    """What saves a config writes attention's newer name; a message shows the kinds that can be simulated."""
    key, config = "mtp_layers_block_type", CONFIGS["nemotron3_nano_30b"]["config"]
    load_model(written(tmp_path, config | {key: ["full_attention", "moe"]}))
    with pytest.raises(InputError, match=r"found \['moe', 'moe'\]; only \['attention', 'moe'\] or \['full_attention'"):
        load_model(written(tmp_path, config | {key: ["moe", "moe"]}))


NANO = CONFIGS["nemotron3_nano_30b"]["config"]
# nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B's config.json
ULTRA = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 131072,
    "mamba_num_heads": 256,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 5120,
    "moe_latent_size": 2048,
    "moe_shared_expert_intermediate_size": 10240,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
    "layers_block_type": [*["mamba", "moe"] * 48, *["attention"] * 12],
}


def test_nemotron_3_ultra_has_its_published_size(tmp_path: Path) -> None:
    """550 billion parameters, 55 of them active without the embedding, as the name says; where attention stands among
    the layers changes neither."""
    left_out = ("hybrid_override_pattern", "num_hidden_layers")
    config = {key: value for key, value in NANO.items() if key not in left_out} | ULTRA
    model = load_model(written(tmp_path, config))
    count = count_parameters(model)
    assert model.moe is not None
    assert (model.moe.latent, model.mtp_layers) == (2048, 1)
    assert count.total / 1e9 == pytest.approx(550, abs=1)
    assert (count.active - count.embedding) / 1e9 == pytest.approx(55, abs=0.1)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_trained_and_served(tmp_path: Path, name: str) -> None:
    tp = 1 if name == "minimax_m2" else 2
    model = {"model": written(tmp_path, CONFIGS[name]["config"]), "cluster": "dgx-h200", "calibration": "roofline"}
    training = {"seq_len": 1024, "global_batch_size": 1, "recompute": "full"}
    step = simulate(parse_scenario({**model, "training": training, "parallelism": {"tp": tp}}))
    assert step.result["step_time_s"] > 0
    inference = {"requests": {"count": 2, "prompt_len": 64, "output_len": 4}}
    gpu = {"gpu": {"preset": "h200-sxm", "memory_bytes": 4e12}}
    served = simulate_serving(parse_scenario({**model, "cluster": gpu, "inference": inference}))
    assert served.end_s > 0


def test_a_config_s_window_is_read(tmp_path: Path) -> None:
    specs = layer_specs(load_model(written(tmp_path, GEMMA3_1B)))
    assert specs[0].attention is not None
    assert specs[0].attention.window.tokens == GEMMA3_1B["sliding_window"]


def test_mamba2_s_matmuls_are_the_paper_s(tmp_path: Path) -> None:
    """Dao and Gu 2024, section 6.3: a token costs a scan 2·(G·Q·N + H·(Q·P + 2·N·P)); backward twice that."""
    model = load_model(written(tmp_path, MAMBA2))
    scan = 2 * (256 * 128 + 80 * (256 * 64 + 2 * 128 * 64))
    expected = 6 * matmul_params_per_token(model) + 3 * 64 * scan
    assert model_flops_per_token(model, 2048) == pytest.approx(expected, rel=1e-12)


def serving(**model: Any) -> Any:
    inference = {"requests": {"count": 2, "prompt_len": 100, "output_len": 20}}
    return parse_scenario({"model": {**ONE_KIND, **model}, "inference": inference, "cluster": "dgx-h100"})


def test_a_state_is_as_large_however_long_the_sequence(tmp_path: Path) -> None:
    """heads·head_dim·state numbers, and 3 inputs of the convolution: x, B and C."""
    sim = simulate_serving(serving(state_space=STATES))
    dims, attentions = sim.costs.dims, sim.costs.attentions
    expected = 4 * (16 * 64 * 32 + 3 * (16 * 64 + 2 * 32)) * 2
    for length in (100.0, 10_000.0):
        assert CacheGroups().sequence_bytes(dims, attentions, (4,), length) == pytest.approx(expected)


def test_two_norms_of_one_input_keep_it_once() -> None:
    """GPT-NeoX: both norms' weights, every operator of a serial block, and one tensor less to keep."""

    def block(**keys: Any) -> Any:
        training = {"seq_len": 512, "global_batch_size": 1}
        return layer_block(parse_scenario({"model": ONE_KIND | keys, "training": training, "cluster": "dgx-h100"}), 0)

    serial, both = block(), block(parallel_block="two_norms")
    assert both.params == serial.params
    assert [both.forward, both.backward] == [serial.forward, serial.backward]
    saved = [sum(s.bytes for s in b.saved) for b in (serial, both)]
    assert saved[0] - saved[1] == 512 * ONE_KIND["hidden"] * 2


def test_whole_gates_are_one_matrix_in_place_of_products_of_two() -> None:
    """Decays and gate of 16 heads from the hidden state, 16·32 and 16·64 numbers; else through 64 numbers each."""
    states = STATES | {"groups": 16, "conv_bias": False, "state": 32}
    whole, low = (serving(state_space=states | {"kind": kind}).model for kind in ("kda_whole", "kda"))
    numbers = 16 * (32 + 64)
    more = 512 * numbers - (512 * 2 * 64 + 64 * numbers)
    assert count_parameters(whole).total - count_parameters(low).total == 4 * more
    attention = layer_specs(whole)[0].attention
    assert attention is not None
    assert [m.name for m in attention.matrices()] == ["state_in", "state_out"]
    assert attention.matrices(1)[0].elements == 2 * attention.matrices(2)[0].elements


def test_norms_by_kind_stand_behind_attention_and_before_states() -> None:
    """As many weights as in one place for all; a layer begins with its norm, or ends with it before the sum."""
    pattern = {"state_space": STATES, "attention_pattern": ["state_space", "full"], "positions": "rope"}
    training = {"seq_len": 512, "global_batch_size": 1}

    def scenario(position: str) -> Any:
        model = ONE_KIND | pattern | {"norm_position": position}
        return parse_scenario({"model": model, "training": training, "cluster": "dgx-h100"})

    pre, post, by_kind = (scenario(position) for position in ("pre", "post", "by_kind"))
    assert len({count_parameters(s.model).total for s in (pre, post, by_kind)}) == 1
    for layer, like in ((0, pre), (1, post), (2, pre), (3, post)):
        assert layer_block(by_kind, layer).forward == layer_block(like, layer).forward
    assert layer_block(pre, 1).forward != layer_block(post, 1).forward


def test_a_parallel_block_has_one_norm_and_one_sum_over_ranks_less_norm() -> None:
    def params(**keys: Any) -> int:
        return count_parameters(serving(**keys).model).total

    assert params() - params(parallel_block=True) == 4 * 512


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (
            {"state_space": STATES},
            {"training": {"recompute": "selective_op"}},
            "training.recompute: found 'selective_op'",
        ),
        ({"state_space": STATES}, {"parallelism": {"cp": 2}}, "parallelism.cp: found 2; layers with a state"),
        ({"attention_pattern": ["state_space"]}, {}, "attention_pattern: .* needs model.state_space"),
        ({"state_space": {**STATES, "groups": 3}}, {}, "state_space.groups: found 3; must divide heads"),
        ({"state_space": {**STATES, "kind": "mamba1"}}, {}, "kind: found mamba1; needs model.state_space.rank"),
        ({"norm_position": "by_kind"}, {}, "norm_position: found 'by_kind'; needs layers with a state"),
        ({"mlp_pattern": ["none"], "attention_pattern": ["none"]}, {}, "neither attention nor MLP"),
        ({"mlp_pattern": ["experts"]}, {}, "mlp_pattern: .* needs model.moe"),
    ],
)
def test_what_does_not_go_together_is_named(model: dict[str, Any], more: dict[str, Any], message: str) -> None:
    training = {"seq_len": 512, "global_batch_size": 1, **more.get("training", {})}
    data = {"model": {**ONE_KIND, **model}, "training": training, "cluster": "dgx-h100"}
    with pytest.raises(InputError, match=message):
        parse_scenario({**data, "parallelism": more.get("parallelism", {})})


def test_a_prefix_cache_needs_keys_and_values() -> None:
    inference = {"requests": {"count": 2, "prompt_len": 100, "output_len": 20}, "prefix_cache": "gpu"}
    data = {"model": {**ONE_KIND, "state_space": STATES}, "inference": inference, "cluster": "dgx-h100"}
    with pytest.raises(InputError, match=r"prefix_cache: found 'gpu'; a state"):
        parse_scenario(data)


def test_a_model_without_attention_has_no_heads_that_tp_must_divide() -> None:
    states = {"kind": "mamba1", "heads": 512, "head_dim": 1, "state": 16, "rank": 16}
    model = {"layers": 2, "hidden": 256, "heads": 1, "vocab": 1024, "state_space": states, "mlp_pattern": ["none"]}
    keys = {"seq_len": 512, "global_batch_size": 1}
    one, two = (
        parse_scenario({"model": model, "training": keys, "parallelism": {"tp": tp}, "cluster": "dgx-h100"})
        for tp in (1, 2)
    )
    whole, half = (layer_block(s, 0).params for s in (one, two))
    assert whole / 2 < half < 0.6 * whole  # a rank has half of the channels, and whole norms and step sizes
    with pytest.raises(InputError, match="heads"):
        parse_scenario(
            {
                "model": model | {"attention_pattern": ["state_space", "full"]},
                "training": keys,
                "parallelism": {"tp": 2},
            }
            | {"cluster": "dgx-h100"}
        )
