"""The Python of DTensor and FSDP2 on the machine that runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")


from calibrate.run import main
from sim.core.host_work import HOST_WORK, coefficient_of
from tests.processes import invoked


def test_every_kind_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    invoked(main, "--device", "cpu", "--quick", "--only", "python", "--out", str(out))
    stated = json.loads(out.read_text())["coefficients"]
    assert set(stated) == {coefficient_of(kind) for kind in HOST_WORK}
    assert all(0 <= c["value"] < 0.1 for c in stated.values())
    assert stated["host_fsdp2_group_s"]["value"] > stated["host_dtensor_operator_optimizer_s"]["value"] > 0
