"""Files and commands of TRL and Axolotl that train by GRPO, as scenarios with `rl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.convert.trainer_arguments.grpo_engine import NEWEST, OF_AXOLOTL, UNTIL_027
from sim.inputs.scenario import parse_scenario
from sim.variants.engines.names import engine_named
from tests.sim.convert.converting import OF_RL, converted, converted_rl, of, refused

ON_8 = (*OF_RL, "--gpus", "8")
LONG = (*ON_8, "--seq-len", "1536")
TRL = """
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward]
learning_rate: 1.0e-6
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_generations: 16
max_completion_length: 1024
loss_type: dapo
epsilon_high: 0.28
importance_sampling_level: sequence
fsdp: full_shard
use_vllm: true
"""
SCRIPT = r"""
CUDA_VISIBLE_DEVICES=4,5,6,7 trl vllm-serve --model Qwen/Qwen2.5-7B-Instruct --port 8000 \
    --tensor-parallel-size 2 --data_parallel_size 2 --max_num_seqs 128 &
CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 4 --use_deepspeed --zero_stage 3 train_grpo.py \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct --bf16 true --gradient_checkpointing true \
    --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --num_generations 16 \
    --max_prompt_length 512 --max_completion_length 1024 --temperature 0.7 --top_k 50 \
    --use_vllm true --vllm_server_host 0.0.0.0 --vllm_gpu_memory_utilization 0.3
"""
AXOLOTL = """
base_model: Qwen/Qwen3-8B
sequence_len: 4096
rl: grpo
trl:
  use_vllm: true
  num_generations: 4
  max_completion_length: 2048
  reward_funcs: [r1.accuracy]
  beta: 0.001
vllm: {host: 0.0.0.0, port: 8000, tensor_parallel_size: 2, gpu_memory_utilization: 0.85}
micro_batch_size: 1
gradient_accumulation_steps: 64
bf16: true
optimizer: adamw_torch_fused
learning_rate: 1.0e-5
"""


def test_an_engine_beside_the_trainer(tmp_path: Path) -> None:
    """trl/generation/vllm_generation.py: requests and tokens of an iteration; states of the trainer stay."""
    data, said = converted(tmp_path, "a.yaml", TRL + "vllm_tensor_parallel_size: 2\n", *LONG)
    assert data["model"] == "hf://Qwen/Qwen3-8B"
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [1536, 4, 4 * 8 * 8]
    assert of(data, "training", "precision", "param_dtype", "recompute") == ["bf16", "fp32", "full"]
    assert of(data, "training", "cross_entropy") == ["tiled"]
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt") == [16, 16]
    assert of(data, "rl", "prompt_len", "output_len") == [{"max": 512, "mean": 100}, {"max": 1024, "mean": 300}]
    assert of(data, "rl", "reference", "sequences", "sleep_level", "offload_training") == ["none", "padded", 0, False]
    engine = data["rl"]["generation"]
    assert (engine["engine"], engine["tp"], engine["kv_cache"]) == ("vllm-0.31", 2, {"memory_fraction": 0.3})
    assert (engine["max_running_requests"], engine["max_batch_tokens"]) == (4 * 2 * 8, 4096)
    assert engine["sampling"] == {"temperature": 1.0, "top_p": 1.0, "logprobs": 0}
    assert "defaults of TRL 1.16: vllm_mode colocate (before 1.0 server), beta 0 and so no reference" in said
    assert "rl.reward_s says how long they take" in said
    assert "not expressed" not in said
    assert parse_scenario(data).rl is not None


def test_a_server_that_the_script_starts(tmp_path: Path) -> None:
    data, said = converted_rl(tmp_path, SCRIPT)
    assert of(data, "parallelism", "dp", "tp", "zero") == [4, None, 3]
    assert of(data, "training", "seq_len", "global_batch_size", "cross_entropy") == [1536, 128, None]
    assert of(data, "rl", "colocated", "prompts_per_step", "log_probs") == [False, 8, None]
    assert of(data, "rl", "prompt_len", "sleep_level") == [{"max": 512, "mean": 100}, None]
    engine = data["rl"]["generation"]
    assert (engine["engine"], engine["tp"], engine["replicas"]) == ("vllm-0.11", 2, 2)
    assert engine["max_running_requests"] == 128
    assert engine["sampling"] == {"temperature": 0.7, "top_p": 1.0, "top_k": 50, "logprobs": 0}
    assert "max_prompt_length: is a key of TRL until 0.27, whose defaults are taken: vllm_mode server" in said
    assert "its GPUs come beside those that train" in said
    assert "not expressed" not in said


@pytest.mark.parametrize(
    "serve", ["vllm serve Qwen/Qwen3-8B", "python -m trl.scripts.vllm_serve", "axolotl vllm-serve"]
)
def test_ways_to_start_a_server(tmp_path: Path, serve: str) -> None:
    """TRL 1.16's server is vLLM's own; its flags are not the trainer's."""
    text = SCRIPT.replace("trl vllm-serve", serve)
    data, _ = converted_rl(tmp_path, text)
    assert (data["rl"]["generation"]["tp"], data["parallelism"].get("tp")) == (2, None)


