"""The real serving engine on two ranks over gloo: the tokens of one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.real.ranks import on_ranks
from tests.real.test_serving import expected, model, prompts

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama", "quantized": False},
    "experts": {"model": "experts", "quantized": False},
    "gpt": {"model": "gpt", "quantized": False},
    "8 bits": {"model": "llama", "quantized": True},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks("serving_worker", CASES, tmp_path_factory.mktemp("serving"), 2)


@pytest.mark.parametrize("name", ["llama", "experts", "gpt"])
def test_two_ranks_serve_the_tokens_of_one(found: dict[str, Any], name: str) -> None:
    """Greedy tokens in fp64, with chunks of prompts and a full cache; both ranks schedule by one clock."""
    whole = model(name)
    (first, ends, held), (second, other_ends, other_held) = found[name]
    assert first == second == expected(whole, prompts(6, whole.config.vocab, seed=1))
    assert ends == other_ends
    assert held == other_held < sum(p.nbytes for layer in whole.blocks[1:-1] for p in layer.parameters())


def test_two_ranks_serve_eight_bit_weights(found: dict[str, Any]) -> None:
    """Scales of row-parallel matrices are each rank's own, so only the ranks must agree; weights shrink."""
    (first, ends, held), (second, other_ends, _) = found["8 bits"]
    assert first == second
    assert ends == other_ends
    assert held < found["llama"][0][2] / 4


def test_both_ranks_of_the_command_serve_the_changed_scenario(tmp_path: Path) -> None:
    out, file = tmp_path / "out.json", Path(__file__).parents[2] / "scenarios" / "serve_cpu.yaml"
    keys = {"parallelism.tp": 2, "inference.requests": "{prompt_len: 8, output_len: 4, count: 2}", "model.layers": 1}
    keys |= {"inference.max_running_requests": 2, "inference.max_batch_tokens": 16}
    changes = [text for key, value in keys.items() for text in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "calibrate.serving.measure", str(file), "--rounds", "1", "--out", str(out)]
    done = subprocess.run([*command, *changes], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["measured"]["iterations"] == found["simulated"]["iterations"] == 4
