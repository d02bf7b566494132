"""The slowdown of matmuls of odd width, which a GPU's calibration measures."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calibrate.records import Constant, Point, Record  # noqa: E402
from calibrate.timings import matmuls as kernels  # noqa: E402
from calibrate.timings.timing import Bench  # noqa: E402


def test_an_odd_vocabulary_is_compared_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products of 257 words take 9 s where those of 264 take 3 s: 3 times as long, and 264 ÷ 257 more a word."""

    def timed(bench: Bench, phase: str, dtype: str, tokens: int, n: int, k: int) -> list[Record]:
        return [Point(f"gemm{phase}", dtype, (1, tokens, n, k), 3.0 if n % 8 else 1.0, 0.0, 1)]

    monkeypatch.setattr(kernels, "_linear", timed)
    monkeypatch.setattr(kernels, "ODD_VOCABULARY", (16, 8, 257, 264))
    (found,) = kernels._odd_vocabulary(Bench("cpu", True, 0.01))
    assert isinstance(found, Constant)
    assert found.name == "unaligned_matmul_slowdown"
    assert found.value == pytest.approx(3.0 * 264 / 257)
