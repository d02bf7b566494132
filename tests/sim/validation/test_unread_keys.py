"""What nothing reads in a row of a table of measurements is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.commands.validate import validate_tables
from sim.validation.tables import read_table
from tests.processes import ROOT

LAYER = json.loads((ROOT / "scenarios" / "published" / "megatron_moe_layer_mixtral.json").read_text())
MATMUL: dict[str, Any] = {"format": "measurements/1", "name": "a", "kind": "kernel"}
MATMUL |= {"scenario": {"calibration": "h100-sxm"}, "source": {}}
ROW = {"id": "a", "op": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "measured": {"seconds": 1e-3}}


def named(tmp_path: Path, table: dict[str, Any]) -> list[str]:
    """The messages on keys of a table's rows that nothing reads."""
    (tmp_path / "t.json").write_text(json.dumps(table))
    (found,) = validate_tables([read_table(tmp_path / "t.json")], jobs=1)
    return [message.partition("reads: ")[2] for message in found.not_read]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, []),
        ({"note": "x", "published": {"seconds": 1}}, []),
        ({"num_streams": 2}, ["num_streams (1 row)"]),
        ({"split_k": 2, "sm_count": 99}, ["split_k (1 row), sm_count (1 row)"]),
    ],
)
def test_a_key_of_a_kernel_s_row_that_nothing_reads_is_named(
    tmp_path: Path, own: dict[str, Any], said: list[str]
) -> None:
    assert named(tmp_path, MATMUL | {"rows": [ROW | own]}) == said


def test_a_dispatcher_of_a_layer_s_rows_is_named_with_their_number(tmp_path: Path) -> None:
    (said,) = named(tmp_path, LAYER)
    rows = sum("dispatcher" in row["parallelism"] for row in LAYER["rows"])
    assert f"parallelism.dispatcher ({rows} rows)" in said
