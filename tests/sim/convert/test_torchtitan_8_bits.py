"""Converters to 8 bits in torchtitan's configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.emit import emit
from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted
from tests.sim.convert.launch_files import TITAN, TITAN_0_3


@pytest.mark.parametrize("dtype", [None, "bf16", "fp8"])
def test_whether_fsdp_gathers_8_bits_survives_torchtitan_s_file(tmp_path: Path, dtype: str | None) -> None:
    """Off where nothing is said (torchtitan's default); what is simulated in 8 bits says so."""
    said = "" if dtype == "bf16" else "[float8]\nenable_fsdp_float8_all_gather = true\n"
    data, _ = converted(
        tmp_path,
        "llama.toml",
        TITAN.replace("replicate_degree = 2", "replicate_degree = 1") + said,
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
    )
    assert data["parallelism"].get("param_gather_dtype") == ("bf16" if dtype == "bf16" else None)
    data["parallelism"]["param_gather_dtype"] = dtype
    text = emit(parse_scenario(data), "torchtitan")
    assert ("enable_fsdp_float8_all_gather = true" in text) == (dtype != "bf16")
    again, _ = converted(tmp_path, "again.toml", text, "--cluster", "dgx-h100", "--gpus", "16")
    assert again["parallelism"].get("param_gather_dtype") == ("bf16" if dtype == "bf16" else None)


@pytest.mark.parametrize(
    ("converters", "sections", "precision"),
    [
        ("[]", "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n", "bf16"),
        ('""', "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = false\n", "bf16"),
        ('"float8"', "[float8]\nenable_fsdp_float8_all_gather = true\n", "fp8"),
        ('["quantize.linear.float8"]', "[quantize.linear.float8]\nrecipe_name = 'rowwise'\n", "fp8"),
    ],
)
def test_model_converters_decide_about_torchtitan_s_precision(
    tmp_path: Path, converters: str, sections: str, precision: str
) -> None:
    """A section of a converter that is not on does nothing; a converter may be a text, as in torchtitan's own files."""
    text = TITAN.replace('["float8"]', converters) + sections
    text += "filter_fqns = ['output']\n"
    data, said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "16")
    assert data["training"]["precision"] == precision
    assert "# not" not in said
    assert ("# [float8] without effect, precision bf16: model.converters" in said) == (precision == "bf16")


@pytest.mark.parametrize(
    ("names", "ends", "note"),
    [
        ("['output']", (None, None), ""),
        ("[]", (None, None), "the output matrix is simulated in 16 bits"),
        ("['output', 'layers.0.', 'layers.31.']", (1, 1), ""),
        ("['output', 'layers.3']", (None, 2), "simulated in 8 bits all the same: layers.3"),  # 30 and 31, too
        ("['output', 'auto_filter_small_kn']", (None, None), "all the same: auto_filter_small_kn"),
        ("'output,layers'", (32, None), ""),
    ],
)
def test_layers_that_torchtitan_s_converter_leaves_out(
    tmp_path: Path, names: str, ends: tuple[int | None, int | None], note: str
) -> None:
    text = f"{TITAN}[quantize.linear.float8]\nfilter_fqns = {names}\n"
    data, said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "16")
    t = data["training"]
    assert (t.get("num_layers_at_start_in_bf16"), t.get("num_layers_at_end_in_bf16")) == ends
    assert note in said
    assert ("all the same" in said) == ("all the same" in note)


@pytest.mark.parametrize(
    ("flavor", "converters", "noted"),
    [
        ("30B-A3B", '["float8"]', True),
        ("30B-A3B", '["quantize.linear.float8", "quantize.grouped_mm.float8"]', False),
        ("8B", '["float8"]', False),
    ],
)
def test_experts_that_no_converter_of_linear_layers_reaches(
    tmp_path: Path, flavor: str, converters: str, noted: bool
) -> None:
    """components/quantization/float8.py: the modules of `Float8LinearConverter` are `nn.Linear`."""
    text = f'[model]\nname = "qwen3"\nflavor = "{flavor}"\nconverters = {converters}\n'
    _, said = converted(tmp_path, "q.toml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert ("experts: torchtitan leaves them in 16 bits" in said) == noted


def test_a_converter_of_experts_in_a_python_config(tmp_path: Path) -> None:
    given = "converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)]"
    moe = (
        TITAN_0_3.replace("models.llama3", "models.qwen3")
        .replace('"70B"', '"30B-A3B"')
        .replace("POLICY_ASYNC", "False")
    )
    moe = moe.replace("activation_checkpoint=POLICY", "activation_checkpoint=FullAC.Config()")
    options = ("--cluster", "dgx-b200", "--gpus", "8")
    for more, noted in (("", True), (", MXFP8GroupedMMConverter.Config()", False)):
        text = moe.replace(given, given.replace("]", f"{more}]"))
        _, said = converted(tmp_path, "q.py", text, *options)
        assert ("experts: torchtitan leaves them in 16 bits" in said) == noted


@pytest.mark.parametrize(
    ("converters", "recipe", "noted"),
    [
        ("[Float8LinearConverter.Config()]", "rowwise", False),
        ("[Float8LinearConverter.Config(recipe_name='rowwise_with_gw_hp')]", "rowwise", True),
        ("ModelConvertersContainer.Config(converters=[Float8LinearConverter.Config()])", None, False),
    ],
)
def test_the_recipe_of_a_python_config(tmp_path: Path, converters: str, recipe: str | None, noted: bool) -> None:
    """components/quantization/float8.py of 0.3.0: `recipe_name` is rowwise; tensorwise went with pull request 3127."""
    given = "converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)]"
    text = TITAN_0_3.replace(given, f"converters={converters}").replace("POLICY_ASYNC", "False")
    text = text.replace("activation_checkpoint=POLICY", "activation_checkpoint=FullAC.Config()")
    data, said = converted(tmp_path, "c.py", text, "--cluster", "dgx-b200")
    assert (data["training"]["precision"], data["training"].get("fp8_recipe")) == ("fp8", recipe)
    assert ("weight gradients' matmuls, in 16 bits there, are simulated in 8" in said) is noted
    parse_scenario(data)
    assert "[float8]" not in converted(tmp_path, "m.py", text.replace(converters, "[]"), "--cluster", "dgx-b200")[1]
