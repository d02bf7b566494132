"""Autocast of captures follows the lists of torch's own header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.gpu import autocast  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
# Reached through other functions: `conv2d`, `scaled_dot_product_attention`, `grid_sample`. No model calls `vdot`.
INSIDE = {"_convolution", "_scaled_dot_product_flash_attention", "grid_sampler", "vdot"}


@pytest.mark.skipif(not HEADER.is_file(), reason="this torch has no headers")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", "LOWER"),
        ("AT_FORALL_FP32", "FP32"),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", "OPTIONAL_FP32"),
        ("AT_FORALL_PROMOTE", "WIDEST"),
    ],
)
def test_every_operator_that_cuda_casts_is_listed(macro: str, ours: str) -> None:
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", HEADER.read_text(encoding="utf-8"), re.DOTALL)
    assert body is not None
    names = {name for name in re.findall(r"_\((\w+)", body[1]) if not name.startswith("_thnn_fused")}
    assert len(names) > 5
    assert not names - INSIDE - getattr(autocast, ours)


def test_an_image_is_enlarged_and_a_root_mean_square_taken_in_fp32() -> None:
    def step() -> Step:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 1), torch.nn.Upsample(scale_factor=2, mode="bilinear"), torch.nn.RMSNorm(8)
        )
        x = torch.zeros(1, 3, 4, 4)
        return Step(model, lambda: model(x).sum(), torch.optim.SGD(model.parameters()), 4, 1, "bf16")

    rows = {row.name: row for row in record(step)[1].rows if row.phase == "forward"}
    assert rows["aten.convolution"].inputs[0][0][0] == "bf16"
    assert rows["aten.upsample_bilinear2d"].inputs[0][0][0] == "fp32"
    assert rows["aten._fused_rms_norm"].inputs[0][0][0] == "fp32"


def test_attention_of_several_heads_is_cast_and_fused_within_its_module() -> None:
    """`multi_head_attention_forward` is written in Python."""

    def step() -> Step:
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        x = torch.zeros(2, 4, 16)
        return Step(model, lambda: model(x).sum(), torch.optim.SGD(model.parameters()), 4, 1, "bf16")

    rows = [row for row in record(step)[1].rows if row.phase == "forward"]
    matmuls = [row for row in rows if row.name in ("aten.mm", "aten.addmm", "aten._scaled_dot_product_flash_attention")]
    assert len(matmuls) == 5
    assert {tensor[0] for row in matmuls for tensor, _ in row.inputs} == {"bf16"}
    assert not any(row.name in ("aten.bmm", "aten.bernoulli_") for row in rows)


def test_a_root_mean_square_has_one_kernel_in_each_direction_on_a_gpu() -> None:
    def step() -> Step:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
        x = torch.zeros(4, 8)
        return Step(model, lambda: model(x).sum(), torch.optim.SGD(model.parameters()), 4, 1)

    named = [row for row in record(step)[1].rows if "rms_norm" in row.name]
    assert [row.name for row in named] == ["aten._fused_rms_norm", "aten._fused_rms_norm_backward"]
    real = step()
    real.loss().backward()
    found = [tensor[1] for tensor, _ in named[1].outputs]
    assert found == [(4, 8), tuple(real.model[1].weight.grad.shape)]
    assert not any("rms_norm" in row.name for row in record(step, "cpu")[1].rows)
