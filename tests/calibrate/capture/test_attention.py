"""Which kernel of attention torch takes on a Hopper GPU, by heads, sizes, layouts and masks (sdp_utils.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.core.program import Compute
from sim.models.captured.model import captured_model
from sim.models.captured.operators import compute_of
from tests.calibrate.capture.test_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
SINCE_2_14 = torch.__version__ >= (2, 14)
BF16, FP32 = torch.bfloat16, torch.float32
BATCH, HEADS, LENGTH = 2, 4, 32


def kernels(
    folder: Path, run: Callable[..., Any], size: int = 64, dtype: Any = BF16, mask: tuple[int, ...] = ()
) -> list[str]:
    """Capture a step that attends: `run(h, mask)` with h [batch, heads, length, size] and a mask that learns.

    Return the kernels of attention, forward and backward; "math": matmuls and a softmax.
    """

    def make() -> Any:
        model = torch.nn.Linear(size, size).to(dtype)
        model.mask = torch.nn.Parameter(torch.zeros(mask, dtype=dtype)) if mask else None
        x = torch.randn(BATCH, HEADS, LENGTH, size, dtype=dtype)
        return model, lambda: run(model(x), model.mask).square().mean()

    program = captured(folder, make)
    fused = [o.name.removeprefix("aten._scaled_dot_product_") for o in launched(program, "scaled_dot_product")]
    short = [x.replace("_attention", "") for x in fused]
    return short if short else ["math"] if launched(program, "softmax") else []


def attend(q: Any, k: Any, v: Any, **how: Any) -> Any:
    """Call torch's attention."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)


def of(kernel: str) -> list[str]:
    """Return what `kernels` returns where both directions run this kernel."""
    return ["math"] if kernel == "math" else [kernel, f"{kernel}_backward"]


@pytest.mark.parametrize(
    ("heads", "says", "dtype", "kernel"),
    [
        (1, True, BF16, "cudnn"),
        (2, True, BF16, "cudnn"),
        (1, False, BF16, "cudnn" if SINCE_2_14 else "math"),
        (1, False, FP32, "efficient" if SINCE_2_14 else "math"),
        (2, True, FP32, "efficient" if SINCE_2_14 else "math"),
    ],
)
def test_fewer_heads_of_keys_are_fused_if_the_code_says_so_or_one_is_broadcast(
    tmp_path: Path, heads: int, says: bool, dtype: Any, kernel: str
) -> None:
    """check_batch_size_and_num_heads_dense. Transformers' Falcon has one head of keys and does not say `enable_gqa`."""

    def run(h: Any, _: Any) -> Any:
        return attend(h, h[:, :heads], h[:, :heads], enable_gqa=says)

    assert kernels(tmp_path, run, dtype=dtype) == of(kernel)


