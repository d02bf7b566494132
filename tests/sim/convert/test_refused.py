"""Configurations that cannot be read as scenarios are refused in one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON, MEMORY_BUDGET, NO_WORDS, SPLIT_AT_1, TITAN


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[model\n", "not TOML"),
        ("a.py", "def f(:\n", "not Python"),
        ("a.py", "x = 1\n", "holds no torchtitan config"),
        ("a.py", "from trl import KTOTrainer\n", "such as TrainingConfig; of trl, give its command, or a YAML or JSON"),
        ("a.py", "from unsloth import X\nfrom trl import SFTTrainer\n", "; of unsloth, give its command, or a YAML"),
        ("a.py", "import torch\n", "a script's own step can be recorded instead (docs/programs_script.md)"),
        ("a.sh", "echo hello\n", "whose configuration it is cannot be told"),
        ("a.sh", " \n", "a.sh: is empty; a trainer's configuration or a launch script is wanted"),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers four", "--gpus N"),
        ("a.sh", "--nproc-per-node 8 --nnodes 1 --num-layers four --seq-length 8", "is required and missing"),
        ("a.sh", "--nproc-per-node 9 --nnodes 1 --tensor-model-parallel-size 2", "must be a multiple of 2"),
        ("a.sh", f"{MEGATRON.rstrip()} --clip-grad x", "clip-grad: found 'x'; must be a number"),
        ("a.sh", f"{MEGATRON.rstrip()} --kv-channels x", "kv-channels: found 'x'; must be a whole number"),
        (
            "a.sh",
            f"{MEGATRON.rstrip()} --context-parallel-size 0",
            "--context-parallel-size: found 0; must be at least 1",
        ),
        ("a.toml", TITAN.replace("replicate_degree = 2", "replicate_degree = 0"), "found 0; must be at least 1"),
        ("a.toml", NO_WORDS, "converters: found a list of 1; must be a list of texts"),
        ("a.toml", SPLIT_AT_1, "pipeline_parallel_split_points: found 1; must be a list of texts"),
        ("a.toml", MEMORY_BUDGET, "found 'memory_budget'; can be simulated: none, selective, full"),
        ("a.json", "[1]", "holds no mapping"),
        ("a.toml", '[parallelism]\ndata_parallel_shard_degree = 1\n[model]\nname = "flux"', "found flux None"),
    ],
)
def test_what_cannot_be_read_is_one_message(tmp_path: Path, name: str, text: str, message: str) -> None:
    output = refused(tmp_path, name, text, "--cluster", "dgx-h100")
    assert message in output
    assert "Traceback" not in output


FOR_ANY = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3-8b", "--seq-len", "512")
STARTS = "accelerate launch {} --per_device_train_batch_size 1"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yml",
            '{"pipe-parallel-size": 1, "num-experts": 4}',
            "num_experts: found 4; experts and soft prompts of",
        ),
        (
            "a.yml",
            '{"pipe-parallel-size": 4, "zero_optimization": {"stage": 1}}',
            "hidden_size: is required and missing",
        ),
        (
            "a.yml",
            "model_name: x\nper_device_batch_size: 4\nmax_target_length: 2048",
            "is a file of MaxText, of JAX, which",
        ),
        ("a.yaml", "model: {type: llama}\ntrainer: {train_batch_size: 8}", "is a file of Levanter, of JAX, which"),
        (
            "a.yaml",
            "policy: {train_global_batch_size: 8, megatron_cfg: {enabled: true}}",
            "has none of the sections grpo, sft; can be converted",
        ),
        ("a.yaml", "model: {_target_: x}\nstep_scheduler: {local_batch_size: 1}", "is a file of NeMo AutoModel, which"),
        ("a.yaml", "model: {model_path: x}\ntrain: {micro_batch_size: 1}", "is a file of VeOmni, which is not read"),
        (
            "a.toml",
            "[model]\nname = 'x'\n[orchestrator]\ntoken_batch_size = 8",
            "orchestrator.token_batch_size: a batch in tokens is not simulated",
        ),
        (
            "a.sh",
            "python3 -m MaxText.train MaxText/configs/base.yml",
            "has a command of MaxText, which is not read: it",
        ),
        (
            "a.sh",
            "uv run python examples/run_grpo.py --config x.yaml",
            "which is not read: convert the YAML behind its",
        ),
        ("train.py", "from olmo_core.train import TrainerConfig", "has a command of OLMo, which is not read"),
        ("a.yaml", "services: {vllm: {image: a}}", "no container has a command of its own: write the"),
        ("a.yaml", "apiVersion: v1\nkind: Pod\nname: {{ .Release.Name }}", "is a template of Helm: convert what `helm"),
        ("a.yaml", "apiVersion: v1\nkind: Service\nspec: {}", "no container has a command of its own"),
        (
            "olmo.yaml",
            "model: {d_model: 64, n_layers: 2}\ndevice_train_microbatch_size: 2\nglobal_train_batch_size: 8",
            "is a file of OLMo, which is not read",
        ),
        (
            "a.sh",
            "python3 -m verl.trainer.main_ppo data.train_batch_size=8 algorithm.adv_estimator=remax",
            "found 'remax'; needs further answers",
        ),
        ("a.sh", "python3 -m verl.trainer.main_ppo --config-name x", "the config x is not there"),
        ("a.sh", "torchrun -m verl.trainer.sft_trainer engine=veomni", "engine: found 'veomni'; can be converted"),
        ("a.sh", "python3 -m verl.trainer.main_eval data.path=a", "has a command of verl, which is not read"),
        (
            "a.sh",
            "deepspeed --module openrlhf.cli.train_dpo --zero_stage 2",
            "a command of OpenRLHF, which is not",
        ),
        (
            "a.sh",
            "lmdeploy serve api_server a/b --tp 2",
            "of LMDeploy, which is not read: this engine has no record here",
        ),
        (
            "a.sh",
            "docker run text-generation-inference:3 --model-id a/b",
            "a command of Text Generation Inference, which",
        ),
        ("a.sh", "llama-server -m model.gguf -ngl 99", "a command of llama.cpp, which is not read"),
        ("a.sh", "colossalai run --nproc_per_node 8 benchmark.py -c 65b", "has a command of Colossal-AI, which is not"),
        (
            "a.yaml",
            "compute_environment: A\ndistributed_type: FSDP",
            "is Accelerate's config of processes and sharding",
        ),
        ("a.sh", "llamafactory-cli train full/llama3.yaml  # x.yaml", "names full/llama3.yaml: convert that file"),
        ("a.yaml", "batch: 3", "whose configuration it is cannot be told: it has no key of Megatron-Bridge"),
        ("a.yaml", "stage: rm\nlearning_rate: 1", "stage rm: trains on pairs of answers, with a head for rewards"),
        ("a.yaml", "stage: bco\nlearning_rate: 1", "stage bco: has a reference model read each answer, too"),
        ("a.yaml", "base_model: llama3-8b\nrl: ebft", "rl ebft: generates answers in each step"),
        ("a.yaml", "base_model: llama3-8b\nrl: newest", "rl newest: trains for something else than next tokens"),
        ("a.yaml", "base_model: llama3-8b\ngkd_trainer: true", "gkd_trainer: has a teacher read each answer"),
        ("a.yaml", "base_model: llama3-8b\nlisa_n_layers: 4", "lisa_n_layers: trains some of the parameters"),
        ("a.yaml", "base_model: llama3-8b\ndiffusion: {eps: 1e-3}", "plugin diffusion: trains on masked tokens with"),
        (
            "a.yaml",
            "base_model: llama3-8b\nplugins: [axolotl.integrations.spectrum.SpectrumPlugin]",
            "plugin spectrum: trains some of the parameters",
        ),
        ("a.yaml", "base_model: llama3-8b\nkd_trainer: true", "plugin kd: learns from a teacher's likeliest tokens"),
        ("a.yaml", "base_model: llama3-8b\nprocess_reward_model: true", "trains on the steps of answers"),
        (
            "bert.yaml",
            "global_train_batch_size: 8\nmodel: {name: mosaic_bert}",
            "model.name mosaic_bert: an encoder is trained on masked tokens",
        ),
        (
            "bert.yaml",
            "model: {num_layers: 2, bert_binary_head: true}",
            "model.bert_binary_head: an encoder is trained on masked tokens",
        ),
        (
            "a.yaml",
            "learning_rate: 1\nnum_generations: 8",
            "use_vllm: is missing, which is false; must be true: answers by Transformers' generate",
        ),
        ("a.sh", STARTS.format("train_grpo_vllm.py"), "use_vllm: is missing, which is false; must be true"),
        ("a.sh", STARTS.format("rloo.py"), "use_vllm: is missing, which is false; must be true"),
        ("a.sh", STARTS.format("rloo.py --rloo_k 2"), "rloo_k, a key of TRL's PPO: generates answers in each step"),
    ],
)
def test_what_would_become_another_training_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Each gave a step of plain data-parallel training, with TrainingArguments' defaults."""
    assert message in refused(tmp_path, name, text, *FOR_ANY)


