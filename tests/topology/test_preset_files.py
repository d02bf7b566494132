"""Files of GPUs and machines: every figure has a document, and what is wrong in one is said with file and key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sim.commands.command import bad_input_exits
from topology.errors import PresetError
from topology.node_parts import gpu_by_name
from topology.preset_files import read_gpu, read_machine
from topology.presets import CLUSTER_SOURCES, CLUSTERS, GPU_SOURCES, GPUS, Shipped, gpu_capabilities, gpu_products

ROOT = Path(__file__).parents[2]
NO_DATA = {".py", ".pyi", ".c", ".h", ".so", ".md"}
GPU: dict[str, Any] = {
    "name": "x900",
    "memory_bytes": 64e9,
    "memory_bandwidth_bytes_per_s": 3e12,
    "peak_flops_per_s": {"bf16": 5e14},
    "source": "a sheet",
    "sources": {"a sheet": ["memory_bytes", "memory_bandwidth_bytes_per_s"], "a blog": ["peak_flops_per_s"]},
}
MACHINE: dict[str, Any] = {
    "name": "x900-node",
    "gpu": "h100-sxm",
    "intra_node": {"kind": "nvswitch", "bandwidth_bytes_per_s": 1e11},
    "sources": {"a sheet": ["intra_node.bandwidth_bytes_per_s"]},
}


def write(folder: Path, data: dict[str, Any], **changes: Any) -> Path:
    path = folder / f"{data['name']}.json"
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_a_file_is_a_gpu_and_another_a_machine(tmp_path: Path) -> None:
    found = read_gpu(write(tmp_path, GPU, product="X900"))
    assert (found.gpu.memory_bytes, found.gpu.source, found.product) == (64e9, "a sheet", "X900")
    assert found.sources["peak_flops_per_s"] == "a blog"
    machine, sources = read_machine(write(tmp_path, MACHINE), GPUS)
    assert machine.intra_node.efficiency == CLUSTERS["dgx-h100"].intra_node.efficiency  # NCCL's, for the architecture
    assert sources == {"intra_node.bandwidth_bytes_per_s": "a sheet"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"power_limit_w": 300}, "power_limit_w: has no document"),
        ({"sources": {**GPU["sources"], "more": ["sm_count"]}}, "'sm_count' must be a figure of the file"),
        ({"sources": {**GPU["sources"], "more": ["memory_bytes"]}}, "of one document only"),
        ({"sources": {"a sheet": "all"}}, "mapping from documents to lists"),
        ({"name": "other"}, "must be the file's own name, 'x900'"),
        ({"memory_bytes": -1.0}, "memory_bytes: Input should be greater than 0"),
        ({"colour": "red", "sources": {**GPU["sources"], "more": ["colour"]}}, "colour: Extra inputs"),
        ({"cuda_capability": "9.0"}, "cuda_capability an integer"),
        ({"peak_flops_per_s": {"bf16": -5}}, r"peak_flops_per_s\.bf16: Input should be greater than 0"),
        ({"peak_flops_per_s": {"bf17": 1}}, r"peak_flops_per_s: .*unknown dtype 'bf17' \(allowed: fp32, bf16"),
    ],
)
def test_what_is_wrong_in_a_gpus_file(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"x900\.json: .*{said}"):
        read_gpu(write(tmp_path, GPU, **changes))


def test_what_is_wrong_in_a_machines_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x900-node\.json: gpu: found 'x1'; allowed: "):
        read_machine(write(tmp_path, MACHINE, gpu="x1"), GPUS)
    with pytest.raises(ValueError, match=r"intra_node\.bandwidth_bytes_per_s: has no document"):
        read_machine(write(tmp_path, MACHINE, sources={}), GPUS)
    with pytest.raises(PresetError, match=r"x900-node\.json: gpu: found \['h100-sxm'\]"):
        read_machine(write(tmp_path, MACHINE, gpu=["h100-sxm"]), GPUS)
    with pytest.raises(PresetError, match=r"x900-node\.json: intra_node: found 'nvswitch'; must be a mapping"):
        read_machine(write(tmp_path, MACHINE, intra_node="nvswitch", sources={"a sheet": ["intra_node"]}), GPUS)
    with pytest.raises(PresetError, match=r"intra_node\.efficiency: is required with a trainium2 and kind nvswitch"):
        read_machine(write(tmp_path, MACHINE, gpu="trainium2"), GPUS)
    path = tmp_path / "torn.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"torn\.json"):
        read_gpu(path)


def test_a_wrong_file_ends_a_command_with_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, GPU, memory_bytes=-1.0)
    with pytest.raises(SystemExit) as ended, bad_input_exits():
        read_gpu(path)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: memory_bytes: ")


def test_a_file_is_read_when_its_record_is_asked_for_and_once(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").touch()
    read: list[str] = []

    def record(path: Path) -> str:
        read.append(path.stem)
        return path.stem.upper()

    records = Shipped(str(tmp_path), record)
    assert (list(records), len(records), "a" in records, "x" in records, read) == (["a", "b"], 2, True, False, [])
    assert (records["b"], records.get("b"), records.get("x"), read) == ("B", "B", None, ["b"])
    assert list(records.values()) == ["A", "B"]


def test_a_products_name_is_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_products(), "A10(", "a10")
    assert gpu_by_name("NVIDIA A10(") == "a10"


def test_every_shipped_figure_has_a_document_and_every_file_is_installed() -> None:
    for name, gpu in GPUS.items():
        needed = {"memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s", "power_limit_w"}
        needed |= {"host_bandwidth_bytes_per_s", "launch_overhead_s"}
        assert needed <= GPU_SOURCES[name].keys(), name
        assert gpu.source
    assert all(CLUSTER_SOURCES[name] for name in CLUSTERS)


@pytest.mark.parametrize(
    ("package", "folder"), [("topology", "topology"), ("sim", "sim"), ("sim.scenarios", "scenarios")]
)
def test_every_data_file_is_installed(package: str, folder: str) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    files = {path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in NO_DATA}
    installed = {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
    assert {path for path in files if "__pycache__" not in path.parts} <= installed


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro", None),
    ],
)
def test_a_product_is_known_by_the_longest_name_that_fits(product: str, name: str | None) -> None:
    assert gpu_by_name(product) == name


def test_each_cuda_capability_has_one_gpu_that_stands_for_it() -> None:
    assert [gpu_capabilities().get(c) for c in (70, 80, 90, 100, 103, 120, 61)] == [
        "v100",
        "a100-sxm",
        "h100-sxm",
        "b200-sxm",
        "b300-sxm",
        "rtx5090",
        None,
    ]
