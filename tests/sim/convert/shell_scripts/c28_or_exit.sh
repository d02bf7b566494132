#!/bin/bash
TP=4; PP=2
cd . || { echo no; exit 1; }
which torchrun > /dev/null || exit 1
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
