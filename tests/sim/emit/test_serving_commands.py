"""What `--emit vllm|sglang|trtllm|dynamo` writes is read back by `stepsim convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.emit import SERVERS, emit
from sim.emit.serving import OUTSIDE
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.inputs.shipped import shipped_scenarios
from tests.sim.convert.converting import converted

SERVING = [name for name in shipped_scenarios() if name.startswith("serve_")]
EITHER = [(name, server) for name in SERVING for server in SERVERS]


def written(scenario: Scenario, server: str) -> str | None:
    try:
        return emit(scenario, server)
    except InputError:
        return None


def of_server(scenario: Scenario, skipped: tuple[str, ...]) -> dict[str, Any]:
    """What the flags of a server decide: `inference` without keys of its clients, and the layout."""
    kept: dict[str, Any] = {}

    def walk(data: dict[str, Any], before: str) -> None:
        for key, value in data.items():
            name = f"{before}{key}"
            if name in skipped:
                continue
            if isinstance(value, dict):
                walk(value, f"{name}.")
            else:
                kept[name] = value

    walk(scenario.for_serving.model_dump(mode="json"), "")
    return kept | scenario.parallelism.model_dump()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "server"), EITHER)
def test_the_engines_sections_are_read_back(tmp_path: Path, name: str, server: str) -> None:
    path = shipped_scenarios()[name]
    text = written(load_scenario(path), server)
    if text is None:
        return
    engine = [f"inference.engine={load_scenario(path).for_serving.engine}"]
    engine = [f"inference.engine={engine_of(text)}"] if "bundled" in engine[0] else engine
    # What is left out of a scenario of the bundled bound is the engine's own.
    before = load_scenario(path, engine)
    suffix = "yaml" if server == "dynamo" else "sh"
    given = ["--set", *engine] if server == "dynamo" else []
    data, _ = converted(tmp_path, f"x.{suffix}", text, "--cluster", before.cluster.name, *given)
    data |= {"cluster": before.model_dump()["cluster"], "calibration": before.calibration}
    if server == "dynamo" or before.source is None or "count" not in before.model_dump()["inference"]["requests"]:
        data["inference"]["requests"] = before.model_dump()["inference"]["requests"]
    after = parse_scenario(data)
    assert after.model == before.model
    assert of_server(after, OUTSIDE) == of_server(before, OUTSIDE)


def engine_of(text: str) -> str:
    """The engine whose defaults hold for what a scenario of the bundled bound leaves out."""
    line = next(line for line in text.splitlines() if "bundled" in line)
    return line.partition("is as ")[2].partition(" ")[0]


def test_each_engine_is_written_for_some_shipped_scenario() -> None:
    assert all(written(load_scenario("serve_llama8b"), server) for server in SERVERS)


def test_requests_come_back(tmp_path: Path) -> None:
    """Of each engine's own benchmark, whichever way it says a range of lengths."""
    asked = {"prompt_len": 1000, "output_len": 200, "range_ratio": 0.2, "count": 64, "max_concurrency": 8, "seed": 3}
    for server in ("vllm", "sglang", "trtllm"):
        scenario = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": asked}})
        data, _ = converted(tmp_path, "x.sh", emit(scenario, server), "--cluster", "dgx-h100")
        assert data["inference"]["requests"] == asked, server


@pytest.mark.parametrize(
    ("overrides", "server", "said"),
    [
        (["inference.kv_cache.layout=contiguous"], "vllm", "inference.kv_cache.layout: found contiguous"),
        (["inference.engine=sglang"], "vllm", "inference.engine: found sglang; --emit vllm starts vLLM"),
        (["inference.lora={}"], "trtllm", "inference.lora: found {"),
        ([], "tgi", "found 'tgi'; for serving must be one of vllm, sglang, trtllm, dynamo"),
        ([], "megatron", "training: is missing; --emit megatron writes flags for training only"),
    ],
)
def test_what_an_engine_cannot_say_is_refused(overrides: list[str], server: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        emit(load_scenario("serve_llama8b", overrides), server)
    assert said in str(error.value)
