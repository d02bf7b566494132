"""Records of frameworks under torch.compile, and the facts of torch's releases that they share with others."""

from __future__ import annotations

from msgspec.structs import replace

from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.parts import (
    COMPILED_ROUTER,
    TORCH_LOSS,
    ContextKernels,
    Former,
    SequenceMessages,
    UnfusedLoss,
)
from sim.variants.frameworks.zero import ZeroEngine

# torchtitan: components/loss.py compiles the loss by itself, so the logits are an input of the graph, and Inductor does
# not write the gradient over them. torch/_functorch/partitioners.py keeps them for the backward with each row's maximum
# and the logarithm of its sum, which one pass finds (torch/_inductor/config.py: `online_softmax`).
COMPILED_LOSS = UnfusedLoss(3, 1, 0.0, 0.0, copies=False, reads=1, backward_reads=1, keeps="logits")
# torch has FlashAttention-2 from 2.2 on, and had the first before. It prefers cuDNN's kernel on Hopper and Blackwell
# where cuDNN is above 9.15.0, which torch has from 2.11 on (pytorch pull request 162073; transformers' 48163 tells it).
TORCH_CHECKPOINT = Former("2023-10", {"checkpoint_stops_early": False}, "torch 2.1: set_checkpoint_early_stop")
TORCH_CUDA_11 = Former("2023-10", {"matmul_library": "cuda_11"}, "torch 2.1: wheels of CUDA 12.1 in place of 11.8")
TORCH_RELEASES = (
    Former("2026-03", {"attention_kernel": "torch_2024"}, "torch 2.11: check_prefer_cudnn_attention"),
    Former("2024-02", {"attention_kernel": "flash1"}, "torch 2.2: FlashAttention-2 in place of the first"),
    TORCH_CHECKPOINT,
    TORCH_CUDA_11,
)
NORM_SUMS_APART = (
    Former("2026-12", {"joins_norm_sums": 2.0}, "before torch 2.15: `nrow >= ncol * 2`"),
    Former("2026-01", {"joins_norm_sums": None}, "pytorch pull request 165370, in torch 2.10"),
)
FOREACH = {"adamw_kernels": ("foreach", "fused")}
ADAMW_FOREACH = Former("2025-08", FOREACH, "transformers pull request 37358: adamw_torch_fused from torch 2.8 on")
TITAN_FOREACH = Former("2025-03", FOREACH, "torchtitan pull request 881: fused is the default")  # of 24 February
SUMS_KEPT = Former("2025-04", {"keeps_unread_sums": True}, "pytorch pull request 149652: unused sums are not kept")
LOSS_FILTER = 4  # the magnitude, its comparison with infinity and their answer's copy; the loss added to those before
# torchtitan cuts [batch, seq, hidden] along seq (models/llama3/infra/parallelize.py: `Shard(1)`).
TITAN_SEQUENCE = SequenceMessages(orders=True, views_one=True, sums_apart=True, copied_chunks=True)
SEQUENCE_COPIED = Former(
    "2026-03", {"sequence": TITAN_SEQUENCE._replace(views_one=False)}, "pytorch pull request 169404, in torch 2.11"
)
REPLICAS_COPIED = ZeroEngine(copies_replicas=True)
COMPOSER_ZERO = REPLICAS_COPIED.as_first_fsdp
# torchtitan: models/common/decoder_sharding.py, `norm_config`, whose weights' gradients FSDP sums over tp.
TITAN_ZERO = REPLICAS_COPIED._replace(kept_last=1, sums_shared=True, reduces_stages=True)
# accelerate/utils/fsdp_utils.py: fsdp2_prepare_model, which keeps [norm, output] for the backward.
ACCELERATE_ZERO = REPLICAS_COPIED._replace(sends_in_precision=True, kept_last=1)
ACCELERATE_ROOT = Former(
    "2026-06",
    {"zero": ACCELERATE_ZERO._replace(kept_last=0, ends_together=True, root_again=True)},
    "accelerate 1.14, pull request 4015: units of embedding and of [norm, output]",
)
COMPILED = Framework(
    "compiled",  # torchtitan's layers under torch.compile
    fuses_rmsnorm=True,
    fuses_rope=True,
    fuses_activation=True,
    compiles_activation=True,
    keeps_copies=False,
    fuses_residual=True,
    fuses_hyper_connections=True,  # by chains
    fuses_adapter_sum=True,
    fuses_latent_rope=True,
    multiplies_complex_rope=True,
    fuses_chains=True,
    joins_norm_sums=0.0,
    # torch/distributed/tensor/experimental/_attention.py: `convert_to_f32`. A compiled graph waits for a functional
    # collective where it starts it (`_maybe_wrap_tensor`; inductor's `reorder_for_compute_comm_overlap` is off).
    context=ContextKernels(blocks=True, fp32_sums=True, waits=True),
    keeps_gathered=True,
    sequence=TITAN_SEQUENCE,
    # torchtitan: models/llama3/infra/parallelize.py, apply_ddp; apply_fsdp, which keeps [norm, output] for the backward
    zero=TITAN_ZERO,
    loss=COMPILED_LOSS,
    router=COMPILED_ROUTER,
    token_steps="torchtitan",
    counts_copies="exchanged",
    splits_expert_halves=True,
    uses_torch_compile=True,
    emitted_for=("torchtitan",),
    family="torch",
    former=(
        NORM_SUMS_APART[0],
        Former("2026-05", {"token_steps": "torchtitan_2025"}, "torchtitan before pull requests 2741 and 2775"),
        SEQUENCE_COPIED,
        Former("2026-02", {"repeats_fused_keys": True}, "torchtitan pull request 2259: GQA without kv repeats"),
        NORM_SUMS_APART[1],
        Former("2025-12", {"reruns_attention": True}, "torchtitan pull request 2095: cuDNN's is on the list"),
        Former("2025-11", {"token_steps": ""}, "torchtitan before pull request 1895: blocks with experts are compiled"),
        Former(
            "2025-08",
            {"zero": TITAN_ZERO._replace(ends_together=True)},
            "torchtitan pull request 1094: units of embedding and of [norm, output]",
        ),
        # ScaledDotProductAttentionWrapper. On Blackwell cuDNN's from May 2025 on (pull request 1196); profiles have it.
        Former("2025-10", {"attention_kernel": "torch_2024", "reruns_attention": False}, "torchtitan: attention.py"),
        TITAN_FOREACH,
        SUMS_KEPT,
        Former("2025-04", {"loss": TORCH_LOSS}, "torchtitan pull requests 755 and 1033: the loss is not compiled"),
    ),
)
COMPILED_REAL_ROPE = replace(
    COMPILED,
    name="compiled_real_rope",  # layers of torchtune, LitGPT, OLMo-core and prime-rl under torch.compile
    kin="compiled",
    # torchtune: modules/position_embeddings.py, RotaryPositionalEmbeddings; LitGPT: litgpt/model.py, apply_rope;
    # OLMo-core: nn/rope.py, RotaryEmbedding; prime-rl: trainer/models/layers/rotary_emb.py, apply_rotary_pos_emb
    multiplies_complex_rope=False,
    # Outside what is compiled: LitGPT's pretrain.py, fit; torchtune unless its key `compile` has the loss, too.
    loss=TORCH_LOSS,
    emitted_for=(),
    former=(
        NORM_SUMS_APART[0],
        SEQUENCE_COPIED,
        TORCH_RELEASES[0],
        NORM_SUMS_APART[1],
        SUMS_KEPT,
        *TORCH_RELEASES[1:],
    ),
)
TRANSFORMERS_COMPILED = replace(
    COMPILED,
    name="transformers_compiled",  # Hugging Face Transformers' modules, as its Trainer's torch_compile runs them
    kin="transformers",
    zero=ACCELERATE_ZERO,
    token_steps="",
    counts_copies="",
    splits_expert_halves=False,
    multiplies_complex_rope=False,
    masks_windows=True,
    masks_causal=True,
    returns_logits=True,
    reduces_each_input=True,
    gathers_logits=True,
    adapters_in_fp32=True,
    checkpoint_asks_gradients=True,
    kernels_after_loss_filter=LOSS_FILTER,
    emitted_for=(),
    family="",
    former=(
        NORM_SUMS_APART[0],
        ACCELERATE_ROOT,
        SEQUENCE_COPIED,
        TORCH_RELEASES[0],
        NORM_SUMS_APART[1],
        ADAMW_FOREACH,
        *TORCH_RELEASES[1:],
    ),
)
