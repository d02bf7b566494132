"""Whatever is thrown at the loader, it is a scenario or an InputError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from tests.sim.cases import GOOD


def refusal(load: Callable[[], Scenario]) -> Scenario | str:
    """What was loaded, or the message of its InputError; any other exception goes through."""
    try:
        return load()
    except InputError as error:
        return str(error)


BASE: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1000},
    "training": {"seq_len": 128, "global_batch_size": 32},
    "parallelism": {},
    "cluster": {"preset": "dgx-h100"},
}
KEYS = {
    "model": [
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "mlp",
        "dropout",
        "positions",
        "max_positions",
        "mtp_layers",
        "moe",
        "mla",
        "preset",
    ],
    "training": ["seq_len", "global_batch_size", "micro_batch_size", "precision", "param_dtype", "recompute"],
    "parallelism": [
        "dp",
        "tp",
        "sp",
        "cp",
        "pp",
        "ep",
        "expert_tp",
        "zero",
        "shard_size",
        "schedule",
        "bucket_bytes",
        "virtual_stages",
        "layers_per_stage",
        "mtp_stage",
        "rank_order",
        "cp_method",
        "cp_split",
        "ep_overlap",
    ],
    "cluster": ["preset", "gpu", "nodes", "gpus_per_node", "nvlink_domain", "intra_node", "inter_node"],
    "faults": ["stragglers", "links", "failures"],
    "distillation": ["teacher", "mode", "teacher_parallelism"],
    "inference": ["requests", "kv_cache", "precision", "batching"],
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 16),
    st.just(10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["fp32", "fp8", "full", "zb_v", "dualpipe", "interleaved_1f1b", "gpt2", "h100-sxm", "9e9 GB"]),
)
TREES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["preset", "mode", "rank", "between", "experts", "top_k", "ffn", "trace"])
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
CHANGES = st.dictionaries(
    st.sampled_from(sorted(KEYS)), st.none() | TREES | st.dictionaries(st.text(max_size=6), TREES, max_size=2)
) | st.fixed_dictionaries(
    {},
    optional={s: st.fixed_dictionaries({}, optional=dict.fromkeys(keys, TREES)) for s, keys in KEYS.items()},
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(CHANGES)
@example({"cluster": {"<": []}})
@example({"model": {"<name>": 1}})
@example({"cluster": {"\n": []}})
def test_any_mapping_is_a_scenario_or_an_input_error(changes: dict[str, Any]) -> None:
    outcome = refusal(lambda: parse_scenario(merge(BASE, changes)))
    if isinstance(outcome, str):
        assert "\n" not in outcome
    else:
        dumped = outcome.model_dump(mode="json")
        assert parse_scenario(dumped).model_dump(mode="json") == dumped


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=60) | st.text(alphabet="ab:{}[]&*!?-|>'\"# \n\t,%@`1.", max_size=40).map(str.encode))
def test_any_file_is_an_input_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(raw)
    with pytest.raises(InputError):
        load_scenario(file)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=30) | st.tuples(st.text(max_size=12), st.text(max_size=20)).map("=".join))
def test_any_override_is_applied_or_refused(tmp_path_factory: pytest.TempPathFactory, option: str) -> None:
    file = tmp_path_factory.getbasetemp() / "good.yaml"
    file.write_text(GOOD)
    outcome = refusal(lambda: load_scenario(file, [option]))
    assert not isinstance(outcome, str) or "\n" not in outcome