def test_a_server_that_nothing_describes(tmp_path: Path) -> None:
    text = TRL + "vllm_mode: server\n"
    data, said = converted(tmp_path, "a.yaml", text, *LONG, "--set", "rl.generation.tp=4")
    assert (data["rl"]["generation"]["tp"], data["rl"]["generation"]["replicas"]) == (4, 1)
    assert "one engine on one GPU is simulated" in said


def test_axolotl_s_sections(tmp_path: Path) -> None:
    """core/trainers/grpo/__init__.py: the server is the default; sizes of the engine stand in `vllm`."""
    data, said = converted(tmp_path, "a.yaml", AXOLOTL, *ON_8)
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [4096, 1, 512]
    assert of(data, "training", "cross_entropy", "param_dtype") == [None, "bf16"]
    assert of(data, "rl", "colocated", "prompts_per_step", "reference") == [False, 128, "gpu"]
    engine = data["rl"]["generation"]
    assert (engine["engine"], engine["tp"], engine["kv_cache"]) == ("vllm-0.21", 2, {"memory_fraction": 0.85})
    assert "sequence_len: taken for the longest prompt with its answer" in said
    assert "not expressed" not in said
    colocated = AXOLOTL.replace("  use_vllm: true", "  use_vllm: true\n  vllm_mode: colocate\n  use_liger_loss: true")
    data, _ = converted(tmp_path, "a.yaml", colocated + "rl_beta: 0.5\n", *ON_8)
    assert of(data, "rl", "colocated", "reference") == [None, "gpu"]
    assert data["rl"]["generation"]["max_running_requests"] == 2 * 64
    assert data["training"]["cross_entropy"] == "chunked"


def test_axolotl_writes_ahead_of_the_trainer(tmp_path: Path) -> None:
    text = AXOLOTL.replace("  use_vllm: true", "  use_vllm: true\n  async_prefetch: true\n  use_data_producer: true")
    data, said = converted(tmp_path, "a.yaml", text.replace("  max_completion_length: 2048\n", ""), *ON_8)
    assert of(data, "rl", "steps_off", "output_len") == [1, {"mean": 300}]
    assert "async_prefetch: simulated is one step ahead" in said


@pytest.mark.parametrize(
    ("added", "log_probs"),
    [
        ("", None),  # for the correction of what vLLM computes otherwise, which is on by default
        ("vllm_importance_sampling_correction: false", "engine"),
        ("vllm_importance_sampling_correction: false\nsteps_per_generation: 16", None),  # updates before its end
        ("vllm_importance_sampling_correction: false\nnum_iterations: 2", None),
    ],
)
def test_when_the_policy_s_log_probabilities_are_computed(tmp_path: Path, added: str, log_probs: str | None) -> None:
    """grpo_trainer.py: `_generate_and_score_completions`."""
    data, _ = converted(tmp_path, "a.yaml", TRL + added, *LONG)
    assert data["rl"].get("log_probs") == log_probs
    assert data["rl"].get("epochs", 1) == (2 if "num_iterations" in added else 1)


@pytest.mark.parametrize(
    ("added", "prompts", "requests"),
    [
        ("", 16, 32),
        ("steps_per_generation: 16", 32, 64),
        ("generation_batch_size: 512", 32, 64),
        ("steps_per_generation: 4", 16, 16),  # two generations of an update
    ],
)
def test_answers_of_a_generation_and_of_an_update(tmp_path: Path, added: str, prompts: int, requests: int) -> None:
    data, said = converted(tmp_path, "a.yaml", TRL + added, *LONG)
    assert data["rl"]["prompts_per_step"] == prompts
    assert data["rl"]["generation"]["max_running_requests"] == requests
    assert ("written in 2 generations, one after another" in said) == (prompts * 16 > requests * 8)


