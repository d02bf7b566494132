"""Which dimension operators go along, where an index or a loss names another than the first or the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.models.captured.operators import compute_of
from tests.calibrate.capture.test_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

TOKENS, CHOSEN, WIDTH = 64, 16, 8


def test_rows_are_chosen_behind_a_full_slice(tmp_path: Path) -> None:
    """Mixtral's loop over experts takes an expert's tokens so: `hidden[None, tokens]`."""

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(TOKENS, WIDTH)
        tokens = torch.randint(0, TOKENS, (CHOSEN,))

        def loss() -> Any:
            hidden = model(x)
            return hidden[None, tokens].sum() + hidden[tokens].sum() + hidden[:, tokens[:4] % WIDTH].sum()

        return model, loss

    found = [compute_of(o).rows_in_turn for o in launched(captured(tmp_path, make), "index_put", "backward")]
    assert sorted(found) == [CHOSEN / TOKENS, CHOSEN / TOKENS, 4 / WIDTH]


def test_messages_of_several_heads_are_whole_rows(tmp_path: Path) -> None:
    """A graph attention network (torch_geometric's GATConv) adds up [edges, heads, width] by node."""
    nodes, edges, heads = 32, 128, 4

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, heads * WIDTH), torch.randn(edges, WIDTH)
        ends = torch.randint(0, nodes, (edges,))

        def loss() -> Any:
            messages = model(x).view(edges, heads, WIDTH)
            places = ends.view(-1, 1, 1).expand_as(messages)
            return messages.new_zeros(nodes, heads, WIDTH).scatter_add_(0, places, messages).square().sum()

        return model, loss

    program = captured(tmp_path, make)
    (added,), (taken,) = launched(program, "scatter_add"), launched(program, "gather", "backward")
    assert compute_of(added).clocks == compute_of(taken).clocks == 0.0
