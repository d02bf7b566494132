"""One record for each training framework: which operators share a kernel, what is kept, who adds up gradients.

`training.framework` names one of `FRAMEWORKS`. Adding a framework is one more record there: the key's allowed values,
the JSON Schema and `--explain` follow from the dict, and nothing else in the simulator asks for a framework's name.

A record holds what releases of today do, `former` what older ones did; `training.software_date` says which are meant.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.variants.frameworks.compiled import (
    ACCELERATE_ROOT,
    ACCELERATE_ZERO,
    ADAMW_FOREACH,
    COMPILED,
    COMPILED_REAL_ROPE,
    COMPOSER_ZERO,
    LOSS_FILTER,
    TITAN_FOREACH,
    TORCH_CHECKPOINT,
    TORCH_CUDA_11,
    TORCH_RELEASES,
    TRANSFORMERS_COMPILED,
)
from sim.variants.frameworks.deepspeed import DEEPSPEED_ZERO, REDUCED_TO_OWNERS
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.keys import Named, Sharded, Trained, Updated
from sim.variants.frameworks.megatron import EVERY_STAGE, MEGATRON, MEGATRON_BRIDGE, MEGATRON_LOSS, NEMO
from sim.variants.frameworks.parts import TRANSFORMERS_ROUTER, AttentionCopies, Former, TensorLoop
from sim.variants.frameworks.zero import ZeroEngine
from sim.variants.optimizers import OPTIMIZERS, UpdateOperators

# nanotron: parallel/tensor_parallel/functional.py, after Megatron's; but the maximum is subtracted into a new tensor.
NANOTRON_LOSS = MEGATRON_LOSS._replace(overwrites="softmax")
_TRANSFORMERS = Framework(
    "transformers",  # Hugging Face Transformers' own modules, each torch operator a kernel
    under_torch_compile="transformers_compiled",
    norms_keep_operators=True,  # transformers/models/llama/modeling_llama.py: LlamaRMSNorm
    writes_activations_out=True,
    runs_model_code=True,
    trains_prediction_layers=False,  # its models leave a checkpoint's modules out
    keeps_copies=False,
    softmax_in_fp32=True,  # the same file: eager_attention_forward
    repeats_keys=True,  # the same file: repeat_kv
    orders_heads=True,
    keeps_merged_outputs=True,
    output_follows_queries=True,
    masks_unselected=True,
    masks_windows=True,
    # transformers/integrations/moe.py: grouped_mm_experts_forward; four 64-bit indices, one fp32 weight
    routing_bytes=36.0,
    token_steps="transformers",
    router=TRANSFORMERS_ROUTER,
    joins_split_gradients=True,
    reduces_each_input=True,
    gathers_logits=True,
    rotates_latents_in_slices=True,
    puts_into_latent_keys=True,
    fills_cut_gradients=True,  # rotate_half and apply_rotary_pos_emb cut by slices
    rope_in_fp32=True,
    zero=ACCELERATE_ZERO,  # accelerate/utils/dataclasses.py: DistributedDataParallelKwargs
    experts_in_param_dtype=True,
    cuts_expert_halves=True,
    adapters_in_fp32=True,
    checkpoint_asks_gradients=True,
    widens_logits=True,
    kernels_after_loss_filter=LOSS_FILTER,
    former=(
        Former("2026-08", {"puts_into_latent_keys": False}, "Transformers before 5.15: torch.cat"),
        ACCELERATE_ROOT,
        Former("2026-06", {"rotates_latents_in_slices": False}, "Transformers before 5.11: views of pairs, transposed"),
        Former(
            "2026-01",
            {"experts_in_param_dtype": False, "cuts_expert_halves": False},
            "Transformers before 5.0: each expert has linear layers",
        ),
        Former("2026-01", {"checkpoint_stops_early": False}, "modeling_utils.py before 5.0: use_reentrant is true"),
        ADAMW_FOREACH,
        *TORCH_RELEASES,
    ),
)
_RECORDS = (
    Framework(
        "eager",
        # calibrate/parallel/expert.py: a copy's expert, token and place in 64 bits; its fp32 weight, and its quotient
        routing_bytes=32.0,
        vocabulary_multiple=128,  # calibrate/bundled_model/model.py
        under_torch_compile="compiled",
        emitted_for=("torchtitan", "megatron"),
        measurable=True,
        family="torch",
        former=(TITAN_FOREACH, *TORCH_RELEASES),
    ),
    MEGATRON,
    MEGATRON_BRIDGE,
    NEMO,
    COMPILED,
    COMPILED_REAL_ROPE,
    TRANSFORMERS_COMPILED,
    _TRANSFORMERS,
    replace(
        _TRANSFORMERS,
        name="deepspeed",  # Transformers' modules under DeepSpeed's engine
        under_torch_compile="",
        kin="transformers",
        keeps_copies=True,  # runtime/zero: stage_1_and_2.py, stage3.py
        gathers_logits=False,  # its own layers in place of `tp_plan`
        zero=DEEPSPEED_ZERO,
        widens_logits=False,  # accelerate/accelerator.py, `native_amp`: not with DeepSpeed
        autocasts=False,  # runtime/engine.py: _configure_distributed_model casts the model, unless torch_autocast is on
        copies_updated=True,  # runtime/zero/stage_1_and_2.py: step
        keeps_gradients_at=(3,),
        adamw_kernels=(),  # ops/adam: FusedAdam
        unscales_gradients=False,  # runtime/zero/stage_1_and_2.py: unscale_and_clip_grads
        sums_in_fp32=False,  # runtime/engine.py: get_data_types, `grad_accum_dtype` unset
        adapters_in_fp32=False,  # the same function casts them with the model
        former=(
            *(f for f in _TRANSFORMERS.former[:-2] if f not in (ADAMW_FOREACH, ACCELERATE_ROOT)),
            *(REDUCED_TO_OWNERS, *TORCH_RELEASES[-2:]),
        ),
    ),
    Framework(
        "gpt_neox",  # EleutherAI's trainer: Megatron-LM's layers of 2020 as torch's operators, under DeepSpeed's engine
        sums_branches_together=True,
        vocabulary_multiple=128,  # megatron/neox_arguments/neox_args.py: make_vocab_size_divisible_by
        checkpoint_stops_early=None,  # deepspeed/runtime/activation_checkpointing: CheckpointFunction
        zero=DEEPSPEED_ZERO,  # megatron/training.py: setup_model_and_optimizer
        autocasts=False,  # the engine casts the model, as in the record above
        copies_updated=True,
        keeps_gradients_at=(3,),
        adamw_kernels=(),
        unscales_gradients=False,
        sums_in_fp32=False,
        family="torch",
        former=(*TORCH_RELEASES[:2], REDUCED_TO_OWNERS, TORCH_CUDA_11),
    ),
    Framework(
        "meta_llama3",  # Meta's own trainer of Llama 3, of which its paper says this
        # Section 3.3.2: FSDP shards the gradients; FP32 sums over multiple micro-batches in backward, and then the
        # reduce-scatter; a stage takes N micro-batches in a row. Whole sums of all stages would not fit in 80 GB.
        accumulates_in_a_row=True,
        attention_kernel="",  # not said
        adamw_kernels=("fused",),
        unscales_gradients=False,  # it trained in bf16
        nccl_month="2024-07",  # the paper's; section 3.3.3: NCCLX is a fork of NCCL
    ),
    Framework(
        "composer",  # MosaicML's llm-foundry: torch's first FSDP
        # composer/distributed/dist_strategy.py: prepare_ddp_module
        zero=COMPOSER_ZERO._replace(ends_together=False, gathers_tied=True),
        keeps_copies=False,
        quantizer="te",  # composer/trainer/trainer.py: `amp_fp8` is te.fp8_autocast with DelayedScaling
        fp8_recipe="delayed",
        attention_kernel="flash2",
        cross_entropy="fused",  # llm-foundry models/mpt/modeling_mpt.py, ComposerMPTCausalLM: `loss_fn`
        metric_losses=2,  # the same class: `use_train_metrics`, LanguageCrossEntropy and LanguagePerplexity
        joins_split_gradients=True,  # llm-foundry models/layers/attention.py: Wqkv is cut by `chunk`
        # The same file, flash_attn_fn: unpad_input of query, key and value, pad_input. Each of three
        # (flash_attn/bert_padding.py) sums the mask, lists what is not zero (3), takes the largest, sums up, pads (2)
        # and gathers; before them a mask of ones, after them zeros that the output is written to (2). Backward: zeros
        # and a scatter each; a gather.
        attention_copies=AttentionCopies(4, (30, 7)),
        adamw_kernels=(),
        adamw_loop=TensorLoop(8, reads_steps=True),  # a ninth decays; MPT's YAML files: `weight_decay: 0.0`
        # Parameter: decay, add_ (2 each); moment: lerp, lerp_ (2); update: written, its sign (2), read.
        lion_operators=UpdateOperators(4, 2, 3, 4, kernels=5),
        family="torch",
        former=(
            # scripts/train/yamls/pretrain/*.yaml and scripts/train/benchmarking/submit_benchmarks.py: `attn_impl`. The
            # Triton kernel reads padded tokens where they are (triton_flash_attn_fn).
            Former(
                "2024-02",
                {"attention_kernel": "triton_2022", "attention_copies": AttentionCopies()},
                "llm-foundry: `attn_impl: triton`, llmfoundry/models/layers/flash_attn_triton.py",
            ),
            Former(
                "2023-11",
                {"matmul_library": "cuda_11"},
                "llm-foundry, scripts/train/benchmarking/sweep.sh: image 2.0.1_cu118",
            ),
            TORCH_CHECKPOINT,
            Former("2023-07", {"zero": COMPOSER_ZERO}, "llm-foundry before 0.2: `fsdp_wrap_fn` wraps MPTBlock alone"),
            Former("2023-06", {"adamw_loop": TensorLoop(8)}, "composer before 0.15: `step` is a number of the host"),
            Former(
                "2023-05",
                {"zero": COMPOSER_ZERO._replace(one_tensor_a_unit=True)},
                "composer before 0.14: torch 1.13, which has no `use_orig_params`",
            ),
            Former("2023-05", {"cross_entropy": "unfused"}, "mosaicml/examples, mosaic_gpt.py: ComposerMosaicGPT.loss"),
        ),
    ),
    Framework(
        "nanotron",
        checkpoint_stops_early=False,  # utils.py: checkpoint_method calls torch's reentrant checkpoint
        fuses_rmsnorm=True,  # nn/layer_norm.py: flash-attn's Triton kernels; one pass backward makes both gradients
        norm_backward_accesses=3,
        # flash_attn/ops/triton/layer_norm.py: `_dw.sum(0).to(weight.dtype)` behind it, and the sum in fp32
        norm_backward_kernels=4,
        fuses_rope=True,  # models/llama.py: flash-attn's rotary kernel
        reads_strided=True,  # GLUActivation; CausalSelfAttention.forward
        merges_projections=True,  # the same file: qkv_proj, gate_up_proj
        attention_kernel="flash2",
        # CausalSelfAttention.forward: query, key and value put in order (3), key and value joined (2) and put in order
        # (2), two zeros, sums and running sums of the mask; backward: gradients of key and value joined, stacked with
        # the query's, put in order.
        attention_copies=AttentionCopies(7, (9, 3)),
        keeps_ordered_heads=True,
        loss=NANOTRON_LOSS,
        starts_with_own_rows=True,
        communicators=(("tp",), ("cp",), ("dp",), ("pp",), ("tp", "pp")),  # parallel/context.py
        small_messages=(5, 2),  # two with each tensor's shape and kind; the sequence's mask goes with the output
        plain_host=False,  # tensor-parallel linear layers and loss are Megatron's autograd functions, in Python
        adds_gradients_late=True,
        autocasts=False,  # trainer.py: the model is made in 16 bits
        # optim/clip_grads.py: clip_grad_norm, "in case of Zero1, we need to clip all fp32 grads"
        zero=ZeroEngine(
            all_reduced_at=(1,), at_once_at=(1,), fsdp_version=0, clips_tensors_at=(0, 1), clips_whole_at=(0, 1)
        ),
        gathers_tensor_by_tensor=True,
        zeroes_gradients=True,  # optim/gradient_accumulator.py: zero_grad
        keeps_gradients_at=EVERY_STAGE,  # the same file: build_grad_buffers
        copies_updated=True,  # the same file: step
        unscales_gradients=False,  # what it does in fp16 was not read
        family="torch",
    ),
)
FRAMEWORKS: dict[str, Framework] = {record.name: record for record in _RECORDS}


def framework_of(training: Named) -> Framework:
    """The record that `training.framework` names, as it was on `training.software_date`."""
    return framework_at(training.framework, training.software_date)


def framework_at(name: str, date: str | None) -> Framework:
    """A record as it was in a month or on a day ("2024-12", "2024-12-23"); None: as it is.

    >>> framework_at("compiled", "2024-12-23").attention_kernel, framework_at("compiled", None).attention_kernel
    ('torch_2024', 'torch')
    """
    record = FRAMEWORKS[name]
    for former in record.former:
        if date is not None and date < former.until:
            record = replace(record, **former.facts)
    return record


def zero_engine(training: Updated, p: Sharded) -> ZeroEngine:
    """Return how the framework reduces and gathers, with the FSDP that `parallelism.fsdp_version` names. Two
    buffers of Megatron's (param_and_grad_buffer.py) hold the layer that computes and the one behind or before it."""
    own = framework_of(training).zero
    if p.fsdp_double_buffer:  # `_enforce_double_buffer_limit`; `need_skip_prefetch`
        own = own._replace(ahead_elements=1, queued_elements=1)
    if own.all_reduces_for_matrices and OPTIMIZERS[training.optimizer].whole_matrices:
        own = own._replace(all_reduced_at=(1,))
    if p.zero < 2 or p.fsdp_version is None:
        return own
    if p.fsdp_version == 1:
        return own if own.fsdp_version == 1 else own.as_first_fsdp
    return ZeroEngine() if own.or_torch else own


def frees_gradients(training: Trained, zero: int) -> bool:
    """Whether gradients are freed between steps: as `training.zero_grad` says, else as the framework does.

    >>> from types import SimpleNamespace as N
    >>> frees_gradients(N(framework="eager", software_date=None, zero_grad=None), 0)
    True
    >>> frees_gradients(N(framework="megatron", software_date=None, zero_grad=None), 1)
    False
    """
    if training.zero_grad is None:
        return zero not in framework_of(training).keeps_gradients_at
    return training.zero_grad == "set_to_none"


def attention_picks() -> frozenset[str]:
    """Kernels that frameworks pick by themselves: where a profile has no such coefficients, the usual kernel's hold."""
    dates = [f.until for record in FRAMEWORKS.values() for f in record.former]
    found = {framework_at(name, date).attention_kernel for name in FRAMEWORKS for date in (None, "0000", *dates)}
    return frozenset(found) - {""}
