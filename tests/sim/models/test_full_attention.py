"""Layers without a window that have sizes of their own (Gemma 4): parameters, FLOPs and cache in closed form."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import resolve_model
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.flops import model_flops_per_token
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.memory import buffer_bytes
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

HIDDEN, HEADS, KV_HEADS, WIDTH, WINDOW = 512, 8, 4, 64, 128
FULL = {"kv_heads": 2, "head_dim": 128, "values_are_keys": True}
MODEL: dict[str, Any] = {
    "layers": 4,
    "hidden": HIDDEN,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": WIDTH,
    "vocab": 1000,
    "mlp": "geglu",
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rope",
    "qk_norm": True,
    "value_norm": True,
    "window": WINDOW,
    "attention_pattern": ["sliding", "sliding", "sliding", "full"],
}


def model(**change: Any) -> ModelConfig:
    return resolve_model(MODEL | change, Source("model", {}), ())


def scenario(**other: Any) -> Scenario:
    return parse_scenario({"model": MODEL | {"full_attention": FULL}, "cluster": {"gpu": "h100-sxm"}, **other})


def test_parameters_of_both_kinds_of_layers() -> None:
    base, own = model(), model(full_attention=FULL)
    sliding = HIDDEN * WIDTH * (HEADS + 2 * KV_HEADS) + HEADS * WIDTH * HIDDEN + 2 * WIDTH
    full = HIDDEN * 128 * (HEADS + 2) + HEADS * 128 * HIDDEN + 2 * 128
    assert count_parameters(own).total - count_parameters(base).total == full - sliding
    assert [s.attention_parameters for s in layer_specs(own)] == [sliding] * 3 + [full]


def test_layers_that_see_all_keys_may_have_no_rope() -> None:
    """As where each fourth layer has none; the order of layers is free."""
    periodic, own = model(no_rope_every=4), model(full_attention={"rope": False})
    assert layer_specs(own) == layer_specs(periodic) != layer_specs(model())
    first = model(full_attention={"rope": False}, attention_pattern=["full", "sliding", "sliding", "sliding"])
    assert list(layer_specs(first)) == [layer_specs(own)[i] for i in (3, 0, 1, 2)]


def test_flops_of_a_long_sequence_grow_with_the_wide_heads_alone() -> None:
    """Of each further token half are seen in the mean: 12 / 2 FLOPs for each number of the last layer's queries."""
    short, long = (model_flops_per_token(model(full_attention=FULL), n) for n in (8192, 16384))
    windows = long - short - 6 * HEADS * 128 * 8192
    assert abs(windows) < 0.001 * (long - short)


def test_the_cache_of_a_sequence() -> None:
    """Keys and values of 16 bits: of the window in three layers, of all tokens and wide heads in one."""
    s = scenario(inference={"engine": "vllm-v1", "requests": {"prompt_len": 1000, "output_len": 8}})
    each = [spec.attention.sequence_bytes(serving_dims(s), 1000) for spec in layer_specs(s.model) if spec.attention]
    assert each == [2 * KV_HEADS * WIDTH * 2 * WINDOW] * 3 + [2 * 2 * 128 * 2 * 1000]
    assert simulate_serving(s).result["output_tokens_per_s"] > 0


@pytest.mark.parametrize("framework", ["eager", "megatron", "compiled", "transformers"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_step_runs(framework: str, tp: int) -> None:
    training = {"seq_len": 1024, "global_batch_size": 2, "framework": framework}
    parts = simulate(scenario(training=training, parallelism={"tp": tp})).result
    assert parts["step_time_s"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"window": None, "attention_pattern": ["full"]},
            "full_attention: found a mapping; is for layers of kind full",
        ),
        ({"full_attention": {"kv_heads": 3}}, r"full_attention.kv_heads: found 3; must divide heads \(8\)"),
        ({"full_attention": {"heads": 6}}, r"full_attention.heads: found 6; kv_heads \(4\) must divide it"),
        ({"full_attention": {"heads": 6, "kv_heads": 4}}, r"kv_heads: found 4; must divide heads \(6\)"),
        ({"full_attention": {"rope": False}, "positions": "none"}, "full_attention.rope: found false; needs positions"),
        ({"merged_projections": True}, "values have weights of their own"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**{"full_attention": FULL} | change)


def test_values_narrower_than_keys() -> None:
    """Value heads of 32 beside key heads of 64: parameters, cache, and FLOPs of the scores' products with them."""
    wide, narrow = (
        model(window=None, attention_pattern=["full"]),
        model(window=None, attention_pattern=["full"], v_head_dim=32),
    )
    fewer = HIDDEN * (WIDTH - 32) * (KV_HEADS + HEADS)
    assert count_parameters(wide).total - count_parameters(narrow).total == 4 * fewer
    one = {"inference": {"requests": {"prompt_len": 64, "output_len": 8}}, "cluster": {"gpu": "h100-sxm"}}
    s = parse_scenario({"model": narrow.model_dump(exclude_unset=True), **one})
    spec = layer_specs(s.model)[0]
    assert spec.attention is not None
    assert spec.attention.sequence_bytes(serving_dims(s), 100) == KV_HEADS * (WIDTH + 32) * 2 * 100
    flops = [model_flops_per_token(m, 4096) - model_flops_per_token(m, 2048) for m in (wide, narrow)]
    assert flops[1] == pytest.approx(0.75 * flops[0])


def test_sinks_of_layers_with_windows_alone() -> None:
    both, some = model(sinks=True, full_attention=FULL), model(sinks=True, full_attention=FULL | {"sinks": False})
    assert count_parameters(both).total - count_parameters(some).total == HEADS


def test_query_heads_of_layers_without_a_window() -> None:
    """Twice as many: parameters, FLOPs of a long sequence; ranks and exchanged heads divide both numbers."""
    base, own = model(), model(full_attention={"heads": 2 * HEADS})
    assert count_parameters(own).total - count_parameters(base).total == 2 * HEADS * WIDTH * HIDDEN
    grown = [model_flops_per_token(m, 16384) - model_flops_per_token(m, 8192) for m in (base, own)]
    assert grown[1] - grown[0] == pytest.approx(6 * HEADS * WIDTH * 8192)
    training = {"seq_len": 1024, "global_batch_size": 2}
    odd = MODEL | {"full_attention": {"heads": 12}}
    for layout, message in (
        ({"tp": 8}, r"tp: found 8; must divide model.full_attention.heads \(12\)"),
        ({"cp": 8, "cp_method": "all_to_all"}, r"cp must divide heads/tp \(12\)"),
    ):
        with pytest.raises(InputError, match=message):
            parse_scenario({"model": odd, "cluster": "dgx-h100", "training": training, "parallelism": layout})
    held = []
    for heads in (4, 12):
        inference = {"requests": {"prompt_len": 512, "output_len": 8}, "attention": "unfused"}
        given = MODEL | {"full_attention": {"heads": heads}}
        s = parse_scenario({"model": given, "cluster": "dgx-h100", "inference": inference})
        d, specs = serving_dims(s), layer_specs(s.model)
        stage = simulate_serving(s).costs.stages[0]
        held.append(buffer_bytes(d, specs, stage, 512, 1, 100_000))
    assert held[1] - held[0] >= 2 * 512 * 100_000 * 4 * 2
