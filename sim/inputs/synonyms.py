"""Names that other programs have for a scenario's keys, for the message about an unknown key.

From Megatron-LM's megatron/training/arguments.py, torchtitan's job configs, DeepSpeed's JSON, Transformers'
`TrainingArguments` and model configs, and vLLM's engine arguments.
"""

from __future__ import annotations

_BY_KEY = {
    "parallelism.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tensor_parallel tp_size",
    "parallelism.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pipeline_parallel "
    "pp_size",
    "parallelism.cp": "context_parallel_size context_parallel_degree context_parallel cp_size",
    "parallelism.ep": "expert_model_parallel_size expert_parallel_degree expert_parallel_size ep_size",
    "parallelism.expert_tp": "expert_tensor_parallel_size expert_tensor_parallel_degree etp",
    "parallelism.dp": "data_parallel_size data_parallel_replicate_degree data_parallel_shard_degree dp_size dp_degree",
    "parallelism.sp": "sequence_parallel sequence_parallel_enabled enable_sequence_parallel",
    "parallelism.zero": "zero_stage zero_optimization stage use_distributed_optimizer fsdp use_fsdp",
    "parallelism.schedule": "pipeline_parallel_schedule pipeline_schedule",
    "parallelism.virtual_stages": "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size "
    "num_virtual_stages_per_pipeline_rank vpp",
    "training.seq_len": "seq_length sequence_length max_seq_len max_seq_length max_length block_size context_length",
    "training.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size mbs "
    "per_device_batch_size batch_size",
    "training.global_batch_size": "train_batch_size gbs total_batch_size global_batch "
    "gradient_accumulation_steps accumulation_steps grad_accum",
    "training.packing": "packed packing_strategy padding_free sequence_packing sample_packing packed_lengths",
    "training.precision": "mixed_precision dtype torch_dtype bf16 fp16 fp8 amp",
    "training.recompute": "activation_checkpointing activation_checkpoint gradient_checkpointing recompute_granularity "
    "recompute_activations ac",
    "training.optimizer": "optim optimizer_type",
    "training.framework": "compile torch_compile",
    "model.layers": "num_layers num_hidden_layers n_layers n_layer",
    "model.hidden": "hidden_size dim d_model n_embd",
    "model.heads": "num_attention_heads n_heads n_head num_heads",
    "model.kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.ffn": "intermediate_size ffn_hidden_size ffn_dim n_inner",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.moe.experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "model.moe.top_k": "num_experts_per_tok moe_router_topk moe_top_k",
    "model.tied_embeddings": "tie_word_embeddings untie_embeddings_and_output_weights",
    "inference.max_batch_tokens": "max_num_batched_tokens",
    "cluster.nodes": "num_nodes nnodes",
    "cluster.gpus_per_node": "nproc_per_node num_gpus_per_node gpus",
}
# What decides nothing about a step's time or memory, and has no key.
_NO_KEY = (
    "lr learning_rate max_lr min_lr weight_decay betas beta1 beta2 eps warmup_steps lr_scheduler lr_scheduler_type "
    "seed max_steps train_iters num_train_epochs epochs"
)
SYNONYMS = {word: key for key, words in _BY_KEY.items() for word in words.split()}


def synonym(word: object) -> str:
    """`; here it is parallelism.pp` for another program's name of a key, that there is none, or nothing.

    >>> synonym("pipeline-model-parallel-size"), synonym("colour")
    ('; here it is parallelism.pp', '')
    """
    name = str(word).lower().lstrip("-").replace("-", "_")
    if name in _NO_KEY.split():
        return "; there is no such key here, since it changes neither a step's time nor its memory"
    key = SYNONYMS.get(name)
    return f"; here it is {key}" if key else ""
