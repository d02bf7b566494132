"""Rows of a table whose programs are captured: what they may say, and that each refusal names its row and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sim.core.errors import InputError

pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture.command import main
from calibrate.capture.table_row import options_of_row

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}
TRAINING = {"seq_len": 16, "global_batch_size": 1}


def row(program: Any = None, training: Any = None, **more: Any) -> dict[str, Any]:
    """Return a row; `more`: further keys of its program."""
    program = {"huggingface_config": CONFIG, **more} if program is None else program
    return {"program": program, "scenario": {"training": TRAINING if training is None else training}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (row("llama"), "program: found 'llama'; must be a mapping with huggingface_config"),
        (row({}), "program.huggingface_config: is missing; must be the content of a config.json"),
        (row({"huggingface_config": {"hidden_size": 64}}), "program.huggingface_config: found"),
        (row(training={}), "scenario.training.seq_len: is missing; must be a whole number, at least 1"),
        (row(weights="fp64"), "program.weights: found 'fp64'; must be fp32, bf16 or null"),
        (row(autocast="int8"), "program.autocast: found 'int8'; must be bf16, fp16 or null"),
        (row(lora_rank="16"), "program.lora_rank: found '16'; must be a whole number"),
        (row(optimizer="adafactor"), "program.optimizer: found 'adafactor'; must be null, AdamW, AdamW(fused=True)"),
        (row(optimizer="SGD(lr=0.1, momentum=0.9)"), "program.optimizer: found 'SGD(lr=0.1, momentum=0.9)'; must be"),
        (row(optimizer="AdamW8bit"), "program.optimizer: found 'AdamW8bit'; must be"),
        (row(optimizer="AdamW(foreach=False)"), "program.optimizer: found 'AdamW(foreach=False)'; must be"),
        (row(clip_grad_norm=-1), "program.clip_grad_norm: found '-1'; must be a number above 0 or null"),
        (row(torch_compile="yes"), "program.torch_compile: found 'yes'; must be true, false or null"),
    ],
)
def test_a_row_that_no_capture_can_use(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        options_of_row(wrong, "table.json: first")
    assert str(error.value).startswith(f"table.json: first: {said}")


def test_dtypes_are_read_in_torchs_spelling_and_other_keys_are_facts() -> None:
    config, options = options_of_row(row(weights="bfloat16", autocast="torch.float16", tf32=False), "table.json: first")
    assert (config, options.weights, options.autocast, options.seq_len) == (CONFIG, "bf16", "fp16", 16)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("torch.optim.AdamW(fused=True)", "adamw"),
        ("AdamW(lr=1e-4, betas=(0.9, 0.95), fused=True)", "adamw"),
        ("AdamW(foreach=True)", "adamw_foreach"),
        ("torch.optim.AdamW", "adamw_foreach"),
        ("adamw", "adamw"),
        (None, "adamw"),
        ("torch.optim.SGD(lr=0.1)", "sgd"),
    ],
)
def test_an_optimizer_is_read_with_its_arguments(text: str | None, option: str) -> None:
    assert options_of_row(row(optimizer=text), "table.json: first")[1].optimizer == option


def test_one_row_that_fails_is_named_and_the_others_are_captured(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")
    rows = [
        {"id": name, "group": "all", "measured": {"step_time_s": 1.0}, **row({"huggingface_config": config})}
        for name, config in (("first", CONFIG | {"model_type": "nothing"}), ("second", CONFIG))
    ]
    table = tmp_path / "table.json"
    source = {"citation": "made", "where": "here"}
    head = {"format": "measurements/1", "name": "t", "title": "t", "kind": "training_step", "source": source}
    table.write_text(json.dumps({**head, "scenario": {"model": "llama3-8b", "cluster": "dgx-h100"}, "rows": rows}))
    done = CliRunner().invoke(main, ["--table", str(table), "--out", str(tmp_path / "out")], standalone_mode=False)
    assert done.return_value == 1
    assert f"error: {table}: first: config.json: model_type: found 'nothing'" in done.output
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["second.json.gz"]
