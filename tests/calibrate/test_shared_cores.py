"""What ranks that share cores take, measured for real: a few keys, no claim about seconds."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from calibrate import shared_cores  # noqa: E402
from calibrate.records import Collective, Constant, to_json  # noqa: E402
from calibrate.timings.timing import Bench  # noqa: E402


def test_a_gpu_and_a_large_cpu_have_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_cores.keys(Bench("cuda", True, 0.1)) == []
    monkeypatch.setattr(shared_cores, "available_cores", lambda: 64)
    assert shared_cores.keys(Bench("cpu", True, 0.1)) == []
    monkeypatch.setattr(shared_cores, "available_cores", lambda: 2)
    assert len(shared_cores.keys(Bench("cpu", True, 0.1))) == 1 + 5 * 2 * 3


def test_a_slowdown_below_1_is_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [to_json(Constant("core_sharing_slowdown", x, "by hand")) for x in (0.9, 1.2)]
    lines = [json.dumps([shared_cores.COMPUTE, [row]]) for row in rows]
    monkeypatch.setattr(shared_cores, "stream_ranks", lambda *_: iter(lines))
    found = [records[0] for _, records in shared_cores.measure(Bench("cpu", True, 0.1), [shared_cores.COMPUTE])]
    assert [x.value for x in found if isinstance(x, Constant)] == [1.0, 1.2]
    assert capsys.readouterr().err.count("warning: core_sharing_slowdown: measured 0.90, set to 1") == 1


@pytest.mark.slow
def test_pairs_and_all_ranks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "available_cores", lambda: 2)
    wanted = ["sharing compute", "sharing send_recv 2 4096", "sharing all_reduce 4 65536"]
    found = dict(shared_cores.measure(Bench("cpu", True, 0.1), wanted))
    assert list(found) == wanted
    (slowdown,), (pair,), (every,) = (found[key] for key in wanted)
    assert isinstance(slowdown, Constant)
    assert 1.0 <= slowdown.value < 10
    assert isinstance(pair, Collective)
    assert pair[:3] == ("send_recv", 2, 4096.0)
    assert isinstance(every, Collective)
    assert every[:3] == ("all_reduce", 4, 65536.0)
    assert pair.ranks_per_core == every.ranks_per_core == 2.0
    assert min(pair.seconds, every.seconds) >= shared_cores.LEAST_S
