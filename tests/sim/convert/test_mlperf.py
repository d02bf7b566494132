"""Variables of MLPerf submissions as scenarios."""

from __future__ import annotations

from pathlib import Path

import yaml

from sim.commands.convert import main
from tests.processes import invoked
from tests.sim.convert.converting import converted, of, refused

COMMON = """
export MICRO_BATCH_SIZE=2
: "${LOAD_MINIMAL_NUM_SAMPLES:=0}"
if [[ "${LOAD_MINIMAL_NUM_SAMPLES}" -eq 1 ]]; then
  export MAX_STEPS=500
fi
export NCCL_MIN_CTAS=16
export FP8=True
export FP8_RECIPE="tensorwise"
export FP8_PARAM_GATHER=True
export DEFER_EMBEDDING_WGRAD_COMPUTE=True
export WGRAD_DEFERRAL_LIMIT=50
export TP_PP_DP_MAPPING=True
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export EXTRA_ARGS=""
export BINDCMD="bindpcie --cpu=node"
"""
LARGE = """
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MINIBS=72
export TENSOR_MODEL_PARALLEL=2
export PIPELINE_MODEL_PARALLEL=8
export INTERLEAVED_PIPELINE=8
export CONTEXT_PARALLEL=2
export MICRO_BATCH_SIZE=1
export TP_COMM_OVERLAP=True
export ASYM_PP_EMBED=True
export ASYM_PP_LOSS=True
export DGXNNODES=128
export DGXNGPU=4
export SEGMENT=$(( (TENSOR_MODEL_PARALLEL * PIPELINE_MODEL_PARALLEL * CONTEXT_PARALLEL) / DGXNGPU ))
"""
SMALL = """
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MODEL_SIZE="8b"
export OVERWRITTEN_NUM_LAYERS=32
export DEFER_EMBEDDING_WGRAD_COMPUTE=False
unset PYTORCH_CUDA_ALLOC_CONF
export CE_FUSION_IMPL=te
export MINIBS=4
export TENSOR_MODEL_PARALLEL=1
export SEQ_PARALLEL=False
export PIPELINE_MODEL_PARALLEL=1
export INTERLEAVED_PIPELINE=null
export CONTEXT_PARALLEL=1
export DGXNNODES=1
"""
LORA = """
export FP8=True
export FP8_DPA=1
export FP8_ACT=1
export MINIBS=1
export TP=4
export CP=2
export SP=1
export MBS=1
export TP_COMM_OVERLAP=1
export LAYER_CUDA_GRAPH=1
export NVTE_FLASH_ATTN=0
export NVTE_FUSED_ATTN=1
export SHARP=True
export VBOOST_VALUE=1
export DGXNNODES="${DGXNNODES:=8}"
"""
GPT3 = """
export MINIBS="${MINIBS:=128}"
export TENSOR_MODEL_PARALLEL="${TP:=4}"   # of the model
export PIPELINE_MODEL_PARALLEL="${PP:=8}"
export DGXNNODES="${DGXNNODES:=64}"
export MICRO_BATCH_SIZE=2
export INTERLEAVED_PIPELINE=4
export TP_COMM_OVERLAP=True
export FP8=True
export FP8_HYBRID=True
export BUCKET_CAP_MB=200
if [ $MINIBS -eq 128 ];  then
    export VBOOST_VALUE=1
fi
"""
H100 = ("--cluster", "dgx-h100")


def with_common(tmp_path: Path, text: str, *options: str) -> tuple[dict, str]:
    (tmp_path / "config_common.sh").write_text(COMMON)
    return converted(tmp_path, "config_a.sh", text, *options)


def test_llama_405b_by_its_own_variables_and_those_of_all(tmp_path: Path) -> None:
    data, said = with_common(tmp_path, LARGE, "--cluster", "gb300-nvl72")
    assert of(data, "parallelism", "dp", "tp", "pp", "cp", "virtual_stages") == [16, 2, 8, 2, 8]
    assert data["parallelism"]["layers_per_stage"] == [1, *[2] * 62, 1]
    assert of(data, "parallelism", "rank_order", "tp_overlap", "p2p_overlap") == ["tp-cp-pp-dp", "full", True]
    assert data["parallelism"]["wgrad_deferral_limit"] == 50
    assert of(data, "training", "micro_batch_size", "global_batch_size", "seq_len") == [1, 72 * 16, 8192]
    assert of(data, "training", "precision", "fp8_recipe", "fp8_param_gather") == ["fp8", "tensorwise", True]
    assert of(data, "training", "framework", "grad_dtype", "cross_entropy") == ["megatron_bridge", "bf16", "native"]
    assert of(data, "model", "layers", "vocab") == [126, 128256]
    assert "NCCL_MIN_CTAS=16" in said
    assert "not expressed here: SEGMENT" not in said


def test_llama_8b_has_no_stages_and_transformer_engines_loss(tmp_path: Path) -> None:
    data, _ = with_common(tmp_path, SMALL, "--cluster", "dgx-h200")
    assert of(data, "parallelism", "dp", "pp", "schedule", "sp") == [8, 1, None, False]
    assert of(data, "training", "global_batch_size", "cross_entropy") == [32, "fused"]
    assert of(data, "model", "layers", "hidden", "kv_heads") == [32, 4096, 8]
    fp4 = SMALL + "export FP4=True\nexport FP8=False\nexport FP8_PARAM_GATHER=False\n"
    data, _ = with_common(tmp_path, fp4, "--cluster", "dgx-b200")
    assert data["training"]["precision"] == "nvfp4"
    both = SMALL + "export FP4=True\n"
    assert "FP4: cannot be set together with FP8" in refused(tmp_path, "config_a.sh", both, "--cluster", "dgx-b200")


