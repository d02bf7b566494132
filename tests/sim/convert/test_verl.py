"""verl's commands as scenarios with `rl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.convert.verl import ENGINES, PINNED
from sim.convert.verl_files import as_usual
from sim.variants.engines.names import engine_named
from tests.sim.convert.converting import OF_RL, converted, converted_rl, of, refused

COMMAND = """
set -x
rollout_name="sglang" # sglang or vllm
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=$rollout_name \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    trainer.logger=['console','wandb'] \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 $@
"""
MEGATRON = """
NNODES=${NNODES:-1}
MODEL_PATH=Qwen/Qwen3-30B-A3B-Base
LENGTH=$((1024 * 2))
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer'\\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=512 data.max_prompt_length=${LENGTH} data.max_response_length=$((LENGTH * 4)) \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \\
    actor_rollout_ref.actor.megatron.param_offload=True \\
    actor_rollout_ref.actor.megatron.optimizer_offload=True \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type="flex" \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.top_p=0.9 actor_rollout_ref.rollout.enforce_eager=True \\
    actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 trainer.nnodes=${NNODES}
"""


def test_fsdp_and_an_engine_take_turns(tmp_path: Path) -> None:
    data, said = converted_rl(tmp_path, COMMAND)
    assert data["model"] == "hf://Qwen/Qwen3-8B"
    assert of(data, "parallelism", "dp", "zero", "fsdp_version") == [8, 3, 1]
    assert of(data, "training", "seq_len", "global_batch_size", "recompute") == [1536, 256 * 5, "full"]
    assert of(data, "training", "param_dtype", "grad_reduce_dtype", "framework") == ["fp32", "fp32", "transformers"]
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt") == [1024, 5]
    assert of(data, "rl", "prompt_len", "output_len") == [{"max": 512, "mean": 100}, {"max": 1024, "mean": 300}]
    assert of(data, "rl", "reference", "sequences", "offload_training") == ["host", "packed", False]
    engine = data["rl"]["generation"]
    assert (engine["engine"], engine["tp"], engine["kv_cache"]) == ("sglang-0.5.11", 2, {"memory_fraction": 0.6})
    assert data["training"]["micro_batch_size"] == 10  # of 24,000 // 1,536 = 15 that divides 1,280 / 8
    assert "verl packs 24,000 tokens" in said
    assert "not expressed" not in said


def test_answers_of_one_length_are_said(tmp_path: Path) -> None:
    assert "rl.output_len.sigma: is 0, so all answers have the mean length" in converted_rl(tmp_path, COMMAND)[1]
    spread = converted_rl(tmp_path, COMMAND, "--set", "rl.output_len.sigma=0.5")[1]
    assert "no long one is waited for" not in spread


@pytest.mark.parametrize(("strategy", "found"), [("fsdp2", ["cpu", True]), ("fsdp", [None, None])])
def test_the_second_fsdps_offload_policy(tmp_path: Path, strategy: str, found: list[object]) -> None:
    actor = "actor_rollout_ref.actor"
    flags = f"{actor}.strategy={strategy} {actor}.fsdp_config.offload_policy=True trainer.nnodes=1"
    data, said = converted_rl(tmp_path, COMMAND.replace("trainer.nnodes=1", flags))
    assert of(data, "training", "optimizer_offload", "parameter_offload") == found
    assert "not expressed" not in said


def test_megatron_trains_experts_and_the_engine_splits_them_within_its_degree(tmp_path: Path) -> None:
    data, said = converted_rl(tmp_path, MEGATRON)
    assert of(data, "parallelism", "dp", "tp", "pp", "ep", "expert_tp", "zero") == [4, 2, 1, 8, 1, 1]
    assert of(data, "parallelism", "sp", "ep_dispatcher") == [True, "deepep"]
    assert of(data, "training", "framework", "micro_batch_size", "optimizer_offload") == ["megatron", 2, "cpu"]
    assert of(data, "rl", "reference", "sequences", "offload_training") == ["none", "mean", True]
    engine = data["rl"]["generation"]
    assert (engine["tp"], engine["expert_tp"]) == (4, 4)
    assert engine["sampling"] == {"temperature": 1.0, "top_p": 0.9}
    assert "enforce_eager" in said
    data, _ = converted_rl(tmp_path, MEGATRON, "--var", "NNODES=2")
    assert data["parallelism"]["dp"] == 8


def test_the_group_of_configs_says_who_trains(tmp_path: Path) -> None:
    """`model_engine=megatron`, which stands in the place of `--config-name`."""
    named = MEGATRON.replace("--config-path=./config --config-name='ppo_megatron_trainer'", "model_engine=megatron")
    assert converted_rl(tmp_path, named)[0] == converted_rl(tmp_path, MEGATRON)[0]
    said = refused(tmp_path, "run.sh", with_keys(COMMAND, "model_engine=veomni"), *OF_RL)
    assert "run.sh: model_engine: found 'veomni'; can be converted: dp, fsdp, fsdp2, megatron" in said
    said = refused(tmp_path, "run.sh", with_keys(COMMAND, "actor_rollout_ref.actor.strategy=torchtitan"), *OF_RL)
    assert "actor.strategy: found 'torchtitan'; can be converted" in said


def test_weights_and_experts_of_the_engine(tmp_path: Path) -> None:
    of_engine = "actor_rollout_ref.rollout"
    data, said = converted_rl(tmp_path, with_keys(MEGATRON, f"{of_engine}.quantization=fp8"))
    assert data["rl"]["generation"]["quantization"] == "fp8"
    assert "not expressed" not in said
    trtllm = MEGATRON.replace("actor_rollout_ref.rollout.top_p=0.9", "").replace(
        "actor_rollout_ref.rollout.name=vllm", f"{of_engine}.name=trtllm {of_engine}.moe_tensor_parallel_size=2"
    )
    engine = converted_rl(tmp_path, trtllm)[0]["rl"]["generation"]
    assert (engine["tp"], engine["ep"], engine["expert_tp"]) == (4, 2, 2)


def test_engines_are_those_that_the_newest_release_requires(tmp_path: Path) -> None:
    """verl 0.9.1 requires vLLM 0.24.0 and SGLang 0.5.12: the records of these versions."""
    for name, version in PINNED.items():
        record = engine_named((version,))
        assert record is not None
        text = COMMAND.replace('rollout_name="sglang"', f'rollout_name="{name}"')
        data, said = converted_rl(tmp_path, text)
        assert data["rl"]["generation"]["engine"] == record.name == ENGINES[name]
        assert f"engine {record.name}: verl 0.9.1 requires {version}" in said


def test_a_state_space_model_keeps_no_prefixes(tmp_path: Path) -> None:
    text = COMMAND.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct")
    data, said = converted_rl(tmp_path, text, "--model", "qwen3-next-80b-a3b")
    assert data["rl"]["generation"]["prefix_cache"] == "none"
    assert "enable_prefix_caching: no prefix of a state-space layer is kept" in said


def test_ulysses_splits_sequences(tmp_path: Path) -> None:
    text = COMMAND.replace("actor.use_dynamic_bsz=True", "actor.ulysses_sequence_parallel_size=2")
    text = text.replace("ppo_max_token_len_per_gpu=24000", "ppo_micro_batch_size_per_gpu=4")
    data, _ = converted_rl(tmp_path, text)
    assert of(data, "parallelism", "dp", "cp", "cp_method") == [4, 2, "all_to_all"]
    assert data["rl"]["sequences"] == "mean"


def test_what_a_file_cannot_say_is_asked_for(tmp_path: Path) -> None:
    said = refused(tmp_path, "run.sh", COMMAND, "--cluster", "dgx-h100")
    assert (
        "does not give the mean length of its prompts, which its data would say: add --set rl.prompt_len.mean=N" in said
    )
    said = refused(tmp_path, "run.sh", COMMAND, *OF_RL[:4])
    assert "add --set rl.output_len.mean=N" in said
    said = refused(tmp_path, "run.sh", COMMAND.replace("estimator=grpo", "estimator=remax"), *OF_RL)
    assert "run.sh:5: algorithm.adv_estimator: found 'remax'; needs further answers" in said
    said = refused(tmp_path, "run.sh", COMMAND.replace("Qwen/Qwen3-8B", "$HOME/mine"), *OF_RL)
    assert "actor_rollout_ref.model.path: found" in said
    data, _ = converted_rl(tmp_path, COMMAND.replace("Qwen/Qwen3-8B", "/models/mine"), "--model", "llama3-8b")
    assert data["model"] == "llama3-8b"
    _, said = converted_rl(tmp_path, COMMAND.replace("ppo_mini_batch_size", "ppo_mini_batch_sise"))
    assert "ppo_mini_batch_sise is not read: did you mean actor_rollout_ref.actor.ppo_mini_batch_size?" in said


def test_what_has_no_key_is_noted(tmp_path: Path) -> None:
    _, said = converted_rl(tmp_path, COMMAND.replace("trainer.nnodes=1", "trainer.nnodes=1 reward_model.enable=True"))
    assert "not expressed here: reward_model.enable" in said


def test_a_command_without_its_batch_is_read_if_the_user_says_so(tmp_path: Path) -> None:
    text = COMMAND.replace("    data.train_batch_size=1024 \\\n", "")
    said = refused(tmp_path, "run.sh", text, *OF_RL)
    assert "not read (a command with data.train_batch_size=N is, and any by --from verl)" in said
    data, _ = converted(tmp_path, "run.sh", text, *OF_RL, "--from", "verl")
    assert of(data, "rl", "prompts_per_step") == [1024]


def test_a_model_that_the_user_names_stands_in_the_place_of_the_path(tmp_path: Path) -> None:
    text = COMMAND.replace("Qwen/Qwen3-8B", "/models/ours")
    assert "model.path: found '/models/ours'; is no model that is known here" in refused(
        tmp_path, "run.sh", text, *OF_RL
    )
    data, said = converted(tmp_path, "run.sh", text, *OF_RL, "--model", "qwen3-8b")
    assert data["model"] == "qwen3-8b"
    assert "model.path" not in said


CHANGED = "actor_rollout_ref.actor.megatron"
OVERRIDES = f"{CHANGED}.override_transformer_config"


def with_keys(text: str, *keys: str) -> str:
    return text.replace("trainer.nnodes=", f"{' '.join(keys)} trainer.nnodes=")


def test_megatron_sends_gradients_behind_the_backward_unless_told(tmp_path: Path) -> None:
    data, _ = converted_rl(tmp_path, MEGATRON)
    assert of(data, "parallelism", "dp_sync", "param_gather_overlap", "tp_overlap") == [
        "after_backward",
        False,
        "wgrad",
    ]
    assert of(data, "training", "attention_kernel", "grad_dtype") == ["flash2", "fp32"]
    overlapped = (
        f"+{CHANGED}.override_ddp_config.{key}=True" for key in ("overlap_grad_reduce", "overlap_param_gather")
    )
    data, said = converted_rl(tmp_path, with_keys(MEGATRON, *overlapped))
    assert of(data, "parallelism", "dp_sync", "param_gather_overlap") == ["bucketed", True]
    assert "not expressed" not in said


def test_megatron_keys_of_stages_kernels_and_the_optimizer(tmp_path: Path) -> None:
    keys = (
        f"{CHANGED}.pipeline_model_parallel_size=4 {CHANGED}.virtual_pipeline_model_parallel_size=1",
        f"+{OVERRIDES}.num_layers_in_last_pipeline_stage=9 +{OVERRIDES}.apply_rope_fusion=False",
        f"+{OVERRIDES}.bias_activation_fusion=True +{OVERRIDES}.moe_permute_fusion=True",
        f'{OVERRIDES}.recompute_granularity=selective {OVERRIDES}.recompute_modules=\'["core_attn","moe_act"]\'',
        "+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True",
        "actor_rollout_ref.actor.optim.clip_grad=0",
    )
    data, said = converted_rl(tmp_path, with_keys(MEGATRON, *keys), "--var", "NNODES=4")
    assert of(data, "parallelism", "pp", "layers_per_stage", "schedule") == [4, [13, 13, 13, 9], None]
    assert of(data, "training", "apply_rope_fusion", "gradient_clipping") == [False, False]
    assert data["training"]["recompute"] == {"mode": "selective", "modules": ["core_attn", "moe_act"]}
    assert "not expressed" not in said


def test_a_typed_wrong_degree_of_megatron_is_asked_for(tmp_path: Path) -> None:
    _, said = converted_rl(tmp_path, MEGATRON.replace("tensor_model_parallel_size=2", "tensor_model_paralel_size=2"))
    assert f"did you mean {CHANGED}.tensor_model_parallel_size?" in said


def test_adapters_of_megatron(tmp_path: Path) -> None:
    dense = MEGATRON.replace("Qwen3-30B-A3B-Base", "Qwen3-8B").replace("expert_model_parallel_size=8", "x=1")
    keys = "actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.model.lora.alpha=64"
    data, _ = converted_rl(tmp_path, with_keys(dense, keys))
    assert data["training"]["lora"] == {"rank": 32}
    data, _ = converted_rl(
        tmp_path, with_keys(dense, keys, "actor_rollout_ref.model.lora.target_modules='[linear_qkv]'")
    )
    assert data["training"]["lora"] == {"rank": 32, "targets": ["qkv"]}


def test_modules_of_prediction_are_trained_only_if_they_are_turned_on(tmp_path: Path) -> None:
    text = COMMAND.replace("Qwen/Qwen3-8B", "zai-org/GLM-4.5-Air")
    data, _ = converted_rl(tmp_path, text)
    assert data["model"] == {"preset": "hf://zai-org/GLM-4.5-Air", "mtp_layers": 0}
    data, _ = converted_rl(tmp_path, with_keys(text, "actor_rollout_ref.model.mtp.enable=True"))
    assert data["model"] == "hf://zai-org/GLM-4.5-Air"


def test_fused_kernels_are_a_loss_in_tiles(tmp_path: Path) -> None:
    fused = "actor_rollout_ref.model.use_fused_kernels=True"
    data, said = converted_rl(tmp_path, with_keys(COMMAND, fused))
    assert data["training"]["cross_entropy"] == "tiled"
    assert "not expressed" not in said
    data, said = converted_rl(tmp_path, with_keys(MEGATRON, fused))  # with tensor parallelism
    assert data["training"]["cross_entropy"] == "unfused"
    assert "not expressed here: actor_rollout_ref.model.use_fused_kernels" in said


def test_what_repeats_the_actors_layout_for_the_reference_is_not_noted(tmp_path: Path) -> None:
    key = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size"
    _, said = converted_rl(tmp_path, with_keys(MEGATRON, f"{key}=2", "algorithm.use_kl_in_reward=False"))
    assert "not expressed" not in said
    _, said = converted_rl(tmp_path, with_keys(MEGATRON, f"{key}=4"))
    assert f"not expressed here: {key}" in said


def test_a_critic_of_the_policys_sizes(tmp_path: Path) -> None:
    text = with_keys(
        COMMAND.replace("adv_estimator=grpo", "adv_estimator=gae"),
        "critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen3-8B critic.model.use_remove_padding=True",
        "critic.model.fsdp_config.param_offload=False critic.ppo_mini_batch_size=256",
    )
    data, said = converted_rl(tmp_path, text)
    assert data["rl"]["critic"] == "gpu"
    assert "the critic: simulated with the policy's layout" in said
    assert "not expressed" not in said
    more = "critic.fsdp.optimizer_offload=True critic.ppo_micro_batch_size_per_gpu=4"
    data, said = converted_rl(tmp_path, with_keys(text, more))
    assert data["rl"]["critic"] == "host"
    assert "not expressed here: critic.ppo_micro_batch_size_per_gpu" in said
    other = text.replace("critic.model.path=Qwen/Qwen3-8B", "critic.model.path=llama3-8b")
    said = refused(tmp_path, "run.sh", other, *OF_RL)
    assert (
        "critic.model.path: found 'llama3-8b'; a critic is simulated with the policy's sizes, 'Qwen/Qwen3-8B'" in said
    )
    said = refused(
        tmp_path, "run.sh", text.replace("mini_batch_size=256 trainer", "mini_batch_size=64 trainer"), *OF_RL
    )
    assert "critic.ppo_mini_batch_size: found 64; a critic is simulated with the policy's" in said


def test_a_critics_own_degrees_are_named(tmp_path: Path) -> None:
    text = MEGATRON.replace("adv_estimator=grpo", "adv_estimator=gae")
    keys = (
        f"critic.model.path=$MODEL_PATH critic.megatron.expert_model_parallel_size=8 {CHANGED}.context_parallel_size=2"
    )
    _, said = converted_rl(tmp_path, with_keys(text, keys, "critic.megatron.context_parallel_size=1"))
    first, second = (f"critic.megatron.{kind}_parallel_size: 1 in verl, 2 here" for kind in ("tensor_model", "context"))
    assert f"and optimizer; {first}; {second}\n" in said
    assert "not expressed" not in said


def test_estimators_without_a_critic_have_none(tmp_path: Path) -> None:
    assert "critic" not in converted_rl(tmp_path, COMMAND)[0]["rl"]


def test_answers_may_keep_the_log_probabilities_of_the_engine(tmp_path: Path) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode"
    data, said = converted_rl(tmp_path, with_keys(COMMAND, f"{bypass}=True"))
    assert data["rl"]["log_probs"] == "engine"
    assert "not expressed" not in said
    assert "log_probs" not in converted_rl(tmp_path, with_keys(COMMAND, f"{bypass}=False"))[0]["rl"]


CONFIG = """
defaults:
  - ppo_trainer
  - _self_