@pytest.mark.parametrize("shape", [(1, HEADS, LENGTH, LENGTH), (LENGTH, LENGTH)])
def test_a_mask_that_learns_is_not_cudnns(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """check_attn_mask_shape; T5 and Swin learn biases of positions. Only the memory-efficient kernel has a gradient."""
    assert kernels(tmp_path, lambda h, mask: attend(h, h, h, attn_mask=mask), mask=shape) == of("efficient")


def test_a_mask_of_three_dimensions_is_not_cudnns(tmp_path: Path) -> None:
    def run(h: Any, _: Any) -> Any:
        return attend(h, h, h, attn_mask=torch.zeros(HEADS, LENGTH, LENGTH, dtype=h.dtype))

    assert kernels(tmp_path, run) == of("efficient")


def test_a_mask_with_equal_columns_takes_matmuls(tmp_path: Path) -> None:
    """check_last_dim_stride_equals_1_dense: neighbours of an expanded mask do not lie together."""

    def run(h: Any, _: Any) -> Any:
        return attend(h, h, h, attn_mask=torch.zeros(LENGTH, 1, dtype=h.dtype).expand(LENGTH, LENGTH))

    assert kernels(tmp_path, run) == of("math")


@pytest.mark.parametrize(
    ("size", "dtype", "masked", "kernel"),
    [
        (36, BF16, False, "flash"),  # no multiple of 8
        (36, BF16, True, "math"),
        (36, FP32, False, "efficient"),
        (30, FP32, False, "math"),  # no multiple of 4
    ],
)
def test_odd_sizes_of_heads(tmp_path: Path, size: int, dtype: Any, masked: bool, kernel: str) -> None:
    """check_cudnn_tensor_shapes, check_head_dim_size_mem_efficient."""

    def run(h: Any, _: Any) -> Any:
        mask = torch.zeros(LENGTH, LENGTH, dtype=h.dtype) if masked else None
        return attend(h, h, h, attn_mask=mask)

    assert kernels(tmp_path, run, size, dtype) == of(kernel)


def test_flash_attention_gets_heads_of_a_multiple_of_8(tmp_path: Path) -> None:
    """attention.cpp: pad_last_dim; queries, keys and values are copied into larger ones."""

    def make() -> Any:
        model = torch.nn.Linear(36, 36).to(BF16)
        x = torch.randn(BATCH, HEADS, LENGTH, 36, dtype=BF16)

        def loss() -> Any:
            h = model(x)
            return attend(h, h * 2, h * 3).square().mean()

        return model, loss

    program = captured(tmp_path, make)
    assert [o.outputs[0].shape[-1] for o in launched(program, "constant_pad_nd", "forward")] == [40] * 3
    (flash,) = launched(program, "flash_attention", "forward")
    assert compute_of(flash).flops == 4 * BATCH * HEADS * LENGTH**2 * 40


def test_rows_of_a_mask_that_are_not_aligned_are_copied(tmp_path: Path) -> None:
    """attention.cpp: preprocess_mask; a Swin's windows have 49 tokens."""

    def run(h: Any, mask: Any) -> Any:
        h = h[:, :, :25]
        return attend(h, h, h, attn_mask=mask)

    def make() -> Any:
        model = torch.nn.Linear(64, 64).to(BF16)
        model.mask = torch.nn.Parameter(torch.zeros(1, HEADS, 25, 25, dtype=BF16))
        x = torch.randn(BATCH, HEADS, LENGTH, 64, dtype=BF16)
        return model, lambda: run(model(x), model.mask).square().mean()

    copies = launched(captured(tmp_path, make), "constant_pad_nd", "forward")
    assert [o.outputs[0].shape for o in copies] == [(1, HEADS, 25, 32)]


def test_three_dimensions_are_those_of_one_sequence(tmp_path: Path) -> None:
    """Plain code with one head: [batch, length, size]. Up to torch 2.13 such tensors took matmuls."""
    found = kernels(tmp_path, lambda h, _: attend(h[:, 0], h[:, 0], h[:, 0]))
    assert found == of("cudnn" if SINCE_2_14 else "math")


def test_a_mask_of_truths_becomes_numbers_by_one_choice(tmp_path: Path) -> None:
    """attention.cpp: convert_boolean_attn_mask_."""

    def make() -> Any:
        model = torch.nn.Linear(64, 64).to(BF16)
        x = torch.randn(BATCH, HEADS, LENGTH, 64, dtype=BF16)
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)

        def loss() -> Any:
            h = model(x)
            return attend(h, h, h, attn_mask=seen).square().mean()

        return model, loss

    program = captured(tmp_path, make)
    assert (len(launched(program, "aten.where")), len(launched(program, "logical_not"))) == (1, 0)


@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_alone_has_larger_heads_in_cudnns_kernel(tmp_path: Path, trains: bool) -> None:
    """check_cudnn_tensor_shapes: up to 256; check_cudnn_d256_bprop_head_dim: a backward has 128 and two others."""
    h = torch.randn(BATCH, HEADS, LENGTH, 160, dtype=BF16)

    def run(x: Any, _: Any) -> Any:
        if trains:
            return attend(x, x, x)
        with torch.no_grad():
            seen = attend(h, h, h)
        return seen + x

    assert kernels(tmp_path, run, 160) == (of("flash") if trains else ["cudnn"])


def test_an_attention_that_drops_is_not_priced_as_one_of_the_same_shape_that_does_not(tmp_path: Path) -> None:
    def make() -> Any:
        model = torch.nn.Linear(64, 64).to(BF16)
        x = torch.randn(BATCH, HEADS, LENGTH, 64, dtype=BF16)

        def loss() -> Any:
            h = model(x)
            return (attend(h, h, h) + attend(h, h, h, dropout_p=0.125)).square().mean()

        return model, loss

    captured(tmp_path, make)
    (path,) = tmp_path.iterdir()
    ran = [c for piece in captured_model(str(path)).pieces for c in piece.forward if isinstance(c, Compute)]
    assert [c.drops for c in ran if c.kind == "attention_forward"] == [False, True]


def test_matmuls_of_attention_look_for_rows_that_a_mask_hides_entirely(tmp_path: Path) -> None:
    """attention.cpp: `_safe_softmax` is a softmax, a comparison, a reduction and a choice."""

    def make() -> Any:
        model, x = torch.nn.Linear(64, 64).to(BF16), torch.randn(BATCH, HEADS, LENGTH, 64, dtype=BF16)

        def loss() -> Any:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                h = model(x)
                return attend(h, h, h).square().mean()

        return model, loss

    program = captured(tmp_path, make)
    for name in ("_softmax", "isneginf", "all", "where"):
        assert [o for o in launched(program, f"aten.{name}", "forward") if o.name == f"aten.{name}"]
    assert not launched(program, "_safe_softmax")
