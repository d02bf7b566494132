"""Variables that an engine reads, and formats of weights that its flags name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("VLLM_PP_LAYER_PARTITION", "vllm serve llama3-8b -pp 2"),
        ("SGLANG_PP_LAYER_PARTITION", "python3 -m sglang.launch_server --model-path llama3-8b --pp 2"),
    ],
)
def test_a_variable_says_the_layers_of_each_stage(tmp_path: Path, name: str, start: str) -> None:
    """`get_pp_indices` of both engines' distributed/utils.py, which refuse another number."""
    found, _ = converted(tmp_path, "s.sh", f'export {name}="12,20"\n{start}\n', "--cluster", "dgx-h100")
    assert found["parallelism"]["layers_per_stage"] == [12, 20]
    told = refused(tmp_path, "t.sh", f"export {name}=12,12,8\n{start}\n", "--cluster", "dgx-h100")
    assert "found 12,12,8; must be 2 whole numbers, one for each pipeline stage" in told


@pytest.mark.parametrize(("word", "format_"), [("w8a8_fp8", "fp8"), ("modelopt_fp8", "fp8"), ("w8a8_int8", "llm_int8")])
def test_weights_and_inputs_in_8_bits(tmp_path: Path, word: str, format_: str) -> None:
    text = f"python3 -m sglang.launch_server --model-path llama3-8b --quantization {word}\n"
    found, _ = converted(tmp_path, "s.sh", text, "--cluster", "dgx-h100")
    assert found["inference"]["quantization"] == format_


def test_a_variable_that_nothing_expresses_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    text = "export VLLM_ALL2ALL_BACKEND=pplx\nvllm serve deepseek-v2 -dp 4 -ep\n"
    _, said = converted(tmp_path, "s.sh", text, "--cluster", "dgx-h100")
    assert "# not expressed here: VLLM_ALL2ALL_BACKEND=pplx\n" in said


def test_experts_over_all_ranks_by_sglangs_former_flag(tmp_path: Path) -> None:
    text = "python3 -m sglang.launch_server --model-path deepseek-v2 --tp 8 --enable-ep-moe\n"
    found, said = converted(tmp_path, "s.sh", text, "--cluster", "dgx-h100")
    assert (found["parallelism"]["ep"], found["parallelism"]["expert_tp"]) == (8, 1)
    assert "not expressed" not in said
