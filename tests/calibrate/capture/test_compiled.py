"""Steps captured as torch.compile runs them: what is fused, what is computed, what is saved."""

from __future__ import annotations

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

ROWS, WIDTH = 32, 64


def model() -> torch.nn.Module:
    """A norm, a GELU in eight operators, a residual."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))
            return x + self.down(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * h**3))))

    return torch.nn.Sequential(Block(), Block())


def captured(compiled: bool, classes: bool = False, tied: bool = False) -> tuple[list[CapturedOperator], int]:
    """Launched operators, and the bytes that the forward saves; with `classes` the loss is a cross-entropy.

    `tied`: both blocks have the same weights.
    """

    def make() -> Step:
        m, x = model(), torch.zeros(ROWS, WIDTH)
        if tied:
            m[1].up.weight, m[1].down.weight = m[0].up.weight, m[0].down.weight
        labels = torch.zeros(ROWS, dtype=torch.int64)

        def loss() -> torch.Tensor:
            y = m(x)
            return torch.nn.functional.cross_entropy(y, labels) if classes else y.square().mean()

        return Step(m, loss, torch.optim.SGD(m.parameters()), ROWS, 1, "bf16", compiled=compiled)

    _, recorder = record(make)
    operators = [
        CapturedOperator(
            r.name,
            r.phase,
            r.module,
            tuple(Tensor(*t) for t, _ in r.inputs),
            tuple(Tensor(*t) for t, _ in r.outputs),
            r.launches,
            bool(r.causal),
        )
        for r in recorder.rows
        if r.launches
    ]
    return operators, sum(x.bytes for x in recorder.lives if x.kind == "activation")


@pytest.fixture(scope="module")
def eager() -> tuple[list[CapturedOperator], int]:
    return captured(False)


@pytest.fixture(scope="module")
def fused() -> tuple[list[CapturedOperator], int]:
    return captured(True)


def test_a_norm_is_one_kernel_and_so_is_a_gelu(fused: tuple[list[CapturedOperator], int]) -> None:
    forward = [op for op in fused[0] if op.phase == "forward"]
    large = [op for op in forward if op.name.startswith("inductor") and op.outputs[0].elements >= ROWS]
    norms = [op for op in large if op.name == "inductor.reduction" and any(x.shape == (WIDTH,) for x in op.inputs)]
    assert len(norms) == 2
    gelu = [op for op in large if op.outputs[0].shape == (ROWS, 4 * WIDTH)]
    assert [len(op.inputs) for op in gelu] == [1, 1]


def test_matmuls_are_the_eager_ones(
    eager: tuple[list[CapturedOperator], int], fused: tuple[list[CapturedOperator], int]
) -> None:
    flops = [sum(c.flops for c in map(compute_of, operators) if c.kind == "gemm") for operators, _ in (eager, fused)]
    assert flops[0] == flops[1] > 0


def test_less_is_moved_and_no_more_is_saved(
    eager: tuple[list[CapturedOperator], int], fused: tuple[list[CapturedOperator], int]
) -> None:
    moved = [sum(compute_of(op).bytes for op in operators) for operators, _ in (eager, fused)]
    assert moved[1] < 0.7 * moved[0]
    assert fused[1] <= eager[1]


def test_a_cross_entropys_gradient_scatters_into_no_zeros() -> None:
    """Inductor compares indices instead, in the kernel that writes the gradient."""
    operators, _ = captured(True, classes=True)
    backward = [op for op in operators if op.phase == "backward"]
    assert not [op.name for op in backward if "scatter" in op.name]
    logits = [op for op in backward if op.name.startswith("inductor") and op.outputs[0].shape == (ROWS, WIDTH)]
    assert any(x.dtype == "int64" for op in logits for x in op.inputs)


def test_both_uses_of_a_tied_weight_give_a_gradient() -> None:
    flops = [
        sum(compute_of(op).flops for op in captured(compiled, tied=True)[0] if op.name in ("aten.mm", "aten.addmm"))
        for compiled in (False, True)
    ]
    # Two products forward and four backward in each block; the input has no gradient, but its norm's weight has one.
    assert flops == [12 * 2.0 * ROWS * WIDTH * 4 * WIDTH] * 2


def test_a_decoders_shifted_tokens_are_traced() -> None:
    """They are written into zeros that are made of the labels, which are no input of the graph (T5, BART, Whisper)."""

    def make() -> Step:
        embedding, labels = torch.nn.Embedding(16, 8), torch.zeros(2, 4, dtype=torch.long)

        def loss() -> torch.Tensor:
            shifted = labels.new_zeros(labels.shape)
            shifted[:, 1:] = labels[:, :-1].clone()
            shifted[:, 0] = 1
            value: torch.Tensor = embedding(shifted).square().mean()
            return value

        return Step(embedding, loss, torch.optim.SGD(embedding.parameters()), 4, 2, compiled=True)

    assert {row.phase for row in record(make)[1].rows} == {"forward", "backward", "optimizer"}


def test_a_norm_of_transposed_gradients_is_in_the_backward() -> None:
    """The eager kernel gives its gradient another layout (Swin: tokens behind the last norm are averaged)."""

    def products(compiled: bool) -> dict[str, int]:
        def make() -> Step:
            layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)])
            x = torch.zeros(2, ROWS, WIDTH)
            pool = torch.nn.AdaptiveAvgPool1d(1)

            def loss() -> torch.Tensor:
                value: torch.Tensor = pool(layers[1](layers[0](layers[0](x))).transpose(1, 2)).square().mean()
                return value

            return Step(layers, loss, torch.optim.SGD(layers.parameters()), ROWS, 2, compiled=compiled)

        rows = [r for r in record(make)[1].rows if "mm" in r.name]
        return {phase: sum(r.phase == phase for r in rows) for phase in ("forward", "backward")}

    assert products(True) == products(False) == {"forward": 2, "backward": 3}


def test_a_reversed_sum_is_part_of_a_kernel() -> None:
    """Inductor writes a flip as `prims.rev`; a gradient of `cumsum`, as Mamba's, is one between two of them."""

    def make() -> Step:
        layer, x = torch.nn.Linear(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH)
        return Step(
            layer, lambda: layer(x).cumsum(0).square().mean(), torch.optim.SGD(layer.parameters()), 1, 1, compiled=True
        )

    assert not [r.name for r in record(make)[1].rows if "rev" in r.name]


