"""Gemma 4 E2B: embeddings for each layer, last layers without keys of their own; by hand and against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_programs import unmasked

import sim.models.attention.core
from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.memory import weight_bytes
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

MODEL: dict[str, Any] = {
    "layers": 8,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 512,
    "vocab": 1024,
    "mlp": "geglu",
    "norm": "rmsnorm",
    "norm_in_fp32": True,
    "norm_position": "both",
    "bias": False,
    "positions": "rope",
    "qk_norm": True,
    "value_norm": True,
    "tied_embeddings": True,
    "window": 64,
    "attention_pattern": ["sliding", "full"],
    "full_attention": {"head_dim": 64},
    "layer_embedding": {"width": 16, "vocab": 512},
    "shared_kv_layers": 4,
    "shared_kv_ffn": 1024,
}


def training(change: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    run = {"seq_len": 256, "global_batch_size": 8} | keys
    model = MODEL | (change or {})
    return parse_scenario({"model": model, "training": run, "parallelism": layout or {}, "cluster": "dgx-h200"})


def test_layers_without_keys_have_queries_alone_and_a_wider_mlp() -> None:
    specs = layer_specs(training().model)
    own, shared = specs[2], specs[6]
    assert own.attention_parameters - shared.attention_parameters == 2 * 256 * 2 * 32 + 32
    assert shared.parameters - own.parameters == 3 * 256 * 512 - (2 * 256 * 2 * 32 + 32)
    table = 512 * 8 * 16 + 256 * 8 * 16 + 16
    counts = count_parameters(training().model)
    assert counts.layer_inputs == table + 8 * (2 * 256 * 16 + 256)
    assert counts.total - counts.active == 512 * 8 * 16 - 8 * 16  # rows that a token does not read
    blocks = [layer_block(training(), i).params for i in range(8)]
    assert blocks == [spec.parameters for spec in specs]
    assert embedding_block(training()).params == 1024 * 256 + table


def test_keys_are_kept_once_and_their_gradients_are_added() -> None:
    def kept(layer: int) -> dict[str, float]:
        return {s.name: s.bytes for s in layer_block(training(framework="megatron"), layer).saved}

    assert {"query", "key", "value"} <= {*kept(2)}
    assert not {"key", "value"} & {*kept(6)}
    backward = [i.name for i in layer_block(training(), 6).backward if isinstance(i, Compute)]
    assert "shared_keys_grad_sum" in backward


def test_which_tensors_are_keys_does_not_depend_on_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> list[float]:
        return [s.bytes for s in layer_block(training(framework="megatron"), 6).saved]

    before, made = kept(), sim.models.attention.core.core_saved
    renamed = lambda *args: tuple(s._replace(name="a tensor") for s in made(*args))  # noqa: E731
    monkeypatch.setattr(sim.models.attention.core, "core_saved", renamed)
    assert kept() == before


def test_the_cache_has_keys_of_the_layers_that_make_them() -> None:
    requests = {"count": 2, "prompt_len": 256, "output_len": 8}
    run = {"inference": {"requests": requests}, "cluster": "dgx-h200"}
    s = parse_scenario(run | {"model": MODEL})
    d = serving_dims(s)
    bytes_ = [spec.attention.sequence_bytes(d, 256) for spec in layer_specs(s.model) if spec.attention is not None]
    assert bytes_ == [64 * 2 * 2 * 32 * 2, 256 * 2 * 2 * 64 * 2] * 2 + [0.0] * 4
    served, plain = (
        simulate_serving(parse_scenario(run | {"model": m})) for m in (MODEL, MODEL | {"layer_embedding": None})
    )
    assert served.end_s > plain.end_s
    held = [weight_bytes(x.costs.dims, x.costs.specs, x.costs.stages[0]) for x in (served, plain)]
    assert held[0] - held[1] == 2 * count_parameters(s.model).layer_inputs


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sp": True}, {"dp": 4, "zero": 3}])
@pytest.mark.parametrize("framework", ["megatron", "transformers", "compiled"])
def test_layouts_run(layout: dict[str, Any], framework: str) -> None:
    assert simulate(training(layout=layout, framework=framework)).step_time_s > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_layers_and_their_inputs_keep_is_what_transformers_keeps(tmp_path: Path, precision: str) -> None:
    """Of four more layers, two of them without keys; each layer's inputs are made in front of the first layer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.real.saved_by_transformers import BATCH, SEQ, SIZES, kept_bytes

    def both(layers: int) -> tuple[float, float]:
        types = [*["sliding_attention", "full_attention"] * (layers // 2)]
        own = {"layer_types": types, "num_kv_shared_layers": layers // 2, "use_double_wide_mlp": True}
        sizes = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "sliding_window": 32}
        keys = SIZES | {"num_hidden_layers": layers} | own | sizes | {"global_head_dim": 64}
        config = transformers.AutoConfig.for_model("gemma4_text", **keys)
        config._attn_implementation = "sdpa"
        (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
        run = {"seq_len": SEQ, "micro_batch_size": BATCH, "global_batch_size": BATCH, "precision": precision}
        run |= {"framework": "transformers", "attention": "fused"}
        s = unmasked(parse_scenario({"model": str(tmp_path), "training": run, "cluster": "dgx-h100"}))
        blocks = [embedding_block(s), *(layer_block(s, i) for i in range(layers))]
        kept = kept_bytes(config, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
        return sum(x.bytes for block in blocks for x in block.saved), kept

    (few, really_few), (many, really_many) = both(4), both(8)
    assert many - few == pytest.approx(really_many - really_few, rel=0.01)


@pytest.mark.parametrize(
    ("change", "layout", "keys", "word"),
    [
        ({"shared_kv_layers": 8}, {}, {}, "shared_kv_layers"),
        ({"shared_kv_layers": 0}, {}, {}, "shared_kv_ffn"),
        ({"attention_gate": True}, {}, {}, "attention_gate"),
        ({"parallel_block": True, "norm_position": "pre"}, {}, {}, "layer_embedding"),
        ({}, {"pp": 2}, {}, "not sent between stages"),
        ({"shared_kv_layers": 0, "shared_kv_ffn": None}, {"pp": 2}, {}, "model.layer_embedding"),
        ({}, {"cp": 2}, {}, "shared_kv_layers"),
        ({}, {}, {"lora": {"rank": 8}}, "shared_kv_layers"),
    ],
)
def test_what_is_not_simulated_is_refused(
    change: dict[str, Any], layout: dict[str, Any], keys: dict[str, Any], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        training(change, layout, **keys)
