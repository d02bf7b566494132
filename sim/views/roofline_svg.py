"""A picture of a GPU's roofline with the memories below it, as an SVG that needs nothing else.

    python -m sim.views.roofline_svg a100-sxm > docs/roofline_a100.svg

Attainable flops/s = min(peak, intensity · bandwidth), intensity in flops a byte (Williams, Waterman, Patterson 2009);
one slope for each memory an operand may come from. Of a GPU's scratch memories (SRAM) a multiprocessor's serves 128
bytes a clock: 32 banks of 4 bytes (NVIDIA's V100, A100 and H100 whitepapers). Its clock is taken from the data sheet's
16-bit peak.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from sim.core.operator_kinds import shape_flops
from sim.core.units import rate
from sim.prices.roofline import shape_bytes
from sim.views.palette import BLUE, GREEN, INK, VERMILION
from topology.presets import GPUS
from topology.spec import GpuSpec

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 430, 88, 24, 18, 46
LOW, HIGH = -2.0, 4.0  # log10 of the intensity shown
FLOOR = 9.0  # log10 of the flops/s shown at the bottom
BYTES_PER_CLOCK = 128


def clock_hz(gpu: GpuSpec) -> float:
    """Clock at which all tensor cores give the data sheet's peak in 16 bits."""
    peak = gpu.peak_flops_per_s.get("fp16", gpu.peak_flops_per_s.get("bf16", 0.0))
    return peak / (gpu.sm_count * gpu.sm_flops_per_clock)


def sram_bytes_per_s(gpu: GpuSpec) -> float:
    """Bandwidth of all multiprocessors' scratch memories together; 0 where the chip's figures are not known."""
    known = gpu.sm_sram_bytes and gpu.sm_flops_per_clock
    return BYTES_PER_CLOCK * gpu.sm_count * clock_hz(gpu) if known else 0.0


class Point(NamedTuple):
    """An operator: its intensity decides which roof it hits. `below`: pixels from the point down to its name."""

    name: str
    intensity: float
    below: int = 14


def operators() -> list[Point]:
    """A few operators of a Llama 3 8B layer at 4,096 tokens, 16 bits."""
    gemm, single = (1, 4096, 14336, 4096), (1, 1, 14336, 4096)
    flash, decode = (1, 32, 8, 4096, 4096, 128, 128, 1), (16, 32, 8, 4096, 128)
    seq, width = 4096.0, 128.0
    unfused = 4 * seq * seq * width / (2 * (4 * seq * width + 4 * seq * seq))  # scores to memory and back, twice
    return [
        Point("ELU in five kernels", 5 / 22),  # bytes: x > 0 3, exp, −1 and ·α 4 each, select 7
        Point("RMS norm, fused", 4 / 4),
        Point("linear layer, one token", _intensity("gemm", single), 28),
        Point("decode attention, grouped queries", _intensity("attention_decode", decode)),
        Point("attention, unfused", unfused, 30),
        Point("FlashAttention", _intensity("attention_forward", flash), 34),
        Point("matmul", _intensity("gemm", gemm), 20),
    ]


def _intensity(kind: str, shape: tuple[int, ...]) -> float:
    return shape_flops(kind, shape) / shape_bytes(kind, shape, "bf16")


def roofline_svg(gpu: GpuSpec) -> str:
    """The picture: log-log axes, a roof for 16-bit tensor cores, a slope for each memory, operators on HBM's."""
    peak = gpu.peak_flops_per_s.get("bf16", gpu.peak_flops_per_s.get("fp16", 1.0))
    memories = [
        ("HBM", gpu.memory_bandwidth_bytes_per_s, BLUE),
        ("host", gpu.host_bandwidth_bytes_per_s, "#6b7280"),
    ]
    if sram := sram_bytes_per_s(gpu):
        memories.insert(0, ("SRAM", sram, GREEN))
    top = math.ceil(math.log10(peak) * 2) / 2
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" font-family="system-ui, sans-serif">'
    head += '<rect width="{0}" height="{1}" fill="#ffffff"/>'
    parts = [head.format(WIDTH, HEIGHT), *_axes(top)]
    for name, bandwidth, colour in memories:
        parts += _slope(name, bandwidth, peak, colour, top)
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    for p in operators():
        x, y = _x(p.intensity), _y(min(peak, p.intensity * bandwidth), top)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{VERMILION}"/>')
        anchor, shift = ("end", -4) if x > WIDTH - 160 else ("start", 7)
        parts.append(_text(x + shift, y + p.below, p.name, 11, anchor))
    title = f"{gpu.name}: {rate(peak, 'FLOP/s')} (16 bits)"
    parts.append(_text(WIDTH - RIGHT - 4, _y(peak, top) - 6, title, 12, "end"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(intensity: float) -> float:
    return LEFT + (math.log10(intensity) - LOW) / (HIGH - LOW) * (WIDTH - LEFT - RIGHT)


def _y(flops_per_s: float, top: float) -> float:
    return TOP + (top - math.log10(flops_per_s)) / (top - FLOOR) * (HEIGHT - TOP - BOTTOM)


def _axes(top: float) -> list[str]:
    out = []
    for e in range(int(LOW), int(HIGH) + 1):
        x = _x(10.0**e)
        out.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e6eaee"/>')
        out.append(_text(x, HEIGHT - BOTTOM + 16, f"{10.0**e:g}", 11, "middle"))
    for e in range(int(FLOOR), int(top) + 1):
        y = _y(10.0**e, top)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e6eaee"/>')
        power, prefix = 10.0 ** (e % 3), "GTP"[(e - 9) // 3]
        out.append(_text(LEFT - 6, y + 4, f"{power:g} {prefix}FLOP/s", 11, "end"))
    out.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, "flops per byte moved", 12, "middle"))
    return out


def _slope(name: str, bandwidth: float, peak: float, colour: str, top: float) -> list[str]:
    start = max(10.0**LOW, 10.0**FLOOR / bandwidth)
    ridge = peak / bandwidth
    end = min(ridge, 10.0**HIGH)
    path = f"M{_x(start):.1f} {_y(start * bandwidth, top):.1f}L{_x(end):.1f} {_y(end * bandwidth, top):.1f}"
    if ridge < 10.0**HIGH:
        path += f"H{WIDTH - RIGHT}"
    x, y = _x(1.6 * start), _y(1.6 * start * bandwidth, top)
    return [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        _text(x + 12, y + 12, f"{name} {rate(bandwidth, 'B/s')}", 12, "start", colour),
    ]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "a100-sxm"
    if chosen not in GPUS:
        sys.stderr.write(f"error: unknown GPU '{chosen[:60]}' (`stepsim clusters` lists them)\n")
        raise SystemExit(2)
    sys.stdout.write(roofline_svg(GPUS[chosen]))
