"""Files that cannot be read as a scenario: one message with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from tests.sim.cases import GOOD
from tests.sim.inputs.test_scenario_errors import message

FILES: list[tuple[str | bytes, str]] = [
    ("", "good.yaml: is empty"),
    ("# only a comment\n", "is empty"),
    ("- 1\n", "good.yaml:1: found a list of 1; a scenario is a mapping"),
    ("word", "found 'word'; a scenario is a mapping"),
    ("vllm serve Qwen/Qwen3-8B", "a scenario is a mapping; `stepsim convert FILE --cluster NAME` makes a scenario"),
    (
        "base_model: x\nadapter: lora\nlora_r: 8\n",
        "good.yaml: has base_model, adapter, lora_r and so on, and no key of",
    ),
    ("base_model: x\nadapter: lora\n", "good.yaml:1: base_model: unknown key; did you mean 'model'?"),  # mistyped
    ("model: x\nadapter: lora\nlora_r: 8\n", "good.yaml:2: adapter: unknown key"),
    ('{"architectures": ["LlamaForCausalLM"]}', "good.yaml: is a model's config.json; a scenario is wanted"),
    ('{"model_type": "llama", "vocab_size": 8}', "(a scenario names it: `stepsim run SCENARIO --set model=FILE`)"),
    ("a: [1\nb: 2\n", "good.yaml:2: is not valid YAML"),
    ("a: b: c\n", "good.yaml:1: is not valid YAML"),
    ("\ta: 1\n", "good.yaml:1: is not valid YAML"),
    ("a: 'open\n", "is not valid YAML"),
    ("a: 1\nb: \x01\n", "good.yaml:2: is not valid YAML: control characters are not allowed"),
    (b"a: 1\nb: \xff\n", "good.yaml:2: is not UTF-8 text (byte 0xff)"),
    (GOOD.encode("utf-16"), "is not UTF-8 text"),
    (GOOD + "name: twice\n", "good.yaml:9: name: is given twice (first in line 1)"),
    (GOOD.replace("  dp: 2", "  dp: 2\n  dp: 4"), "good.yaml:8: parallelism.dp: is given twice"),
    (GOOD.replace("dp: 2", "dp: 3"), "good.yaml:5: training.global_batch_size: found 32"),
    (GOOD.replace("dp: 2", "tq: 2"), "good.yaml:7: parallelism.tq: unknown key; did you mean 'tp'?"),
    (GOOD.replace("dp: 2", "tp: 3"), "good.yaml:7: parallelism.tp: found 3"),
    (
        GOOD.replace("seq_len", "seq_length"),
        "good.yaml:4: training.seq_length: unknown key; here it is training.seq_len",
    ),
    (GOOD.replace("  seq_len: 128\n", ""), "good.yaml:3: training.seq_len: is required and missing"),
    (GOOD.replace("layers: 8", "layers: 8.5"), "good.yaml:2: model.layers: found 8.5; must be an integer"),
    (GOOD.replace("2\n", "2\n---\na: 1\n", 1), "good.yaml:"),
    (GOOD + "---\na: 1\n", "holds more than one YAML document"),
    ("a: &x [1]\nb: *x\n", "good.yaml:1: anchors and aliases"),
    ("b: *x\n", "anchors and aliases"),
    ("a: &a [b]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "anchors and aliases"),
    ("<<: {a: 1}\n", "<<: unknown key"),
    (
        "a: !!python/object/apply:os.system ['true']\n",
        "the tag !!python/object/apply:os.system is not allowed",
    ),
    ("a: !custom 3\n", "the tag !custom is not allowed"),
    ("? [1, 2]\n: 3\n", "a key must be a plain word"),
    ("1: 2\n", "good.yaml:1: 1: unknown key"),
    ("a: " + "[" * 40 + "]" * 40, "nested more than 32 levels deep"),
    ("[" * 200_000, "nested more than 32 levels deep"),
    ("{a: " * 100_000, "nested more than 32 levels deep"),
    ("# " + "x" * 1_000_001, "is larger than 1000000 bytes"),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_unreadable_files(tmp_path: Path, text: str | bytes, expected: str) -> None:
    file = tmp_path / "good.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert expected in message(file)


def test_file_is_missing_or_a_directory(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "good.yaml")
    (tmp_path / "good.yaml").mkdir()
    assert "good.yaml: is a directory" in message(tmp_path / "good.yaml")
    with pytest.raises(InputError):
        load_scenario("nul\0byte.yaml")
    with pytest.raises(InputError):
        load_scenario("x" * 5000)
