"""`sim.run --explain`: every key in words, with all of its values."""

from __future__ import annotations

import re

import pytest

from sim.core.errors import InputError
from sim.inputs.explain import all_keys, explain


def test_every_key_of_the_schema_is_explained() -> None:
    keys = all_keys()
    assert len(keys) > 150
    assert {"parallelism.zero", "training.recompute.every", "cluster.inter_node.kind", "model.moe.top_k"} <= set(keys)
    for key in keys:
        text = explain(key)
        assert text.startswith(f"{key}: ")
        assert "\n  default: " in text
        assert "anything" not in text.splitlines()[0], text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("parallelism.zero", ["0 | 1 | 2 | 3", "default: 0", "FSDP"]),
        ("training.seq_len", ["whole number (at least 1, at most 100,000,000)", "default: required"]),
        ("training.recompute", ["none | selective | selective_op | full | mapping", "training.recompute.every:"]),
        ("faults.failures", ["checkpoint_interval_s: number", "(default: 1800)", "(default: 180,000,000)"]),
        ("parallelism.bucket_bytes", ["default: 25MiB"]),
        ("faults", ["faults.stragglers: list of mapping"]),
        ("faults.stragglers", ["faults.stragglers.rank: whole number (at least 0, at most 10,000,000)"]),
        ("processes.link_flap.down_s", ["at most 1,000,000,000", "default: required"]),
        ("", ["scenario: mapping", "model: text | mapping (default: required)"]),
    ],
)
def test_explanations(key: str, words: list[str]) -> None:
    text = explain(key)
    assert all(w in text for w in words), text


# The page says for these in words which of a key's values there are.
IN_WORDS = {"training.param_dtype", "parallelism.ep_dispatch_dtype", "inference.kv_cache.dtype", "model.moe.activation"}


def test_a_note_that_names_values_names_all() -> None:
    within = ("distillation.teacher.", "inference.speculative.draft.", "rl.reward.model.")  # models have their own rows
    for key in {key for key in all_keys() if not key.startswith(within)} - IN_WORDS:
        first, note, *_ = explain(key).splitlines()
        values = [value for value in first.partition(": ")[2].split(" | ") if re.fullmatch(r"[a-z][\w.-]*", value)]
        named = [v for v in values if re.search(rf"(?<![\w.-]){re.escape(v)}(?![\w-]|\.\d)", note)]
        left_out = set(values) - set(named) - {"mapping", "text", "true", "false"}
        assert len(named) < 2 or not left_out, (key, left_out)
        assert "](" not in note, key


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(InputError, match=r"parallelism has no key 'zeroo'; did you mean 'zero'\?"):
        explain("parallelism.zeroo")
    with pytest.raises(InputError, match=r"parallelism\.zero has no key 'x'"):
        explain("parallelism.zero.x")


def test_a_key_of_several_sections_names_them() -> None:
    with pytest.raises(
        InputError, match=r"found 'precision'; must be one of training\.precision, inference\.precision"
    ):
        explain("precision")


def test_a_number_format_is_shown_once() -> None:
    assert explain("training.grad_dtype").startswith("training.grad_dtype: fp32 | bf16 | fp16\n")
