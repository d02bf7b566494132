"""Real values beside fake tensors: which are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402

from calibrate.capture.values.known_values import KnownValues  # noqa: E402


@pytest.mark.parametrize(("device", "known"), [("cpu", True), ("meta", False)])
def test_numbers_of_a_range_are_known_unless_torch_makes_none(device: str, known: bool) -> None:
    """Transformers builds a model on `meta` before it loads weights: tensors have shapes there, and no numbers."""
    values = KnownValues(False)
    with FakeTensorMode(allow_non_fake_inputs=True), values:
        with torch.device(device):
            x = torch.arange(0, 4, 2, dtype=torch.float) / 4
        found = values.of(x)
    assert x.shape == (2,)
    assert (found is not None) is known
    assert found is None or found.tolist() == [0.0, 0.5]


ENDS: dict[str, Callable[[Any, Any], bool]] = {
    "all": lambda token, ended: bool((token == 3).all()),
    "noted": lambda token, ended: bool((ended | (token == 3)).all()),
    "in place": lambda token, ended: bool(ended.logical_or_(token == 3).all()),
    "left": lambda token, ended: not bool(((token != 3) & ~ended).all()),
    "of the first": lambda token, ended: bool(token[:1] == 3),
    "in a list": lambda token, ended: bool((~(ended | torch.isin(token, torch.tensor([3, 5])))).long().max() == 0),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_unknown_token_ends_no_text(case: str) -> None:
    """So a loop makes as many tokens as it may."""
    with FakeTensorMode(), KnownValues():
        ended = torch.zeros(4, dtype=torch.bool)
        tokens = [torch.multinomial(torch.rand(4, 8), 1)[:, 0] for _ in range(2)]
        assert [ENDS[case](token, ended) for token in tokens] == [False, False]


def test_whether_an_expert_has_a_token_stays_unknown() -> None:
    with FakeTensorMode(), KnownValues():
        chosen = torch.rand(4, 8).argmax(-1)
        with pytest.raises(DataDependentOutputException):
            bool((chosen == 3).any())
