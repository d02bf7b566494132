"""The real serving engine: greedy decoding gives the tokens that computing everything anew gives."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from calibrate.bundled_model.model import Layer  # noqa: E402
from calibrate.bundled_model.rotation import Constants, make_constants  # noqa: E402
from calibrate.serving.cache import make_cache  # noqa: E402
from calibrate.serving.drafting import Drafts  # noqa: E402
from calibrate.serving.engine import Prompt, Settings, serve  # noqa: E402
from calibrate.serving.forward import Model, SequenceChunk, forward, make_model  # noqa: E402
from calibrate.serving.weight_only import quantize, weight_bytes  # noqa: E402
from sim.inputs.model_config import ModelConfig  # noqa: E402
from tests.sim.cases import llama_like  # noqa: E402

torch.set_num_threads(1)  # operators this small only wait for one another's threads

LLAMA: dict[str, Any] = llama_like(layers=3, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=102)
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "experts": LLAMA | {"moe": {"experts": 4, "top_k": 2, "ffn": 64, "shared_experts": 1, "dense_layers": 1}},
    "gpt": {"layers": 2, "hidden": 48, "heads": 4, "vocab": 68, "positions": "learned", "max_positions": 160},
}


def model(name: str = "llama", dtype: Any = None) -> Model:
    made = make_model(ModelConfig(**MODELS[name]), 160, dtype or torch.float64)
    for block in made.blocks:  # weights large enough that greedy choices are many different tokens
        for p in block.parameters():
            if p.dim() > 1:
                p.data.mul_(8)
    return made


def prompts(count: int, vocab: int, seed: int = 0, shared: int = 0) -> list[Prompt]:
    draw = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (n,), generator=draw).tolist())

    beginning = tokens(shared)
    made = []
    for _ in range(count):
        own = tokens(int(torch.randint(1, 50, (1,), generator=draw)))
        output = int(torch.randint(1, 24, (1,), generator=draw))
        made.append(Prompt(beginning + own, output, 0.0, "system" if shared else "", shared))
    return made


@torch.no_grad()
def greedy_without_cache(model: Model, prompt: tuple[int, ...], count: int) -> list[int]:
    """Generate without a cache: the training model computes the whole sequence again for every token."""
    tokens = list(prompt)
    embedding, layers, head = model.parts
    for _ in range(count):
        x = embedding(torch.tensor([tokens]).to(model.device))
        for layer in layers:
            layer_in = _shortened(layer, len(tokens))
            x = layer_in(x)
        tokens.append(int(head.output(head.norm(x[0, -1:]))[0, : model.config.vocab].argmax()))
    return tokens[len(prompt) :]


def _shortened(layer: Layer, length: int) -> torch.nn.Module:
    """Return the layer with rotation tables of this length; the layer's own are for the longest sequence."""
    c = layer.constants
    short = copy.copy(layer)
    short.constants = Constants(c.mask[:length, :length], c.cos[:length], c.sin[:length])
    return short


