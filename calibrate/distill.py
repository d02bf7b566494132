"""Short real runs of distillation on a small model: both modes, and four kinds of students compared.

    python -m calibrate.distill

Mode logits (Hinton et al. 2015, arXiv 1503.02531, section 2): cross-entropy against the teacher's softened
distribution, times T² so that gradients keep their size. Mode sequence (Kim and Rush 2016, arXiv 1606.07947, section
3.2): the teacher generates text, here greedily through the bundled serving engine, and the student trains on it. Their
table 1 compares four students: undistilled, distilled by word, by sequence, and by both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.model import Head
from calibrate.quantization import BATCH, SEQ, SMALL, loss, make_small, next_words, perplexity, text, train
from calibrate.serving.engine import Prompt, Served, Settings, serve
from calibrate.serving.forward import Clock, Model
from sim.commands.command import Command, run_command
from sim.inputs.model_config import ModelConfig

STUDENT = ModelConfig(layers=1, hidden=32, heads=2, vocab=SMALL.vocab, positions="learned", max_positions=SEQ)
TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class Distilled:
    """The loss of every step, and the student's perplexity on held-out text before and after.

    The held-out text is the language's own, or in mode sequence what the teacher generates from new prompts.
    """

    losses: tuple[float, ...]
    before: float
    after: float


def logits_of(blocks: list[nn.Module], tokens: Tensor) -> Tensor:
    """Compute logits: tokens [batch, seq] → [batch, seq, vocabulary]."""
    x = tokens
    for block in blocks[:-1]:
        x = block(x)
    head = cast(Head, blocks[-1])
    logits: Tensor = head.output(head.norm(x))
    return logits


def soft_loss(student: Tensor, teacher: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return T² times the mean Kullback-Leibler divergence of a token's softened distributions (student, teacher)."""
    wanted = F.log_softmax(teacher / temperature, -1).flatten(0, -2)
    got = F.log_softmax(student / temperature, -1).flatten(0, -2)
    return F.kl_div(got, wanted, log_target=True, reduction="batchmean") * temperature**2


def distill_logits(teacher: list[nn.Module], student: list[nn.Module], steps: int, rate: float = 6e-3) -> Distilled:
    """Train the student on the frozen teacher's distributions alone, not on the text's next tokens."""

    def step_loss(step: int) -> Tensor:
        tokens = text(BATCH, 50_000 + step)[:, :-1]
        with torch.no_grad():
            wanted = logits_of(teacher, tokens)
        return soft_loss(logits_of(student, tokens), wanted)

    return _run(student, steps, rate, step_loss, text(32, 2))


def distill_sequence(teacher: list[nn.Module], student: list[nn.Module], steps: int, rate: float = 6e-3) -> Distilled:
    """Let the teacher generate the second halves of sequences, then train the student on whole sequences."""
    written, _ = generate(teacher, text(16 * BATCH, 60_000)[:, : SEQ // 2], SEQ + 1 - SEQ // 2)
    written, held_out = written[:-BATCH], written[-BATCH:]

    def step_loss(step: int) -> Tensor:
        start = step * BATCH % len(written)
        return loss(student, written[start : start + BATCH])

    return _run(student, steps, rate, step_loss, held_out)


def generate(
    teacher: list[nn.Module],
    prompts: Tensor,
    count: int,
    config: ModelConfig = SMALL,
    clock: Clock = time.perf_counter,
) -> tuple[Tensor, Served]:
    """Continue prompts [n, s] by `count` tokens each: [n, s + count]; also return how they were served."""
    asked = [Prompt(tuple(row), count) for row in prompts.tolist()]
    blocks = -(-(prompts.shape[1] + count) // 16) * len(asked)
    served = serve(Model(config, teacher), asked, Settings(blocks=blocks), clock)
    return torch.cat([prompts, torch.tensor(served.outputs).to(prompts.device)], 1), served


def _run(
    student: list[nn.Module], steps: int, rate: float, step_loss: Callable[[int], Tensor], held_out: Tensor
) -> Distilled:
    before = perplexity(student, held_out)
    optimizer = torch.optim.AdamW([p for b in student for p in b.parameters()], lr=rate, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = step_loss(step)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return Distilled(tuple(losses), before, perplexity(student, held_out))


@dataclass(frozen=True, slots=True)
class Compared:
    """A student on held-out text of the language.

    `likeliest`: the share of greedily generated tokens that are the language's likeliest. It stands for BLEU, which
    compares a translation with the best one.
    """

    kind: str
    perplexity: float
    likeliest: float


def compare_kinds(teacher: list[nn.Module], steps: int = 300) -> list[Compared]:
    """Compare the teacher and students of four kinds with equal starts, steps and held-out text.

    Undistilled trains on the language's own text. Word adds the teacher's distribution over each next token of it.
    Sequence trains on what the teacher generates from the same prompts. Both adds the teacher's distribution to that.
    """
    own = text(16 * BATCH, 60_000)
    written = generate(teacher, own[:, : SEQ // 2], SEQ + 1 - SEQ // 2)[0]
    students = {"undistilled": (own, False), "word": (own, True), "sequence": (written, False), "both": (written, True)}
    held_out = text(64, 2)

    def judged(kind: str, blocks: list[nn.Module], config: ModelConfig) -> Compared:
        return Compared(kind, perplexity(blocks, held_out), likeliest_share(blocks, config, held_out))

    found = [judged("teacher", teacher, SMALL)]
    for kind, (tokens, word) in students.items():
        student = make_small(1, STUDENT)
        _run(student, steps, 6e-3, _lesson(teacher, student, tokens, word), held_out)
        found.append(judged(kind, student, STUDENT))
    return found


def _lesson(teacher: list[nn.Module], student: list[nn.Module], tokens: Tensor, word: bool) -> Callable[[int], Tensor]:
    """Return the loss of each step on these texts; with `word`, half of it compares with the teacher's distribution."""

    def step_loss(step: int) -> Tensor:
        start = step * BATCH % len(tokens)
        mine = tokens[start : start + BATCH]
        hard = loss(student, mine)
        if not word:
            return hard
        with torch.no_grad():
            wanted = logits_of(teacher, mine[:, :-1])
        return (hard + soft_loss(logits_of(student, mine[:, :-1]), wanted)) / 2

    return step_loss


def likeliest_share(blocks: list[nn.Module], config: ModelConfig, held_out: Tensor) -> float:
    """Return the share of greedily generated tokens, after half a sentence, that are the language's likeliest."""
    half = SEQ // 2
    written = generate(blocks, held_out[:, :half], SEQ - half, config)[0]
    best = next_words()[written[:, half - 1 : -1], written[:, half - 2 : -2] % 8, 0]
    return float((written[:, half:] == best).float().mean())


@click.command("distill", cls=Command)
def main() -> None:
    """Train a teacher, distill it in both modes, print the losses, and compare the four kinds of students."""
    torch.set_num_threads(1)
    teacher = train(make_small(), 300)
    for name, run in (("logits", distill_logits), ("sequence", distill_sequence)):
        found = run(teacher, make_small(1, STUDENT), 150)
        print(
            f"{name:10} loss {found.losses[0]:.3f} → {found.losses[-1]:.3f}, "
            f"perplexity on held-out text {found.before:.1f} → {found.after:.1f}"
        )
    print(f"\n{'student':12} {'perplexity':>10} {'likeliest words':>16}")
    for row in compare_kinds(teacher):
        print(f"{row.kind:12} {row.perplexity:>10.1f} {row.likeliest:>16.1%}")


if __name__ == "__main__":
    run_command(main)
