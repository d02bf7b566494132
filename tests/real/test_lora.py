"""Adapters for real: what a small model trains, computes and keeps is what the simulator counts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from calibrate.bundled_model.model import Build, make_blocks  # noqa: E402
from calibrate.parallel.memory import resident, saved_storages  # noqa: E402
from calibrate.quantization import loss as mean_loss  # noqa: E402
from sim.core.program import Block, Compute  # noqa: E402
from sim.inputs.scenario import Scenario, parse_scenario  # noqa: E402
from sim.programs.stages import stage_blocks  # noqa: E402
from sim.ranks.plan import make_plan  # noqa: E402
from tests.real.adapters import Adapted, add_adapters, merged  # noqa: E402

torch.set_num_threads(1)
ALL = ["qkv", "attention_out", "mlp_up", "mlp_down"]
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "positions": "learned"},
    "gpt_none": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "positions": "none"},
}


def make(model: str, lora: dict[str, Any] | None) -> Scenario:
    return parse_scenario(
        {
            "model": MODELS[model],
            "cluster": "cpu-host",
            "training": {
                "seq_len": 32,
                "global_batch_size": 2,
                "micro_batch_size": 2,
                "precision": "fp32",
                "attention": "unfused",
                "lora": lora,
            },
        }
    )


def run(s: Scenario) -> tuple[list[torch.nn.Module], list[torch.nn.Parameter], torch.Tensor]:
    assert s.training is not None
    blocks = make_blocks(s.model, s.training, range(s.model.layers + 2), Build())
    trained = (
        [p for b in blocks for p in b.parameters()]
        if s.training.lora is None
        else add_adapters(blocks, s.training.lora)
    )
    tokens = torch.randint(s.model.vocab, (2, 33), generator=torch.Generator().manual_seed(0))
    return blocks, trained, tokens


def simulated(s: Scenario) -> tuple[Block, ...]:
    plan = make_plan(s)
    return stage_blocks(plan, plan.parts[0], 0)


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("targets", [ALL, ["qkv", "attention_out"], ["mlp_down"]])
def test_parameters_flops_and_saved_bytes(model: str, targets: list[str]) -> None:
    s = make(model, {"rank": 4, "targets": targets})
    blocks, trained, tokens = run(s)
    counted = simulated(s)
    assert sum(p.numel() for p in trained) == sum(b.params for b in counted)
    every = sum(p.numel() for b in blocks for p in b.parameters())
    assert every == sum(b.params + b.frozen_params for b in counted)
    with saved_storages(resident(blocks)) as saved:
        loss = mean_loss(blocks, tokens)
    assert sum(saved.values()) == pytest.approx(sum(x.bytes for b in counted for x in b.saved), rel=0.02)
    with FlopCounterMode(display=False) as flops:
        mean_loss(blocks, tokens).backward()
    expected = sum(
        i.flops for b in counted for i in (*b.forward, *b.backward) if isinstance(i, Compute) and i.kind == "gemm"
    )
    assert flops.get_total_flops() == expected
    assert loss.requires_grad


def test_without_adapters_the_same_counts_hold() -> None:
    """The comparison can fail: with all parameters trained more is kept and computed."""
    adapted, whole = (make("gpt", lora) for lora in ({"rank": 4}, None))
    blocks, _, tokens = run(whole)
    with FlopCounterMode(display=False) as flops:
        mean_loss(blocks, tokens).backward()
    found = [
        sum(
            i.flops
            for b in simulated(s)
            for i in (*b.forward, *b.backward)
            if isinstance(i, Compute) and i.kind == "gemm"
        )
        for s in (adapted, whole)
    ]
    assert flops.get_total_flops() == found[1] > 1.2 * found[0]


def test_only_adapters_learn_and_merge_into_one_matrix() -> None:
    s = make("gpt", {"rank": 4})
    blocks, trained, tokens = run(s)
    before = {n: p.clone() for b in blocks for n, p in b.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = mean_loss(blocks, tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    states = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
    assert states == 2 * sum(p.numel() for p in trained)
    after = {n: p for b in blocks for n, p in b.named_parameters() if not p.requires_grad}
    assert all(torch.equal(before[n], after[n]) for n in list(before)[-4:])
    layer = blocks[1].qkv
    assert isinstance(layer, Adapted)
    x = torch.randn(3, 64)
    assert torch.allclose(layer(x), x @ merged(layer).T + layer.base.bias, atol=1e-5)
