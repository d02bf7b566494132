"""Distillation for real: the losses fall, the teacher stays, the soft loss is what it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calibrate import distill as d  # noqa: E402
from calibrate.measure import simulated_blocks  # noqa: E402
from calibrate.parallel.runner import make_place  # noqa: E402
from calibrate.quantization import make_small, perplexity, text, train  # noqa: E402
from calibrate.real_steps.block_cuts import block_cuts  # noqa: E402
from calibrate.real_steps.distillation_step import Lesson, Pupil  # noqa: E402
from calibrate.real_steps.timed_rounds import calibrate  # noqa: E402
from sim.inputs.scenario import load_scenario  # noqa: E402
from tests.real.cpu_time import agree_within_a_quarter, measured_and_simulated  # noqa: E402

SCENARIOS = Path(__file__).parents[2] / "scenarios" / "cpu"

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


def taught(mode: str) -> tuple[float, float]:
    """Seconds of a step, measured and simulated, in which the student's loss falls."""
    scenario = load_scenario(SCENARIOS / f"distill_{mode}.yaml")
    pupil = Pupil(scenario, make_place(scenario, 0), torch.float32, lessons=5)
    blocks, epilogue = simulated_blocks(scenario, pupil.numbers, pupil.schedule.part_of_stage, 0)
    keys = {s: [b.key for b in own] for s, own in blocks.items()}
    lesson = Lesson(pupil, keys, {b.key: block_cuts(b) for own in blocks.values() for b in own})
    measured, simulated, losses = measured_and_simulated(scenario, pupil, epilogue, lambda: calibrate(pupil, lesson))
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    return measured, simulated


@pytest.mark.timed
@pytest.mark.parametrize("mode", ["logits", "sequence"])
def test_a_real_step_takes_what_is_simulated(mode: str, one_rank: None) -> None:
    agree_within_a_quarter(lambda: taught(mode))


def test_the_teacher_writes_its_likeliest_words(teacher: list[torch.nn.Module]) -> None:
    prompts = text(3, 9)[:, :20]
    written, _ = d.generate(teacher, prompts, 10)
    with torch.no_grad():
        again = d.logits_of(teacher, written[:, :-1])[:, 19:, : d.SMALL.vocab].argmax(-1)
    assert torch.equal(written[:, 20:], again)
    assert perplexity(teacher, written) < perplexity(teacher, text(3, 9)[:, :30])


def test_what_works_better_is_what_kim_and_rush_found() -> None:
    """Their table 1: each kind writes better than the one before, and sequences alone cost perplexity."""
    rows = {row.kind: row for row in d.compare_kinds(train(make_small(), 300), 200)}
    shares = [rows[kind].likeliest for kind in ("undistilled", "word", "sequence", "both")]
    assert shares[0] < shares[1] < shares[3]
    assert shares[0] < shares[2] < shares[3]
    assert rows["word"].perplexity < rows["undistilled"].perplexity < rows["sequence"].perplexity
