"""A real step of distillation: a frozen teacher beside the runner of `calibrate.parallel`, and its calibration.

Mode logits: the teacher's forward runs first. The student's loss then adds T² times the divergence from the teacher's
logits (Hinton et al. 2015). Mode sequence: the teacher continues the step's prompts through the bundled serving engine,
and the student trains on the result (Kim and Rush 2016). The text is a made-up language that a small model can learn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from calibrate.bundled_model.model import Build, Head, make_blocks
from calibrate.distill import generate, logits_of, soft_loss
from calibrate.parallel.pipeline import Record
from calibrate.parallel.runner import Place, Runner
from calibrate.quantization import loss, text
from calibrate.real_steps.block_cuts import Cuts
from calibrate.real_steps.blocks import Rehearsal, Samples
from calibrate.serving.forward import Model
from calibrate.serving.side_by_side import Samples as ServingSamples
from calibrate.serving.side_by_side import sample_parts
from sim.distillation import INFERENCE, teacher_blocks
from sim.inputs.scenario import Scenario
from sim.prices.serving_parts import part_key

LESSONS = 60  # steps of AdamW on the teacher, so that its distributions are not random
RATE = 1e-3
BLOCK_TOKENS = 16
BeforeBlock = Callable[[nn.Module, int], None]


class DistillingHead(Head):
    """The head whose loss also compares its distribution with that of `wanted`, the teacher's logits."""

    wanted: Tensor

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        hard = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
        return hard + soft_loss(logits, self.wanted)


class Pupil(Runner):
    """A runner of the student whose steps begin with the teacher's forward or generation."""

    def __init__(
        self, scenario: Scenario, place: Place, dtype: torch.dtype, device: str = "cpu", lessons: int = LESSONS
    ) -> None:
        super().__init__(scenario, place, dtype, device)
        d, t = scenario.distillation, scenario.training
        assert d is not None
        assert t is not None
        self.config, self.seq_len = d.teacher, t.seq_len
        self.logits = d.mode == "logits"
        self.prompt = d.prompt_len or max(1, t.seq_len // 2)
        self.wanted: list[Tensor] = []
        self.gaps: list[float] = []
        build = Build(device, dtype, seed=1)
        self.teacher = make_blocks(d.teacher, t, range(d.teacher.layers + 2), build)
        self._teach_teacher(lessons)
        for stage in self.stages.values() if self.logits else ():
            stage.before_block = self._handing_over(stage.before_block)
            stage.blocks[-1].__class__ = DistillingHead

    def batch(self, number: int) -> Tensor:
        """Return this rank's sentences of the made-up language [m · b, s + 1]."""
        own = self.scenario.for_training.global_batch_size // self.scenario.parallelism.dp
        return self.sentences(number)[self.place.data_rank * own :][:own]

    def sentences(self, number: int) -> Tensor:
        """Return the sentences of all ranks in a step."""
        t = self.scenario.for_training
        rows = text(t.global_batch_size, 70_000 + number, self.scenario.model.vocab, t.seq_len + 1)
        return rows.to(self.device)

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of the teacher's weights."""
        return sum(p.nbytes for b in self.teacher for p in b.parameters())

    def _teach_teacher(self, lessons: int) -> None:
        parameters = [p for b in self.teacher for p in b.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
        for number in range(lessons):
            optimizer.zero_grad()
            loss(self.teacher, self.sentences(number - lessons)).backward()
            optimizer.step()
        for p in parameters:
            p.requires_grad_(False)
            p.grad = None

    def _handing_over(self, before: BeforeBlock) -> BeforeBlock:
        def before_block(block: nn.Module, micro_batch: int) -> None:
            before(block, micro_batch)
            if isinstance(block, DistillingHead):
                block.wanted = self.wanted[micro_batch]

        return before_block

    def teach(self, batch: Tensor) -> Tensor:
        """Run the teacher: keep its logits of all micro-batches, or return what it generates in place of the batch."""
        if self.logits:
            with torch.no_grad():
                self.wanted = [logits_of(self.teacher, tokens) for tokens in self.micro_batch_tokens(batch)[0]]
            return batch
        prompts, missing = batch[:, : self.prompt + 1], self.seq_len - self.prompt
        written, served = generate(self.teacher, prompts, missing, self.config, time.process_time)
        self.gaps += served.gaps
        return written

    def gradients(self, batch: Tensor) -> list[Record]:
        """Run the teacher, then the student's forward, backward and gradient synchronization."""
        start = self.pipeline.now()
        batch = self.teach(batch)
        turn = Record("TEACHER" if self.logits else "GENERATE", -1, -1, start, self.pipeline.now())
        return [turn, *super().gradients(batch)]


class Lesson(Rehearsal):
    """Times the student's blocks as `Rehearsal` does, and the teacher's parts right before them."""

    def __init__(self, runner: Pupil, keys: Mapping[int, Sequence[str]], cuts: dict[str, dict[str, Cuts]]) -> None:
        super().__init__(runner, keys, cuts)
        self.pupil = runner

    def run(self, batch: Tensor) -> Samples:
        """Return seconds by (key, phase, run), those of the teacher's parts included."""
        pupil = self.pupil
        teacher = self._forward_alone(batch) if pupil.logits else self._serving()
        if pupil.logits:
            pupil.teach(batch)
        return {**super().run(batch), **teacher}

    @torch.no_grad()
    def _forward_alone(self, batch: Tensor) -> Samples:
        pupil, found = self.pupil, Samples()
        assert pupil.scenario.distillation is not None
        keys = [b.key for b in teacher_blocks(pupil.scenario, pupil.scenario.distillation)]
        for x in pupil.micro_batch_tokens(batch)[0]:
            for key, block in zip(keys, pupil.teacher, strict=True):
                start = time.perf_counter(), time.process_time()
                x = block.output(block.norm(x)) if isinstance(block, Head) else block(x)
                seconds = time.perf_counter() - start[0], time.process_time() - start[1]
                found.setdefault((key, INFERENCE, 0), []).append(seconds)
        return found

    def _serving(self) -> Samples:
        """Time the parts of the engine's iterations in CPU time, which equals wall time on a quiet machine."""
        pupil, samples = self.pupil, ServingSamples()
        sample_parts(Model(pupil.config, pupil.teacher), BLOCK_TOKENS, samples, time.process_time, pupil.seq_len)
        if pupil.gaps:
            samples["engine", 0, 0] = pupil.gaps
            pupil.gaps = []
        return {
            (part_key(pupil.config, part, a, b), "forward", 0): [(s, s) for s in values]
            for (part, a, b), values in samples.items()
        }
