"""Launch scripts and configurations as people write them, for tests of `stepsim convert`."""

from __future__ import annotations

MEGATRON = """
#!/bin/bash
# a launch script as Megatron-LM's examples have them
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
TP=4
PP=2   # pipeline
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0
    --vocab-size 128256
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --recompute-activations
    --cuda-graph-scope full
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP \\
    --sequence-parallel
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
MEMORY_BUDGET = TITAN.replace('"selective"', '"memory_budget"').replace("shard_degree = -1", "shard_degree = 2")
NO_WORDS = TITAN.replace('["float8"]', "[1]").replace("shard_degree = -1", "shard_degree = 2")
SPLIT_AT_1 = """
[model]
flavor = "8B"
[parallelism]
data_parallel_shard_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_split_points = 1
"""
TITAN_PYTHON = """
from torchtitan.config import TrainingConfig, ParallelismConfig, ActivationCheckpointConfig
from . import model_registry

def debug():
    return Trainer.Config(model_spec=model_registry("debugmodel"), training=TrainingConfig(local_batch_size=8))

def llama3_8b():
    import os; os._exit(3)
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, data_parallel_shard_degree=2),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )
"""
TITAN_0_3 = """
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry

def train():
    return Trainer.Config(
        model_spec=model_registry("70B", converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)]),
        training=TrainingConfig(local_batch_size=2, seq_len=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=4, enable_sequence_parallel=False,
            data_parallel_shard_degree=2),
        compile=CompileConfig(enable=True, enable_async_tensor_parallel=POLICY_ASYNC),
        activation_checkpoint=POLICY,
    )
"""
EXPERTS = "--num-experts 64 --expert-model-parallel-size 4"  # of Megatron-LM

FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: full
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
enable_liger_kernel: true
"""
FULL_RECOMPUTE = {"mode": "full", "early_stop": False}  # of torchtitan, as a scenario has it
