"""slime's commands, Megatron-LM's arguments and SGLang's, as scenarios with `rl`."""

from __future__ import annotations

from pathlib import Path

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import OF_RL, converted_rl, of, refused

SIZES = """
MODEL_ARGS=(
   --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32
   --swiglu --disable-bias-linear --add-qkv-bias --normalization "RMSNorm" --group-query-attention --num-query-groups 2
   --vocab-size 151552 --use-rotary-position-embeddings --rotary-percent 0.5 --untie-embeddings-and-output-weights
   --post-self-attn-layernorm --post-mlp-layernorm --max-position-embeddings 8192 --seq-length 4096
)
"""
COMMAND = """
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/sizes.sh"
ROLLOUT_ARGS=(
   --prompt-data /data/dapo.jsonl --num-rollout 3000 --rm-type deepscaler
   --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-prompt-len 1024 --rollout-max-response-len 8192
   --rollout-temperature 0.8 --global-batch-size 256 --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {\\"PYTHONPATH\\": \\"/opt/Megatron-LM/\\"}
}"
ray start --head --num-gpus 8
ray job submit --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 4 --hf-checkpoint /models/GLM-Z1-9B-0414 \\
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --attention-dropout 0.0 --hidden-dropout 0.0 \\
   --advantage-estimator gspo --attention-backend flash ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]}
"""


def sized(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "sizes.sh").write_text(SIZES)
    return tmp_path


def test_engines_have_gpus_of_their_own(tmp_path: Path) -> None:
    data, said = converted_rl(sized(tmp_path), COMMAND)
    assert of(data, "model", "layers", "hidden", "kv_heads", "qkv_bias", "norm_position") == [40, 4096, 2, True, "both"]
    assert of(data, "parallelism", "dp", "tp", "cp", "sp", "zero") == [2, 2, 2, True, 1]
    assert of(data, "training", "seq_len", "global_batch_size", "precision", "recompute") == [9216, 256, "bf16", "full"]
    assert data["training"]["micro_batch_size"] == 2  # of 9,216 · 2 tokens
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt", "colocated") == [32, 8, False]
    assert of(data, "rl", "reference", "sequences") == ["none", "packed"]
    assert of(data, "rl", "prompt_len", "output_len") == [{"max": 1024, "mean": 100}, {"max": 8192, "mean": 300}]
    engine = data["rl"]["generation"]
    assert (engine["replicas"], engine["tp"], engine["max_running_requests"]) == (2, 2, 512)
    assert engine["kv_cache"] == {"memory_fraction": 0.7}
    assert engine["sampling"] == {"temperature": 0.8, "top_p": 1.0}
    assert "not expressed" not in said
    parse_scenario(data)


def test_engines_and_the_trainer_take_turns(tmp_path: Path) -> None:
    text = COMMAND.replace("--rollout-num-gpus 4", "--colocate --use-kl-loss --no-offload-rollout")
    data, said = converted_rl(sized(tmp_path), text)
    assert of(data, "rl", "colocated", "sleep_level", "offload_training", "reference") == [True, 2, True, "host"]
    assert data["rl"]["generation"]["replicas"] == 4
    assert "not expressed here: --no-offload-rollout" in said


def test_a_flag_of_sglang_s_is_not_taken_for_another(tmp_path: Path) -> None:
    text = COMMAND.replace("--balance-data", "--sglang-enable-dp-attention --sglang-dp-size 2")
    _, said = converted_rl(sized(tmp_path), text)
    assert "not expressed here: --sglang-dp-size, --sglang-enable-dp-attention" in said
    assert "did you mean" not in said


def test_a_step_ahead_and_the_steps_of_a_rollout(tmp_path: Path) -> None:
    text = COMMAND.replace("train.py", "train_async.py").replace("--global-batch-size 256", "--num-steps-per-rollout 4")
    data, _ = converted_rl(sized(tmp_path), text)
    assert data["rl"]["steps_off"] == 1
    assert data["training"]["global_batch_size"] == 64


def test_experts_of_a_model_that_its_name_tells(tmp_path: Path) -> None:
    text = COMMAND.replace("GLM-Z1-9B-0414", "Qwen3-30B-A3B").replace(
        "--context", "--expert-model-parallel-size 8 --context"
    )
    text = text.replace("${MODEL_ARGS[@]}", "--num-layers 48 --num-experts 128 --expert-tensor-parallel-size 1")
    data, said = converted_rl(sized(tmp_path), text.replace("-engine 2", "-engine 4 --sglang-ep-size 4"))
    assert data["model"] == "qwen3-30b-a3b"
    assert of(data, "parallelism", "ep", "expert_tp") == [8, 1]
    assert (data["rl"]["generation"]["ep"], data["rl"]["generation"]["expert_tp"]) == (4, 1)
    assert "dispatcher" not in said


def test_what_is_no_step_without_a_critic_is_refused(tmp_path: Path) -> None:
    sized(tmp_path)
    said = refused(tmp_path, "run.sh", COMMAND.replace("gspo", "ppo"), *OF_RL)
    assert "--advantage-estimator: found 'ppo'; can be converted: grpo, gspo" in said
    said = refused(tmp_path, "run.sh", COMMAND.replace("--balance-data", "--loss-type sft_loss"), *OF_RL)
    assert "--loss-type: found 'sft_loss'; can be converted: policy_loss" in said
    text = COMMAND.replace("--rollout-max-prompt-len 1024", "")
    said = refused(tmp_path, "run.sh", text, *OF_RL)
    assert "--rollout-max-prompt-len: is missing, so the longest sequence is not known; give --seq-len N" in said
    data, _ = converted_rl(tmp_path, text, "--seq-len", "9216")
    assert of(data, "rl", "prompt_len") == [{"mean": 100}]
    assert "attention masks" not in converted_rl(tmp_path, text, "--seq-len", "65536")[1]
    said = refused(tmp_path, "run.sh", COMMAND.replace("-engine 2", "-engine 3"), *OF_RL)
    assert "--rollout-num-gpus-per-engine: found 3; must be a multiple of --sglang-pp-size (1) that divides 4" in said
    assert "add --set rl.prompt_len.mean=N" in refused(tmp_path, "run.sh", COMMAND, "--cluster", "dgx-h100")


def test_answers_may_keep_the_log_probabilities_of_the_engine(tmp_path: Path) -> None:
    folder, text = sized(tmp_path), COMMAND.replace("--balance-data", "--use-rollout-logprobs")
    assert converted_rl(folder, text)[0]["rl"]["log_probs"] == "engine"
    text = COMMAND.replace("--balance-data", "--use-rollout-logprobs --get-mismatch-metrics")
    assert "log_probs" not in converted_rl(folder, text)[0]["rl"]
