"""Captured programs: the file, the operators that it becomes, memory by lives, and predictions of tables."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.commands.validate import validate_tables
from sim.core.errors import InputError
from sim.core.operator_kinds import shape_flops
from sim.core.program import Role
from sim.inputs.program_file import CapturedOperator, Tensor, read_program
from sim.models.captured.kernels import moved_bytes
from sim.models.captured.operators import compute_of, computes_of, known, masked_flops
from sim.validation.tables import read_table

MLP = Path(__file__).parents[1] / "data" / "mlp.json.gz"  # 64 -> 256 -> 64 on 32 rows, autocast bf16, fused AdamW
PARAMETERS = (64 * 256, 256, 256 * 64, 64)


def content() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(MLP.read_bytes()))
    return data


def written(folder: Path, data: object, name: str = "p.json.gz") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


def test_matmuls_have_the_flops_that_the_layers_have() -> None:
    computes = [compute_of(op) for op in read_program(MLP).operators if op.launches]
    matmuls = [c for c in computes if c.kind == "gemm"]
    one = 2 * 32 * 64 * 256
    by_role = {role: sum(c.flops for c in matmuls if c.role is role) for role in Role}
    # the first layer's input needs no gradient
    assert by_role == {Role.OUTPUT: 2 * one, Role.INPUT_GRADIENT: one, Role.WEIGHT_GRADIENT: 2 * one}
    assert all(c.dtype == "bf16" for c in matmuls)


def test_adam_moves_28_bytes_a_parameter() -> None:
    adam = [compute_of(op) for op in read_program(MLP).operators if op.name == "aten._fused_adamw_"]
    assert len(adam) == 1
    assert adam[0].bytes == pytest.approx(28 * sum(PARAMETERS), rel=0.01)  # step counters besides


def test_every_launch_of_a_plain_step_is_known() -> None:
    assert [op.name for op in read_program(MLP).operators if op.launches and not known(op.name)] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(format="program/9"), "format: found 'program/9'; must be 'program/1'"),
        (lambda d: d.update(seq_len="x"), "seq_len: found 'x'; allowed: a whole number from 1"),
        (lambda d: d["operators"].pop("phase"), "operators.phase: allowed: a list as long as name"),
        (lambda d: d["operators"]["name"].__setitem__(3, 9999), r"operators\[3\].name: found 9999; allowed: 0 to"),
        (lambda d: d["storages"]["bytes"].__setitem__(0, -1), r"storages\[0\].bytes: found -1"),
        (lambda d: d["tables"]["phases"].append("later"), "tables.phases: found 'later'; allowed: forward"),
        (lambda d: d.update(device="tpu"), "device: found 'tpu'; allowed: cpu, cuda"),
        (lambda d: d["operators"]["causal"].__setitem__(0, 2), r"operators\[0\].causal: found 2; .* from 0 to 1"),
        (
            lambda d: d["operators"].update(fused=[]),
            r"operators.fused: unknown column \(of a newer version\?\); allowed",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    data = content()
    change(data)
    with pytest.raises(InputError, match=said):
        read_program(written(tmp_path, data))


def test_no_file_and_no_gzip(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_program(tmp_path / "none.json.gz")
    (tmp_path / "text").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is not a gzipped file"):
        read_program(tmp_path / "text")


def table(folder: Path, **training: int) -> Path:
    model = {"layers": 1, "hidden": 64, "heads": 1, "vocab": 64}
    said = {"seq_len": 32, "micro_batch_size": 1, "global_batch_size": 1, **training}
    row = {
        "id": "mlp",
        "group": "mlp",
        "program": {},
        "scenario": {"model": model, "training": said, "cluster": "dgx-h200"},
        "measured": {"step_time_s": 0.001, "peak_memory_bytes": 1e6},
    }
    data = {"format": "measurements/1", "kind": "training_step", "name": "t", "title": "t", "rows": [row]}
    path = folder / "table.json"
    path.write_text(json.dumps({**data, "source": {"citation": "none"}}), encoding="utf-8")
    return path


def outcome(folder: Path, path: Path) -> dict[str, Any]:
    written(folder, content(), "mlp.json.gz")
    return validate_tables([read_table(path)], programs=folder)[0].as_dict()


def test_a_row_is_predicted_from_its_program(tmp_path: Path) -> None:
    found = outcome(tmp_path, table(tmp_path))
    errors = {e["quantity"]: e for e in found["errors"]}
    launches = sum(op.launches for op in read_program(MLP).operators)
    # the host decides about so small a step: 30 µs for each kernel on this profile, and 500 µs for the optimizer
    assert errors["step_time"]["predicted"] == pytest.approx(launches * 30e-6 + 500e-6, rel=0.03)
    held = sum(-(-4 * n // 512) * 512 for n in PARAMETERS)
    peak = errors["peak_memory"]["predicted"] - 2 * 32 * 2**20  # two workspaces
    assert 4 * held <= peak <= 6 * held  # parameters, two moments, and gradients when the optimizer runs


def test_a_row_that_contradicts_its_program_is_refused(tmp_path: Path) -> None:
    found = outcome(tmp_path, table(tmp_path, seq_len=64))
    assert found["simulated"] == 0
    assert "training.seq_len: found 64" in found["failed"][0]["reason"]
    assert "was captured with 32" in found["failed"][0]["reason"]


def operator(name: str, inputs: list[Tensor], outputs: list[Tensor], phase: str = "forward") -> CapturedOperator:
    return CapturedOperator(name, phase, "", tuple(inputs), tuple(outputs), 1, False)


def test_a_convolution_is_the_matmul_that_it_is() -> None:
    x, weight, y = (Tensor("bf16", shape, ()) for shape in ((2, 32, 16, 16), (64, 32, 3, 3), (2, 64, 16, 16)))
    forward = compute_of(operator("aten.convolution", [x, weight], [y]))
    assert forward.flops == 2 * y.elements * 32 * 9
    backward = compute_of(operator("aten.convolution_backward", [y, x, weight], [x, weight], "backward"))
    assert backward.flops == 2 * forward.flops  # gradients of input and weight
    first = compute_of(operator("aten.convolution_backward", [y, x, weight], [weight], "backward"))
    assert first.flops == forward.flops  # the step's input needs none
    depthwise = weight._replace(shape=(32, 1, 3, 3))
    assert compute_of(operator("aten.convolution", [x, depthwise], [x])).flops == 2 * x.elements * 9


@pytest.mark.parametrize(("channels", "groups"), [(16, 1), (32, 1), (32, 32)])
def test_a_transposed_convolution_multiplies_each_input_by_its_weights(channels: int, groups: int) -> None:
    """Of stride 2, with 32 channels in; torch's own count (`conv_flop_count`) is the same."""
    x, weight, y = (
        Tensor("bf16", shape, ()) for shape in ((2, 32, 16, 16), (32, channels // groups, 4, 4), (2, channels, 32, 32))
    )
    forward = compute_of(operator("aten.convolution", [x, weight], [y]))
    assert forward.flops == 2 * x.elements * channels // groups * 16
    backward = compute_of(operator("aten.convolution_backward", [y, x, weight], [x, weight], "backward"))
    assert backward.flops == 2 * forward.flops


def test_layouts_of_tensors_name_their_kernel() -> None:
    x, bf16, row = Tensor("fp32", (64, 128), ()), Tensor("bf16", (64, 128), ()), Tensor("fp32", (128,), ())
    turned = Tensor("fp32", (64, 128), (1, 64))

    def kernel(name: str, inputs: list[Tensor], output: Tensor) -> str:
        return compute_of(operator(name, inputs, [output])).kernel

    assert [kernel("aten.add", [x, other], x) for other in (x, bf16, row, turned)] == [
        "",
        "mixed",
        "broadcast",
        "transposed",
    ]
    assert kernel("aten.mul", [x], x) == "unary"
    assert kernel("aten.sum", [x], Tensor("fp32", (64,), ())) == "reduce_last"
    assert kernel("aten.sum", [x], row) == "reduce_first"
    assert compute_of(operator("aten.clone", [turned], [x])).kind == "permute"
    assert compute_of(operator("aten.clone", [x], [x])).kind == "copy"


def test_a_loss_reads_one_number_of_a_row_and_its_backward_writes_all_of_them() -> None:
    """ATen/native/cuda/Loss.cu: the forward looks up a log-probability for each target; the backward fills the gradient
    with zeros and writes one number of each row. On a CPU the forward takes microseconds, and the backward as long as a
    fill of its gradient."""
    scores, targets, one = Tensor("fp32", (512, 32000), ()), Tensor("int64", (512,), ()), Tensor("fp32", (), ())
    forward = CapturedOperator("aten.nll_loss_forward", "forward", "", (scores, targets), (one, one), 1, False)
    inputs = (one, scores, targets, one)
    backward = CapturedOperator("aten.nll_loss_backward", "backward", "", inputs, (scores,), 1, False)
    touched = 512 * (8 + 32)
    assert moved_bytes(forward) == touched + 8
    assert moved_bytes(backward) == touched + scores.bytes


def _operator(name: str, inputs: tuple[Tensor, ...], *outputs: Tensor, phase: str = "forward") -> CapturedOperator:
    return CapturedOperator(f"aten.{name}", phase, "", inputs, outputs, 1, False)


def test_an_embeddings_gradient_of_many_tokens_is_sorted() -> None:
    """Zeros [vocabulary, width], the tokens' rows read, their sums in fp32 written and read, the rows written."""
    table = Tensor("bf16", (128_000, 64), ())
    few, many = (
        _operator("embedding_dense_backward", (Tensor("bf16", (n, 64), ()), Tensor("int64", (n,), ())), table)
        for n in (3072, 8192)
    )
    assert moved_bytes(few) == table.bytes + 2 * 3072 * 64 * 2
    assert moved_bytes(many) == table.bytes + 2 * 8192 * 64 * 2 + 2 * 8192 * 64 * 4
    assert [sum(c.kernels for c in computes_of(op)) for op in (few, many)] == [2, 2 + 18]
    assert [c.kernels for c in computes_of(many, on_gpu=False)] == [2]


@pytest.mark.parametrize(
    ("length", "kernels", "accesses"), [(4096, 4, 1 + 1 + 2 + 2 * (1 + 2)), (8192, 11, 2 + 1 + 8 * 3 + 6 + 6)]
)
def test_a_sort_of_long_rows_goes_over_values_and_places_once_for_each_byte(
    length: int, kernels: int, accesses: int
) -> None:
    x, places = Tensor("fp32", (2, length), ()), Tensor("int64", (2, length), ())
    op = _operator("sort", (x,), x, places)
    assert sum(c.kernels for c in computes_of(op)) == kernels
    assert moved_bytes(op) == accesses * x.bytes


def test_norms_of_groups_read_their_input_twice() -> None:
    x, sums, weight = Tensor("fp32", (2, 64, 8, 8), ()), Tensor("fp32", (2, 4), ()), Tensor("fp32", (64,), ())
    found = computes_of(_operator("native_group_norm", (x, weight, weight), x, sums, sums))
    assert found[0].bytes == 3 * x.bytes + 4 * weight.bytes + 2 * sums.bytes
    assert [c.kernels for c in found] == [2, 1]
    last = x._replace(strides=(4096, 1, 512, 64))  # a GPU's kernel takes the channels first
    found = computes_of(_operator("native_group_norm", (last, weight, weight), x, sums, sums))
    assert [(c.kind, c.bytes) for c in found[:1]] == [("permute", 2 * x.bytes)]
    found = computes_of(_operator("native_group_norm_backward", (last, last, sums, sums, weight), x, weight, weight))
    assert [c.kind for c in found] == ["permute", "permute", "norm", "elementwise"]
    # since torch 2.15 it keeps them last
    assert [c.kind for c in computes_of(_operator("native_group_norm", (last, weight, weight), last, sums, sums))] == [
        "norm",
        "elementwise",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "flops"),
    [
        ("linalg_solve_triangular", (3, 64, 8), 3 * 64 * 64 * 8),
        ("linalg_solve_triangular", (3, 8, 64), 3 * 64 * 64 * 8),  # left=False
        ("linalg_inv_ex", (3, 64, 64), 3 * 2 * 64**3),
    ],
)
def test_a_solver_has_the_flops_of_its_algorithm(name: str, shape: tuple[int, ...], flops: int) -> None:
    matrix, right = Tensor("fp32", (3, 64, 64), ()), Tensor("fp32", shape, ())
    found = compute_of(_operator(name, (matrix, right), right))
    assert found.kind == "gemm"
    assert found.flops == flops


@pytest.mark.parametrize(("name", "squares"), [("triangular_solve", 1), ("cholesky_solve", 2)])
def test_a_solver_whose_right_hand_sides_come_first_has_the_flops_of_its_matrix(name: str, squares: int) -> None:
    matrix, right = Tensor("fp32", (3, 64, 64), ()), Tensor("fp32", (3, 64, 8), ())
    assert compute_of(_operator(name, (right, matrix), right)).flops == 3 * squares * 64 * 64 * 8


def test_a_wide_matrix_is_factored_in_as_many_flops_as_the_transposed_one() -> None:
    tall, wide, square = Tensor("fp32", (256, 64), ()), Tensor("fp32", (64, 256), ()), Tensor("fp32", (64, 64), ())
    found = {compute_of(_operator("_linalg_svd", (x,), x, square)).flops for x in (tall, wide)}
    assert found == {22 * 256 * 64 * 64}


def test_bags_read_the_rows_that_they_choose_and_not_the_table() -> None:
    """A recommender's table of a million rows, of which 512 bags choose 20 each (EmbeddingBag.cu)."""
    table, indices, bags = Tensor("fp32", (10**6, 64), ()), Tensor("int64", (10240,), ()), Tensor("int64", (512,), ())
    out, none, rows = Tensor("fp32", (512, 64), ()), Tensor("int64", (0,), ()), 10240 * 64 * 4
    forward = _operator("_embedding_bag", (table, indices, bags), out, indices, bags, none)
    assert moved_bytes(forward) == rows + 2 * (indices.bytes + bags.bytes) + out.bytes
    inputs = (out, indices, bags, indices, bags, none)
    backward = _operator("_embedding_bag_backward", inputs, table, phase="backward")
    assert moved_bytes(backward) == table.bytes + 4 * rows
    maxima = _operator("_embedding_bag_backward", (*inputs[:5], Tensor("int64", (512, 64), ())), table)
    assert moved_bytes(maxima) == table.bytes + 2 * out.bytes
    assert [sum(c.kernels for c in computes_of(op)) for op in (backward, maxima)] == [2 + 18, 2]


@pytest.mark.parametrize(("name", "touches"), [("index_copy_", 1), ("index_put_", 1), ("index_add_", 2)])
def test_a_write_into_a_part_leaves_the_rest_of_the_target(name: str, touches: int) -> None:
    """As a token into a cache of 4,096: the token is read and written; a sum reads what was there."""
    cache, token = Tensor("bf16", (4096, 64), ()), Tensor("bf16", (1, 64), ())
    place = Tensor("int64", (1,), ())
    assert moved_bytes(_operator(name, (cache, place, token), cache)) == place.bytes + (1 + touches) * token.bytes


def test_images_put_between_tokens_are_numbered_by_the_sum_of_their_mask() -> None:
    """As a model of images puts them there: the mask of each row is expanded to all its columns."""
    rows, image = Tensor("bf16", (2, 512, 64), ()), Tensor("bf16", (256, 64), ())
    mask = Tensor("bool", (2, 512, 64), (512, 1, 0))
    copy, sums, put = 1, 1 + 8, 1 + 8 + 2 + 2  # bytes of an element: mask written; mask read, sums written; the rest
    inside = _operator("masked_scatter_", (rows, mask, image), rows)
    assert moved_bytes(inside) == (copy + sums + put) * rows.elements + image.bytes
    outside = _operator("masked_scatter", (rows, mask, image), rows)
    assert moved_bytes(outside) == moved_bytes(inside) + 2 * rows.bytes
    back = _operator("masked_scatter_backward", (rows, mask), image, phase="backward")
    assert moved_bytes(back) == 3 * rows.elements + image.elements * (2 * 8 + 3 * 2 * 8) + 2 * image.bytes
    assert [sum(c.kernels for c in computes_of(op)) for op in (inside, outside, back)] == [3 + 2, 4 + 2, 5 + 2]


def test_the_gradient_of_an_index_sorts_its_places() -> None:
    """A remainder, a product, a division and a range; a sort of 13 bits in two passes after two starts; the sums."""
    rows, places, table = Tensor("bf16", (512, 64), ()), Tensor("int64", (512,), ()), Tensor("bf16", (4096, 64), ())
    found = [_operator("index_put_", (table, places, rows), table, phase=phase) for phase in ("forward", "backward")]
    assert [sum(c.kernels for c in computes_of(op)) for op in found] == [1, 1 + 4 + 2 + 2]


def test_a_pools_backward_asks_its_input_for_the_shape_alone() -> None:
    x, grad = Tensor("fp32", (4, 8, 32, 32), ()), Tensor("fp32", (4, 8, 16, 16), ())
    assert moved_bytes(_operator("avg_pool2d_backward", (grad, x), x, phase="backward")) == grad.bytes + x.bytes


@pytest.mark.parametrize(("shape", "passes"), [((4096,), 1), ((64, 64), 4)])
def test_places_of_a_mask_are_chosen_in_two_passes(shape: tuple[int, ...], passes: int) -> None:
    """Flat places are written; with two dimensions they are read, and those of each dimension written."""
    mask, chosen, x = Tensor("bool", shape, ()), Tensor("fp32", (1000,), ()), Tensor("fp32", shape, ())
    places = Tensor("int64", (1000, len(shape)), ())
    assert moved_bytes(_operator("nonzero", (mask,), places)) == 2 * 4096 + 8000 * passes
    selected = moved_bytes(_operator("masked_select", (x, mask), chosen))
    assert selected == 2 * 4096 + 8000 * passes + places.bytes + 2 * chosen.bytes


def test_a_diagonal_is_read_alone_and_its_gradient_put_into_zeros() -> None:
    matrix, diagonal = Tensor("fp32", (64, 64), ()), Tensor("fp32", (64,), ())
    assert moved_bytes(_operator("diagonal_copy", (matrix,), diagonal)) == 2 * diagonal.bytes
    assert moved_bytes(_operator("diagonal_backward", (diagonal,), matrix)) == matrix.bytes + 2 * diagonal.bytes


@pytest.mark.parametrize(("q", "kv"), [(64, 64), (64, 256), (256, 64)])
@pytest.mark.parametrize("backward", [False, True])
def test_a_causal_mask_begins_at_the_first_key_as_torchs_does(q: int, kv: int, backward: bool) -> None:
    """torch.nn.functional.scaled_dot_product_attention: `is_causal` of unequal lengths is aligned at the upper left."""
    x, y = Tensor("bf16", (2, 4, q, 32), ()), Tensor("bf16", (2, 4, kv, 32), ())
    name = f"aten._scaled_dot_product_efficient_attention{'_backward' if backward else ''}"
    op = operator(name, [x, x, y, y] if backward else [x, y, y], [x])._replace(causal=True)
    found = compute_of(op)
    pairs = sum(min(i + 1, kv) for i in range(q)) - min(q, kv) / 2  # half of the diagonal
    assert found.flops == pytest.approx((10 if backward else 4) * 2 * 4 * 32 * pairs)
    assert shape_flops(found.kind, found.shape) == pytest.approx(found.flops, rel=0.02)
    assert found.flops + masked_flops(op) == compute_of(op._replace(causal=False)).flops


def test_joined_sequences_end_at_the_last_key_as_flash_attention_has_it() -> None:
    starts = Tensor("int32", (3,), ())
    x, y = Tensor("bf16", (64, 4, 32), ()), Tensor("bf16", (512, 4, 32), ())
    found = compute_of(operator("torch_attn._varlen_attn", [x, y, y, starts, starts], [x])._replace(causal=True))
    pairs = sum(256 - 32 + i + 1 for i in range(32)) - 16
    assert found.flops == pytest.approx(4 * 2 * 4 * 32 * pairs)
