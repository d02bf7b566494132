#!/bin/bash
TP=4
A=(
  # model
  --num-layers 32 --hidden-size 4096 # (x) "quoted
  --num-attention-heads 32
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 --micro-batch-size 1
  --tensor-model-parallel-size $TP
)
((TP*=2))
torchrun --nproc_per_node 8 pretrain_gpt.py "${A[@]}" --global-batch-size 64
