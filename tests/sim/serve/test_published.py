"""Published static batches on A100, predicted with the shipped profile; nothing was fitted to them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import mean, median

import pytest

from sim.validation.predict import predict
from sim.validation.tables import read_table

TABLE = Path(__file__).parents[3] / "scenarios" / "published" / "trtllm_static_a100.json"


@cache
def errors(key: str) -> tuple[float, ...]:
    rows = [row for row in read_table(TABLE).rows if key in row.measured]
    return tuple(abs(predict(row)[0][key].value / row.measured[key] - 1) for row in rows)


def test_every_row_is_predicted_with_an_interval() -> None:
    for row in read_table(TABLE).rows:
        found = predict(row).found
        assert found.keys() == row.measured.keys()
        assert all(p.low < p.value < p.high for p in found.values())


def test_throughput() -> None:
    """Grouped-query rows are off for a known reason (docs/serving_checked.md): the median says more than the mean."""
    assert len(errors("output_tokens_per_s_per_gpu")) == 13
    assert mean(errors("output_tokens_per_s_per_gpu")) <= 0.10
    assert median(errors("output_tokens_per_s_per_gpu")) <= 0.06


def test_time_to_first_token() -> None:
    assert mean(errors("time_to_first_token_s")) <= 0.10


@pytest.mark.parametrize("model", ["GPTJ6B", "LLaMA7B"])
def test_models_with_as_many_key_heads_as_query_heads(model: str) -> None:
    rows = [row for row in read_table(TABLE).rows if model in row.id and "output_tokens_per_s_per_gpu" in row.measured]
    for row in rows:
        value = predict(row)[0]["output_tokens_per_s_per_gpu"].value
        assert value == pytest.approx(row.measured["output_tokens_per_s_per_gpu"], rel=0.12)
