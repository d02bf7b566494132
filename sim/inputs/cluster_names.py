"""Suggest a preset for a cluster's name that is not shipped, also for the names that clouds give to machines."""

from __future__ import annotations

import re

from sim.inputs.input_source import nearest
from topology.presets import CLUSTERS, GPUS

# Chips, and the beginnings of AWS's and Google Cloud's types of machines with them. Other clouds' types name the chip.
_TYPES = {
    "v100": ("p3", "p3dn"),
    "a100": ("p4d", "p4de", "a2"),
    "h100": ("a3-highgpu", "a3-megagpu"),
    "h200": ("p5e", "p5en", "a3-ultragpu"),
    "b200": ("a4",),
    "gb200": ("a4x",),
}
# Types whose nodes have fewer or slower NICs for their GPUs than the machine of NVIDIA's with the chip: how many, and
# Gbit/s of each (aws.amazon.com/ec2/instance-types, "Accelerated computing"; Google Cloud's documentation, "GPU machine
# types", whose first NIC serves the CPUs).
_NICS = {
    "p3dn": (1, 100),
    "p4d": (4, 100),
    "p4de": (4, 100),
    "a2": (1, 100),
    "a3-highgpu": (4, 200),
    "a3-megagpu": (8, 200),
}
_KINDS = {"dgx", "node", "torus", "host"}  # words of presets that say nothing about the chip


def no_such_cluster(name: str) -> str:
    """Say that no preset has this name, and which one to take.

    >>> no_such_cluster("dgx-h101")
    "no such cluster preset; did you mean 'dgx-h100'? (`stepsim clusters` lists them)"
    >>> for name in ("p5.48xlarge", "a3-highgpu-8g", "a3-ultragpu-8g", "ND H100 v5", "ND96isr_H100_v5"):
    ...     print(name, no_such_cluster(name).split("'")[1])
    p5.48xlarge p5-efa
    a3-highgpu-8g dgx-h100
    a3-ultragpu-8g dgx-h200
    ND H100 v5 dgx-h100
    ND96isr_H100_v5 dgx-h100
    >>> no_such_cluster("p4d.24xlarge").split(" (")[0].split(", with ")[1]
    'inter_node: {nics_per_node: 4, nic_bandwidth_bytes_per_s: 100Gbps}'
    >>> no_such_cluster("rtx4090")
    'is a GPU, not a cluster; write {gpu: rtx4090, gpus_per_node: 4} with the GPUs of a node'
    """
    if name in GPUS:
        return f"is a GPU, not a cluster; write {{gpu: {name}, gpus_per_node: 4}} with the GPUs of a node"
    words = re.split("[^a-z0-9]+", name.lower().strip())
    beginnings = words[0], "-".join(words[:2])
    for said in (set(words), {chip for begin in beginnings for chip, types in _TYPES.items() if begin in types}):
        shared = {preset: len(said & set(preset.split("-")) - _KINDS) for preset in CLUSTERS}
        if any(shared.values()):
            found = f"'{max(shared, key=shared.__getitem__)}'{_with_nics(beginnings)}"
            return f"no such cluster preset; the nearest is {found} (`stepsim clusters` shows what each one has)"
    return f"no such cluster preset{nearest(name, CLUSTERS)} (`stepsim clusters` lists them)"


def _with_nics(beginnings: tuple[str, ...]) -> str:
    """Return what to write of the NICs of a cloud's type of machine where it has others than the preset; else ""."""
    found = next((_NICS[begin] for begin in beginnings if begin in _NICS), None)
    if found is None:
        return ""
    return f", with inter_node: {{nics_per_node: {found[0]}, nic_bandwidth_bytes_per_s: {found[1]}Gbps}}"
