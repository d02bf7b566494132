"""Which kernels captured operators are on a GPU: products in tf32, attention, cells, dropout, quantized states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, CapturedProgram, read_program
from sim.models.captured.operators import compute_of, known

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
Make = Callable[[], Any]


def captured(folder: Path, make: Make, *, compiled: bool = False) -> CapturedProgram:
    """Capture a step of `make`, which returns a model, its loss, and an optimizer or its class."""
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    def step() -> Step:
        model, loss, *others = make()
        optimizer = others[0] if others else torch.optim.SGD(model.parameters())
        return Step(model, loss, optimizer, 1, 1, compiled=compiled)

    path = folder / f"p{len(list(folder.iterdir()))}.json.gz"  # a file is read once
    write_program(path, *record(step))
    return read_program(path)


def launched(program: CapturedProgram, part: str, phase: str = "") -> list[CapturedOperator]:
    """Return the launched operators whose names contain `part`."""
    return [o for o in program.operators if o.launches and part in o.name and phase in o.phase]


def layers(*modules: Any, rows: tuple[int, ...] = (8, 16)) -> Make:
    """Return what makes layers in a row, on random numbers."""

    def make() -> Any:
        model = torch.nn.Sequential(*(m() for m in modules))
        x = torch.randn(*rows)
        return model, lambda: model(x).square().mean()

    return make


def test_convolutions_round_to_tf32_and_matmuls_do_not_unless_allowed(tmp_path: Path) -> None:
    make = layers(
        lambda: torch.nn.Conv1d(4, 8, 3), lambda: torch.nn.Flatten(), lambda: torch.nn.Linear(48, 4), rows=(2, 4, 8)
    )
    dtypes = {o.name: compute_of(o).dtype for o in captured(tmp_path, make).operators if o.launches}
    assert (dtypes["aten.convolution"], dtypes["aten.convolution_backward"]) == ("tf32", "tf32")
    assert (dtypes["aten.addmm"], dtypes["aten.mm"]) == ("fp32", "fp32")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        products = launched(captured(tmp_path, make), "mm")
    finally:
        torch.set_float32_matmul_precision(before)
    assert {compute_of(o).dtype for o in products} == {"tf32"}


def test_convolutions_keep_fp32_if_the_code_forbids_tf32(tmp_path: Path) -> None:
    torch.backends.cudnn.allow_tf32 = False
    try:
        program = captured(tmp_path, layers(lambda: torch.nn.Conv1d(4, 8, 3), rows=(2, 4, 8)))
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert {compute_of(o).dtype for o in launched(program, "convolution")} == {"fp32"}


ATTENDING = {  # what torch picks on Hopper (sdp_utils.cpp)
    "plain": ("cudnn", {}, 64, "bfloat16"),
    "dropout of a multiple of 1/16": ("cudnn", {"dropout_p": 0.125}, 64, "bfloat16"),
    "dropout of another": ("flash", {"dropout_p": 0.1}, 64, "bfloat16"),
    "mask": ("cudnn", {"attn_mask": True}, 64, "bfloat16"),
    "mask and dropout": ("efficient", {"attn_mask": True, "dropout_p": 0.1}, 64, "bfloat16"),
    "size 160": ("flash", {}, 160, "bfloat16"),
    "size 512": ("efficient", {}, 512, "bfloat16"),
    "fp32": ("efficient", {}, 64, "float32"),
}


@pytest.mark.parametrize("case", ATTENDING)
def test_attention_is_the_kernel_that_torch_picks(tmp_path: Path, case: str) -> None:
    kernel, how, size, dtype = ATTENDING[case]

    def make() -> Any:
        model = torch.nn.Linear(size, size).to(getattr(torch, dtype))
        x = torch.randn(2, 4, 32, size, dtype=getattr(torch, dtype))
        given: dict[str, Any] = dict(how)
        if "attn_mask" in given:
            given["attn_mask"] = torch.ones(32, 32, dtype=torch.bool)

        def loss() -> Any:
            h = model(x)
            return torch.nn.functional.scaled_dot_product_attention(h, h, h, **given).square().mean()

        return model, loss

    found = launched(captured(tmp_path, make), "scaled_dot_product")
    assert [o.name for o in found] == [
        f"aten._scaled_dot_product_{kernel}_attention",
        f"aten._scaled_dot_product_{kernel}_attention_backward",
    ]
    assert compute_of(found[0]).flops == 4 * 2 * 4 * 32 * 32 * size
    assert {o.drops for o in found} == {"dropout_p" in how} == {compute_of(o).drops for o in found}


def test_joined_sequences_attend_each_to_its_own(tmp_path: Path) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn

    def make() -> Any:
        model = torch.nn.Linear(64, 3 * 64).bfloat16()
        x, starts = torch.randn(96, 64, dtype=torch.bfloat16), torch.tensor([0, 32, 64, 96], dtype=torch.int32)

        def loss() -> Any:
            q, k, v = model(x).view(96, 3, 2, 32).unbind(1)
            return varlen(q, k, v, starts, starts, 32, 32).square().mean()

        return model, loss

    forward, backward = (compute_of(o) for o in launched(captured(tmp_path, make), "varlen"))
    assert known("torch_attn._varlen_attn_backward")
    assert forward.shape == backward.shape == (3, 2, 2, 32, 32, 32, 32, 0)
    assert forward.flops == 4 * 3 * 2 * 32 * 32 * 32


@pytest.mark.parametrize(("kind", "gates"), [("LSTMCell", 4), ("GRUCell", 3)])
def test_a_cell_is_two_matmuls_and_one_kernel(tmp_path: Path, kind: str, gates: int) -> None:
    def make() -> Any:
        cell, x = getattr(torch.nn, kind)(8, 16), torch.randn(4, 8)

        def loss() -> Any:
            out = cell(x)
            return (out[0] if kind == "LSTMCell" else out).square().mean()

        return cell, loss

    program = captured(tmp_path, make)
    fused = f"aten._thnn_fused_{kind[:-4].lower()}_cell"
    assert [o.name for o in launched(program, fused, "forward")] == [fused]
    assert [o.outputs[0].shape for o in launched(program, "aten.mm", "forward")] == [(4, gates * 16)] * 2
    assert not launched(program, "sigmoid")
    assert not launched(program, "tanh")
    assert all(known(o.name) for o in launched(program, "_thnn"))


def test_dropout_in_place_is_not_the_fused_kernel(tmp_path: Path) -> None:
    def behind_a_layer(inplace: bool) -> CapturedProgram:
        dropout = lambda: torch.nn.Dropout(0.5, inplace=inplace)  # noqa: E731
        return captured(tmp_path, layers(lambda: torch.nn.Linear(16, 16), dropout))

    assert launched(behind_a_layer(False), "native_dropout", "forward")
    program = behind_a_layer(True)
    assert not launched(program, "native_dropout")
    assert [o.name for o in launched(program, "_", "forward") if o.name.endswith("_")] == [
        "aten.bernoulli_",
        "aten.div_",
        "aten.mul_",
    ]


NORMS: dict[str, tuple[dict[str, Any], str, list[str]]] = {  # what is said of it, its dtype, whose kernels run
    "fp32": ({}, "float32", ["cudnn", "cudnn"]),
    "bf16": ({}, "bfloat16", ["native", "native"]),
    "fp16": ({}, "float16", ["native", "native"]),
    "no weights": ({"affine": False}, "float32", ["native", "native"]),
    "no running means": ({"track_running_stats": False}, "float32", ["cudnn", "cudnn"]),
    "not trained": ({"eval": True}, "float32", ["cudnn", "native"]),
}


@pytest.mark.parametrize("case", NORMS)
def test_batch_norms_run_in_cudnn_or_in_kernels_of_torch(tmp_path: Path, case: str) -> None:
    """Normalization.cpp: _select_batch_norm_backend, _batch_norm_impl_index_backward."""
    keys, dtype, libraries = NORMS[case]

    def make() -> Any:
        norm = torch.nn.BatchNorm2d(4, **{key: value for key, value in keys.items() if key != "eval"})
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), norm.train(not keys.get("eval"))).to(
            getattr(torch, dtype)
        )
        x = torch.zeros(2, 3, 8, 8, dtype=getattr(torch, dtype))
        return model, lambda: model(x).square().mean()

    found = [o.name.removeprefix("aten.") for o in launched(captured(tmp_path, make), "batch_norm")]
    assert found == [f"{libraries[0]}_batch_norm", f"{libraries[1]}_batch_norm_backward"]


def test_a_complex_product_is_four_real_ones(tmp_path: Path) -> None:
    def make() -> Any:
        model = torch.nn.ParameterList([torch.randn(16, 32, dtype=torch.cfloat)])
        x = torch.randn(8, 16, dtype=torch.cfloat)
        return model, lambda: (x @ model[0]).abs().square().mean()

    op = compute_of(launched(captured(tmp_path, make), "aten.mm", "forward")[0])
    assert (op.dtype, op.flops) == ("fp32", 4 * 2 * 8 * 16 * 32)


def test_a_product_of_8_bits_has_its_peak(tmp_path: Path) -> None:
    def make() -> Any:
        model = torch.nn.Linear(32, 16)
        x = torch.ones(32, 32, dtype=torch.int8)

        def loss() -> Any:
            return torch._int_mm(x, x).float().mean() + model.weight.sum()

        return model, loss

    op = compute_of(launched(captured(tmp_path, make), "_int_mm")[0])
    assert (op.kind, op.dtype, op.flops) == ("gemm", "int8", 2 * 32**3)


def test_zeros_like_a_tensor_do_not_read_it(tmp_path: Path) -> None:
    from sim.models.captured.kernels import moved_bytes

    def make() -> Any:
        model = torch.nn.Linear(16, 4)
        x = torch.randn(8, 16)
        return model, lambda: (model(x) + torch.zeros_like(x)[:, :4] + x.new_ones(4)).sum()

    program = captured(tmp_path, make)
    assert [moved_bytes(o) for o in launched(program, "zeros_like", "forward")] == [8 * 16 * 4]
    assert [moved_bytes(o) for o in launched(program, "new_ones", "forward")] == [4 * 4]


def test_a_float_that_the_code_reads_is_one(tmp_path: Path) -> None:
    read = []

    def make() -> Any:
        model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

        def loss() -> Any:
            out = model(x).mean()
            read.append(out.item())
            if torch.isnan(out) or out > 2:
                raise AssertionError
            return out

        return model, loss, torch.optim.Adafactor(model.parameters())  # which reads a norm

    program = captured(tmp_path, make)
    assert set(read) == {1.0}
    assert len(launched(program, "_local_scalar_dense", "forward")) == 3


def test_an_optimizer_of_a_cuda_graph_keeps_its_steps_on_the_device(tmp_path: Path) -> None:
    def make() -> Any:
        model, loss = layers(lambda: torch.nn.Linear(16, 16))()
        return model, loss, torch.optim.AdamW(model.parameters(), capturable=True)

    assert launched(captured(tmp_path, make), "_foreach_pow", "optimizer")  # of the number of steps, a tensor


def test_states_of_a_tensor_subclass_count_what_they_hold(tmp_path: Path) -> None:
    optim = pytest.importorskip("torchao.optim", reason="torchao has optimizers of 8 bits")

    def make() -> Any:
        model, loss = layers(lambda: torch.nn.Linear(64, 64, bias=False), rows=(2, 64))()
        return model, loss, optim.AdamW8bit(model.parameters())

    program = captured(tmp_path, make)
    states = sum(s.bytes for s in program.storages if s.kind == "optimizer state")
    blocks = 64 * 64 // 256
    assert states == 2 * (64 * 64 + 4 * blocks + 4 * 256)  # codes, a scale for each block, the codes' values


def test_a_compiled_dropout_is_part_of_a_kernel(tmp_path: Path) -> None:
    make = layers(lambda: torch.nn.Linear(16, 16), lambda: torch.nn.GELU(), lambda: torch.nn.Dropout(0.5))
    program = captured(tmp_path, make, compiled=True)
    assert not launched(program, "inductor_random")
    assert not launched(program, "lookup_seed")
    assert len(launched(program, "inductor_seeds")) == 1
    assert all(known(o.name) for o in program.operators if o.launches)


@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_is_a_kernel_that_skips_blocks(
    tmp_path: Path, causal: bool, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", set(), raising=False)  # it warns once in a process

    def make() -> Any:
        model = torch.nn.Linear(64, 3 * 64).bfloat16()
        x = torch.randn(2, 512, 64, dtype=torch.bfloat16)
        seen = (lambda b, h, q, k: q >= k) if causal else (lambda b, h, q, k: q >= 0)
        mask = flex.create_block_mask(seen, None, None, 512, 512, device="cpu")  # blocks of 128 by 128

        def loss() -> Any:
            q, k, v = model(x).view(2, 512, 3, 2, 32).permute(2, 0, 3, 1, 4)
            return flex.flex_attention(q, k, v, block_mask=mask).square().mean()

        return model, loss

    forward, backward = (compute_of(o) for o in launched(captured(tmp_path, make), "flex_attention"))
    part = (4 + 3 + 2 + 1) / 16 if causal else 1.0
    products = 2 * 2 * 2 * 512 * 512 * 32 * part  # of each matmul: batch, heads, queries, keys, head size
    assert (forward.flops, backward.flops) == (2 * products, 5 * products)
    assert forward.bytes == 4 * 2 * 2 * 512 * 32 * 2 + 2 * 2 * 512 * 4  # q, k, v, the result, logarithms of sums
    assert known("calibrate.flex_attention_backward")
    assert not any("unfused" in str(w.message) for w in recwarn)


def test_a_fourier_transform_sweeps_once_for_each_dimension(tmp_path: Path) -> None:
    def make() -> Any:
        model = torch.nn.Linear(8, 8)
        x = torch.randn(4, 8, 8)

        def loss() -> Any:
            y = torch.fft.rfft2(model(x), norm="ortho")
            return torch.fft.irfft2(y).square().mean()

        return model, loss

    program = captured(tmp_path, make)
    forward = [
        o.name.removeprefix("aten.") for o in launched(program, "", "forward") if "fft" in o.name or "mul_" in o.name
    ]
    assert forward == ["_fft_r2c", "_fft_c2c", "mul_", "_fft_c2c", "_fft_c2r", "mul_"]  # the inverse is always scaled
    sizes = [o.outputs[0].shape for o in launched(program, "fft", "forward")]
    assert sizes == [(4, 8, 5), (4, 8, 5), (4, 8, 5), (4, 8, 8)]


def test_nested_tensors_are_refused_in_words() -> None:
    from calibrate.capture import Step
    from calibrate.capture.failure import failure
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = torch.nn.Linear(4, 4)

        def loss() -> Any:
            parts = [torch.randn(2, 4), torch.randn(3, 4)]
            return model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().mean()

        return Step(model, loss, torch.optim.SGD(model.parameters()), 1, 1)

    with pytest.raises(AssertionError) as error:
        record(step)
    assert "nested tensors have sizes that depend on data" in str(failure(error.value, "mine:step"))


def test_a_forward_mode_derivative_starts_only_known_kernels(tmp_path: Path) -> None:
    """Views of constants, a zero tangent without memory and questions about storages start none."""

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
        x, direction = torch.randn(8, 16), torch.randn(8, 16)

        def loss() -> torch.Tensor:
            y, change = torch.func.jvp(model, (x,), (direction,))
            return (y - change * torch.tensor([2.0])[:, None]).square().mean()

        return model, loss

    program = captured(tmp_path, make)
    names = {o.name for o in program.operators if o.launches}
    assert not names & {"aten._has_same_storage_numel", "aten._efficientzerotensor", "aten.unsqueeze"}
    assert len([o for o in launched(program, "tanh", "forward") if o.name == "aten.tanh"]) == 1


def test_random_token_ids_decide_on_shapes(tmp_path: Path) -> None:
    """Where an image's tokens lie depends on no weight: a Qwen3-VL adds features there, by a mask."""

    def make() -> Any:
        model = torch.nn.Embedding(100, 16)
        ids = torch.randint(0, 90, (2, 32))
        ids[:, 4:12] = 95

        def loss() -> Any:
            h, mask = model(ids), ids == 95
            return (h[mask, :] + torch.zeros(16, 16)).square().mean()

        return model, loss

    (chosen,) = [o for o in launched(captured(tmp_path, make), "aten.index", "forward") if o.name == "aten.index"]
    assert chosen.outputs[0].shape == (16, 16)


