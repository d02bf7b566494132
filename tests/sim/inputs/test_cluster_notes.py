"""What a scenario that loads is warned of about its cluster: GPUs that idle, NVLink domains, keys of links."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.sim.small_scenario import small


def test_gpus_that_idle_are_named() -> None:
    def warnings(**parallelism: int) -> str:
        data = {**small(parallelism=parallelism), "cluster": {"preset": "dgx-h100", "nodes": 8}}
        return " ".join(parse_scenario(data).warnings)

    assert "one of the cluster's 64 GPUs computes" in warnings()
    assert "computes" not in warnings(dp=2)
    assert "parallelism.dp: 1, the default, so 2 of the cluster's 64 GPUs compute; dp 32" in warnings(tp=2)
    assert "compute" not in warnings(tp=2, dp=2)


@pytest.mark.parametrize(
    ("domain", "layout", "said"),
    [
        (
            72,
            {"dp": 128, "ep": 64},
            "with 72, no multiple of ep 64, some groups lie in two domains; 64 keeps each in one",
        ),
        (None, {"dp": 128, "ep": 64}, ""),  # 64 of 72, as schedulers do
        (72, {"dp": 144, "ep": 8}, ""),
        (72, {"dp": 64, "ep": 64}, ""),  # one domain holds the job
        (72, {"dp": 16, "tp": 16, "ep": 8}, "with 72, no multiple of tp 16, some"),
        (8, {"dp": 128, "ep": 64}, ""),  # no domain holds such a group
        (72, {"dp": 128, "tp": 2, "ep": 64, "expert_tp": 2}, ""),  # nor one of 128 ranks, every second of which is ep's
        (72, {"dp": 64, "tp": 4, "ep": 16, "expert_tp": 4}, "with 72, no multiple of ep·expert_tp 64, some"),
    ],
)
def test_groups_that_lie_in_two_nvlink_domains_are_named(domain: int | None, layout: dict[str, Any], said: str) -> None:
    cluster = {"preset": "gb200-nvl72"} | ({} if domain is None else {"nvlink_domain": domain})
    model = {"layers": 2, "hidden": 1024, "heads": 16, "vocab": 1024, "moe": {"experts": 64, "top_k": 2, "ffn": 512}}
    training = {"seq_len": 64, "global_batch_size": 2 * layout["dp"]}
    keys = {"model": model, "training": training, "parallelism": layout, "cluster": cluster}
    found = [w for w in parse_scenario(keys).warnings if w.startswith("cluster.nvlink_domain")]
    assert said in "".join(found)
    assert len(found) == bool(said)


@pytest.mark.parametrize(("gpus", "said"), [(2, True), (8, False), (16, False)])
def test_nvlink_within_a_part_of_a_node_is_not_simulated(gpus: int, said: bool) -> None:
    data = {**small(parallelism={"dp": 8}), "cluster": {"preset": "dgx-h100", "nvlink_domain": gpus}}
    warnings = parse_scenario(data).warnings
    assert any(text.startswith("cluster.nvlink_domain: 2 is simulated as 8") for text in warnings) is said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"inter_node": {"kind": "torus", "oversubscription": 2}},
            ["cluster.inter_node.oversubscription: of no effect with kind torus, which has no leaf switches"],
        ),
        ({"inter_node": {"oversubscription": 2}}, []),
    ],
)
def test_keys_of_links_that_are_not_there_are_named(changes: dict[str, Any], said: list[str]) -> None:
    data = {**small(parallelism={"dp": 16}), "cluster": {"preset": "dgx-h100", **changes}}
    assert [text for text in parse_scenario(data).warnings if "of no effect" in text] == said


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (
            {"preset": "dgx-h100", "gpu": {"nvlink": False}},
            "nvswitch is simulated, although GPU h100-sxm has no NVLink",
        ),
        ({"preset": "dgx-h100", "gpu": {"nvlink": False}, "intra_node": {"kind": "pcie"}}, ""),
        (
            {"gpu": "l40s", "intra_node": {"kind": "full_mesh"}},
            "full_mesh is simulated, although GPU l40s has no NVLink",
        ),
        ({"gpu": "l40s"}, ""),
    ],
)
def test_nvlink_between_gpus_without_it_is_told_by_the_key_that_says_so(cluster: dict[str, Any], said: str) -> None:
    """The second user wrote nothing of `gpu.nvlink`: its preset did."""
    data = {**small(parallelism={"dp": 16}), "cluster": cluster}
    told = [text for text in parse_scenario(data).warnings if "NVLink" in text]
    assert [text.startswith(f"cluster.intra_node.kind: {said}") for text in told] == ([True] if said else [])


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ({"efficiency": 0.5}, ["efficiency"]),
        ({"efficiency": 0.5, "nvls_efficiency": 0.0}, ["efficiency", "nvls_efficiency"]),
        ({"efficiency": 0.5, "bandwidth_bytes_per_s": 300e9}, []),
        ({"kind": "nvswitch", "bandwidth_bytes_per_s": 450e9}, []),  # not written: a cautious default
    ],
)
def test_efficiencies_that_measured_collectives_do_not_read_are_named(links: dict[str, Any], said: list[str]) -> None:
    """Between nodes the closed forms read them."""
    base = {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 2, "intra_node": {"kind": "nvswitch"} | links}
    changed = base if "kind" in links else {"preset": "dgx-h100", "nodes": 2, "intra_node": links}
    outcome = simulate(parse_scenario(small(cluster=changed, parallelism={"tp": 4}))).outcome
    start = "cluster.intra_node."
    assert [w.split(":")[0].removeprefix(start) for w in outcome.warnings if w.startswith(start)] == said
    if said:
        plain = simulate(
            parse_scenario(small(cluster={"preset": "dgx-h100", "nodes": 2}, parallelism={"tp": 4}))
        ).outcome
        assert outcome.step_time_s == plain.step_time_s


def test_switches_that_are_not_there_reduce_nothing() -> None:
    warnings = parse_scenario(small(cluster={"preset": "cpu-host", "intra_node": {"nvls_efficiency": 0.5}})).warnings
    assert any(w.startswith("cluster.intra_node.nvls_efficiency: of no effect with kind pcie") for w in warnings)


NICS = "8 NICs of 400 Gbit/s a node, as DGX H100s have, are simulated"


@pytest.mark.parametrize(
    ("cluster", "dp", "said"),
    [
        ({"gpu": "rtx4090"}, 16, NICS),
        ({"gpu": "rtx4090"}, 8, ""),  # one node
        ({"gpu": "rtx4090", "inter_node": {"nics_per_node": 1}}, 16, NICS.replace("8 NICs", "1 NIC")),
        ({"gpu": "rtx4090", "inter_node": {"nic_bandwidth_bytes_per_s": "100GbE"}}, 16, ""),
        ({"preset": "dgx-a100"}, 16, ""),  # which says its own
        ({"gpu": "tpu-v5p"}, 16, ""),  # a machine by itself
    ],
)
def test_a_network_that_nobody_described_is_told(cluster: dict[str, Any], dp: int, said: str) -> None:
    told = parse_scenario({**small(parallelism={"dp": dp}), "cluster": cluster}).warnings
    found = [text for text in told if text.startswith("cluster.inter_node.nic_bandwidth_bytes_per_s: not given")]
    assert [text.endswith(said) for text in found] == ([True] if said else [])
