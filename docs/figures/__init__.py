"""The pictures of the documentation, each out of simulations: `python -m docs.figures` draws them."""

from __future__ import annotations

from collections.abc import Callable

from docs.figures import schemes
from docs.figures.area import draw_area
from docs.figures.gantt import draw_gantt
from docs.figures.mesh import draw_mesh
from docs.figures.networks import NETWORKS, draw_network
from docs.figures.sources import FIGURES, memory_steps
from docs.figures.svg import draw

GANTTS = {
    "schedules": schemes.schedules,
    "tp_overlap": schemes.tensor_overlap,
    "cp_methods": schemes.context_methods,
    "ep_exchange": schemes.expert_exchange,
    "dp_sync": schemes.data_sync,
}
CHARTS = {**FIGURES, "memory_recompute": schemes.memory_recompute}
PICTURES: dict[str, Callable[[], str]] = {
    **{name: lambda chart=chart: draw(chart()) for name, chart in CHARTS.items()},
    "mesh": draw_mesh,
    "memory_steps": lambda: draw_area(memory_steps()),
    **{name: lambda gantt=gantt: draw_gantt(gantt()) for name, gantt in GANTTS.items()},
    **{name: lambda name=name: draw_network(name) for name in NETWORKS},
}
