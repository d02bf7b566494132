"""Which GPU is what: the ranks of a layout on their nodes, for two orders of its dimensions."""

from __future__ import annotations

from html import escape
from pathlib import Path

from docs.figures.svg import COLOURS, FAINT, INK, WIDTH
from sim.core.units import seconds
from sim.inputs.scenario import Scenario, load_scenario
from sim.ranks.rank_mesh import make_mesh
from sim.simulation import simulate

SCENARIO = Path(__file__).parents[2] / "scenarios" / "mesh_llama8b.yaml"
ORDERS = ("tp-cp-pp-dp", "dp-pp-cp-tp")
BOX_W, BOX_H, LEFT, TOP = 80, 50, 36, 96
PANEL = 170


def draw_mesh() -> str:
    """Both orders, one above the other, each with the step that it gives."""
    height = TOP + PANEL * len(ORDERS) - 10
    body = [
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 22, "A 4D mesh: tp 2, cp 2, pp 2, dp 2 on two nodes of eight GPUs", 15, INK, 600),
        _text(LEFT, 42, "A colour for each tensor-parallel pair, which talks most; numbers are ranks.", 12, FAINT),
    ]
    for i, order in enumerate(ORDERS):
        scenario = load_scenario(SCENARIO, [f"parallelism.rank_order={order}"])
        step = seconds(simulate(scenario).step_time_s)
        top = TOP + i * PANEL
        body.append(_text(LEFT, top - 18, f"rank_order: {order}, a step of {step}", 13, INK, 600))
        body += _ranks(scenario, top)
    label = escape("Ranks of a 4D mesh on two nodes for two rank orders", quote=True)
    head = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}"'
    font = "font-family=\"Inter, 'Segoe UI', system-ui, sans-serif\""
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} {font}>\n' + "\n".join(body) + "\n</svg>\n"


def _ranks(scenario: Scenario, top: float) -> list[str]:
    """A row of boxes for each node; those of one tensor-parallel group share a colour."""
    mesh, per_node = make_mesh(scenario.parallelism), scenario.cluster.gpus_per_node
    groups: dict[tuple[int, ...], int] = {}
    out = []
    for rank in range(scenario.parallelism.ranks):
        node, place = divmod(rank, per_node)
        x, y = LEFT + place * (BOX_W + 6), top + node * (BOX_H + 12)
        group = groups.setdefault(tuple(mesh.along(("tp",), rank)), len(groups))
        colour = (*COLOURS, "#8a6d00", "#6b7280")[group % 8]
        where = {d: mesh.coordinate(d, rank) for d in ("tp", "cp", "pp", "dp")}
        out.append(
            f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="4" fill="{colour}" '
            f'fill-opacity="0.25" stroke="{colour}" stroke-width="2"/>'
        )
        out.append(_text(x + 6, y + 16, str(rank), 12, INK, 600))
        out.append(_text(x + 6, y + 30, f"tp {where['tp']}  cp {where['cp']}", 11, INK))
        out.append(_text(x + 6, y + 43, f"pp {where['pp']}  dp {where['dp']}", 11, INK))
    nodes = range(-(-scenario.parallelism.ranks // per_node))
    out += [_text(4, top + n * (BOX_H + 12) + 28, f"n{n}", 12, FAINT) for n in nodes]
    return out


def _text(x: float, y: float, text: str, size: int, colour: str, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'
    )
