"""AIConfigurator's tables: what is read, what is left out and said, and what a profile of them prices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.imports import FORMATS
from calibrate.imports.__main__ import main
from calibrate.imports.measured import THIN, MeasuredTable, thinned
from sim.core.errors import InputError
from sim.core.program import Compute, Phase
from sim.prices.coefficients import PriceOptions
from sim.prices.kernel_file import TableName
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.table_prices import nearest_source
from tests.processes import invoked
from topology.presets import GPUS

pyarrow = pytest.importorskip("pyarrow")
ROWS, SIZES = (1, 4, 16, 64, 256, 1024), (1024, 2048, 4096)


def write(folder: Path, place: str, rows: list[dict[str, Any]]) -> Path:
    """A file of the package's layout below a GPU's folder."""
    import pyarrow.parquet

    path = folder / "h100_sxm" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def matmul_ms(m: int, n: int, k: int) -> float:
    return 4e-3 + 1e3 * max(2 * m * n * k / 6e14, 2 * n * k / 3e12)


def matmuls(dtype: str, slower: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "gemm_dtype": dtype,
            "kernel_source": "one",
            "m": str(m),
            "n": n,
            "k": k,
            "latency": slower * matmul_ms(m, n, k),
        }
        for m in ROWS
        for n in SIZES
        for k in SIZES
    ]


def test_a_measured_matmul_is_priced_as_measured_in_its_engine_alone(tmp_path: Path) -> None:
    write(tmp_path, "gemm/vllm/0.24.0/gemm_perf.parquet", matmuls("fp8_block"))
    write(tmp_path, "gemm/sglang/0.5.14/gemm_perf.parquet", matmuls("fp8_block", 1.5))
    out = tmp_path / "own.json"
    said = invoked(main, "aiconfigurator", str(tmp_path), "--out", str(out)).output
    assert "gemm:fp8_block in fp8 of vLLM 0.24.0" in said
    shape = (1, 16, 2048, 4096)
    op = Compute("x", "gemm", shape, "fp8", 2.0 * 16 * 2048 * 4096, 1.0, Phase.FORWARD, kernel="fp8_block")
    for engine, slower in (("vLLM 0.19", 1.0), ("vLLM 0.30", 1.0), ("SGLang 0.5.3", 1.5)):
        costs = Costs(load_profile(out), GPUS["h100-sxm"], PriceOptions(power=False, engine=engine))
        assert costs.compute(op).seconds == pytest.approx(slower * 1e-3 * matmul_ms(*shape[1:]), rel=1.5 * THIN)


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    write(tmp_path, "gemm/sglang/0.5.14/gemm_perf.parquet", matmuls("fp8_block"))
    write(tmp_path, "gemm/vllm/0.24.0/gemm_perf.parquet", matmuls("fp8_block", 5.0) + matmuls("int3"))
    write(tmp_path, "sparse_attention/vllm/0.24.0/dsa_context_module_perf.parquet", [{"latency": 1.0}])
    found = FORMATS["aiconfigurator"]([tmp_path], "h100-sxm")
    assert [table.name.source for table in found.tables] == ["SGLang 0.5.14"]
    said = "\n".join(found.skipped)
    for words in (
        "so its times have the host's work",
        "54 rows: gemm in int3",
        "dsa_context_module, for which there is no operator",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"gemm_dtype": "fp8", "m": 1, "n": 1, "latency": 1.0}] * 40, "has no column 'k'; it has gemm_dtype, m, n"),
        ([{"gemm_dtype": "fp8", "m": "x", "n": 1, "k": 1, "latency": 1.0}] * 40, "column 'm': could not convert"),
        ([{"m": 1, "n": 1, "k": 1, "latency": 1.0}] * 40, "has no column 'gemm_dtype'"),
    ],
)
def test_a_file_of_another_layout_is_refused(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    path = write(tmp_path, "gemm/vllm/0.24.0/gemm_perf.parquet", rows)
    with pytest.raises(InputError) as error:
        FORMATS["aiconfigurator"]([tmp_path], "")
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


def test_what_is_left_out_lies_on_the_line_of_what_stays() -> None:
    rng = np.random.default_rng(0)
    x = np.unique(rng.integers(1, 10**5, 200))
    shapes = np.array([[1, m, n, 64] for n in (64, 128) for m in x])
    seconds = 1e-6 * (3.0 + shapes[:, 1] ** 0.9 * shapes[:, 2] / 64) * np.exp(rng.normal(0, 0.01, len(shapes)))
    few = thinned(MeasuredTable(TableName("gemm", "bf16"), shapes, seconds), 1)
    assert len(few.seconds) < 0.5 * len(seconds)
    for n in (64, 128):
        own, kept = shapes[:, 2] == n, few.shapes[:, 2] == n
        line = np.interp(np.log(shapes[own, 1]), np.log(few.shapes[kept, 1]), np.log(few.seconds[kept]))
        assert np.abs(line - np.log(seconds[own])).max() <= THIN


def test_of_several_engines_the_nearest_release_counts() -> None:
    known = ["", "SGLang 0.5.9", "SGLang 0.5.14", "vLLM 0.19.0", "vLLM 0.24.0"]
    for engine, source in (
        ("vLLM 0.8", "vLLM 0.19.0"),
        ("vLLM 0.23.1", "vLLM 0.19.0"),
        ("vLLM 0.33", "vLLM 0.24.0"),
        ("SGLang 0.5.10", "SGLang 0.5.9"),
        ("TensorRT-LLM 1.2", ""),
        ("", ""),
    ):
        assert nearest_source(known, engine) == source
    assert nearest_source(known[1:], "bundled 0") == "vLLM 0.24.0"


def test_a_matmul_of_an_imported_profile_is_priced_without_the_cast_of_its_input(tmp_path: Path) -> None:
    """A served layer's cast is an operator of its own; the measured 8-bit matmul has it, the one in 16 bits none."""
    cast_ms = 5e-3
    narrow = [{**row, "latency": row["latency"] + cast_ms} for row in matmuls("fp8")]
    write(tmp_path, "gemm/vllm/0.24.0/gemm_perf.parquet", matmuls("bfloat16") + narrow)
    out = tmp_path / "own.json"
    invoked(main, "aiconfigurator", str(tmp_path), "--out", str(out))
    costs = Costs(load_profile(out), GPUS["h100-sxm"], PriceOptions(power=False, engine="vLLM 0.24"))
    op = Compute("x", "gemm", (1, 16, 4096, 4096), "fp8", 2.0 * 16 * 4096 * 4096, 1.0, Phase.FORWARD)
    assert costs.compute(op).seconds == pytest.approx(1e-3 * matmul_ms(16, 4096, 4096), rel=2 * THIN)
