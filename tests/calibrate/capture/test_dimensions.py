"""Which dimension operators go along, where an index or a loss names another than the first or the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of, computes_of
from sim.models.captured.reductions import sum_shape
from sim.models.torch_kernels.row_sums import shared_sum
from tests.calibrate.capture.test_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

TOKENS, CHOSEN, WIDTH = 64, 16, 8
RESIZED_HERE = ("bilinear2d", "bicubic2d")


def test_rows_are_chosen_behind_a_full_slice(tmp_path: Path) -> None:
    """Mixtral's loop over experts takes an expert's tokens so: `hidden[None, tokens]`."""

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(TOKENS, WIDTH)
        tokens = torch.randint(0, TOKENS, (CHOSEN,))

        def loss() -> Any:
            hidden = model(x)
            return hidden[None, tokens].sum() + hidden[tokens].sum() + hidden[:, tokens[:4] % WIDTH].sum()

        return model, loss

    found = [compute_of(o).rows_in_turn for o in launched(captured(tmp_path, make), "index_put", "backward")]
    assert sorted(found) == [CHOSEN / TOKENS, CHOSEN / TOKENS, 4 / WIDTH]


def test_messages_of_several_heads_are_whole_rows(tmp_path: Path) -> None:
    """A graph attention network (torch_geometric's GATConv) adds up [edges, heads, width] by node."""
    nodes, edges, heads = 32, 128, 4

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, heads * WIDTH), torch.randn(edges, WIDTH)
        ends = torch.randint(0, nodes, (edges,))

        def loss() -> Any:
            messages = model(x).view(edges, heads, WIDTH)
            places = ends.view(-1, 1, 1).expand_as(messages)
            return messages.new_zeros(nodes, heads, WIDTH).scatter_add_(0, places, messages).square().sum()

        return model, loss

    program = captured(tmp_path, make)
    (added,), (taken,) = launched(program, "scatter_add"), launched(program, "gather", "backward")
    assert compute_of(added).clocks == compute_of(taken).clocks == 0.0


def test_a_softmax_of_columns_waits_for_each_number(tmp_path: Path) -> None:
    """A language model's loss over transposed logits, and a router's weights over the experts of each place."""
    tokens, letters = 128, 500

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, letters), torch.randn(4, tokens, WIDTH)
        labels = torch.randint(0, letters, (4, tokens))

        def loss() -> Any:
            logits = model(x)
            rows = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return rows + torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)

        return model, loss

    program = captured(tmp_path, make)
    forward = {o.dims_behind: computes_of(o) for o in launched(program, "aten._log_softmax", "forward")}
    backward = {o.dims_behind: computes_of(o) for o in launched(program, "log_softmax_backward", "backward")}
    assert [c.kind for c in forward[1]] == ["permute", "softmax"]  # the logits, with the letters last, are copied
    assert [c.kind for c in forward[0]] == ["softmax"] == [c.kind for c in backward[1]]
    # 4 blocks of 128 threads, which read a letter three times, twice from the second cache, and of its gradient four at
    # once and then one.
    clocks = [letters * n for n in (479.0 + 2 * 263.0, 1.25 * 479.0)]
    assert [found[1][-1].lone_clocks for found in (forward, backward)] == clocks
    assert {found[0][-1].lone_clocks for found in (forward, backward)} == {0.0}


def test_a_softmax_of_few_columns_has_several_threads_for_each(tmp_path: Path) -> None:
    classes, places = 16384, 16

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, places), torch.randn(2, classes, WIDTH)
        return model, lambda: model(x).softmax(1).square().sum()

    program = captured(tmp_path, make)
    clocks = [compute_of(o).lone_clocks for o in launched(program, "aten._softmax")]
    assert clocks == [classes / 64 * n for n in (479.0 + 2 * 263.0, 2 * 479.0)]


@pytest.mark.parametrize(("name", "turns", "again"), [("_softmax", 2, 263.0), ("_log_softmax", 1, 479.0)])
def test_registers_of_a_softmax_leave_room_for_one_block_of_1024_columns(name: str, turns: int, again: float) -> None:
    """cuobjdump -res-usage: 34 to 37 registers, 30 of a log-softmax. 132 multiprocessors run 132 or 264 such blocks,
    and the second cache keeps the columns of 132."""
    classes = 80
    x = Tensor("fp32", (264, classes, 32, 32), ())
    found = compute_of(CapturedOperator(f"aten.{name}", "forward", "", (x,), (x,), 1, False, dims_behind=2))
    assert found.lone_clocks == turns * classes * (479.0 + 2 * again)


