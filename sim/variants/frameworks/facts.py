"""Define the facts in which training frameworks differ: each with plain torch's value, its meaning and its source."""

from __future__ import annotations

from msgspec import Struct

from sim.variants.frameworks.parts import (
    PLAIN_ROUTER,
    TORCH_LOSS,
    AttentionCopies,
    ContextKernels,
    Former,
    RouterKernels,
    SequenceMessages,
    TensorLoop,
    UnfusedLoss,
)
from sim.variants.frameworks.userbuffers import UserBuffers
from sim.variants.frameworks.zero import ZeroEngine
from sim.variants.optimizers import UpdateOperators
from topology.nccl import NcclFrom


class Framework(Struct, frozen=True):
    """Hold the facts of one framework; facts that a record leaves out are plain torch's. `name`: the key's value.

    Behind each fact stand its meaning and, in brackets, its source. `core/` is megatron/core of Megatron-LM, `TE` is
    transformer_engine/pytorch.
    """

    name: str

    fuses_rmsnorm: bool = False
    """RMSNorm is one kernel, not eight [TE module/rmsnorm.py; torch.compile]"""
    fuses_rope: bool = False
    """rope is one kernel for each tensor, not five [TE attention/rope.py]"""
    fuses_latent_rope: bool = False
    """rope of latent attention's pairs is one kernel a tensor [core/fusions/fused_mla_yarn_rope_apply.py]"""
    rotates_latents_in_slices: bool = False
    """rope of latent attention reads every second number of a head, or pairs of them as complex numbers, as
    `model.code` says [transformers/models/deepseek_v3/modeling_deepseek_v3.py: apply_rotary_pos_emb_interleave]"""
    multiplies_complex_rope: bool = False
    """rope of latent attention, and of heads without norms with weights, is a product of complex numbers, torch's own
    kernel between two compiled casts [torchtitan: models/common/rope.py, backend "complex"]"""
    puts_into_latent_keys: bool = False
    """keys of latent attention are put into an empty tensor by slices [DeepseekV3Attention.expand_kv]"""
    assembles_in_latent_rope: bool = False
    """rope rotates queries of latent attention in place, and its kernel for the shared key writes keys and values of
    every head from the up-projection's result [core/fusions/fused_mla_yarn_rope_apply.py]"""
    fills_cut_gradients: bool = False
    """the gradient of a part cut out of a tensor is a tensor of zeros with that part filled in, and such are added up,
    in rope and behind it [torch: slice_backward]"""
    scales_rope_apart: bool = False
    """rope whose result is scaled (`model.scaled_rope`) is separate operators, which compute cosines and sines anew in
    every layer [core/models/common/embeddings/rope_utils.py: apply_rotary_pos_emb, `mscale`]"""
    fuses_activation: bool = False
    """SwiGLU and squared ReLU are one kernel, not two [core/fusions/fused_bias_swiglu.py]"""
    compiles_activation: bool = False
    """torch.compile makes the activation's kernel, whose instructions are counted [core/jit.py: jit_fuser]"""
    fuses_weighted_relu2: bool = False
    """an expert's squared ReLU multiplies by the router's weight in its own kernel, as a gated activation does
    [core/transformer/moe/experts.py: use_fused_weighted_squared_relu]"""
    writes_activations_out: bool = False
    """GPT-2's and GPT-NeoX-20B's GELU (`gelu_new`, `gelu_fast`) is separate operators, as its formula is written, not
    torch's kernel of it [transformers/activations.py: NewGELUActivation, FastGELUActivation]"""
    clamps_apart: bool = False
    """a clamped gated activation clamps and joins halves by operators before its kernel [core: fused_bias_geglu.py]"""
    fuses_residual: bool = False
    """bias, dropout and residual sum are one kernel [core/fusions/fused_bias_dropout.py]"""
    passes_biases_on: bool = False
    """the last matmul of attention and MLP never adds its bias, which is added before dropout and the residual sum
    [core/transformer/attention.py, mlp.py: skip_bias_add]"""
    fuses_hyper_connections: bool = False
    """hyper-connections are four kernels: weights, Sinkhorn, the branch's input, new streams
    [core/fusions/fused_mhc_kernels.py]"""
    fuses_adapter_sum: bool = False
    """scaling and sum of a LoRA adapter are one kernel [peft has two]"""
    adapters_in_fp32: bool = False
    """LoRA adapters of a 16-bit model have fp32, and each copies its input to fp32; without autocast it multiplies in
    it, and its sum with the layer's result is copied back [peft: tuners/tuners_utils.py: cast_adapter_dtype;
    tuners/lora/layer.py: Linear.forward]"""
    fuses_chains: bool = False
    """a chain of operators without a matmul is one kernel [torch._inductor]"""
    joins_norms: bool = False
    """the norm before a branch is part of the module of the matmul behind it, but before latent attention and experts,
    so that recomputation and offloading of norms leave it alone [core/models/gpt/gpt_layer_specs.py:
    TELayerNormColumnParallelLinear; core/transformer/transformer_layer.py: `recompute_input_layernorm`]"""
    norm_kernel: str = ""
    """whose fused norm it is, a name in profiles; empty: torch's [TE common/normalization]"""
    rope_clocks: tuple[float, float] = (0.0, 0.0)
    """clocks of a multiprocessor for a number in fused rope, forward and backward; 0: bytes alone count
    [TE common/fused_rope: a thread handles one number at a time]"""
    norm_backward_accesses: int = 5
    """memory accesses per element in a norm's backward; 3: one pass makes both gradients [TE common/normalization]"""
    joins_norm_sums: float | None = None
    """a norm's backward is one kernel if it has at least this many rows for each element of its width; None: two
    kernels [torch/_inductor/scheduler.py: MixOrderReduction]"""
    norm_backward_kernels: int = 2
    """kernels of a norm's backward, including those of its weight's gradient [torch's own]"""
    reads_strided: bool = False
    """activations read both halves of a merged projection in place, and 16-bit gradients are added to fp32 sums;
    torch vectorizes neither kernel [nanotron: models/llama.py; torch: aten/src/ATen/native/cuda/CUDALoops.cuh]"""
    norms_keep_operators: bool = False
    """a norm of separate operators saves its input in fp32 and the normalized values [LlamaRMSNorm]"""
    runs_model_code: bool = False
    """a model's layers are its own code in Transformers, which `model.code` names [transformers/models]"""
    softmax_in_fp32: bool = False
    """the unfused softmax is computed in fp32 and cast back, and both results are saved [eager_attention_forward]"""
    repeats_keys: bool = False
    """unfused attention copies key and value heads for every query head [repeat_kv]"""
    orders_heads: bool = False
    """unfused attention copies queries, keys and values whose heads lie beside each other in a token's row, and their
    gradients [torch.matmul: expand and reshape]"""
    repeats_fused_keys: bool = False
    """fused attention does, too [torchtitan: models/llama/model.py, repeat_kv]"""
    keeps_merged_outputs: bool = False
    """saving a slice of a projection's output keeps the whole output in memory [torch.split]"""
    keeps_ordered_heads: bool = False
    """with equal heads, one tensor with reordered queries, keys and values stays in memory beside the copies that
    the kernel reads [nanotron: models/llama.py, CausalSelfAttention.forward]"""
    output_follows_queries: bool = False
    """if queries were concatenated, attention's output has their memory order and is copied for the next matmul
    [torch.cat]"""
    casts_routers: bool = True
    """a router in fp32 multiplies an fp32 copy of its input; otherwise 16-bit numbers, to an fp32 result [x.float();
    core/transformer/moe/moe_utils.py: RouterGatingLinearFunction]"""
    routing_bytes: float = 4.0
    """bytes of indices and weights saved for each token copy in an expert layer [permutation of 32 bits]"""
    token_steps: str = ""
    """whose operators copy tokens and weight experts' results, kernel by kernel [transformers/integrations/moe.py]"""
    maps_copies: bool = False
    """a map of tokens and experts is made and kept, by which one kernel copies tokens and another adds copies up
    [TE pytorch/triton/permutation.py: make_row_id_map, make_chunk_sort_map]"""
    skips_masked_scores: bool = False
    """the unfused softmax reads only scores that the causal mask leaves [core/fusions/fused_softmax.py]"""
    masks_unselected: bool = False
    """sparse attention is computed as dense attention with a mask, and its indexer gets no gradient
    [transformers/models/deepseek_v32/modular_deepseek_v32.py]"""
    masks_causal: bool = False
    """torch's fused attention gets the causal mask as numbers, one tensor for all layers: it computes all pairs of
    tokens, with keys and values copied for each query head [transformers/masking_utils.py: _ignore_causal_mask_sdpa,
    which leaves no mask out while a graph is traced]"""
    returns_logits: bool = False
    """a compiled model returns its logits beside the loss, and autograd fills their gradient with zeros, to which the
    loss's backward adds [torch/_functorch/_aot_autograd: tangents of outputs]"""
    masks_windows: bool = False
    """torch's fused attention gets a window as a mask: it computes all pairs of tokens, with keys and values copied for
    each query head; a kernel named by `training.attention_kernel` skips what the window hides
    [transformers/integrations/sdpa_attention.py; masking_utils.py: _ignore_causal_mask_sdpa]"""
    matmul_library: str = ""
    """library whose 16-bit matmuls are slower than a profile's points, which is one of `MATMUL_LIBRARIES`; a profile
    that says how much slower has `matmul_slowdown_NAME` [CUDA's release in torch's wheels, or in a trainer's image]"""
    attention_kernel: str = "torch"
    """kernel (or who chooses it: `torch`, `megatron`) whose coefficients price fused attention, if the profile has
    them; empty: the profile's usual one [sim.prices.attention_speed]"""
    copies_split_projection: bool = False
    """what the fused kernel cannot read where the merged projection wrote it is copied, and the three gradients are
    joined [core/transformer/attention.py: get_query_key_value_tensors; TE attention/dot_product_attention/utils.py:
    get_qkv_layout; TE pytorch/utils.py: SplitAlongDim]"""
    tokens_first: bool = False
    """activations are [tokens, sequences, hidden], so that the heads of all sequences are one dimension: unfused
    attention's matmuls read the gradient of its result where it lies [core/transformer/dot_product_attention.py]"""
    joins_split_gradients: bool = False
    """the gradients of queries, keys and values that a model cut out of one matmul's result are joined by a kernel of
    its own; with rope its own copies bring them there [transformers/models/gpt2/modeling_gpt2.py: GPT2Attention; torch:
    split_with_sizes_backward]"""
    attention_copies: AttentionCopies = AttentionCopies()
    """copies that reorder or pack tokens around the fused kernel, see `AttentionCopies` [each trainer's own]"""
    context: ContextKernels = ContextKernels()
    """what context parallelism does around its kernels and messages, see `ContextKernels`
    [TE attention/dot_product_attention/context_parallel.py; torch/distributed/tensor/experimental/_attention.py]"""
    loss: UnfusedLoss = TORCH_LOSS
    """kernels of the unfused loss, forward and backward [core/tensor_parallel/cross_entropy.py]"""
    native_loss: UnfusedLoss | None = None
    """kernels of the loss in compiled parts (cross_entropy: native) [core/fusions/fused_cross_entropy.py]"""
    metric_losses: int = 0
    """how often torch's cross-entropy of the logits is computed again for metrics, without a gradient; their sums are
    gathered each step [composer/trainer/trainer.py: _eval_train_metrics, _compute_and_log_metrics]"""
    widens_logits: bool = False
    """under autocast a model's 16-bit results are copied to fp32, its logits among them
    [accelerate/accelerator.py: prepare_model; utils/operations.py: convert_outputs_to_fp32; not `_prepare_fsdp2`]"""

    trains_prediction_layers: bool = True
    """the modules of multi-token prediction are trained [core/transformer/multi_token_prediction.py; not by
    transformers/models/deepseek_v3/modeling_deepseek_v3.py: `_keys_to_ignore_on_load_unexpected`]"""
    autocasts: bool = True
    """default of `training.autocast` for fp32 parameters [transformers/trainer.py: autocast_smart_context_manager;
    torchtitan/distributed/utils.py: maybe_enable_amp]"""
    rope_in_fp32: bool = False
    """under autocast rope multiplies by fp32 cosines, which have the embedding's dtype, and its result is cast to 16
    bits for attention [transformers/models/llama/modeling_llama.py: LlamaRotaryEmbedding]"""
    experts_in_param_dtype: bool = False
    """under autocast routed experts run in their parameters' fp32, because their grouped matmul is on none of torch's
    lists [transformers/integrations/moe.py: _grouped_mm]"""

    cuts_expert_halves: bool = False
    """gate and up of routed experts are cut out of one matmul's result, and a kernel of its own joins their gradients
    [transformers/models/mixtral/modeling_mixtral.py: MixtralExperts.forward]"""

    merges_projections: bool = False
    """query, key and value are one matmul; gate and up are one matmul [core/transformer/attention.py: linear_qkv]"""
    sums_branches_together: bool = False
    """outputs of attention and MLP beside each other (`model.parallel_block`) are added up before their sum over tp:
    one all-reduce forward, and one backward for each input's gradient [gpt-neox: megatron/model/transformer.py,
    `parallel_output`; mpu/layers.py]"""
    reduces_each_input: bool = False
    """each column-parallel layer all-reduces its own part of the gradient of an input that several share
    [transformers/distributed/tensor_parallel.py: ColwiseParallel; deepspeed/module_inject/layers.py: ColumnParallel]"""
    gathers_logits: bool = False
    """the logits of all ranks of tp are gathered, and each rank computes the loss of the whole vocabulary
    [transformers/models/llama/modeling_llama.py: `_tp_plan`, colwise_gather_output]"""
    keeps_gathered: bool = False
    """a matmul's input that sequence parallelism gathered is kept for the weight gradient, not gathered again
    [torch/distributed/tensor: redistribute; torch/_functorch/partitioners.py]"""
    sequence: SequenceMessages = SequenceMessages()
    """kernels around messages of sequence parallelism, see `SequenceMessages` [torch: _functional_collectives.py]"""
    overlaps_weight_gradients: bool = False
    """its trainer always runs messages of tp beside weight gradients (`tp_overlap: wgrad`), which advice proposes
    [core/tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication]"""
    userbuffers: UserBuffers | None = None
    """with `tp_overlap: full` and `sp`, one call of a library issues a matmul's chunks and messages: gathers round a
    ring, chunks of a row's forward, and whole matmuls of a column's backward, beside the gather of its input and the
    reduce-scatter of its gradient, see `UserBuffers` [TE module/base.py: initialize_ub; comm_gemm_overlap.h]"""
    vocabulary_multiple: int = 1
    """the vocabulary's entries are padded to a multiple of so many for each rank of tp; of 1, only the ranks share them
    evenly [megatron/training/tokenizer/tokenizer.py: _vocab_size_with_padding; calibrate/bundled_model/model.py]"""
    starts_with_own_rows: bool = False
    """with `tp_overlap`, a matmul of gathered rows computes the rank's own rows while the others arrive [nanotron:
    parallel/tensor_parallel/functional.py]"""
    copies_around_scans: bool = False
    """layers with a state copy, gate and norm around the scan by kernels of their own [core/ssm: mamba_mixer.py,
    gated_delta_net.py]"""
    adds_projection_bias_apart: bool = False
    """the bias of queries, keys and values is added by a kernel of its own [core/tensor_parallel/layers.py:
    LinearWithGradAccumulationAndAsyncCommunication.forward]"""
    accumulates_in_matmul: bool = False
    """a weight gradient's matmul adds to the kept gradient [core: gradient_accumulation_fusion]"""
    accumulates_sharded: bool = False
    """where FSDP shards gradients, a weight gradient's matmul writes straight into the bucket that is reduced
    [core/distributed/fsdp: mcore_fsdp_adapter.py; src/megatron_fsdp/megatron_fsdp.py: overwrite_main_grad]"""
    keeps_empty_gradients: bool = False
    """one empty gradient tensor is kept for each shape of a weight matrix [TE module/base.py: get_dummy_wgrad]"""
    quantizer: str = "torchao"
    """library whose kernels quantize: `te` or `torchao` [sim.variants.recipes]"""
    fp8_recipe: str = "tensorwise"
    """default of `training.fp8_recipe` [training/arguments.py; torchao Float8LinearConfig]"""
    saves_originals: bool = False
    """with 8- and 4-bit recipes other than delayed scaling some linear layers keep their 16-bit input, which is kept
    anyway or made again, and quantize it once more for the weight gradient [core/transformer: attention.py,
    moe/experts.py, moe/shared_experts.py: set_save_original_input]"""
    sums_in_fp32: bool = True
    """default of `training.grad_dtype` is fp32, otherwise 16 bits [training/arguments.py; FSDP's own]"""
    cross_entropy: str = "unfused"
    """default of `training.cross_entropy` [training/arguments.py]"""
    skips_transposes: bool = False
    """8-bit tensors with one scale have no transposed copy if matmuls read both memory orders (Blackwell) [TE
    common/util: is_non_tn_fp8_gemm_supported]"""
    weights_experts_after_activation: bool = False
    """the router's weight multiplies the expert's activation, not its output [core/transformer/moe/experts.py]"""
    router: RouterKernels = PLAIN_ROUTER
    """kernels of an expert layer's router, forward and backward [core/transformer/moe/router.py]"""
    loops_over_experts: bool = False
    """a grouped matmul and the quantization of its operands are launched expert by expert, in a loop [TE
    common/gemm: multi_stream_cublas_gemm; pytorch/csrc/extensions/cast.cpp: multi_tensor_quantize_impl]"""
    hybridep_sms: int = 16
    """multiprocessors of HybridEP's kernels [core/transformer/transformer_config.py: moe_hybridep_num_sms]"""
    pads_experts: bool = False
    """rows of 8-bit experts are copied to fill up each expert's to multiples of a tile, and back [TE fp8_padding.py]"""
    fused_experts_tile: int = 0
    """that tile of fused experts; 0: they are not padded [core/.../moe_utils.py: get_align_size_for_quantization]"""
    biases_experts_one_by_one: bool = False
    """the bias of an expert's second matmul, weighted for each row, is added expert by expert
    [core/transformer/moe/experts.py: TEGroupedMLP._apply_bias]"""
    sends_probabilities: bool = False
    """the router's fp32 weights of token copies are sent to their experts by a separate all-to-all
    [core/transformer/moe/token_dispatcher.py: MoEAlltoAllTokenDispatcher.token_dispatch]"""
    shares_beside_libraries: bool = False
    """shared experts run beside the exchanges of DeepEP and HybridEP, too, not of NCCL alone
    [core/transformer/transformer_config.py: moe_shared_expert_overlap]"""
    counts_copies: str = ""
    """each expert's copies are counted, and the host waits for all ranks' counts [token_dispatcher.py: preprocess]"""
    splits_expert_halves: bool = False
    """experts' gate and up projections are two grouped matmuls [torchtitan: models/common/moe.py, w1 and w3]"""
    routes_by_chance: bool = False
    """balanced experts are chosen at random, so that in each layer all ranks of ep wait for the one with most copies
    [core/transformer/moe/moe_utils.py: apply_random_logits]"""
    splits_experts_over_tp: bool = False
    """experts are split over tp unless `expert_tp` is given; a warning says so [training/arguments.py]"""
    needs_sp_for_experts: bool = False
    """a layer with experts raises an error with tp above 1 and sp false, of which a scenario's warning tells
    [core/transformer/moe/moe_layer.py: MoELayer.forward]"""
    runs_experts_apart: bool = False
    """experts can be modules of their own that run one after another (`training.moe_grouped_gemm` false)
    [core/transformer/moe/experts.py: SequentialMLP]"""
    engine_workspaces: int = 0
    """cuBLAS workspaces beside torch's [TE module/base.py: get_cublas_workspace_size_bytes]"""
    grouped_streams: int = 0
    """streams of grouped matmuls, each with a cuBLAS workspace [TE common/gemm: multi_stream_cublas_gemm]"""

    adamw_kernels: tuple[str, ...] = ("fused", "foreach")
    """values that `training.adamw_kernels` may have, the default first; empty: a library's own, which no switch changes
    [torchtitan: components/optimizer.py; transformers/training_args.py: default_optim]"""
    unscales_gradients: bool = True
    """with precision fp16 and fp32 gradients, the loss's scale is taken out of them by a pass of its own, which also
    looks for overflows [torch/amp/grad_scaler.py: _unscale_grads_; torch/distributed/fsdp/sharded_grad_scaler.py;
    core/optimizer/optimizer.py: _unscale_main_grads_and_check_for_nan]"""
    adamw_loop: TensorLoop = TensorLoop()
    """AdamW's kernels for each tensor, see `TensorLoop` [composer/optim/decoupled_weight_decay.py: adamw]"""
    ropes_in_projection: bool = False
    """one kernel takes a projection's result apart and rotates it [core: apply_fused_qkv_rotary_pos_emb]"""
    lion_operators: UpdateOperators | None = None
    """Lion's accesses of parameter, gradient, moment, update, its kernels; None: one kernel [optim/lion.py: lionw]"""
    adds_gradients_late: bool = False
    """16-bit gradients of a micro-batch are added to fp32 sums after its backward; with ZeRO-0 DDP sizes its buckets
    by the 16-bit gradients [nanotron: optim/gradient_accumulator.py, `backward`; trainer.py, `make_ddp`]"""
    zero: ZeroEngine = ZeroEngine()
    """how gradients are reduced and parameters gathered, see `ZeroEngine` [nanotron: trainer.py, `make_ddp`,
    sync_gradients_across_dp; deepspeed/runtime/zero: stage_1_and_2.py, stage3.py, config.py]"""
    gathers_tensor_by_tensor: bool = False
    """with ZeRO-1, updated parameters are put into one buffer for each rank, and each rank's part of each tensor is
    copied back by a kernel of its own [nanotron: distributed.py, all_gather_coalesced]"""
    accumulates_in_a_row: bool = False
    """default of `parallelism.accumulate_in_a_row` [Llama Team 2024, section 3.3.2]"""
    checkpoint_stops_early: bool | None = True
    """default of `recompute.early_stop`: recomputation ends at the last tensor that the backward needs; None: by a
    checkpoint of the framework's own it never does [torch.utils.checkpoint: early_stop, unless `use_reentrant`]"""
    checkpoint_asks_gradients: bool = False
    """with adapters and full recomputation the embedding's result is made to need a gradient, so that the backward of
    the first layer is whole [transformers/modeling_utils.py: enable_input_require_grads, for models of peft]"""
    reruns_attention: bool = False
    """`selective_op` runs fused attention again: cuDNN's is not on its list [torchtitan: `_op_sac_save_list`]"""
    keeps_unread_sums: bool = False
    """with `selective_op` a compiled graph keeps the result of a layer's last reduce-scatter, though its backward does
    not read it [torch/_functorch/partitioners.py: _extract_fwd_bwd_modules, for which its wait was a reader]"""
    kernels_after_loss_check: int = 0
    """kernels that the host issues once it has read whether a micro-batch's loss is a number; the device waits
    [pretrain_gpt.py: loss_func; core/pipeline_parallel/schedules.py: forward_step_calc_loss]"""
    kernels_after_batch_sizes: int = 0
    """kernels that the host of every stage issues before a forward once it has read the batch's sizes back from the
    device, which waits [core/tensor_parallel/data.py: broadcast_data; megatron/utils.py of 2023:
    get_ltor_masks_and_position_ids]"""
    kernels_after_loss_filter: int = 0
    """kernels that the host issues behind a micro-batch's backward once it has read whether the loss is a number; the
    device waits [transformers/trainer.py: `logging_nan_inf_filter`, isnan, then isinf and the sum of losses]"""
    checks_gradients: bool = False
    """the gradient buffer is read for NaNs [core/distributed: check_grads]"""
    averages_gradients: bool = False
    """the gradient buffer is scaled to a mean by a kernel, not by NCCL [core/distributed: start_grad_sync]"""
    zeroes_gradients: bool = False
    """the gradient buffer is zeroed; otherwise gradients are freed [core/distributed: zero_grad_buffer]"""
    keeps_gradients_at: tuple[int, ...] = ()
    """default of `training.zero_grad`: with these ZeRO stages gradients stay allocated between steps (keep), else they
    are freed (set_to_none) [core/distributed: ParamAndGradBuffer; DeepSpeed runtime/zero/stage3.py:
    grad_partitions_flat_buffer; torch/optim/optimizer.py: zero_grad]"""
    widens_gradients: bool = False
    """gradients of 16 bits are copied to fp32 before the optimizer, unless it keeps its moments in 16 bits
    [core/optimizer: _copy_model_grads_to_main_grads, `use_precision_aware_optimizer`]"""
    keeps_copies: bool = True
    """16-bit parameters can have copies in fp32; if not, a scenario that leaves out `training.master_weights` gets a
    warning [torch's update what FSDP or autocast casts: torch/optim/adam.py; _fsdp_api.py: MixedPrecisionPolicy]"""
    copies_updated: bool = False
    """updated fp32 copies are read once more to write the 16-bit parameters, which the update's own kernel does not
    write [core/optimizer: _copy_main_params_to_model_params]"""

    communicators: tuple[tuple[str, ...], ...] = ()
    """dimensions of the mesh that have an NCCL communicator; empty: not counted [sim.results.beside_allocator]"""
    fills_stages: bool = False
    """refuses stages that hold nothing unless all are listed [Megatron: training/arguments.py, validate_args]"""
    small_messages: tuple[int, int] = (0, 0)
    """small messages before a stage's output and before its gradient, one after the other, while both hosts wait
    [nanotron: parallel/pipeline_parallel/p2p.py, `_send_meta`]"""
    sends_pieces: bool = False
    """default of `parallelism.p2p_scatter` [p2p_communication.py of 2021: scatter_gather_tensors_in_pipeline]"""
    plain_host: bool = True
    """an operator costs the host `host_operator_eager_s`; otherwise `host_operator_s` [docs/calibration.md]"""
    captures_layers: bool = False
    """a flag of the trainer captures each layer as a CUDA graph [core/transformer/cuda_graphs.py: TECudaGraphHelper,
    `--cuda-graph-impl`]"""
    uses_torch_compile: bool = False
    """torch.compile generates the kernels [torchtitan: training.compile]"""
    under_torch_compile: str = ""
    """the framework that the same trainer is when its flag turns torch.compile on, which advice proposes [torchtitan:
    compile.enable; transformers/training_args.py: torch_compile]"""
    emitted_for: tuple[str, ...] = ()
    """trainers of `--emit` whose flags express this framework [sim.emit]"""
    measurable: bool = False
    """calibrate.measure can run a step with this framework [calibrate.real_steps.runnable]"""

    nccl_from: NcclFrom = "torch"
    """who brings NCCL [topology.nccl]"""
    nccl_month: str | None = None
    """the month whose NCCL ran where `training.software_date` is left out; None: today's"""

    kin: str = ""
    """the record with the same code base; `evidence` treats both as one"""
    family: str = ""
    """the records of one family share this word; `evidence` takes them for half as far apart as other frameworks"""
    former: tuple[Former, ...] = ()  # newest first

    def sees_masks(self, fused_attention: bool, kernel: str | None, cp: int) -> bool:
        """Tell whether torch's own attention gets windows of whole sequences as masks; a named `kernel` has windows."""
        return self.masks_windows and fused_attention and not kernel and cp == 1