def expected(m: Model, asked: list[Prompt]) -> list[list[int]]:
    return [greedy_without_cache(m, p.tokens, p.output_tokens) for p in asked]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_served_tokens_are_those_without_a_cache(name: str, block_tokens: int) -> None:
    m = model(name)
    asked = prompts(7, m.config.vocab)
    served = serve(m, asked, Settings(blocks=600 // block_tokens, block_tokens=block_tokens, max_batch_tokens=40))
    want = expected(m, asked)
    assert served.outputs == want
    assert len({t for out in want for t in out}) > 10  # the choices are no constant
    assert sorted(served.cache.free) == list(range(600 // block_tokens))
    assert max(tokens for _, _, tokens in served.iterations) <= 40


def test_preempted_sequences_are_recomputed_to_the_same_tokens() -> None:
    m = model()
    asked = [Prompt(p.tokens, 30) for p in prompts(6, m.config.vocab, seed=1)]
    served = serve(m, asked, Settings(blocks=22, block_tokens=8))
    assert served.scheduler.counts.preemptions > 0
    assert served.outputs == expected(m, asked)


@pytest.mark.parametrize("shared", [0, 19])
def test_swapped_sequences_come_back_as_they_were(shared: int) -> None:
    m = model()
    asked = [Prompt(p.tokens, 30, 0.0, p.prefix_id, p.prefix_tokens) for p in prompts(6, m.config.vocab, 1, shared)]
    settings = Settings(blocks=22, block_tokens=8, swap_tokens=10_000, host_tokens=1000 if shared else 0)
    served = serve(m, asked, settings)
    assert served.scheduler.counts.swapped_tokens > 0
    assert served.scheduler.counts.recomputed_tokens == 0
    assert served.outputs == expected(m, asked)
    assert not served.swapped.kept
    again = serve(m, asked, replace(settings, swap_tokens=0))
    assert sum(t for _, _, t in served.iterations) < sum(t for _, _, t in again.iterations)


def test_prefixes_come_from_host_memory() -> None:
    m = model()
    asked = prompts(6, m.config.vocab, seed=2, shared=37)
    settings = Settings(blocks=80, block_tokens=8, max_running=2, host_tokens=1000)
    served = serve(m, asked, settings)
    assert served.outputs == expected(m, asked)
    assert served.scheduler.counts.hit_tokens >= 4 * 32  # 37 shared: four whole blocks
    assert len(served.host.blocks) >= 4
    plain = serve(m, asked, Settings(blocks=80, block_tokens=8, max_running=2))
    assert plain.outputs == served.outputs
    assert sum(t for _, _, t in served.iterations) < sum(t for _, _, t in plain.iterations)


def test_fp32_too() -> None:
    m = model(dtype=torch.float32)
    asked = prompts(4, m.config.vocab, seed=3)
    assert serve(m, asked, Settings(blocks=100)).outputs == expected(m, asked)


def test_what_can_never_be_served_is_refused() -> None:
    m = model()
    with pytest.raises(ValueError, match="the cache holds 16"):
        serve(m, [Prompt(tuple(range(20)), 5)], Settings(blocks=1))
    with pytest.raises(ValueError, match="are not those of prefix"):
        serve(m, [Prompt((1, 2), 1, 0.0, "a", 2), Prompt((1, 3), 1, 0.0, "a", 2)], Settings(blocks=9))


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_eight_bit_weights_are_served_as_they_multiply(name: str) -> None:
    """Tokens are those of the quantized model without a cache; weights take what is simulated, but for the scales."""
    m, whole = model(name), model(name)
    quantize(m.blocks)
    asked = prompts(5, m.config.vocab, seed=4)
    assert serve(m, asked, Settings(blocks=200)).outputs == expected(m, asked)
    layers, before = m.blocks[1:-1], weight_bytes(whole.blocks[1:-1])
    small = sum(p.nbytes for b in whole.blocks[1:-1] for n, p in b.named_parameters() if "norm" in n or "router" in n)
    scales = sum(8 * x.shape[0] for b in layers for x in b.buffers() if x.dtype == torch.int8)
    assert weight_bytes(layers) == (before - small) // 8 + small + scales


def drafts_of(m: Model, tokens: int, blocks: int = 400, block_tokens: int = 4) -> Drafts:
    return Drafts(m, make_cache(m.config, blocks, block_tokens, m.dtype), tokens)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("alike", [True, False])
def test_a_draft_changes_no_token(alike: bool, tokens: int) -> None:
    """A draft that is the model itself is always right; another one seldom. With prompts in chunks and preemptions."""
    m, other = model(), model()
    if not alike:
        for p in other.blocks[-1].parameters():
            p.data.copy_(p.data.flip(0))
    asked = prompts(6, m.config.vocab, seed=5)
    drafts = drafts_of(other, tokens)
    settings = Settings(blocks=40, block_tokens=4, max_running=4, max_batch_tokens=24)
    served = serve(m, asked, settings, drafts=drafts)
    assert served.outputs == expected(m, asked)
    assert drafts.acceptance == 1.0 if alike else drafts.acceptance < 0.5
    assert served.scheduler.counts.accepted_tokens == drafts.kept
    assert not drafts.cache.tables


def test_a_draft_that_is_always_right_needs_an_iteration_for_all_its_tokens_and_one_more() -> None:
    m = model()
    asked = [Prompt(tuple(range(8)), 25)]
    served = serve(m, asked, Settings(blocks=100), drafts=drafts_of(m, 3))
    assert served.outputs == expected(m, asked)
    assert len(served.iterations) == 1 + 24 / 4


MORE = {
    "dense": [],
    "a draft of one layer": [
        "inference.speculative.draft={layers: 1, hidden: 128, heads: 4, kv_heads: 4, ffn: 384, vocab: 1024, "
        "mlp: swiglu, norm: rmsnorm, bias: false, positions: rope}",
        "inference.speculative.tokens=3",
    ],
    "experts in 8 bits": ["model.moe={experts: 4, top_k: 2, ffn: 384}", "inference.quantization=int8_weight_only"],
}


@pytest.mark.parametrize("name", MORE)
def test_measured_throughput_is_the_simulated_one(name: str) -> None:
    """In CPU seconds, which neighbours on the machine do not stretch: within 25 %, in the best of five tries."""
    from calibrate.serving.side_by_side import compare
    from sim.inputs.scenario import load_scenario

    file = Path(__file__).parents[2] / "scenarios" / "serve_cpu.yaml"
    scenario = load_scenario(file, ["inference.requests.count=24", *MORE[name]])
    errors = []
    while len(errors) < 5:
        found = compare(scenario, clock=time.process_time)
        if name != "a draft of one layer":  # whose tokens are right or wrong at other places than simulated
            assert found.measured["iterations"] == found.simulated["iterations"]
        errors.append(found.error)
        if abs(found.error) < 0.25:
            return
    pytest.fail(f"simulated / measured - 1 = {errors}")


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_nothing_of_a_forward_lies_on_another_device_than_the_model(name: str) -> None:
    """On torch's device `meta`, which computes nothing and, as a GPU, refuses most operands that lie on the CPU."""
    m = make_model(ModelConfig(**MODELS[name]), 160)
    for block in m.blocks:
        block.to("meta")
    for layer in m.parts[1]:
        layer.constants = make_constants(m.config, 160, "meta", m.dtype)
    cache = make_cache(m.config, 40, 4, m.dtype, m.device)
    parts = [SequenceChunk(0, (1, 2, 3, 4, 5), 0), SequenceChunk(1, (1, 2, 3), 6), SequenceChunk(2, (7,), 9)]
    for part in parts:
        cache.grow(part.sequence, part.end)
    logits = forward(m, cache, parts)
    assert logits.device.type == "meta"
    assert logits.shape == (3, m.config.vocab)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_served_tokens_on_a_gpu_are_those_on_the_cpu() -> None:
    config = ModelConfig(**MODELS["llama"])
    found = []
    for device in ("cpu", "cuda"):
        m = make_model(config, 160, torch.float64, device=device)
        for block, same in zip(m.blocks, model().blocks, strict=True):
            block.load_state_dict(same.state_dict())
        found.append(serve(m, prompts(7, config.vocab), Settings(blocks=60, max_batch_tokens=40)).outputs)
    assert found[0] == found[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_a_missing_gpu_is_one_message() -> None:
    from calibrate.serving.side_by_side import compare
    from sim.core.errors import InputError
    from sim.inputs.scenario import load_scenario

    scenario = load_scenario(Path(__file__).parents[2] / "scenarios" / "serve_cpu.yaml", ["cluster=dgx-h100"])
    with pytest.raises(InputError, match="cluster: found GPU 'h100-sxm'; torch finds no CUDA GPU on this machine"):
        compare(scenario)


def test_parts_add_up_to_the_seconds_that_were_sampled_however_skewed() -> None:
    """A part's price times how often it was sampled is the sum of the samples, as a run takes the sum of its parts."""
    from calibrate.serving.side_by_side import measured_blocks, sample_parts

    m, samples = model(), dict[tuple[str, int, int], list[float]]()
    sample_parts(m, 16, samples, longest=64, checked=4)
    assert {(4, 16), (32, 64)} <= {(n, length) for part, n, length in samples if part == "check4"}
    samples["rest", 1, 0] = [1.0, 1.0, 1.0, 9.0]
    blocks = {b.key.partition(" | ")[2]: b.seconds for b in measured_blocks(m.config, 1, samples, 0.5)}
    for (part, a, b), seconds in samples.items():
        assert blocks[f"{part} a={a} b={b}"] * len(seconds) == pytest.approx(sum(seconds))
    assert blocks["rest a=1 b=0"] == 3.0


def test_the_engine_refuses_what_it_does_not_run() -> None:
    from calibrate.serving.side_by_side import compare
    from sim.core.errors import InputError
    from sim.inputs.scenario import load_scenario

    with pytest.raises(InputError, match="latent attention"):
        compare(load_scenario(Path(__file__).parents[2] / "scenarios" / "serve_deepseek_v3.yaml"))
