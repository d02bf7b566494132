#!/bin/bash
parse() { while [[ $# -gt 0 ]]; do case "$1" in --tp) TP="$2"; shift 2;; --pp=*) PP="${1#*=}"; shift;; *) shift;; esac; done; }
parse --tp 4 --x --pp=2
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
