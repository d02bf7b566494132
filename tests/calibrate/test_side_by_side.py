"""Unfused and fused kernels: the same results, and the table and picture that show their times."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.modules import run_module

torch = pytest.importorskip("torch")

from calibrate.records import Constant, Point, make_profile  # noqa: E402
from calibrate.side_by_side import cells, markdown, rows_of, svg  # noqa: E402
from calibrate.timings import fused  # noqa: E402
from calibrate.timings.timing import Bench  # noqa: E402
from sim.prices.profile import Profile  # noqa: E402

FACTS = {"hardware": {"device": "cpu"}, "software": {"torch": "2"}, "settings": {"quick": True}}
ATTENTION = (1, 8, 8, 512, 512, 64, 64, 1)


def profile() -> Profile:
    def p(op: str, shape: tuple[int, ...], seconds: float) -> Point:
        return Point(op, "fp32", shape, seconds, 0.0, 5)

    return make_profile(
        "node",
        FACTS,
        [
            p("attention_unfused_forward", ATTENTION, 4e-3),
            p("attention_unfused_backward", ATTENTION, 8e-3),
            p("attention_forward", ATTENTION, 2e-3),
            p("attention_backward", ATTENTION, 4e-3),
            p("attention_forward:flash", ATTENTION, 1e-3),
            p("attention_backward:flash", ATTENTION, 2e-3),
            p("elementwise:elu_eager", (1 << 20,), 5e-3),
            p("elementwise:elu_eager_backward", (1 << 20,), 5e-3),
            p("elementwise:elu_compiled", (1 << 20,), 1e-3),
            p("elementwise:elu_compiled_backward", (1 << 20,), 1e-3),
            p("linear_cross_entropy:eager", (8, 4, 2), 1e-3),
            p("linear_cross_entropy:eager_backward", (8, 4, 2), 1e-3),
            p("linear_cross_entropy:chunked", (8, 4, 2), 3e-3),
            p("linear_cross_entropy:chunked_backward", (8, 4, 2), 1e-3),
            p("elementwise:rope_eager", (64,), 1e-3),
            p("gemm", (1, 64, 64, 64), 1e-5),
            p("elementwise", (64,), 1e-5),
            Constant("linear_cross_entropy:chunked fp32 8x4x2 peak_bytes", 2.0**20, "a test"),
        ],
    )


def test_ways_of_one_thing_stand_together_the_unfused_first() -> None:
    rows = rows_of(profile())
    assert [(r.what, r.how) for r in rows] == [
        ("attention", "unfused"),
        ("attention", "flash"),
        ("attention", "torch's choice"),
        ("elu", "eager"),
        ("elu", "compiled"),
        ("linear_cross_entropy", "eager"),
        ("linear_cross_entropy", "chunked"),
    ]
    assert [c[6] for c in cells(rows)] == ["", "4.00×", "2.00×", "", "5.00×", "", "0.50×"]
    assert cells(rows)[-1][-1] == "1.0 MiB"


def test_table_and_picture() -> None:
    rows = rows_of(profile())
    assert "| attention | fp32 | b=1 h=8 s=512 d=64 | flash | 1 ms | 2 ms | 4.00× |  |" in markdown(rows)
    picture = ElementTree.fromstring(svg(rows))
    bars = [float(e.get("width", 0)) for e in picture.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert bars[0] == pytest.approx(4 * bars[2], rel=0.01)
    assert bars[1] == pytest.approx(2 * bars[0], rel=0.01)


def test_the_command(tmp_path: Path) -> None:
    file, picture = tmp_path / "p.json", tmp_path / "p.svg"
    profile().save(file)
    command = ("calibrate.side_by_side", file, "--svg", picture)
    found = run_module(*command)
    assert "flash" in found.stdout
    assert picture.read_text().startswith("<svg")
    make_profile("node", FACTS, []).save(file)
    refused = run_module(*command)
    assert refused.returncode == 2
    assert "has no kernel both unfused and fused" in refused.stderr


@pytest.mark.parametrize("rows", [7, 64, 300])
def test_chunked_loss_is_the_loss(rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=draw, dtype=torch.float64, requires_grad=True) for n in (rows, 257))
    target = torch.randint(257, (rows,), generator=draw)
    assert fused.chunk_rows(rows, 257, 16) < rows
    results = []
    for function in (fused.linear_cross_entropy, fused.chunked_cross_entropy):
        loss = function(x, weight, target)
        results.append((loss.double(), *torch.autograd.grad(3 * loss, (x, weight))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_chunked_loss_never_holds_all_logits() -> None:
    """Beyond both gradients: the logits of a chunk in four copies, against all tokens' in three or more."""
    rows, vocab, hidden = 512, 2048, 64
    x, weight = torch.randn(rows, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True)
    target = torch.randint(vocab, (rows,))

    def peak(function: fused.Function) -> int:
        return fused.peak_bytes("cpu", lambda: torch.autograd.grad(function(x, weight, target), (x, weight)))

    logits, gradients = 4 * rows * vocab, 4 * (rows + vocab) * hidden
    chunk = 4 * fused.chunk_rows(rows, vocab, hidden) * vocab
    assert peak(fused.linear_cross_entropy) > 2 * logits
    assert peak(fused.chunked_cross_entropy) < 2 * gradients + 5 * chunk < 0.6 * logits


def test_written_out_chains_are_the_functions() -> None:
    draw = torch.Generator().manual_seed(1)
    width = 512
    x = torch.randn(5, width, generator=draw, dtype=torch.float64)
    ones = torch.ones(width, dtype=torch.float64)
    F = torch.nn.functional
    assert torch.allclose(fused.elu(x), 1.0507 * F.elu(x))
    assert torch.allclose(fused.bias_gelu(x, ones), F.gelu(x + 1, approximate="tanh"), atol=1e-7)
    assert torch.allclose(fused.rms_norm(x, ones), F.rms_norm(x, (width,), eps=fused.EPSILON), atol=1e-6)


def test_where_ligers_kernels_cannot_run_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fused.liger.cache_clear()
    assert fused.liger("cpu") == fused.liger("cpu") == {}
    assert capsys.readouterr().err == "liger-kernel: skipped, its kernels need a CUDA GPU\n"


@pytest.mark.slow
def test_eager_and_compiled_are_measured_both_ways() -> None:
    records = fused._chain(Bench("cpu", True, 0.05), "elu", "fp32", 1 << 16)
    assert [r.op for r in records if isinstance(r, Point)] == [
        "elementwise:elu_eager",
        "elementwise:elu_compiled",
        "elementwise:elu_eager_backward",
        "elementwise:elu_compiled_backward",
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])
def test_liger_computes_the_same(name: str) -> None:
    if name not in fused.liger():
        pytest.skip("liger-kernel is not installed")
    bench = Bench("cuda", True, 0.05)
    inputs = fused.CHAINS[name].inputs(1 << 20, 512, lambda *shape: fused._random(bench, "fp32", *shape))
    expected = fused.CHAINS[name].function(*inputs)  # first: Liger's rope writes over its input
    assert torch.allclose(fused.liger()[name](*inputs), expected, atol=1e-4)
