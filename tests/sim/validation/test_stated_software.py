"""What a table of measurements says about its software becomes keys of its rows' scenarios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.validation.script_records import DEEPSEEK_STAGES, DEEPSEEK_V3
from sim.validation.tables import read_table
from sim.validation.what_ran import with_what_ran


def training(tmp_path: Path, software: str, row: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    data = {
        "format": "measurements/1",
        "name": "t",
        "kind": "training_step",
        "software": software,
        "rows": [
            {
                "id": "r",
                "scenario": {"training": {"seq_len": 8, **training}},
                "measured": {"step_time_s": 1.0},
                **(row or {}),
            }
        ],
    }
    file = tmp_path / "table.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return dict(read_table(file).rows[0].scenario["training"])


BRIDGE = "Megatron-Bridge on Megatron-Core, NeMo container of the named release"
DEEPSEEK = {"layers": 61, "hidden": 7168, "moe": {"experts": 256}}
MXFP8 = {"seq_len": 8, "precision": "mxfp8"}
QWEN3 = {"layers": 94, "hidden": 4096, "moe": {"experts": 128}}


def launched(tmp_path: Path, group: str, cluster: str, model: dict[str, Any], **keys: Any) -> dict[str, Any]:
    scenario = {"training": {"seq_len": 8}, "model": model, "cluster": cluster, **keys}
    row = {"id": "r", "group": group, "scenario": scenario, "measured": {"step_time_s": 1.0}}
    data = {"format": "measurements/1", "name": "t", "kind": "training_step", "software": BRIDGE, "rows": [row]}
    file = tmp_path / "table.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return dict(read_table(file).rows[0].scenario)


def test_a_launch_script_sets_what_its_release_has_for_a_model_on_a_gpu(tmp_path: Path) -> None:
    drops = launched(tmp_path, "Qwen3 GB200 25.09", "gb200-nvl72", QWEN3)
    assert (drops["training"]["cuda_graphs"], drops["model"]["moe"]["capacity_factor"]) == ("step", 1.0)
    paired = launched(tmp_path, "Qwen3 H100 26.02", "dgx-h100", QWEN3)
    assert paired["parallelism"] == {"ep_overlap": True}
    assert "cuda_graphs" not in paired["training"]
    assert "capacity_factor" not in paired["model"]["moe"]
    assert (drops["model"]["qk_norm"], paired["model"]["qk_norm"]) == (True, True)
    layout = {"pp": 8, "virtual_stages": 4, "schedule": "interleaved_1f1b"}
    found = launched(tmp_path, "DeepSeekV3 H100 25.09", "dgx-h100", DEEPSEEK, parallelism=layout)
    assert found["training"]["recompute"]["modules"] == ["mla_up_proj", "mlp"]
    assert found["parallelism"]["layers_per_stage"] == [1, *[2] * 30, 0]
    assert found["model"]["mtp_layers"] == 1
    assert found["parallelism"]["ep_overlap"]


@pytest.mark.parametrize(
    ("group", "cluster", "model", "precision", "graphs", "paired"),
    [
        ("DeepSeekV3 GB300 26.04", "gb300-nvl72", "deepseek", "mxfp8", None, False),
        ("DeepSeekV3 GB300 26.06", "gb300-nvl72", "deepseek", "mxfp8", "step", True),
        ("DeepSeekV3 GB300 26.06", "gb300-nvl72", "deepseek", "bf16", "layers", False),
        ("DeepSeekV3 B200 26.06", "dgx-b200", "deepseek", "mxfp8", None, False),
        ("Qwen3 B200 26.04", "dgx-b200", "qwen3", "mxfp8", None, False),
        ("Qwen3 GB200 26.04", "gb200-nvl72", "qwen3", "mxfp8", "layers", False),
        ("Qwen3 B200 26.06", "dgx-b200", "qwen3", "mxfp8", "step", True),
        ("GPT-OSS GB200 26.06", "gb200-nvl72", "gpt-oss", "mxfp8", "step", True),
        ("GPT-OSS GB300 26.06", "gb300-nvl72", "gpt-oss", "bf16", "layers", False),
    ],
)
def test_what_a_script_captures_and_hides_depends_on_gpu_precision_and_release(
    tmp_path: Path, group: str, cluster: str, model: str, precision: str, graphs: str | None, paired: bool
) -> None:
    sizes = {"deepseek": DEEPSEEK, "qwen3": QWEN3, "gpt-oss": {"layers": 36, "hidden": 2880, "moe": {"experts": 128}}}
    found = launched(tmp_path, group, cluster, sizes[model], training={"seq_len": 8, "precision": precision})
    assert found["training"].get("cuda_graphs") == graphs
    assert found.get("parallelism", {}).get("ep_overlap", False) == paired


def test_a_script_that_hides_exchanges_is_for_layouts_with_pairs(tmp_path: Path) -> None:
    straight = {"pp": 8, "virtual_stages": 1}
    found = launched(tmp_path, "Qwen3 B200 26.06", "dgx-b200", QWEN3, training=MXFP8, parallelism=straight)
    assert found["parallelism"] == straight
    assert "cuda_graphs" not in found["training"]


@pytest.mark.parametrize("layout", ["tp8", [8], {"pp": "8", "virtual_stages": "two", "schedule": ["1f1b"]}])
def test_a_layout_that_cannot_be_read_is_left_to_the_scenario(tmp_path: Path, layout: Any) -> None:
    assert launched(tmp_path, "Qwen3 H100 26.02", "dgx-h100", QWEN3, parallelism=layout)["parallelism"] == layout


def test_the_stages_of_deepseek_hold_all_its_layers() -> None:
    for layouts, layers in DEEPSEEK_STAGES.items():
        assert sum(layers) == DEEPSEEK_V3.layers
        assert {pp * stages for pp, stages in layouts} == {len(layers)}


def test_what_a_row_says_stands_against_the_launch_script(tmp_path: Path) -> None:
    said = {"training": {"seq_len": 8, "cuda_graphs": "none"}, "parallelism": {"ep_overlap": False}}
    graphs = launched(tmp_path, "Qwen3 GB200 25.09", "gb200-nvl72", QWEN3, **said)
    assert graphs["training"]["cuda_graphs"] == "none"
    assert not launched(tmp_path, "Qwen3 H100 26.02", "dgx-h100", QWEN3, **said)["parallelism"]["ep_overlap"]


@pytest.mark.parametrize(
    ("group", "cluster", "model"),
    [
        ("no release", "dgx-h100", QWEN3),
        ("Llama H100 25.11", "dgx-h100", {"layers": 32, "hidden": 4096}),
        ("Qwen3 H100 26.02", "dgx-h100", {**QWEN3, "layers": 93}),
        ("Qwen3 H100 26.02", "a machine of its own", QWEN3),
    ],
)
def test_where_no_launch_script_is_known_a_row_stays(
    tmp_path: Path, group: str, cluster: str, model: dict[str, Any]
) -> None:
    found = launched(tmp_path, group, cluster, model)
    assert found["model"] == model
    assert "parallelism" not in found


@pytest.mark.parametrize(
    ("software", "date"),
    [
        ("torch 1963fc8 (2024-12-23), torchao eab345c", "2024-12-23"),
        ("NeMo 24.07, Megatron-Core", "2024-07"),
        ("torch==2.7.1+cu128", "2025-04"),
        ("Megatron-Core 0.12.1, TE 2.4, CUDA 12.9", "2025-06"),
        ("DeepSpeed 0.14.4", "2024-03"),
        ("Composer + PyTorch FSDP (A100: PyTorch 1.13 era; H100: PyTorch 2.1)", "2023-10"),
        ("Megatron-LM fork of the authors (2023)", "2023-07"),
    ],
)
def test_the_latest_release_is_the_date(tmp_path: Path, software: str, date: str) -> None:
    assert training(tmp_path, software)["software_date"] == date


def test_a_row_of_a_table_of_several_releases_has_its_own(tmp_path: Path) -> None:
    software = "NeMo (24.04 in v4.0, 24.09 in v4.1, 25.01-25.04 in v5.0)"
    for number, date in (("v4.1", "2024-09"), ("v5.0", "2025-04"), ("v6.0", "2025-04")):
        assert training(tmp_path, software, {"run": {"round": number}})["software_date"] == date
    assert (
        training(tmp_path, software, {"id": "v5.0_n64_ngc25.01", "run": {"round": "v5.0"}})["software_date"]
        == "2025-01"
    )


def test_a_trainer_with_a_record_takes_the_place_of_its_nearest_word_alone(tmp_path: Path) -> None:
    assert training(tmp_path, "nanotron (early 2025)", elementwise="eager")["framework"] == "nanotron"
    assert training(tmp_path, "nanotron (early 2025)", elementwise="megatron")["framework"] == "megatron"
    assert "framework" not in training(tmp_path, "Megatron-LM, read beside nanotron")
    assert training(tmp_path, "Meta's in-house training stack with NCCLX")["framework"] == "meta_llama3"
    assert "framework" not in training(tmp_path, "Meta Lingua")


def test_switches_of_the_launch_script(tmp_path: Path) -> None:
    on = {"run": {"settings": {"LAYER_CUDA_GRAPH": "1", "FULL_CUDA_GRAPH": "False"}}}
    assert training(tmp_path, "NeMo 24.09", on)["cuda_graphs"] == "layers"
    assert "cuda_graphs" not in training(tmp_path, "NeMo 24.09", {"run": {"settings": {"MCORE_CUDA_GRAPH": "0"}}})
    both = {"run": {"settings": {"LAYER_CUDA_GRAPH": "1", "FULL_CUDA_GRAPH": "1"}}}
    assert training(tmp_path, "NeMo 24.09", both)["cuda_graphs"] == "step"  # the wider
    assert training(tmp_path, "NeMo 24.09", on, cuda_graphs="none")["cuda_graphs"] == "none"


@pytest.mark.parametrize(
    ("fact", "basis", "spread"),
    [
        ("medians over many jobs on a shared cluster", "stated", 0.8),
        ("medians over many jobs on a shared cluster", "inferred", None),
        ("the cluster was ours alone", "stated", None),
    ],
)
def test_a_table_that_states_other_jobs_has_their_messages(
    tmp_path: Path, fact: str, basis: str, spread: float | None
) -> None:
    nics = {"nics_per_node": 32, "nic_bandwidth_bytes_per_s": 12.5e9, "latency_s": 75e-6}
    data = {
        "format": "measurements/1",
        "name": "t",
        "kind": "collective",
        "assumptions": [{"fact": fact, "basis": basis}],
        "scenario": {"cluster": {"preset": "dgx-h100", "inter_node": nics}},
        "rows": [{"id": "r", "measured": {"seconds": 1.0}}],
    }
    file = tmp_path / "table.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    assert read_table(file).rows[0].scenario["cluster"]["inter_node"].get("spread") == spread


def _ran(config: dict[str, Any], **program: Any) -> dict[str, Any]:
    described = {"model": {"layers": 2}, "training": {"seq_len": 8, "elementwise": "eager"}}
    return with_what_ran(described, {"program": {"huggingface_config": config, **program}}, "table: rows[0]")


def test_a_row_s_program_names_the_model_and_whose_modules_ran() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    found = _ran(config)
    assert found["training"] == {"seq_len": 8, "framework": "transformers"}
    assert (found["model"]["hidden"], found["model"]["mlp"]) == (64, "gelu_new")
    assert _ran(config, torch_compile=True)["training"] == {"seq_len": 8, "framework": "eager"}


def test_a_family_without_words_keeps_its_nearest_description() -> None:
    found = _ran({"model_type": "nobody's"})
    assert found == {"model": {"layers": 2}, "training": {"seq_len": 8, "framework": "transformers"}}


def test_a_precisions_name_dates_a_row_of_llm_foundrys_benchmark(tmp_path: Path) -> None:
    """Composer's `bf16` and `PURE` are older than `amp_bf16` and `DEFAULT`; torch's checkpoint changed between them."""
    table = "Composer + PyTorch FSDP (PyTorch 1.13 era)"
    ids = ("mpt_13b_n8_bf16_pure_z3_ck1", "mpt_13b_n8_amp_bf16_default_z3_ck1", "mpt_13b")
    assert [training(tmp_path, table, {"id": i})["software_date"] for i in ids] == ["2023-02", "2023-10", "2022-10"]


PARAMS, FP8 = {"FP8_PARAMS": "True"}, {"precision": "fp8"}
LORA = {**FP8, "lora": {"rank": 16}}


@pytest.mark.parametrize(
    ("settings", "round_", "keys", "zero", "kept"),
    [
        ({"FP8_PARAM_GATHER": "True"}, "v5.0", FP8, 1, True),
        (PARAMS, "v5.0", FP8, 1, True),
        ({}, "v5.0", FP8, 1, False),
        ({}, "v5.0", LORA, 0, True),
        ({"FP8_PARAM_GATHER": "0"}, "v5.1", LORA, 1, False),
        (PARAMS, "v5.0", {"precision": "nvfp4"}, 1, False),
        (PARAMS, "v5.0", {**FP8, "framework": "eager"}, 1, False),
        (PARAMS, "v5.0", FP8, 0, False),
    ],
)
def test_mlperf_parameters_in_8_bits(
    tmp_path: Path, settings: dict[str, str], round_: str, keys: dict[str, Any], zero: int, kept: bool
) -> None:
    """Only where a scenario can have them: a row is never refused for what is stated beside it."""
    scenario = {"training": {"seq_len": 8, "framework": "megatron", **keys}, "parallelism": {"zero": zero}}
    row = {
        "id": "r",
        "run": {"round": round_, "settings": settings},
        "scenario": scenario,
        "measured": {"step_time_s": 1},
    }
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"format": "measurements/1", "name": "t", "kind": "training_step", "rows": [row]}))
    assert read_table(file).rows[0].scenario["training"].get("fp8_param_gather", False) is kept


def of_nemo(tmp_path: Path, model: dict[str, Any], *facts: str, **training: Any) -> dict[str, Any]:
    """A row of NeMo's whose table has gradients in fp32 for all rows."""
    data = {
        "format": "measurements/1",
        "name": "t",
        "kind": "training_step",
        "software": "NeMo 24.07, Megatron-Core",
        "assumptions": [{"fact": fact, "basis": "inferred"} for fact in facts],
        "scenario": {"cluster": "dgx-h100", "training": {"seq_len": 8, "grad_dtype": "fp32"}},
        "rows": [{"id": "r", "scenario": {"model": model, "training": training}, "measured": {"step_time_s": 1.0}}],
    }
    file = tmp_path / "table.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return dict(read_table(file).rows[0].scenario)


