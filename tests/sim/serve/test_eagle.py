"""EAGLE's and EAGLE-3's drafts against counts from vLLM 0.33's code, and the format of a draft's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.load import Load
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import SMALL, finished, serving

H, FFN, HEAD, VOCAB = 4096, 14336, 128, 32_000  # of the EAGLE-3 draft for Llama 3.1 8B: 32 heads, 8 KV heads
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128_256,
    "draft_vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
REQUESTS = {"prompt_len": 64, "output_len": 31, "count": 3}


def served(draft: Any, states: int, **more: Any) -> ServingSimulation:
    speculative = {"draft": draft, "tokens": 3, "acceptance": 0.6, "hidden_states": states}
    section = {"engine": "vllm-0.33", "requests": REQUESTS, "speculative": speculative, **more}
    return simulate_serving(parse_scenario({"model": "llama3.1-8b", "cluster": "dgx-h100", "inference": section}))


def draft_bytes(sim: ServingSimulation) -> float:
    """What the draft adds to the weights of the model."""
    plain = simulate_serving(
        parse_scenario(
            {
                "model": "llama3.1-8b",
                "cluster": "dgx-h100",
                "inference": {**sim.scenario.for_serving.model_dump(include={"engine", "quantization"})}
                | {"requests": REQUESTS},
            }
        )
    )
    return sim.capacity.weight_bytes[0] - plain.capacity.weight_bytes[0]


def test_the_weights_of_an_eagle_3_draft_are_those_of_the_published_one(tmp_path: Path) -> None:
    """models/llama_eagle3.py: fc 3h -> h, query, key and value over 2h, the MLP, an output matrix of its own words,
    four norms; the embedding is the model's (v1/spec_decode/llm_base_proposer.py, _maybe_share_embeddings)."""
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    qkv = 2 * H * (32 + 2 * 8) * HEAD
    elements = 3 * H * H + qkv + 32 * HEAD * H + 3 * H * FFN + VOCAB * H + 4 * H
    assert draft_bytes(served(str(tmp_path / "config.json"), 3)) == 2 * elements


def test_an_eagle_draft_shares_both_tables_with_its_model() -> None:
    """models/llama_eagle.py: fc 2h -> h and a layer; the output matrix is the model's (_maybe_share_lm_head)."""
    layer = H * (32 + 2 * 8) * HEAD + 32 * HEAD * H + 3 * H * FFN
    found = draft_bytes(served({"preset": "llama3.1-8b", "layers": 1}, 1))
    assert found == pytest.approx(2 * (layer + 2 * H * H), abs=2 * 4 * H)


def test_eagle_3_reads_the_models_states_once_in_each_iteration() -> None:
    """The pass over checked tokens is longer than a step of as many tokens by the matrix in front of the layer."""
    speculative = {"draft": {**SMALL, "layers": 1}, "tokens": 3, "acceptance": 1.0, "hidden_states": 3}
    sim = simulate_serving(serving({"requests": REQUESTS, "speculative": speculative}, SMALL))
    costs = iteration_costs(sim.scenario, sim.profile)
    load = Load(12, 3, 300, (), 12, 4)
    checked, *steps = costs.drafted(load)
    first, later = (costs.drafting_costs(one) for one in (checked, steps[0]))
    assert first is not later
    assert [costs.drafting_costs(one) for one in steps] == [later] * 2
    names = [[item.name for item in own.specs[0].serve_tokens(own.dims, 12)] for own in (first, later)]
    assert [name for name in names[0] if name not in names[1]] == ["draft_fc"]
    assert costs.draft_seconds(load)[0] == pytest.approx(
        first.stage_seconds(checked)[0] + sum(later.stage_seconds(one)[0] for one in steps)
    )
    finished(sim)


def width_of_qkv(costs: IterationCosts) -> int:
    return next(op.shape[-1] for op in costs.specs[0].serve_tokens(costs.dims, 8) if op.name == "qkv")


@pytest.mark.parametrize(("states", "inputs"), [(0, 1), (1, 1), (3, 2)])
def test_attention_of_eagle_3_reads_embedding_and_state(states: int, inputs: int) -> None:
    speculative = {"draft": {**SMALL, "layers": 1}, "tokens": 3, "hidden_states": states}
    costs = iteration_costs(serving({"requests": REQUESTS, "speculative": speculative}, SMALL), serving_profile())
    assert costs.draft is not None
    assert width_of_qkv(costs.draft) == inputs * SMALL["hidden"]


def serving_profile() -> Any:
    return simulate_serving(serving({"requests": REQUESTS}, SMALL)).profile


def test_engines_treat_a_draft_of_states_as_the_models_own_layer() -> None:
    """vLLM 0.14, config/vllm.py: asynchronous with EAGLE, unlike with a draft model; SGLang 0.5.3 keeps 2 GiB free for
    EAGLE, 6 for STANDALONE."""
    draft = {"preset": "llama3.1-8b", "layers": 1}
    own, other = (served(draft, states).scenario.for_serving.drafts for states in (1, 0))
    assert (own, other) == ("layer", "model")
    fractions = [served(draft, n, engine="sglang-0.5").scenario.for_serving.kv_cache.memory_fraction for n in (1, 0)]
    assert (fractions[0] - fractions[1]) * 79.65 == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize(
    ("speculative", "told"),
    [
        ({"hidden_states": 1}, "hidden_states: found 1; needs a draft that reads them; allowed: 0"),
        ({"draft": {**SMALL, "layers": 1, "vocab": SMALL["vocab"] - 128}}, "(EAGLE-3's draft: hidden_states 3)"),
        ({"draft": {**SMALL, "vocab": 2 * SMALL["vocab"]}, "hidden_states": 3}, "has a vocabulary of"),
    ],
)
def test_what_no_draft_can_be(speculative: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told.replace("(", r"\(").replace(")", r"\)")):
        serving({"requests": REQUESTS, "speculative": speculative}, {**SMALL, "mtp_layers": 1})


@pytest.mark.parametrize(("engine", "narrow"), [("vllm-0.33", False), ("sglang-0.5.23", True)])
def test_a_draft_is_kept_as_published_unless_sglang_is_told_a_format(engine: str, narrow: bool) -> None:
    """vLLM 0.33, config/speculative.py; SGLang 0.5.23, arg_groups/serving_hook.py: the draft's is that of
    --quantization, if it is given."""
    draft = {"preset": "llama3.1-8b", "layers": 1}
    wide, told = (served(draft, 0, engine=engine, quantization=form).costs.draft for form in ("none", "fp8"))
    assert wide is not None
    assert told is not None
    assert (wide.dims.weight_bytes, told.dims.weight_bytes) == (2, 1 if narrow else 2)
