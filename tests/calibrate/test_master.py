"""AdamW on fp32 copies of 16-bit parameters."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calibrate.parallel import master  # noqa: E402


def test_it_is_adamw_in_fp32_rounded_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master, "CHUNK", 100)  # three chunks
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=draw).bfloat16() for n in (60, 30, 90, 200)]
    low = [torch.nn.Parameter(x.clone()) for x in start]
    wide = [torch.nn.Parameter(x.float()) for x in start]
    ours, theirs = master.MasterAdamW(low, lr=1e-3), torch.optim.AdamW(wide, lr=1e-3)
    assert len(ours.chunks) == 3
    for _ in range(20):
        for p, w in zip(low, wide, strict=True):
            p.grad = torch.randn(p.shape, generator=draw).bfloat16()
            w.grad = p.grad.float()
        ours.step()
        theirs.step()
    for p, w in zip(low, wide, strict=True):
        assert torch.equal(p, w.bfloat16())
        assert torch.allclose(ours.state[p]["master"], w, atol=1e-6)
        assert set(ours.state[p]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert not any(torch.equal(p, x) for p, x in zip(low, start, strict=True)), "steps of 1e-3 add up in fp32"
