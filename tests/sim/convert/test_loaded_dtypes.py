"""In which dtype trainers of `TrainingArguments` load a model, and what casts it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.sim.convert.converting import converted

MODEL = "model_name_or_path: meta-llama/Llama-3.2-1B\nbf16: true\nper_device_train_batch_size: 1\n"
TRL = f"{MODEL}max_length: 512\n"
PLAIN = f"{MODEL}block_size: 512\n"
FACTORY = f"{MODEL}stage: sft\ntemplate: llama3\ncutoff_len: 512\n"
FSDP = "fsdp: full_shard auto_wrap\nfsdp_config: {version: 2}\n"
LORA = "use_peft: true\n"


@pytest.mark.parametrize(
    ("text", "dtype", "said"),
    [
        (PLAIN, "bf16", "since release 5 loads a model in the dtype of its checkpoint"),
        (f"{PLAIN}torch_dtype: float32\n", "fp32", ""),
        (f"{PLAIN}{FSDP}", "fp32", "as Accelerate casts what FSDP trains to it"),
        (TRL, "fp32", ""),  # trl/trainer/utils.py: `create_model_from_path`
        (f"{TRL}dtype: bfloat16\n", "bf16", ""),
        (f"{TRL}{LORA}", "fp32", "taken for fp32, as TRL loads a model where dtype is not given"),
        (f"{TRL}{LORA}dtype: bfloat16\n", None, "taken for 16 bits"),
        (f"{TRL}{LORA}load_in_4bit: true\n", None, "TRL loads embedding, output and norms in fp32 where dtype is not"),
        (f"{TRL}{LORA}load_in_4bit: true\ndtype: bfloat16\n", None, "what is not quantized is taken for 16 bits"),
        (f"{FACTORY}finetuning_type: full\n", "fp32", ""),  # llamafactory/model/adapter.py: `init_adapter`
        (f"{FACTORY}finetuning_type: lora\n", None, "taken for 16 bits"),
    ],
)
def test_parameters_have_the_dtype_that_the_trainer_loads(
    tmp_path: Path, text: str, dtype: str | None, said: str
) -> None:
    data, notes = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"].get("param_dtype") == dtype
    assert said in notes.replace("\n# ", " ")
    assert parse_scenario(data)


def test_adapters_in_fp32_have_no_second_copy(tmp_path: Path) -> None:
    """peft/tuners/tuners_utils.py, `cast_adapter_dtype`: beside 16-bit weights an adapter's number takes 4 bytes, its
    gradient 4 and its moments 8."""
    data, _ = converted(tmp_path, "a.yaml", f"{FACTORY}finetuning_type: lora\n", "--cluster", "dgx-h100", "--gpus", "1")
    frozen = {**data, "training": {**data["training"], "lora": {"rank": 16}}}
    (narrow,), (wide,) = (simulate(parse_scenario(scenario)).result["memory"] for scenario in (data, frozen))
    adapters = 16 * (2048 * 9 + 512 * 2 + 8192 * 3) * 16 - 8 * (2048 * 9 + 512 * 2 + 8192 * 3) * 16
    assert wide["parameters"] - narrow["parameters"] == 4 * adapters
    assert wide["optimizer"] - narrow["optimizer"] == 8 * adapters
    assert wide["gradients"] - narrow["gradients"] == 4 * adapters


def test_quantized_matrices_have_no_casts_of_a_whole_step(tmp_path: Path) -> None:
    """Beside fp32 embeddings and norms, too: each is converted for its own matmul (bitsandbytes, `MatMul4Bit`)."""
    text = f"{FACTORY}finetuning_type: lora\nquantization_bit: 4\n"
    data, _ = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-h100", "--gpus", "1")
    wide = {**data, "training": {**data["training"], "param_dtype": "fp32"}}
    (narrow,), (wide_,) = (simulate(parse_scenario(scenario)).result["memory"] for scenario in (data, wide))
    adapters = 8 * (2048 * 9 + 512 * 2 + 8192 * 3) * 16
    cast = 128_256 * 2048 + 33 * 2048 + adapters  # to 16 bits; the head is the embedding
    assert wide_["buffers"] - narrow["buffers"] == pytest.approx(2 * cast, rel=1e-3)