LLAMA_8B = {"layers": 32, "hidden": 4096, "mlp": "swiglu"}


def test_a_trainers_script_says_in_what_type_gradients_are_summed_where_no_assumption_does(tmp_path: Path) -> None:
    assert of_nemo(tmp_path, LLAMA_8B)["training"]["grad_dtype"] == "bf16"
    gpt = of_nemo(tmp_path, {"layers": 24, "hidden": 4096, "mlp": "gelu"})
    assert (gpt["training"]["grad_dtype"], gpt["model"]["dropout"]) == ("bf16", 0.1)
    nemotron = {**LLAMA_8B, "mlp": "relu2"}
    assert "grad_dtype" not in of_nemo(tmp_path, nemotron)["training"]
    assert "grad_dtype" not in of_nemo(tmp_path, LLAMA_8B, lora={"rank": 8})["training"]
    assert of_nemo(tmp_path, LLAMA_8B, grad_dtype="fp32")["training"]["grad_dtype"] == "fp32"
    assert of_nemo(tmp_path, LLAMA_8B, "gradients reduced in FP32")["training"]["grad_dtype"] == "fp32"


LLAMA_70B = {"layers": 80, "hidden": 8192}


@pytest.mark.parametrize(
    ("cluster", "precision", "layout", "layers"),
    [
        ("gb200-nvl72", "fp8", {"zero": 3}, 40),
        ("gb300-nvl72", "bf16", {"zero": 3}, 30),
        ("gb200-nvl72", "mxfp8", {"zero": 3}, None),
        ("gb200-nvl72", "fp8", {"zero": 1}, None),
        ("gb200-nvl72", "fp8", {"zero": 3, "pp": 4, "virtual_stages": 5}, None),
        ("dgx-h100", "fp8", {"zero": 3}, None),
    ],
)
def test_activations_wait_on_the_host_beside_fsdp_alone(
    tmp_path: Path, cluster: str, precision: str, layout: dict[str, Any], layers: int | None
) -> None:
    given = {"training": {"seq_len": 8, "precision": precision}, "parallelism": layout}
    found = launched(tmp_path, "Llama 3 70B 25.11", cluster, LLAMA_70B, **given)["training"].get("activation_offload")
    assert found == (None if layers is None else {"layers": layers})


def test_without_fsdp_the_8b_in_8_bits_recomputes_five_layers_on_an_h100(tmp_path: Path) -> None:
    given: dict[str, Any] = {"training": {"seq_len": 8, "precision": "fp8"}, "model": {"layers": 32, "hidden": 4096}}
    for zero, recompute in ((1, {"mode": "full", "layers": 5}), (3, None)):
        found = launched(tmp_path, "Llama 3 8B 26.02", "dgx-h100", parallelism={"zero": zero}, **given)
        assert found["training"].get("recompute") == recompute