def test_a_batch_norm_counts_in_its_buffers_within_the_graph() -> None:
    """Inductor writes buffers by kernels of the graph; torch refuses to write into what is no input of a trace."""

    def make() -> Step:
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.MaxPool2d(2))
        x = torch.zeros(2, 3, 16, 16)
        return Step(
            layers, lambda: layers(x).square().mean(), torch.optim.SGD(layers.parameters()), 1, 2, compiled=True
        )

    names = {r.name for r in record(make)[1].rows if r.launches and r.phase == "forward"}
    assert names == {"aten.convolution", "inductor.pointwise", "inductor.reduction"}


class OwnLoss(torch.nn.Module):
    """Computes its loss itself and returns the logits beside it, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(512, WIDTH), torch.nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embedding(tokens)
        normed = (h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        logits = self.head(normed)
        return torch.nn.functional.cross_entropy(logits.float(), tokens), logits


@pytest.fixture(scope="module")
def own_loss() -> list[CapturedOperator]:
    def make() -> Step:
        m, tokens = OwnLoss().bfloat16(), torch.zeros(ROWS, dtype=torch.int64)
        return Step(m, lambda: m(tokens)[0], torch.optim.SGD(m.parameters()), ROWS, 1, compiled=True)

    rows = record(make)[1].rows
    return [
        CapturedOperator(
            r.name, r.phase, r.module, *(tuple(Tensor(*t) for t, _ in x) for x in (r.inputs, r.outputs)), 1, r.causal
        )
        for r in rows
        if r.launches
    ]


def test_a_kernel_reads_the_rows_that_it_takes_and_writes_no_cast(own_loss: list[CapturedOperator]) -> None:
    """Inductor computes a cheap value again in each kernel that reads it."""
    norm = next(op for op in own_loss if op.name.startswith("inductor"))
    assert {x.dtype for x in norm.outputs if x.elements > ROWS} == {"bf16"}
    assert sum(x.bytes for x in norm.inputs if x.dtype == "bf16") == 2 * ROWS * WIDTH


def test_logits_beside_the_loss_get_a_gradient_of_zeros(own_loss: list[CapturedOperator]) -> None:
    backward = [op for op in own_loss if op.phase == "backward"]
    zeros = [op for op in backward if op.name in ("aten.zeros", "aten.zeros_like", "aten.new_zeros")]
    assert [op.outputs[0].shape for op in zeros if op.outputs[0].elements == ROWS * 128] == [(ROWS, 128)]
    loss = next(op for op in backward if op.name.startswith("inductor") and op.outputs[0].elements == ROWS * 128)
    assert sum(x.elements == ROWS * 128 for x in loss.inputs) == 2  # logits, and their gradient


def test_the_gradient_of_an_embedding_adds_rows_to_zeros(own_loss: list[CapturedOperator]) -> None:
    """Atomic additions read and write the rows of the tokens, not the whole table."""
    tables = [op for op in own_loss if op.phase == "backward" and any(x.elements == 512 * WIDTH for x in op.outputs)]
    added = [op for op in own_loss if op.phase == "backward" and any(x.shape == (ROWS * WIDTH,) for x in op.outputs)]
    assert tables
    assert added
    assert all(any(x.shape == (ROWS * WIDTH,) for x in op.inputs) for op in added)


def test_what_a_matmul_of_the_backward_reads_is_saved() -> None:
    """torch._functorch.partitioners, `is_materialized_backwards`: SwiGLU keeps gate, up and product; silu is free."""

    class Swiglu(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    def make() -> Step:
        m, x = Swiglu(), torch.zeros(ROWS, WIDTH)
        return Step(m, lambda: m(x).square().mean(), torch.optim.SGD(m.parameters()), ROWS, 1, compiled=True)

    lives = record(make)[1].lives
    assert [x.bytes for x in lives if x.kind == "activation" and x.bytes == 4 * ROWS * 3 * WIDTH] == 3 * [
        4 * ROWS * 3 * WIDTH
    ]
