"""The real model has the parameters, and saves for its backward the bytes, that the simulator counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calibrate.bundled_model.model import Build, make_blocks, parameter_count
from calibrate.parallel.memory import resident, saved_storages
from sim.core.program import Block
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import Shard
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from tests.sim.cases import llama_like

GPT = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1000, "positions": "learned"}
LLAMA = llama_like(layers=2, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=1000)
MLA = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
LATENT = LLAMA | {"kv_heads": 8, "mla": MLA}
WHOLE_QUERIES = LATENT | {"mla": MLA | {"q_lora_rank": None, "v_head_dim": 96}}
MODELS = {
    "gpt": GPT,
    "gpt tied": GPT | {"tied_embeddings": True},
    "llama": LLAMA,
    "latents": LATENT,
    "latents, whole queries": WHOLE_QUERIES,
    "latents, gpt": GPT | {"mla": MLA},
    "relu2 without bias": GPT | {"mlp": "relu2", "bias": False, "positions": "none"},
}


def _scenario(model: dict[str, Any], precision: str = "bf16", attention: str = "unfused", b: int = 2) -> Scenario:
    training = {
        "seq_len": 256,
        "micro_batch_size": b,
        "global_batch_size": b,
        "precision": precision,
        "attention": attention,
    }
    return parse_scenario({"model": model, "training": training, "cluster": "cpu-host"})


def _simulated(s: Scenario) -> list[Block]:
    layers = [layer_block(s, i, Shard()) for i in range(s.model.layers)]
    return [embedding_block(s), *layers, head_block(s)]


def _saved(s: Scenario, block: int, split: bool = False) -> int:
    """Bytes that the real block saves, of a micro-batch as in the scenario."""
    from calibrate.bundled_model.linear import WeightGrads

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[s.training.precision]
    build = Build(dtype=dtype, store=WeightGrads() if split else None)
    real = make_blocks(s.model, s.training, [block], build)[0]
    shape = (s.training.micro_batch_size, s.training.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    x = torch.randn(*shape, s.model.hidden).to(dtype).requires_grad_()
    with saved_storages(resident([real])) as found:
        if block == 0:
            y = real(tokens)
        elif block == s.model.layers + 1:
            y = real(x, tokens)
        else:
            y = real(x)
    assert y.grad_fn is not None
    return sum(found.values())


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str) -> None:
    s = _scenario(MODELS[name])
    real = make_blocks(s.model, s.training, range(s.model.layers + 2), Build())
    assert parameter_count(real) == sum(b.params for b in _simulated(s))


CASES = {
    "gpt unfused, dropout": (GPT | {"dropout": 0.1}, "bf16", "unfused"),
    "gpt unfused": (GPT, "bf16", "unfused"),
    "gpt unfused, fp32": (GPT, "fp32", "unfused"),
    "gpt fused": (GPT, "bf16", "fused"),
    "gpt fused, fp32": (GPT, "fp32", "fused"),
    "llama fused": (LLAMA, "bf16", "fused"),
    "llama unfused": (LLAMA, "bf16", "unfused"),
    "llama fused, fp32": (LLAMA, "fp32", "fused"),
    "latents unfused": (LATENT, "bf16", "unfused"),
    "latents, whole queries, fused": (WHOLE_QUERIES, "bf16", "fused"),
    "relu2": (MODELS["relu2 without bias"], "bf16", "unfused"),
}


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bytes_saved_by_a_layer(name: str, split: bool, b: int) -> None:
    model, precision, attention = CASES[name]
    s = _scenario(model, precision, attention, b)
    simulated = sum(x.bytes for x in layer_block(s, 1, Shard()).saved)
    assert _saved(s, 1, split) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("name", ["gpt unfused, dropout", "gpt fused, fp32", "llama fused"])
def test_bytes_saved_by_embedding_and_head(name: str) -> None:
    model, precision, attention = CASES[name]
    s = _scenario(model, precision, attention)
    simulated = _simulated(s)
    for block in (0, s.model.layers + 1):
        expected = sum(x.bytes for x in simulated[block].saved)
        assert _saved(s, block) == pytest.approx(expected, rel=0.01, abs=8 * 2 * 256), simulated[block].name


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gpt unfused, dropout", lambda s, b, h, a: 34 * s * b * h + 5 * a * s * s * b),
        ("gpt unfused", lambda s, b, h, a: 32 * s * b * h + 2 * a * s * s * b),
        ("gpt fused", lambda s, b, h, a: 32 * s * b * h + 4 * a * s * b),
    ],
)
def test_published_formula(name: str, formula: Any, b: int) -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), equation 1 and its parts: 16-bit, masks of one byte."""
    model, precision, attention = CASES[name]
    saved = _saved(_scenario(model, precision, attention, b), 1)
    assert saved == pytest.approx(formula(256, b, 256, 8), rel=0.01)
