"""The JSON schema of scenarios: every key with its default, and its place on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sim.inputs.scenario import Scenario, json_schema


def test_schema_has_every_key_and_its_default() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Scenario.__struct_fields__) - {"warnings", "source"}
    training = schema["$defs"]["Training"]
    assert training["required"] == ["seq_len", "global_batch_size"]
    defaults = {key: value.get("default") for key, value in training["properties"].items()}
    assert defaults["recompute"] == "none"
    assert (defaults["precision"], defaults["param_dtype"], defaults["grad_dtype"]) == ("bf16", None, "fp32")
    assert (defaults["framework"], defaults["cross_entropy"]) == ("eager", "unfused")
    parallelism = schema["$defs"]["Parallelism"]["properties"]
    assert parallelism["bucket_bytes"]["default"] == "25MiB"
    assert parallelism["virtual_stages"]["default"] is parallelism["layers_per_stage"]["default"] is None
    assert schema["$defs"]["ModelConfig"]["required"] == ["layers", "hidden", "heads", "vocab"]
    assert "preset" in schema["$defs"]["Cluster"]["anyOf"][2]["properties"]


def test_schema_references_resolve() -> None:
    schema = json_schema()

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [r for item in value.values() for r in references(item)]
        return [r for item in value for r in references(item)] if isinstance(value, list) else []

    assert {r.removeprefix("#/$defs/") for r in references(schema)} <= set(schema["$defs"])


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scenario.md").read_text()
    keys = {key for d in json_schema()["$defs"].values() for key in d.get("properties", {})}
    assert sorted(key for key in keys | set(json_schema()["properties"]) if not re.search(rf"\b{key}\b", page)) == []
