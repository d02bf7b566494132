"""A step on a network from a file: equal to the preset's where the file is, slower where a link is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.commands.topology import main as topology
from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.inputs.topology_input import read_topology, write_topology
from sim.simulation import simulate
from tests.processes import exit_code
from tests.sim.cases import scenario_with
from topology.graph import described
from topology.presets import CLUSTERS

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp16": {"tp": 16, "sp": True},
    "tp8 dp2": {"tp": 8, "sp": True, "dp": 2},
    "tp4 pp4": {"tp": 4, "pp": 4},
    "pp8 dp2": {"pp": 8, "dp": 2},
    "interleaved": {"pp": 4, "dp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zero 1": {"dp": 16, "zero": 1},
    "zero 2": {"dp": 16, "zero": 2},
    "zero 3": {"dp": 16, "zero": 3},
    "hsdp": {"dp": 16, "zero": 3, "shard_size": 4},
    "ring cp": {"cp": 8, "dp": 2},
    "ulysses": {"cp": 8, "dp": 2, "cp_method": "all_to_all"},
    "dp outermost": {"tp": 2, "dp": 2, "pp": 4, "rank_order": "tp-cp-pp-dp"},
}


def scenario(cluster: Any, parallelism: dict[str, Any]) -> Any:
    training = {"seq_len": 4096, "global_batch_size": 32}
    model = {"preset": "llama3-8b", "layers": 8}
    if CLUSTERS.get(cluster if isinstance(cluster, str) else "", CLUSTERS["dgx-h100"]).gpu.name == "v100":
        training["precision"] = "fp16"
    return scenario_with(training, parallelism, model=model, cluster=cluster, calibration="h100-sxm")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_what_it_takes_on_the_preset(name: str, layout: str, tmp_path: Path) -> None:
    """From the file, which is recognised, and with every collective and message asked of the routes."""
    preset = scenario(name, LAYOUTS[layout])
    write_topology(tmp_path / "network.json", described(preset.cluster))
    read = read_topology(str(tmp_path / "network.json"))
    expected = simulate(preset).step_time_s
    routed = read.model_copy(update={"topology": described(preset.cluster)})
    for cluster in (read, routed):
        found = simulate(preset.unchecked_copy(update={"cluster": cluster})).step_time_s
        assert found == pytest.approx(expected, rel=1e-9, abs=0)


def slowed(path: Path, scale: float, *ends: str) -> str:
    data = json.loads(path.read_text())
    for edge in data["edges"]:
        if {edge["source"], edge["target"]} == set(ends):
            edge["bandwidth_bytes_per_s"] *= scale
    out = path.with_name("slow.json")
    out.write_text(json.dumps(data))
    return str(out)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks") / "two.json"
    assert exit_code(topology, "dgx-h100", "--nodes", "2", "--out", str(path)) == 0
    return path


def step_s(cluster: Any, parallelism: dict[str, Any]) -> float:
    return simulate(scenario(cluster, parallelism)).step_time_s


def test_a_slow_link_slows_the_steps_that_use_it(two_nodes: Path) -> None:
    slow = {"topology": slowed(two_nodes, 0.25, "nic1.3", "leaf1.3")}
    assert step_s(slow, {"tp": 8}) == pytest.approx(step_s("dgx-h100", {"tp": 8}), rel=1e-9)
    assert step_s(slow, {"tp": 16, "sp": True}) > 1.2 * step_s("dgx-h100", {"tp": 16, "sp": True})
    inside = {"topology": slowed(two_nodes, 0.25, "gpu9", "nvswitch1")}
    assert step_s(inside, {"tp": 8}) == pytest.approx(step_s("dgx-h100", {"tp": 8}), rel=1e-9)
    assert step_s(inside, {"tp": 8, "dp": 2}) > 1.1 * step_s("dgx-h100", {"tp": 8, "dp": 2})


def test_a_file_beside_the_scenario_is_found_and_a_result_can_be_run_again(two_nodes: Path) -> None:
    slowed(two_nodes, 0.5, "nic1.3", "leaf1.3")
    file = two_nodes.with_name("s.yaml")
    file.write_text(
        "model: gpt2\ncluster: {topology: slow.json}\nparallelism: {dp: 16}\n"
        "training: {seq_len: 1024, global_batch_size: 16}\n"
    )
    first = simulate(load_scenario(file))
    again = simulate(parse_scenario(json.loads(json.dumps(first.result["scenario"]))))
    assert again.step_time_s == first.step_time_s
    assert first.scenario.cluster.topology is not None


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"topology": "nowhere.json"}, "cluster.topology: found 'nowhere.json'; no such file"),
        ({"topology": 3}, "cluster.topology: found 3; must be a file"),
        ({"topology": "nowhere.json", "nodes": 2}, "cluster.nodes: cannot be given with topology"),
        ({"topology": {"nodes": []}}, "edges: must be a list"),
    ],
)
def test_what_is_wrong_is_said(cluster: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario(cluster, {"tp": 8})


def test_more_ranks_than_the_file_has_gpus_are_refused(two_nodes: Path) -> None:
    with pytest.raises(InputError, match="16"):
        scenario({"topology": str(two_nodes)}, {"tp": 8, "dp": 4})