hydra:
  searchpath: [file://verl/trainer/config]
data: {train_batch_size: 1024, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora: {rank: 0, dropout: 0.0}}
  actor:
    ppo_mini_batch_size: 256
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 24000
    use_kl_loss: true
    ppo_epochs: 1
    rollout_n: "${oc.select:actor_rollout_ref.rollout.n,1}"
    profiler: {_target_: verl.utils.profiler.ProfilerConfig, enable: false, ranks: []}
    mtp: {enable: false, method: mtp}
  ref:
    log_prob_use_dynamic_bsz: "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    fsdp_config: {param_offload: true}
  rollout:
    name: sglang
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    n: 5
    prompt_length: "${oc.select:data.max_prompt_length,512}"
    mtp: "${oc.select:actor_rollout_ref.actor.mtp, null}"
critic: {ppo_max_token_len_per_gpu: 32768, forward_max_token_len_per_gpu: "${.ppo_max_token_len_per_gpu}"}
algorithm: {adv_estimator: grpo, lam: 1.0}
reward: {reward_model: {enable: false, rollout: {name: "???"}}}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""


def test_a_whole_config_is_what_its_command_is(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "run.yaml", CONFIG, *OF_RL)
    assert (data, "not expressed" in said) == (converted_rl(tmp_path, COMMAND)[0], False)


def test_what_a_whole_config_says_otherwise_than_verl_does_anyhow_is_named(tmp_path: Path) -> None:
    changed = CONFIG.replace("ppo_epochs: 1", "ppo_epochs: 2").replace("rollout_n: ", "rollout_n: 7 # ")
    data, said = converted(tmp_path, "run.yaml", changed, *OF_RL)
    named = "not expressed here: actor_rollout_ref.actor.rollout_n\n" in said
    assert (data["rl"]["epochs"], named) == (2, True)


def test_a_commands_own_config_is_read_beneath_it(tmp_path: Path) -> None:
    command = "python3 -m verl.trainer.main_ppo --config-path=$DIR/config --config-name=mine trainer.nnodes=2\n"
    absent = converted_rl(tmp_path, COMMAND.replace("main_ppo", "main_ppo --config-name mine"))[1]
    assert "the config mine is not there, so what it says is not read: put it beside the script" in absent
    (tmp_path / "mine.yaml").write_text(CONFIG)
    data, said = converted_rl(tmp_path, command)
    assert (data["parallelism"]["dp"], data["rl"]["generations_per_prompt"]) == (16, 5)
    assert "not there" not in said


def test_a_whole_config_says_that_megatron_trains(tmp_path: Path) -> None:
    actor = "actor:\n    megatron: {tensor_model_parallel_size: 2}\n    strategy: megatron"
    config = CONFIG.replace("actor:", actor, 1).replace("critic: {", "critic: {enable: true, ")
    data, said = converted(tmp_path, "run.yaml", config, *OF_RL)
    assert (data["training"]["framework"], data["parallelism"]["tp"], "critic.enable" in said) == ("megatron", 2, True)
    for value in ("${trainer.nnodes}", "1${trainer.nnodes}${trainer.nnodes}", "${trainer}"):
        circle = CONFIG.replace("nnodes: 1", f'nnodes: "{value}", other: "{value}"')
        assert "an interpolation that leads back to itself" in refused(tmp_path, "run.yaml", circle, *OF_RL)


def test_a_choice_of_a_section_stands_beside_its_settings() -> None:
    assert as_usual(Path("x"), {"trainer": "mine", "trainer.use_v1": True}) == {"trainer.use_v1"}


@pytest.mark.parametrize("words", ["trainer.x", "div:1,0", "mul:1e308,1e308", "add:nan,1"])
def test_an_interpolation_without_a_value_stays_as_it_is(tmp_path: Path, words: str) -> None:
    config = CONFIG.replace("n: 5", f'n: "${{{words}}}"')
    assert f"rollout.n: found '${{{words}}}'" in refused(tmp_path, "run.yaml", config, *OF_RL)
