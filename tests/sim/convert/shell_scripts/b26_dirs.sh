#!/bin/bash
DIR=/ckpt/llama-8b/tp4_pp2/; NAME=$(basename "$DIR"); TP=$(echo $NAME | cut -d_ -f1 | tr -d a-z); PP=${NAME##*pp}; 
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
