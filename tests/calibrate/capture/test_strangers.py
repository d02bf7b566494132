"""Programs as other people write them: what of them was captured or priced wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import computes_of, known
from tests.calibrate.capture.captured_scripts import captures_of_scripts
from tests.calibrate.capture.test_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture.failure import reason  # noqa: E402

TOKENS, EXPERTS = 4096, 16


def test_an_autocast_that_decorates_keeps_what_it_asks_for(tmp_path: Path) -> None:
    """It is made when the class is, before the step is captured, and torch switches it off without a GPU."""

    def make() -> Any:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.outer, self.inner = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

            @torch.autocast("cuda", enabled=False)
            def exact(self, x: Any) -> Any:
                return self.inner(x.float())

            @torch.autocast("cuda")
            def forward(self, x: Any) -> Any:
                return self.exact(self.outer(x)).square().mean()

        model, x = Model(), torch.randn(2, 8)
        return model, lambda: model(x)

    found = launched(captured(tmp_path, make), "addmm")
    assert [o.outputs[0].dtype for o in found] == ["fp16", "fp32"]  # fp16: CUDA's default


def test_places_of_tokens_are_counted_along_columns(tmp_path: Path) -> None:
    """A router that gives each expert so many places adds up its choices along the tokens."""

    def make() -> Any:
        router = torch.nn.Linear(8, EXPERTS)
        x = torch.randn(TOKENS, 8)

        def loss() -> Any:
            scores = router(x).softmax(-1)
            along = [scores.cumsum(dim) for dim in (0, 1)]
            return (along[0] + along[1] + scores.sort(0).values + scores.topk(2, 0).values.sum()).sum()

        return router, loss

    program = captured(tmp_path, make)
    (columns, rows), (sort,), (top,) = (launched(program, f"aten.{n}", "forward") for n in ("cumsum", "sort", "topk"))
    assert [o.dims_behind for o in (columns, rows, sort, top)] == [1, 0, 1, 1]
    # A thread for each expert: 64 bytes of each token are one load behind the other.
    assert computes_of(columns)[0].lone_clocks == TOKENS * 479.0
    assert computes_of(rows)[0].lone_clocks == 3150.0  # one turn of a block


def test_a_pool_goes_through_the_places_of_its_windows(tmp_path: Path) -> None:
    """Halves of an image, as in a U-Net, and windows that overlap, as before a ResNet's blocks."""

    def make() -> Any:
        conv = torch.nn.Conv2d(3, 64, 3, padding=1)
        x = torch.randn(2, 3, 32, 32)

        def loss() -> Any:
            y = conv(x)
            halves, overlapping = torch.nn.functional.max_pool2d(y, 2), torch.nn.functional.max_pool2d(y, 3, 2, 1)
            return (halves + overlapping).sum()

        return conv, loss

    program = captured(tmp_path, make)
    for name in ("max_pool2d_with_indices", "max_pool2d_with_indices_backward"):
        found = {o.window: computes_of(o)[0].clocks for o in launched(program, name)}
        assert sorted(found) == [4, 9]
        assert found[4] == pytest.approx(4 / 9 * found[9])


def test_a_single_number_of_the_host_is_an_argument_of_a_kernel(tmp_path: Path) -> None:
    """DeBERTa divides by the root of a number that it makes without a device; one made on `x.device` is the GPU's."""

    def make() -> Any:
        linear, x = torch.nn.Linear(8, 16), torch.randn(4, 8)

        def loss() -> Any:
            root = torch.sqrt(torch.tensor(16.0) * 2)
            there = torch.tensor(3.0, device=x.device) + torch.tensor(2.0).to(x.device)
            return (linear(x) / root * there).sum()

        return linear, loss

    program = captured(tmp_path, make)
    divided = launched(program, "div")
    assert [[x.shape for x in o.inputs] for o in divided] == [[(4, 16)], [(4, 16)]]  # forward and backward
    assert not launched(program, "sqrt")
    assert [len(o.inputs) for o in launched(program, "mul")] == [2, 2]
    assert launched(program, "add", "forward")


def test_long_columns_are_sorted_in_transposed_copies(tmp_path: Path) -> None:
    def make() -> Any:
        weight = torch.nn.Linear(EXPERTS, 2 * TOKENS)
        return weight, lambda: weight.weight.sort(0).values.sum() + weight.weight.sort(1).values.sum()

    columns, rows = launched(captured(tmp_path, make), "sort", "forward")
    assert [(c.kind, c.shape) for c in computes_of(columns)[:3]] == [("permute", (2 * TOKENS * EXPERTS,))] * 3
    assert [c.kind for c in computes_of(rows)] == ["elementwise", "elementwise"]


def test_a_matmul_adds_a_bias_itself_and_a_matrix_to_its_copy(tmp_path: Path) -> None:
    """Blas.cpp: addmm_out_cuda_impl. Muon's products are such; a bias is copied for one row, as of a new token."""

    def make() -> Any:
        model = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)])
        x = torch.randn(8, 16)

        def loss() -> Any:
            h = model[0](x)
            return model[1](torch.addmm(h, h, model[0].weight, beta=0.5)).sum() + model[0](x[:1]).sum()

        return model, loss

    found = [[c.kind for c in computes_of(o)] for o in launched(captured(tmp_path, make), "addmm", "forward")]
    assert found == [["gemm"], ["copy", "gemm"], ["copy", "gemm"], ["copy", "gemm"]]


