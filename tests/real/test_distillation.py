"""Distillation for real: the losses fall, the teacher stays, the soft loss is what it should be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calibrate import distill as d  # noqa: E402
from calibrate.quantization import make_small, perplexity, text, train  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def teacher() -> list[torch.nn.Module]:
    return train(make_small(), 150)


def test_soft_loss_is_zero_for_equal_and_tends_to_the_logits_distance() -> None:
    """At high temperatures T²·KL is half the variance of the logits' difference (Hinton 2015, equation 4)."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 7, 11, generator=draw, dtype=torch.float64) for _ in range(2))
    assert float(d.soft_loss(a, a)) == pytest.approx(0.0, abs=1e-12)
    expected = float((a - b).var(-1, correction=0).mean() / 2)
    assert float(d.soft_loss(a, b, 1000.0)) == pytest.approx(expected, rel=0.01)


def test_logits_teach(teacher: list[torch.nn.Module]) -> None:
    kept = [p.clone() for b in teacher for p in b.parameters()]
    found = d.distill_logits(teacher, make_small(1, d.STUDENT), 60)
    assert found.losses[-1] < 0.5 * found.losses[0]
    assert found.after < 0.7 * found.before
    assert all(torch.equal(p, q) for p, q in zip(kept, (p for b in teacher for p in b.parameters()), strict=True))


def test_written_sequences_teach(teacher: list[torch.nn.Module]) -> None:
    found = d.distill_sequence(teacher, make_small(1, d.STUDENT), 60)
    assert found.losses[-1] < 0.8 * found.losses[0]
    assert found.after < found.before


def test_the_teacher_writes_its_likeliest_words(teacher: list[torch.nn.Module]) -> None:
    prompts = text(3, 9)[:, :20]
    written, _ = d.generate(teacher, prompts, 10)
    with torch.no_grad():
        again = d.logits_of(teacher, written[:, :-1])[:, 19:, : d.SMALL.vocab].argmax(-1)
    assert torch.equal(written[:, 20:], again)
    assert perplexity(teacher, written) < perplexity(teacher, text(3, 9)[:, :30])