def test_reference_reward_and_sleep(tmp_path: Path) -> None:
    added = "beta: 0.04\nsync_ref_model: true\nvllm_enable_sleep_mode: true\nuse_peft: true\nlora_dropout: 0.1\n"
    added += "disable_dropout: true\nrepetition_penalty: 1.1\nreward_model_name_or_path: Qwen/Qwen3-8B\n"
    data, said = converted(tmp_path, "a.yaml", TRL + added, *LONG)
    assert of(data, "rl", "reference", "sleep_level", "reward") == ["gpu", 2, {"model": "hf://Qwen/Qwen3-8B"}]
    assert "dropout" not in data["training"]["lora"]
    assert data["rl"]["generation"]["sampling"]["repetition_penalty"] == 1.1
    assert "rl.reference: it is the policy without its adapters" in said
    assert "sync_ref_model: mixing" in said
    text = TRL + "reward_model_name_or_path: our/judge\n"
    data, said = converted(tmp_path, "a.yaml", text, *LONG)
    assert "reward" not in data["rl"]
    assert "reward model our/judge: not known here" in said


def test_experts_and_what_has_no_key(tmp_path: Path) -> None:
    text = TRL.replace("Qwen3-8B", "Qwen3-30B-A3B") + "vllm_tensor_parallel_size: 4\nmin_p: 0.1\n"
    data, said = converted(tmp_path, "a.yaml", text, *LONG)
    assert data["rl"]["generation"]["expert_tp"] == 4
    assert "not expressed here: min_p" in said


def test_a_recipe_of_trl_s_command(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(TRL)
    text = "trl grpo --config recipe.yaml --accelerate_config fsdp2 --vllm_max_model_length 4096 --num_generations 8\n"
    data, _ = converted_rl(tmp_path, text)
    assert of(data, "training", "seq_len", "global_batch_size") == [4096, 256]
    assert of(data, "rl", "generations_per_prompt", "prompt_len") == [8, {"max": 3072, "mean": 100}]
    assert of(data, "parallelism", "dp", "zero") == [8, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRL.replace("use_vllm: true", "use_vllm: false"), "use_vllm: found false; must be true: answers by Trans"),
        (TRL, "max_prompt_length: is missing, and TRL cuts no prompt: give --seq-len N"),
        (TRL + "vllm_max_model_length: 1024", "answers of 1024 tokens leave no room for a prompt in 1024"),
        (TRL + "max_prompt_length: 512\nvllm_mode: local", "found 'local'; must be one of colocate, server"),
        (
            TRL + "max_prompt_length: 8\nsteps_per_generation: 12",
            "steps_per_generation: found 12; must divide gradient",
        ),
        (TRL + "max_prompt_length: 8\ngeneration_batch_size: 80", "found 80; must be a multiple of the 32 answers"),
        (TRL.replace("generations: 16", "generations: 12") + "max_prompt_length: 8", "must divide the 256 answers"),
        (
            TRL + "max_prompt_length: 8\nvllm_mode: colocate\nvllm_tensor_parallel_size: 3",
            "vllm_tensor_parallel_size: found 3; must divide the 8 ranks that train",
        ),
        (AXOLOTL.replace("batch_size: 1", "batch_size: 0"), "the micro-batch of a rank: found 0; must be at least 1"),
        (AXOLOTL.replace("  use_vllm: true\n", ""), "use_vllm: is missing, which is false"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, "a.yaml", text, *ON_8)


def test_engines_are_the_newest_that_a_release_allows() -> None:
    for release in (NEWEST, UNTIL_027, OF_AXOLOTL):
        found = engine_named((release.vllm,))
        assert found is not None
        assert found.name == release.engine


def test_rloo_is_grpo_with_defaults_of_its_own(tmp_path: Path) -> None:
    """trl/trainer/rloo_config.py and rloo_trainer.py, which computes the policy's log-probabilities in any case."""
    only = "reward_clip_range: [-1, 1]\nnormalize_advantages: true\n"
    of_grpo = ("loss_type", "epsilon_high", "importance", "num_gen", "max_completion")
    text = "".join(line for line in TRL.splitlines(keepends=True) if not line.startswith(of_grpo)) + only
    data, said = converted(tmp_path, "a.yaml", text, *LONG)
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt", "reference") == [128, 2, "gpu"]
    assert of(data, "rl", "output_len", "log_probs") == [{"max": 512, "mean": 300}, None]
    assert "num_generations 2, beta 0.05 and so a reference" in said
    assert "not expressed" not in said
    command = SCRIPT.replace("train_grpo.py", "examples/scripts/rloo.py").replace("--num_generations 16 ", "")
    data, said = converted_rl(tmp_path, command)
    assert of(data, "rl", "generations_per_prompt", "reference", "colocated") == [2, "gpu", False]
