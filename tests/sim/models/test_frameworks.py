"""Framework records: one more is a framework, and the key's former name is still read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.inputs.explain import explain
from sim.inputs.overrides import merge
from sim.inputs.scenario import json_schema, load_scenario, parse_scenario
from sim.prices.profiles import load_profile
from sim.simulation import simulate
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.records import FRAMEWORKS, framework_at
from tests.record_tables import former_table, framework_table
from tests.sim.cases import scenario_with


def scenario(**training: Any) -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": "dgx-a100",
        "parallelism": {"tp": 2, "sp": True, "zero": 1, "dp": 4},
        "training": {"seq_len": 2048, "global_batch_size": 8, **training},
    }


def step(**training: Any) -> tuple[float, float]:
    found = simulate(parse_scenario(scenario(**training))).result
    return found["step_time_s"], found["peak_memory_bytes"]


def test_a_framework_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two that are known it shares what it does with either: here Megatron's kernels, torch's gradients."""
    mixed = replace(FRAMEWORKS["megatron"], name="mixed", accumulates_in_matmul=False, keeps_empty_gradients=False)
    with pytest.raises(InputError, match=r"found 'mixed'; must be 'eager', 'megatron', .* or 'nanotron'"):
        parse_scenario(scenario(framework="mixed"))
    monkeypatch.setitem(FRAMEWORKS, "mixed", mixed)
    assert json_schema()["$defs"]["Training"]["properties"]["framework"]["anyOf"][0]["enum"][-1] == "mixed"
    eager, found, megatron = (step(framework=name) for name in ("eager", "mixed", "megatron"))
    assert megatron[0] < found[0] < eager[0]  # a kernel more for each weight gradient; its other chains are fused
    assert parse_scenario(scenario(framework="mixed")).model_dump(mode="json")["training"]["framework"] == "mixed"


def test_a_record_of_plain_torch_alone_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRAMEWORKS, "plain", Framework("plain"))
    assert step(framework="plain") == step(framework="eager") != step(framework="compiled")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_former_name_of_the_key_is_read(name: str) -> None:
    old, new = (parse_scenario(scenario(**{key: name})) for key in ("elementwise", "framework"))
    assert old == new
    assert "elementwise" not in old.model_dump()["training"]
    assert parse_scenario(scenario(elementwise=name, framework=name)) == new


def written(folder: Path, **keys: str) -> Path:
    file = folder / "scenario.yaml"
    lines = [f"  {key}: {value}\n" for key, value in ({"seq_len": 128, "global_batch_size": 8} | keys).items()]
    file.write_text("model: gpt2-124m\ncluster: dgx-h100\ntraining:\n" + "".join(lines))
    return file


def test_both_names_must_agree(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_scenario(written(tmp_path, framework="eager", elementwise="compiled"))
    said = "training.elementwise: found 'compiled', but training.framework, its present name, is 'eager' in line 6"
    assert f":7: {said}; give one of the two" in str(caught.value)


@pytest.mark.parametrize("key", ["elementwise", "framework"])
@pytest.mark.parametrize("option", ["elementwise", "framework"])
def test_options_replace_the_key_by_either_name(tmp_path: Path, key: str, option: str) -> None:
    file = written(tmp_path, **{key: "eager"})
    for value in ("megatron", "compiled"):
        found = load_scenario(file, [f"training.{option}={value}"]).training
        assert found is not None
        assert found.framework == value
    with pytest.raises(InputError, match=f"--set training.{option}: .*must be 'eager', 'megatron', .* or 'nanotron'"):
        load_scenario(file, [f"training.{option}=fast"])
    merged = merge({"training": {key: "eager"}}, {"training": {option: "megatron"}})
    assert merged == {"training": {"framework": "megatron"}}


def test_a_wrong_value_is_told_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scenario.yaml:6: .*found 'egaer'; .*did you mean 'eager'"):
        load_scenario(written(tmp_path, elementwise="egaer"))


def test_a_framework_fills_in_what_its_recipes_set_and_what_is_said_stands() -> None:
    def gradients_and_loss(**training: object) -> tuple[str, str, str]:
        step = {"seq_len": 1024, "global_batch_size": 1, **training}
        t = parse_scenario({"model": "llama3.2-1b", "training": step, "cluster": "dgx-h100"}).for_training
        return t.grad_dtype, t.grad_reduce_dtype, t.cross_entropy

    plain = ("fp32", "fp32", "unfused")
    assert gradients_and_loss() == gradients_and_loss(framework="megatron") == plain
    assert gradients_and_loss(framework="megatron_bridge", grad_dtype=None) == ("bf16", "bf16", "fused")
    said = {"grad_dtype": "fp32", "cross_entropy": "unfused", "framework": "megatron_bridge"}
    assert gradients_and_loss(**said) == plain


def test_metas_trainer_adds_up_a_row_of_micro_batches_before_it_reduces() -> None:
    def in_a_row(framework: str, **layout: object) -> bool | None:
        return scenario_with(
            {"seq_len": 1024, "global_batch_size": 8, "framework": framework},
            {"dp": 2, "zero": 2, **layout},
            model="llama3.2-1b",
        ).parallelism.accumulate_in_a_row

    assert in_a_row("meta_llama3")
    assert not in_a_row("eager")
    assert not in_a_row("meta_llama3", accumulate_in_a_row=False)
    assert in_a_row("eager", accumulate_in_a_row=True)


def test_explain_says_that_it_is_the_former_name() -> None:
    assert "former name of framework" in explain("training.elementwise")
    assert (
        "eager | megatron | megatron_bridge | nemo | compiled | compiled_real_rope | transformers_compiled"
        in explain("training.framework")
    )


def test_the_page_shows_the_records() -> None:
    """Written anew by `python -m tests.record_tables`."""
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text(encoding="utf-8")
    assert framework_table() in page
    assert former_table() in page


def test_llm_foundry_of_2023_ran_flash_attention_in_triton() -> None:
    """It reads tokens where they lie (nothing is packed), and is slower than FlashAttention-2 above all backward."""
    then, now = framework_at("composer", "2023-08"), framework_at("composer", None)
    assert (then.attention_kernel, then.attention_copies.tensors) == ("triton_2022", 0)
    assert (now.attention_kernel, now.attention_copies.tensors) == ("flash2", 4)
    speeds = load_profile("h100-sxm").coefficients.attention
    triton, second = speeds["triton_2022"], speeds["flash2"]
    assert triton.efficiency_128 is not None
    assert second.efficiency_128 is not None
    forward = second.efficiency_128 / triton.efficiency_128
    # Dao 2023, section 4.1: 1.3 to 1.5 times forward, around 2 backward; both on an A100, and with other shapes
    assert 1.2 < forward < 1.7
    assert 1.7 < forward * second.backward_share / triton.backward_share < 2.7


@pytest.mark.parametrize(("framework", "modules"), [("transformers", 0), ("deepspeed", 0), ("megatron", 1)])
def test_transformers_trains_no_prediction_layers(framework: str, modules: int) -> None:
    given = scenario(framework=framework) | {"model": "deepseek-v3", "parallelism": {"dp": 64, "ep": 8, "zero": 3}}
    given["training"]["global_batch_size"] = 64
    found = parse_scenario(given)
    assert found.model.mtp_layers == modules
    assert any("model.mtp_layers" in note for note in found.warnings) is not bool(modules)
    explicit = parse_scenario({**given, "model": {"preset": "deepseek-v3", "mtp_layers": 0}})
    assert not any("model.mtp_layers" in note for note in explicit.warnings)