@pytest.mark.parametrize(
    ("name", "threads"), [("linear1d", 1536), ("trilinear3d", 512), ("trilinear3d_backward", 1024)]
)
def test_threads_of_an_interpolation_share_a_multiprocessor(name: str, threads: int) -> None:
    places, dims = 132 * threads, 2 if "3d" in name else 0

    def clocks(count: int) -> float:
        small, large = (Tensor("fp32", (1, 1, *(1,) * dims, n), ()) for n in (count // 2, count))
        read, made = (large, small) if name.endswith("backward") else (small, large)
        return compute_of(
            CapturedOperator(f"aten.upsample_{name}", "forward", "", (read,), (made,), 1, False)
        ).lone_clocks

    assert (clocks(places), clocks(places + 1)) == (263.0, 2 * 263.0)


def test_the_copy_of_a_softmax_lives_while_it_runs(tmp_path: Path) -> None:
    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(4, TOKENS, WIDTH)
        return model, lambda: model(x).transpose(1, 2).log_softmax(1).sum()

    program = captured(tmp_path, make)
    size = 4 * TOKENS * WIDTH * 4
    row = next(i for i, o in enumerate(program.operators) if o.name == "aten._log_softmax")
    assert [s.bytes for s in program.storages if (s.born, s.died) == (row, row + 1)] == [size]


@pytest.mark.parametrize("name", ["amax", "max", "linalg_vector_norm", "argmax", "prod", "any"])
def test_other_reductions_share_the_kernels_of_sums(name: str) -> None:
    """torch has one template for all (Reduce.cuh), so few threads wait for their loads in each of them."""
    x, rows, columns = Tensor("bf16", (200704, 128), ()), Tensor("bf16", (200704,), ()), Tensor("bf16", (128,), ())

    def reduced(name: str, out: Tensor) -> Any:
        return compute_of(CapturedOperator(f"aten.{name}", "forward", "", (x,), (out,), 1, False))

    for out in (rows, columns):
        one, summed = reduced(name, out), reduced("sum", out)
        assert (one.sums, one.clocks, one.single_elements) == (summed.sums, summed.clocks, summed.single_elements)
        assert one.sums is not None


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_a_variance_s_thread_loads_two_numbers_at_once(name: str) -> None:
    """ReduceMomentKernel.cu: a sum's loads four, so that a variance's thread waits twice as often."""
    x, rows = Tensor("bf16", (512, 768), ()), Tensor("bf16", (768,), ())
    shapes = [sum_shape(CapturedOperator(f"aten.{n}", "forward", "", (x,), (rows,), 1, False)) for n in (name, "sum")]
    assert [shared_sum(shape, 132).loads for shape in shapes if shape] == [64, 32]


def test_a_thread_of_an_interpolation_goes_through_all_channels(tmp_path: Path) -> None:
    """As in the head of a segmentation; with the channels last each number of the result has a thread."""
    images, channels = 4, 32

    def make() -> Any:
        model, x = torch.nn.Conv2d(3, channels, 1), torch.randn(images, 3, 8, 8)

        def loss() -> Any:
            y = model(x)
            resized = [torch.nn.functional.interpolate(y, size=(16, 16), mode=m) for m in ("bilinear", "bicubic")]
            last = y.contiguous(memory_format=torch.channels_last)
            of_last = torch.nn.functional.interpolate(last, size=(16, 16), mode="bilinear")
            return sum(z.square().sum() for z in (*resized, of_last))

        return model, loss

    program = captured(tmp_path, make)
    clocks = {n: [compute_of(o).lone_clocks for o in launched(program, f"aten.upsample_{n}")] for n in RESIZED_HERE}
    assert clocks == {
        "bilinear2d": [images * channels * 263.0, 0.0, 0.0, 0.0],  # forward, channels last, and both gradients
        "bicubic2d": [0.0, images * channels * 263.0],
    }
