"""The drawing of a cluster in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from sim.views.topology_page import BUSY, layer_of, shade, topology_page
from tests.topology.link_flows import cluster as nodes
from topology.graph import build_graph
from topology.loads import Traffic, link_loads
from topology.spec import ClusterSpec

pytestmark = pytest.mark.browser
LINKS = "Bokeh.documents[0].get_model_by_name('links').data_source.data"


@pytest.mark.parametrize(
    "cluster",
    [
        nodes("dgx-v100", 1),
        nodes("dgx-h100", 2),
        nodes("gb200-nvl72", 36),
        nodes("dgx-a100", 8, kind="torus"),
        nodes("dgx-a100", 4, kind="fat_tree", oversubscription=4.0),
        nodes("cpu-host", 1),
    ],
    ids=["mesh", "rails", "nvl72", "torus", "fat_tree", "host"],
)
def test_every_link_is_drawn_once_and_at_a_place_of_its_own(open_page: Any, cluster: ClusterSpec) -> None:
    page = open_page(topology_page(cluster))
    drawn = page.evaluate(f"[...{LINKS}.text]")
    assert len(drawn) == len(set(drawn)) == build_graph(cluster).number_of_edges() / 2
    graph = build_graph(cluster)
    for kind in {layer_of(graph, name) for name in graph}:
        source = f"Bokeh.documents[0].get_model_by_name('{kind}').data_source.data"
        spots = page.evaluate(f"[...{source}.x].map((x, i) => x + ' ' + {source}.y[i])")
        assert len(spots) == len(set(spots))
    assert page.locator("h1").inner_text() == f"Cluster {cluster.name}"
    assert page.locator(".plot canvas").count() > 0


def test_links_are_coloured_by_how_busy_a_run_keeps_them(open_page: Any) -> None:
    cluster = nodes("dgx-h100", 2)
    traffic = [Traffic("all_gather", tuple(range(8)), 1e9), Traffic("send_recv", (0, 8), 1e8)]
    page = open_page(topology_page(cluster, link_loads(cluster, traffic, 0.01)))
    colours = dict(page.evaluate(f"[...{LINKS}.text].map((text, i) => [text, {LINKS}.colour[i]])"))
    inside = {colour for text, colour in colours.items() if text.startswith("gpu0 – nvswitch0")}
    idle = {colour for text, colour in colours.items() if text.startswith("gpu8 – nvswitch1")}
    assert inside != idle == {shade(0.0, *BUSY)}
    assert all("busy" in text for text in colours)
    assert "Busiest" in page.locator("thead").inner_text()
    rows = {row.split("\t")[0]: row for row in page.locator("tbody tr").all_inner_texts()}
    assert rows["PCIe: PCIe switch to Host"].endswith("0.0 %")
    assert not rows["PCIe: PCIe switch to NIC"].endswith("0.0 %")


def test_idle_links_stand_out_from_neither_ground() -> None:
    """On a dark page a pale line would be the brightest of all."""
    idle, busy = (bytes.fromhex(colour[1:]) for colour in BUSY)
    assert 0.35 < sum(idle) / 3 / 255 < 0.65
    assert max(busy) > 200 > max(idle)


def test_of_a_large_cluster_the_page_says_what_it_draws(open_page: Any) -> None:
    page = open_page(topology_page(nodes("dgx-h100", 2048).model_copy(update={"name": "<b>big</b>"})))
    assert "the first 18 nodes are drawn" in page.locator(".sub").first.inner_text()
    assert page.locator("h1").inner_text() == "Cluster <b>big</b>"
