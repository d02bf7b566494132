"""The table of number formats is torch's, and the worked example is what the bundled quantizer gives."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from calibrate import quantization as q  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "number_formats.md"
FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 E4M3": torch.float8_e4m3fn,
    "fp8 E5M2": torch.float8_e5m2,
}


def cells(name: str) -> list[str]:
    line = next(x for x in PAGE.read_text("utf-8").splitlines() if x.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", FORMATS)
def test_floating_point_formats(name: str) -> None:
    _, bits, parts, largest, smallest, step, _ = cells(name)
    info = torch.finfo(FORMATS[name])
    sign, exponent, mantissa = map(int, parts.split(","))
    assert int(bits) == info.bits == sign + exponent + mantissa
    assert float(largest) == pytest.approx(info.max, rel=0.005)
    assert float(smallest) == pytest.approx(info.tiny, rel=0.005)
    assert float(step) == pytest.approx(info.eps, rel=0.005)
    assert info.eps == 2.0**-mantissa


def test_integer_formats() -> None:
    assert int(cells("int8")[3]) == torch.iinfo(torch.int8).max


def test_the_worked_example() -> None:
    x = torch.tensor([15.0, 0.1, 0.02, 1.0, 0.01])
    assert q._int8(x, q._scale(x, None)).tolist() == [127, 1, 0, 8, 0]
    assert float(q._scale(x, None)) / 2 == pytest.approx(0.059, abs=5e-4)