def test_a_tensor_of_numbers_that_lie_in_tensors_reads_each(tmp_path: Path) -> None:
    """torch copies each to the host; Qwen2-VL makes offsets of positions so."""

    def make() -> Any:
        model = torch.nn.Embedding(100, 16)
        ids = torch.randint(0, 90, (3, 8))

        def loss() -> Any:
            least = torch.tensor([row.min() for row in ids])
            return (model(ids) * least.view(3, 1, 1)).square().mean()

        return model, loss

    assert len(launched(captured(tmp_path, make), "_local_scalar_dense", "forward")) == 3


def test_a_group_norm_of_a_gpu_gives_the_channels_first_until_torch_2_15(tmp_path: Path) -> None:
    from calibrate.capture.recorder import KEEPS_CHANNELS_LAST

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.GroupNorm(2, 8)).to(
            memory_format=torch.channels_last
        )
        x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        return model, lambda: model(x).square().mean()

    norms = launched(captured(tmp_path, make), "native_group_norm")
    if torch.__version__ >= KEEPS_CHANNELS_LAST:
        assert [o.outputs[0].strides for o in norms] == [(128, 1, 32, 8)] * 2
    else:
        assert [bool(o.inputs[0].strides) for o in norms] == [True, False]
        assert [o.outputs[0].strides for o in norms] == [(), ()]
