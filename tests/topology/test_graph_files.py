"""Networks as files: what is written is read back, and what is wrong is said."""

from __future__ import annotations

import copy
from typing import Any

import networkx as nx
import pytest

from tests.topology.link_flows import cluster
from topology.graph import described
from topology.graph_files import TopologyError, from_graphml, from_node_link, graphml, parse_xml
from topology.presets import CLUSTERS
from topology.recognise import recognise
from topology.wiring import Wiring, node_link


def written(name: str = "dgx-h100", nodes: int = 2, **inter_node: object) -> dict[str, Any]:
    return copy.deepcopy(node_link(described(cluster(name, nodes, **inter_node))))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("nodes", [2, 20])
def test_every_preset_is_recognised_in_its_own_graph(name: str, nodes: int) -> None:
    spec = cluster(name, nodes)
    data = node_link(described(spec))
    for wiring in (from_node_link(data), from_graphml(parse_xml(graphml(described(spec))))):
        found = recognise(wiring)
        domain = min(spec.nvlink_domain, nodes * spec.gpus_per_node)
        assert found == spec.model_copy(update={"nvlink_domain": max(domain, spec.gpus_per_node)})


@pytest.mark.parametrize(
    "inter",
    [
        {"kind": "fat_tree", "oversubscription": 3.0, "nodes_per_leaf": 4},
        {"kind": "rail_optimized", "oversubscription": 2.0, "nodes_per_leaf": 2},
        {"kind": "torus"},
        {"kind": "torus", "nics_per_node": 4},
        {"kind": "fat_tree", "nics_per_node": 32, "nic_bandwidth_bytes_per_s": 12.5e9, "rendezvous": True},
    ],
    ids=["fat tree", "rails", "torus of 3", "torus of 2", "many NICs"],
)
def test_every_kind_of_network_is_recognised_whatever_its_parts_are_called(inter: dict[str, Any]) -> None:
    spec = cluster("dgx-h100", 12, **inter)
    data = node_link(described(spec))
    names = {node["id"]: f"part {i}" for i, node in enumerate(sorted(data["nodes"], key=lambda n: str(n["id"])[::-1]))}
    for node in data["nodes"]:
        node["id"] = names[node["id"]]
        node.pop("tier", None)
    for edge in data["edges"]:
        edge["source"], edge["target"] = names[edge["source"]], names[edge["target"]]
    assert recognise(from_node_link(data)) == spec.model_copy(update={"source": spec.source})


def test_networkx_reads_and_writes_both_forms(tmp_path: Any) -> None:
    data = written()
    graph = nx.node_link_graph(data, edges="edges")
    assert nx.is_connected(graph)
    again = recognise(from_node_link(nx.node_link_data(graph, edges="links")))
    assert again == recognise(from_node_link(data))
    nx.write_graphml(graph.copy(), tmp_path / "n.graphml")
    assert recognise(from_graphml(parse_xml((tmp_path / "n.graphml").read_text()))) == again


def test_a_link_that_differs_in_its_directions_is_written_as_two() -> None:
    wiring = described(cluster("dgx-h100", 1))
    ends = ("gpu0", "nvswitch0")
    links = {**wiring.links, ends: wiring.links[ends]._replace(bandwidth_bytes_per_s=1e9)}
    data = node_link(Wiring(wiring.parts, links))
    assert data["directed"]
    assert dict(from_node_link(data).links) == links


def change(data: dict[str, Any], what: str) -> None:
    gpu, edge = next(n for n in data["nodes"] if n["kind"] == "gpu"), data["edges"][0]
    match what:
        case "no nodes":
            del data["nodes"]
        case "unknown kind":
            gpu["kind"] = "gpuu"
        case "unknown GPU":
            gpu["gpu"] = "h100-sxn"
        case "same rank":
            gpu["rank"] = 1
        case "a rank left out":
            gpu["rank"] = 99
        case "text for a rank":
            gpu["rank"] = "0"
        case "negative bandwidth":
            edge["bandwidth_bytes_per_s"] = -1
        case "no bandwidth":
            del edge["bandwidth_bytes_per_s"]
        case "efficiency above 1":
            edge["efficiency"] = 1.5
        case "latency as text":
            edge["latency_s"] = "1us"
        case "an end that is no node":
            edge["target"] = "nowhere"
        case "an edge twice":
            data["edges"].append(edge)
        case "a loop":
            edge["target"] = edge["source"]
        case "a GPU without a link":
            data["edges"] = [e for e in data["edges"] if gpu["id"] not in (e["source"], e["target"])]
        case "in two parts":
            data["edges"] = [e for e in data["edges"] if "spine" not in (e["source"], e["target"])]
        case "one way":
            data["directed"] = True
        case "one GPU":
            data["nodes"], data["edges"] = [gpu], []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no nodes", "nodes: must be a list"),
        ("unknown kind", "node 'gpu0': kind: found 'gpuu'; must be one of gpu, nvswitch, pcie, cpu, nic, switch"),
        ("unknown GPU", "did you mean 'h100-sxm'"),
        ("same rank", "rank: found 1, which"),
        ("a rank left out", "none of rank 0; ranks are 0 to 15"),
        ("text for a rank", "must be an integer"),
        ("negative bandwidth", "bandwidth_bytes_per_s: found -1"),
        ("no bandwidth", "bandwidth_bytes_per_s: must be above 0"),
        ("efficiency above 1", "efficiency: found 1.5"),
        ("latency as text", "latency_s: found '1us'"),
        ("an end that is no node", "no node has the id 'nowhere'"),
        ("an edge twice", "stands twice"),
        ("a loop", "joins a node to itself"),
        ("a GPU without a link", "is a GPU without a link"),
        ("in two parts", "no way leads from GPU 'gpu0' to GPU 'gpu8'"),
        ("one way", "has no way back"),
        ("one GPU", "has 1 node of kind gpu"),
    ],
)
def test_what_is_wrong_is_said(what: str, message: str) -> None:
    data = written()
    change(data, what)
    with pytest.raises(TopologyError, match=message):
        from_node_link(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "is no XML"), ("<!DOCTYPE a [<!ENTITY b 'c'>]><a/>", "entities"), ("<a/>", "no graph")],
)
def test_what_is_no_graphml_is_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        from_graphml(parse_xml(text))


def test_nodes_hold_as_many_gpus_each_and_ranks_run_through_them() -> None:
    data = written()
    by_rank = {node["rank"]: node for node in data["nodes"] if node["kind"] == "gpu"}
    by_rank[0]["rank"], by_rank[8]["rank"] = 8, 0
    with pytest.raises(TopologyError, match="ranks must run through the nodes"):
        recognise(from_node_link(data))
    data = written()
    gone = by_rank[15]["id"]
    data["nodes"] = [node for node in data["nodes"] if node["id"] != gone]
    data["edges"] = [edge for edge in data["edges"] if gone not in (edge["source"], edge["target"])]
    with pytest.raises(TopologyError, match="and node 0 have 7 and 8 GPUs"):
        recognise(from_node_link(data))
