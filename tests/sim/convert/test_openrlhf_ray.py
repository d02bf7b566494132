"""OpenRLHF's commands of reinforcement learning with Ray as scenarios with `rl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import OF_RL, converted_rl, of, refused

FORMER = """
set -x
python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \\
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \\
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \\
   --colocate_all_models \\
   --vllm_gpu_memory_utilization 0.5 \\
   --pretrain meta-llama/Meta-Llama-3-8B --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k \\
   --save_path /x --ckpt_path /y --save_hf_ckpt \\
   --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024 \\
   --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 --max_samples 100000 --generate_max_len 2048 \\
   --zero_stage 3 --param_dtype bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 \\
   --prompt_data a/b --input_key messages --apply_chat_template --normalize_reward --gradient_checkpointing \\
   --packing_samples --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep

#    --ds_tensor_parallel_size 2 \\
"""
TODAY = """
ENGINE_ARGS=(
   --actor.num_nodes 2
   --actor.num_gpus_per_node 8
   --vllm.num_engines 8   # on GPUs of their own
   --vllm.enable_prefix_caching
)
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 -m openrlhf.cli.train_ppo_ray ${ENGINE_ARGS[@]} \\
   --actor.model_name_or_path Qwen/Qwen3-8B --reward.remote_url reward.py --train.colocate_actor_ref \\
   --train.async_enable --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --ds.ring_attn_size 2 \\
   --ds.ring_attn_head_stride 2 --data.max_len 8192 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \\
   --train.batch_size 256 --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.init_coef 1e-3 \\
   --ref.offload --rollout.top_p 0.9 --actor.adam.lr 5e-7 --ds.zero_stage 3 --train.max_epochs 2 --ds.deepcompile
"""


def test_all_models_take_turns_on_the_same_gpus(tmp_path: Path) -> None:
    data, said = converted_rl(tmp_path, FORMER)
    assert data["model"] == "hf://meta-llama/Meta-Llama-3-8B"
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [3072, 8, 128]
    assert of(data, "training", "recompute", "framework", "attention") == ["full", "deepspeed", "fused"]
    assert of(data, "parallelism", "dp", "zero") == [8, 3]
    rl = data["rl"]
    assert (rl["prompts_per_step"], rl["generations_per_prompt"], rl["colocated"]) == (1024, 1, True)
    assert (rl["prompt_len"], rl["output_len"]) == ({"max": 1024, "mean": 100}, {"max": 2048, "mean": 300})
    assert (rl["reference"], rl["critic"], rl["sequences"]) == ("gpu", "host", "mean")
    assert (rl["sleep_level"], rl["offload_training"]) == (1, True)
    engine = rl["generation"]
    assert (engine["replicas"], engine["tp"], engine["prefix_cache"]) == (4, 2, "none")
    assert engine["kv_cache"] == {"memory_fraction": 0.5}
    assert "reward model OpenRLHF/Llama-3-8b-rm-700k: not known here, so a rule gives the rewards" in said
    assert "enforce_eager: the engine is simulated with CUDA graphs" in said
    assert "not expressed" not in said
    assert "full length" not in said


def test_engines_on_gpus_of_their_own_run_one_step_ahead(tmp_path: Path) -> None:
    data, said = converted_rl(tmp_path, TODAY)
    assert of(data, "parallelism", "dp", "cp", "zero") == [8, 2, 3]
    rl = data["rl"]
    assert (rl["colocated"], rl["steps_off"], rl["reference"], rl["critic"]) == (False, 1, "host", "none")
    assert (rl["sequences"], rl["generation"]["replicas"], rl["generation"]["tp"]) == ("packed", 8, 1)
    assert (rl["generation"]["prefix_cache"], rl["generation"]["sampling"]["top_p"]) == ("gpu", 0.9)
    assert data["training"]["micro_batch_size"] == 4  # 16,384 tokens on each of two ranks
    assert "train_max_epochs" not in said
    assert data["rl"]["epochs"] == 2
    assert "not expressed here: --ds.deepcompile" in said
    assert "reward" not in rl


def test_a_reward_model_that_is_known(tmp_path: Path) -> None:
    data, _ = converted_rl(tmp_path, FORMER.replace("OpenRLHF/Llama-3-8b-rm-700k", "meta-llama/Meta-Llama-3-8B"))
    assert data["rl"]["reward"] == {"model": "hf://meta-llama/Meta-Llama-3-8B"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--colocate_all_models", "", "the reference has GPUs of its own, which is not simulated; with --train.coloc"),
        ("--colocate_all_models", "--colocate_actor_ref", "the critic of gae has GPUs of its own"),
        ("--vllm_num_engines 4", "--vllm_num_engines 2", "2 engines of 2 GPUs; all models share their GPUs, of which"),
        ("--vllm_num_engines 4", "", "without vLLM is not read"),
        ("--pretrain meta-llama/Meta-Llama-3-8B", "--pretrain $MODEL", "in which a variable has no value: --var MODEL"),
        ("OpenRLHF/Llama-3-8b-rm-700k", "Qwen/Qwen3-4B", "one is simulated with the policy's sizes"),
    ],
)
def test_what_is_not_simulated_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in refused(tmp_path, "run.sh", FORMER.replace(old, new), *OF_RL)


def test_one_of_several_commands_is_not_taken_for_all(tmp_path: Path) -> None:
    said = refused(tmp_path, "run.sh", FORMER + FORMER.replace("--zero_stage 3", "--zero_stage 2"), *OF_RL)
    assert "2 commands of openrlhf.cli.train_ppo_ray differ: keep the one that runs in the file" in said
    data, _ = converted_rl(tmp_path, FORMER + FORMER)
    assert data["parallelism"]["zero"] == 3
