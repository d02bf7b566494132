"""Links that are cut: traffic goes another way, or an error says that there is none."""

from __future__ import annotations

import pytest

from sim.core.errors import InputError
from sim.inputs.faults_config import LinkFault, NicFault
from sim.ranks.faults import link_scales
from sim.simulation import simulate
from tests.sim.cases import case
from tests.sim.faulty_links import links, with_faults


def test_a_cut_nvlink_goes_over_pcie_and_is_blamed() -> None:
    """The ring of eight on H100 has 63 GB/s of PCIe a GPU in place of NVLink's 371."""
    scenario = case({"dp": 8, "dp_sync": "after_backward"}, {"gradient_clipping": False})
    cut = simulate(with_faults(scenario, links(0, 0, 0.0)))
    slow_s = simulate(with_faults(scenario, links(0, 0, 63e9 / (450e9 * 20.6 / 25)))).step_time_s
    assert cut.step_time_s == pytest.approx(slow_s, rel=1e-9)
    assert slow_s > simulate(scenario).step_time_s
    assert cut.result["blame"][0]["cause"] == "links inside node0, cut, 0.17 of the bandwidth over the detour"


@pytest.mark.parametrize(
    ("kind", "a", "b", "why"),
    [
        ("fat_tree", 0, 1, "between node0 and node1 there is no other way"),
        ("rail_optimized", 1, 0, "between node0 and node1 there is no other way"),
        ("torus", 0, 5, "between node0 and node5 no link joins them"),
    ],
)
def test_a_cut_link_without_a_detour_is_an_error(kind: str, a: int, b: int, why: str) -> None:
    inter = {"kind": kind, "nics_per_node": 4}
    scenario = case({"dp": 128}, {"global_batch_size": 128}, cluster={"preset": "dgx-h100", "inter_node": inter})
    with pytest.raises(InputError, match=f"faults.links\\[0\\].bandwidth_scale.*found 0: {why}"):
        with_faults(scenario, links(a, b, 0.0))


def test_neighbours_on_a_torus_go_round_a_cut_link() -> None:
    inter = {"kind": "torus", "nics_per_node": 4}
    scenario = case({"pp": 2, "dp": 64}, {"global_batch_size": 64}, cluster={"preset": "dgx-h100", "inter_node": inter})
    assert link_scales(with_faults(scenario, links(0, 1, 0.0))) == {(0, 1): pytest.approx(1 / 3)}


def test_a_node_without_a_number_is_refused_and_not_taken_for_the_first() -> None:
    for fault in (lambda: NicFault(node="head").node_number, lambda: LinkFault(between=("node3", "leaf2")).nodes):
        with pytest.raises(ValueError, match="is no node's name"):
            fault()
    assert (NicFault(node="node7").node_number, LinkFault(between=("node3", "node1")).nodes) == (7, (1, 3))