def test_variables_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    bomb = "A6=" + "x" * 1000 + "".join(f"\nA{i}={f'$A{i + 1}' * 61}" for i in reversed(range(6)))
    assert "characters" in refused(tmp_path, "a.sh", bomb + "\n--num-layers $A0 $A0 $A0", "--cluster", "dgx-h100")


def test_a_script_that_runs_another(tmp_path: Path) -> None:
    """As examples/deepseek_v3 of ROCm/Megatron-LM starts its training: on each node of a job, in a container."""
    text = (
        "#SBATCH --nodes=8\nsrun bash -c 'docker run image /bin/bash -c \"TP=2 PP=16 bash examples/train_dsv3.sh\"'\n"
    )
    said = refused(tmp_path, "slurm.sh", text, "--cluster", "dgx-h100")
    assert "runs examples/train_dsv3.sh: convert that file, with the variables that this one sets as --var" in said
    said = refused(tmp_path, "a.sh", 'exec bash "${HERE}/run_moe.sh" --num-experts 8\n', "--cluster", "dgx-h100")
    assert "runs ${HERE}/run_moe.sh: convert that file" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-lora-rank 512", "--kv-lora-rank: a rank of latent attention, without --multi-latent-attention: add"),
        ("--num-experts 8 --num-shared-experts 2", "--num-shared-experts: experts that read each token, by a patch"),
        ("--num-experts 8 --enable-shared-expert", "write their width in all as --moe-shared-expert-intermediate-size"),
    ],
)
def test_flags_of_a_patched_megatron_lm_are_refused(tmp_path: Path, flags: str, message: str) -> None:
    """alibaba/Pai-Megatron-Patch: its DeepSeek-V2 has latent attention without Megatron-LM's own flag."""
    assert message in refused(tmp_path, "a.sh", f"{MEGATRON.rstrip()} {flags}\n", "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("use_vllm: true", "max_completion_length: answers of 512 tokens leave no room for a prompt in 512"),
        ("loss_type: apo_zero_unpaired", "its models read no other answers, which is not simulated"),
        ("loss_type: dapo", "use_vllm: is missing, which is false; must be true"),
        (
            "teacher_model_name_or_path: a/b",
            "lmbda: found 0.5; the student writes answers in this share of the batches",
        ),
        ("num_ppo_epochs: 4", "a key of TRL's PPO: generates answers"),
    ],
)
def test_files_of_trls_other_trainers_are_told_by_their_keys(tmp_path: Path, key: str, message: str) -> None:
    """A file of these has no name of its trainer, and the other keys are those of its SFTTrainer."""
    text = f"max_length: 512\nlearning_rate: 1.0e-6\n{key}\n"
    assert message in refused(tmp_path, "a.yaml", text, *FOR_ANY)


@pytest.mark.parametrize("key", ["use_vllm: false", "beta: null", "precompute_ref_log_probs: false"])
def test_keys_of_trls_other_trainers_that_are_off_say_nothing(tmp_path: Path, key: str) -> None:
    data, _ = converted(tmp_path, "a.yaml", f"max_length: 512\nlearning_rate: 1.0e-6\n{key}\n", *FOR_ANY)
    assert data["training"]["seq_len"] == 512


def test_layers_of_sparse_attention_are_named_and_not_their_ranks(tmp_path: Path) -> None:
    flags = "--hybrid-layer-pattern M-MCM-MHMDM- --q-lora-rank 512 --hidden-size 2048 --num-attention-heads 16"
    text = f"torchrun pretrain_hybrid.py {flags} --micro-batch-size 1 --seq-length 8192 --vocab-size 1000 --bf16"
    said = refused(tmp_path, "t.sh", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert "--hybrid-layer-pattern: found 'M-MCM-MHMDM-'" in said