def test_triton_kernels_of_the_code_are_operators_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tests.calibrate.capture.triton_code import Gated

    def make() -> Any:
        model = torch.nn.Linear(8, 32)
        x, gates = torch.randn(4, 8), torch.randn(4, 32)
        return model, lambda: Gated.apply(model(x), gates).sum()

    gate, scale = launched(captured(tmp_path, make), "triton.")
    size = 4 * 32 * 4
    assert (gate.name, gate.phase, [x.bytes for x in gate.inputs]) == ("triton.gate", "forward", [size, size])
    assert (scale.name, scale.phase) == ("triton.scale_", "backward")
    assert [[x.bytes for x in tensors] for tensors in (scale.inputs, scale.outputs)] == [[size, 4]] * 2
    assert computes_of(scale)[0].bytes == 2 * (size + 4)


TRITON_SCRIPT = """
import torch
from tests.calibrate.capture.triton_code import choose
model = torch.nn.Linear(8, 32, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = model(torch.randn(4, 8, device="cuda"))
    out, places = torch.zeros(64, device="cuda"), torch.arange(64, device="cuda")
    counts = torch.zeros(1, dtype=torch.int64, device="cuda")
    choose[(1,)](x.detach(), places, out, counts, BLOCK=64)
    (x.sum() + out.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_triton_kernels_of_scripts_read_whole_numbers_and_call_functions_that_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's whole numbers are real tensors."""
    pytest.importorskip("triton")
    script = tmp_path / "train.py"
    script.write_text(TRITON_SCRIPT)
    with captures_of_scripts(monkeypatch) as capture:
        program = capture(script, 1).program
    (found,) = launched(program, "triton.")
    assert [(x.dtype, x.shape) for x in found.inputs] == [("fp32", (4, 32)), ("int64", (64,))]
    assert [(x.dtype, x.shape) for x in found.outputs] == [("fp32", (64,)), ("int64", (1,))]


def test_whole_numbers_that_a_triton_kernel_writes_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "train.py"
    script.write_text(TRITON_SCRIPT.replace("    (x.sum()", "    print(counts.tolist())\n    (x.sum()"))
    with captures_of_scripts(monkeypatch) as capture, pytest.raises(ValueError, match="int64, which depends on data"):
        capture(script, 1)


def test_a_gaussian_loss_asks_whether_variances_are_negative(tmp_path: Path) -> None:
    """torch/nn/functional.py: gaussian_nll_loss; the answer is no."""

    def make() -> Any:
        model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        return model, lambda: torch.nn.functional.gaussian_nll_loss(model(x), x, model(x).exp())

    assert launched(captured(tmp_path, make), "local_scalar")


def test_a_ctc_loss_reads_lengths_and_adds_up_frame_by_frame(tmp_path: Path) -> None:
    """LossCTC.cpp copies lengths of the GPU to the host; LossCTC.cu has a loop over frames in one kernel."""
    frames, texts = 50, torch.randint(1, 5, (2, 4))

    def make() -> Any:
        model, x = torch.nn.Linear(8, 5), torch.randn(frames, 2, 8)
        lengths = [torch.full((2,), n) for n in (frames, 4)]
        return model, lambda: torch.nn.functional.ctc_loss(model(x).log_softmax(-1), texts, *lengths)

    program = captured(tmp_path, make)
    assert [o.name for o in launched(program, "local_scalar", "forward")] == ["aten._local_scalar_dense"] * 2
    forward, backward = (computes_of(o)[0] for o in launched(program, "_ctc_loss"))
    assert forward.lone_clocks == backward.lone_clocks == frames * 479.0
    assert (forward.kernels, backward.kernels) == (1, 4)


def test_an_optimizer_of_bitsandbytes_reads_gradients_and_updates_the_rest() -> None:
    """Two states of a byte, with a factor for 256 of them; its schema says that gradients change, too."""
    n, name = 4096, "bitsandbytes.optimizer_update_8bit_blockwise"
    numbers, state, scales = Tensor("fp32", (n,), ()), Tensor("uint8", (n,), ()), Tensor("fp32", (n // 256,), ())
    changed = (numbers, numbers, state, state, scales, scales)
    (found,) = computes_of(CapturedOperator(name, "optimizer", "", changed, changed, 1, False))
    assert found.bytes == n * (4 + 8 + 2 * 2) + 2 * 2 * 4 * n // 256
    assert known(name)


def test_quantized_layers_of_bitsandbytes_are_refused_with_what_to_do() -> None:
    said = reason(RuntimeError("Creating a new Tensor subclass Params4bit but the raw Tensor object is already …"))
    assert "bitsandbytes in 4 bits cannot be captured" in said


MESH_SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (2,))
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    loss = model(torch.randn(4, 8, device="cuda")).sum()
    loss.backward()
    dist.all_reduce(model.weight.grad, group=mesh.get_group())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_mesh_of_a_script_without_groups_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init_device_mesh` calls `init_process_group` itself, which waited for the other ranks for ever."""
    script = tmp_path / "train.py"
    script.write_text(MESH_SCRIPT)
    with captures_of_scripts(monkeypatch) as capture:
        found = capture(script, 2)
    assert len(found.collectives) == 1
