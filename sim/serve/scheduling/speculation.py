"""Speculative decoding: a small model drafts tokens, the large one checks them all in one iteration.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192: of `tokens`
drafted ones those before the first rejected are kept, and the large model adds one of its own. Each is accepted with
the same probability, whatever became of others (their assumption); then an iteration yields (1 - a^(k+1)) / (1 - a)
tokens on average (their equation 1). What happens to a request is drawn, not averaged, so that requests end at
different times as they do; its draws depend on the seed, the request and the position alone, not on what else there is.

The draft is a model of its own, a few layers that read the model's hidden states (`sim.models.serving.eagle`), or the
model's multi-token prediction module, which drafts one token after another
(DeepSeek-V3, section 5.4.3; vLLM and SGLang run the one module that is published as often as they draft tokens).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sim.core.quantization import Quantization
from sim.inputs.engine_file import engine_of
from sim.inputs.scenario import Scenario
from sim.inputs.workloads import Speculative
from sim.models.layers import LayerSpec
from sim.models.serving.eagle import draft_layers
from sim.models.serving.prediction import prediction_module
from sim.serve.prices.load import Load

_WORD = (1 << 64) - 1


def expected_tokens(drafted: int, acceptance: float) -> float:
    """Tokens that an iteration yields on average.

    >>> expected_tokens(4, 0.0), expected_tokens(4, 1.0), round(expected_tokens(4, 0.7), 3)
    (1.0, 5.0, 2.773)
    """
    return sum([acceptance**i for i in range(drafted + 1)])


class Acceptance(Struct, frozen=True):
    """Draws how many drafted tokens are accepted. `found`: the probability that the text holds any to draft."""

    probability: float
    seed: int
    steps: int
    found: float = 1.0

    def finds(self, request: int, position: int) -> bool:
        """Whether anything is drafted at this position; a draw of its own."""
        return self.found >= 1.0 or _uniform(~self.seed, request, position) < self.found

    def accepted(self, request: int, position: int, drafted: int) -> int:
        """Return how many of `drafted` tokens, from `position` of a request on, come before the first rejected one. Of
        a tree at most one is kept for each of its `steps`."""
        most = min(drafted, self.steps) if self.finds(request, position) else 0
        for i in range(most):
            if _uniform(self.seed, request, position + i) >= self.probability:
                return i
        return most


def _uniform(seed: int, request: int, position: int) -> float:
    """A number from 0 to 1 (without it) for these three: SplitMix64's mixing (Steele et al. 2014).

    >>> round(sum(_uniform(1, 2, i) for i in range(10_000)) / 10_000, 2)
    0.5
    """
    x = (seed * 0x9E3779B97F4A7C15 + request * 0xD1342543DE82EF95 + position * 0xAF251AF3B0F025B5) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return (x ^ (x >> 31)) / 2.0**64


def drafting(load: Load, speculative: Speculative, on_prompts: bool = False) -> list[Load]:
    """What the draft computes in an iteration: the same prompts; of each sequence that is checked all tokens that were,
    for the draft computes those again that the model kept, and then one token after another; with `on_prompts` also of
    those whose prompts are computed (`Engine.drafts_on_prompts`).

    vLLM (v1/spec_decode/llm_base_proposer.py, set_inputs_first_pass) and SGLang (speculative/eagle_worker_v2.py,
    _draft_extend_for_decode), of models of their own, too; rejected tokens pad the pass. Each step of a tree computes
    `branches` tokens of a sequence (SGLang, speculative/spec_utils.py, select_top_k_tokens).
    """
    n, kv, out = load.decodes if load.queries > 1 else 0, load.decode_kv - load.decodes * load.queries, list[Load]()
    if load.prefills:
        prompts = sum([q * alike for q, _, alike in load.prefills])
        out.append(Load(prompts, 0, 0, load.prefills, load.sequences - load.decodes))
    if n:
        out.append(Load(n * load.queries, n, load.decode_kv, (), n, load.queries))
    if on_prompts:
        kv = kv * bool(n) + sum([seen * alike for _, seen, alike in load.prefills])
        n += load.sequences - load.decodes
    b = speculative.branches
    out += [Load(n * b, n, kv + n * (1 + i), (), n * b, b) for i in range(1, speculative.tokens) if n]
    if load.pooled and speculative.draft is None:  # the module's experts are spread as the model's are
        out = [replace(own, pooled=max(1, round(load.pooled * own.tokens / load.tokens))) for own in out]
    return out


def joins_states(load: Load) -> bool:
    """Whether a draft reads the model's hidden states in this pass: over prompts and over tokens that were checked, of
    which it needs the logits of each sequence's last alone."""
    return bool(load.prefills) or load.samples < load.tokens


def _stored_as(scenario: Scenario) -> Quantization:
    """The format of a draft's weights: its own checkpoint's (vLLM 0.33, config/speculative.py: the draft's ModelConfig
    has the quantization that `speculative_config` says, or none), the model's where that is its own layer."""
    given = scenario.for_serving
    engine, draft = engine_of(given.engine), None if given.speculative is None else given.speculative.draft
    told = given.quantization != scenario.model.checkpoint_quantization
    if draft is None or not engine.reads_checkpoint or (told and engine.drafts_as_told):
        return given.quantization
    return draft.checkpoint_quantization


def draft_of(scenario: Scenario, joins: bool = True) -> tuple[Scenario, tuple[LayerSpec, ...] | None] | None:
    """The draft as a workload on the tensor-parallel ranks of the last stage (vLLM, v1/worker/gpu_model_runner.py: "we
    put the entire draft model on the last PP rank"), and its layers where these are not the model's; None where nothing
    is drafted. Its steps have no engine's host time of their own, and no LoRA adapters: these are the model's (the same
    file: load_lora_model is called for the model alone). `joins`: in passes in which it reads the model's hidden
    states."""
    given = scenario.for_serving
    if given.speculative is None or given.drafts == "text":
        return None
    alone = {"speculative": None, "weight_offload": None, "two_batch_overlap": False, "engine": "bundled", "lora": None}
    alone["sampling"] = None  # drafts are the largest logit's
    alone["quantization"] = _stored_as(scenario)
    inference = given.model_copy(update=alone)
    model, layout = given.speculative.draft, {"ep": 1, "expert_tp": 1}
    specs: tuple[LayerSpec, ...] | None = None
    if model is None:
        model, specs, layout = scenario.model.model_copy(update={"layers": 1}), (prediction_module(scenario.model),), {}
    elif given.speculative.hidden_states:
        specs = draft_layers(model, given.speculative.hidden_states, scenario.model.hidden, joins)
    parallelism = scenario.parallelism.model_copy(update={**layout, "pp": 1, "layers_per_stage": (model.layers,)})
    own = {"model": model, "inference": inference, "parallelism": parallelism, "faults": None}  # see `prices.faults`
    return scenario.unchecked_copy(update=own), specs
