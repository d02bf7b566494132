"""The kernel that torch's attention runs: the first of its order that takes the sizes, the dropout and the mask.

ATen/native/transformers/cuda/sdp_utils.cpp: cuDNN's where it is preferred, FlashAttention, the memory-efficient one.
"""

from __future__ import annotations

from sim.core.operator_kinds import EFFICIENT

CUDNN, FLASH2, FLASH1 = "torch", "torch_2024", "flash1"  # as frameworks' records name what torch takes first
# cuDNN's probabilities of dropout are multiples of 1 / 16 (check_cudnn_dropout).
CUDNN_DROPOUT_STEPS = 16.0
# Its largest head of a training step, and larger ones of queries and values (check_cudnn_tensor_shapes).
CUDNN_HEAD_DIM, CUDNN_HEAD_DIMS = 128, ((192, 128), (256, 256))
FLASH_HEAD_DIM = 256  # check_head_dim_size_flash


def chosen_kernel(preferred: str, sizes: tuple[int, int], dropout: float, masked: bool) -> str:
    """Return the kernel of a training step with heads of these `sizes` of queries and of values.

    A kernel that is not torch's stays.

    >>> chosen_kernel("torch", (192, 128), 0.0, True), chosen_kernel("torch_2024", (192, 128), 0.0, False)
    ('torch', 'efficient')
    >>> chosen_kernel("torch", (160, 160), 0.0, False), chosen_kernel("torch", (160, 160), 0.0, True)
    ('torch_2024', 'efficient')
    >>> chosen_kernel("torch", (128, 128), 0.1, False), chosen_kernel("flash2", (192, 128), 0.1, False)
    ('torch_2024', 'flash2')
    """
    if preferred == CUDNN:
        fits = max(sizes) <= CUDNN_HEAD_DIM or sizes in CUDNN_HEAD_DIMS
        if fits and (dropout * CUDNN_DROPOUT_STEPS).is_integer():
            return CUDNN
        preferred = FLASH2
    if preferred not in (FLASH1, FLASH2):
        return preferred
    # FlashAttention takes no mask (check_for_attn_mask), and heads of one size (check_head_dim_size_flash).
    return preferred if sizes[0] == sizes[1] <= FLASH_HEAD_DIM and not masked else EFFICIENT