def test_graphs_are_of_the_iteration_or_of_layers(tmp_path: Path) -> None:
    cluster = ("--cluster", "gb300-nvl72")
    data, _ = with_common(tmp_path, LARGE + "export FULL_CUDA_GRAPH=1\n", *cluster)
    assert data["training"]["cuda_graphs"] == "step"
    data, _ = with_common(tmp_path, LARGE + "export MCORE_CUDA_GRAPH=True\n", *cluster)
    assert data["training"]["cuda_graphs"] == "layers"


def test_lora_of_older_rounds_keeps_frozen_weights_in_8_bits(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "config_b.sh", LORA, *H100)
    assert data["training"]["lora"] == {"rank": 16, "targets": ["qkv", "attention_out"], "dropout": 0.1}
    assert of(data, "training", "fp8_param_gather", "fp8_recipe", "cuda_graphs") == [True, "delayed", "layers"]
    assert of(data, "training", "fp8_dot_product_attention", "activation_func_fp8_input_store") == [True, True]
    assert of(data, "training", "attention_kernel", "cross_entropy") == ["cudnn", "unfused"]
    assert of(data, "parallelism", "dp", "dp_sync", "zero") == [8, "after_backward", 1]
    assert data["parallelism"]["tp_overlap_except"] == ["qkv"]
    assert "SHARP: cluster.inter_node.sharp=true has it" in said
    assert "not expressed here: VBOOST_VALUE=1" in said
    assert "frozen weights in 8 bits" in said
    data, said = converted(tmp_path, "config_b.sh", LORA + "export FP8_PARAM_GATHER=0\n", *H100)
    assert data["training"].get("fp8_param_gather") is None
    assert "frozen weights in 8 bits" not in said


def test_gpt3_has_apexs_buckets(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "config_c.sh", GPT3, *H100)
    assert of(data, "parallelism", "dp", "tp", "pp", "virtual_stages") == [16, 4, 8, 4]
    assert of(data, "parallelism", "bucket_bytes", "tp_overlap", "zero") == [200 * 2**20, "full", 1]
    assert of(data, "training", "global_batch_size", "precision", "grad_dtype") == [2048, "fp8", "bf16"]
    assert of(data, "model", "layers", "hidden", "vocab", "dropout") == [96, 12288, 50257, 0.0]
    assert "cross entropy: unfused, as in rounds 3.0 to 4.0" in said
    data, _ = converted(tmp_path, "config_c.sh", GPT3, *H100, "--var", "MINIBS=64")
    assert data["training"]["global_batch_size"] == 1024


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "config_a.sh", SMALL.replace("export MINIBS", "export MINIBS=4\nexport X"), *H100)
    assert "MICRO_BATCH_SIZE: is required and missing" in said
    assert "config_common.sh, not found beside it" in said
    said = refused(tmp_path, "config_b.sh", LORA.replace("TP=4", "TP=3"), *H100)
    assert "64 GPUs; must be a multiple of TP · PP · CP, 6" in said
    said = refused(tmp_path, "config_b.sh", LORA.replace("TP=4", "TP=many"), *H100)
    assert "config_b.sh:6: TP: found 'many'; must be a whole number" in said
    said = refused(tmp_path, "config_b.sh", LORA.replace("TP=4", "TP=$DEGREE"), *H100)
    assert "TP: found '$DEGREE', in which a variable has no value: --var DEGREE=VALUE gives one" in said


def test_the_scenario_has_the_files_name(tmp_path: Path) -> None:
    file = tmp_path / "config_DGXH100_8x8x1xtp4pp1cp2.sh"
    file.write_text(LORA)
    data = yaml.safe_load(invoked(main, str(file), *H100).output)
    assert data["name"] == file.stem


def test_a_wrong_value_is_told_with_the_file_and_line_that_has_it(tmp_path: Path) -> None:
    common = tmp_path / "config_common.sh"
    common.write_text(COMMON)
    said = refused(tmp_path, "config.sh", LARGE.replace("PARALLEL=8\n", "PARALLEL=eight\n"), "--cluster", "dgx-h100")
    assert f"{tmp_path / 'config.sh'}:5: PIPELINE_MODEL_PARALLEL: found 'eight'" in said
    said = refused(tmp_path, "config.sh", LARGE.replace("SIZE=1\n", "SIZE=one\n"), "--cluster", "dgx-h100")
    assert f"{tmp_path / 'config.sh'}:8: MICRO_BATCH_SIZE: found 'one'" in said  # not the common file's first line
    common.write_text(COMMON.replace("WGRAD_DEFERRAL_LIMIT=50", "OVERWRITTEN_NUM_LAYERS=many"))
    said = refused(tmp_path, "config.sh", LARGE, "--cluster", "dgx-h100")
    line = COMMON.splitlines().index("export WGRAD_DEFERRAL_LIMIT=50") + 1
    assert f"{common}:{line}: OVERWRITTEN_NUM_LAYERS: found 'many'" in said


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    plain = converted(tmp_path, "config.sh", GPT3, "--cluster", "dgx-h100")[1]
    file = tmp_path / "config.sh"
    file.write_bytes(GPT3.replace("\n", "\r\n").encode())
    assert invoked(main, str(file), "--cluster", "dgx-h100").output == plain
