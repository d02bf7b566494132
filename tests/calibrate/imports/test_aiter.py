"""AITER's tuning records become tables: forms of files, what a point has beside the recorded time, bad lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from calibrate.imports import Imported
from calibrate.imports.aiter import CACHE_BYTES, DISPATCH_S, SORTING_S, SPLITS, read
from sim.core.errors import InputError

JOINED = """gfx,compute_units,kind,dtype,batch,m,n,k,us,library
gfx942,304,a8w8_blockscale,,1,16,2112,7168,11.9,ck
gfx950,256,bf16,bfloat16,1,1,256,6144,5.0,asm
"""
OF_REPOSITORY = """cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,errRatio
304,16,2112,7168,ck,8,0,11.9,a8w8_blockscale_1x128,0.0
304,32,2112,7168,ck,8,0,nan,None,0.0
"""
LAYERS = """cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,us1,us2,us
"""
LAYER = "304,{},7168,256,257,9,ActivationType.Silu,torch.bfloat16,{},QuantType.{},1,1,{},{}\n"
FP8 = "torch.float8_e4m3fnuz,torch.float8_e4m3fnuz"


def table(found: Imported, op: str) -> dict[tuple[int, ...], float]:
    (own,) = [each for each in found.tables if each.name.op == op]
    return {tuple(shape): float(s) for shape, s in zip(own.shapes.tolist(), own.seconds, strict=True)}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_both_forms_of_a_record_give_the_same_point(tmp_path: Path) -> None:
    joined = read([write(tmp_path, "gemm.csv.gz", JOINED)], "mi300x")
    own = read([write(tmp_path, "dsv3_a8w8_blockscale_tuned_gemm.csv", OF_REPOSITORY)])
    assert own.gpu == "mi300x"
    assert table(joined, "gemm:fp8_block") == table(own, "gemm:fp8_block")
    assert any("nan or 0" in said and "1 record" in said for said in own.skipped)


def test_a_point_has_a_dispatch_and_its_weights_from_memory(tmp_path: Path) -> None:
    row = "gfx942,304,a8w8_blockscale,,1,16,{},128,9.0,ck\n"
    text = JOINED.splitlines()[0] + "\n" + row.format(128) + row.format(CACHE_BYTES // 64)
    found = table(read([write(tmp_path, "g.csv", text)]), "gemm:fp8_block")
    # Weights of 16 KiB take next to nothing; those that do not fit in the cache came from memory already.
    assert [seconds - 9e-6 for seconds in found.values()] == pytest.approx([DISPATCH_S, DISPATCH_S], rel=0.01)


def test_weights_from_memory_take_longer_the_less_bandwidth_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm.csv", JOINED)
    ((slow,), (fast,)) = (table(read([path], gpu), "gemm:fp8_block").values() for gpu in ("mi300x", "mi325x"))
    kernel_s = 11.9e-6 + DISPATCH_S
    weights = 2112 * 7168
    assert slow - fast == pytest.approx(weights / 0.79 * (1 / 5.3e12 - 1 / 6e12))
    assert kernel_s < fast < slow


def test_an_experts_layer_has_what_runs_before_it_and_stands_for_all_splits(tmp_path: Path) -> None:
    two = LAYER.format(4096, FP8, "per_1x128", 900.0, 1500.0)
    one = LAYER.format(8192, FP8, "per_1x128", 0.0, 3000.0)
    found = table(read([write(tmp_path, "ds_v3_tuned_fmoe.csv", LAYERS + two + one)]), "moe_layer:fp8_block")
    assert len(found) == 2 * len(SPLITS)
    shapes = [(4096 * e, 7168, 256 * t, 9, 257 * e, t, e) for t, e in SPLITS]
    assert len({found[shape] for shape in shapes}) == 1
    assert found[shapes[0]] > 1500e-6 + SORTING_S
    # The second product's input is quantized by a kernel of its own only where it has a kernel of its own.
    inputs_s = [found[tokens, 7168, 256, 9, 257, 1, 1] - us * 1e-6 for tokens, us in ((4096, 1500.0), (8192, 3000.0))]
    streamed_s = 3.0 * 4096 / (0.79 * 5.3e12)  # of the number of rows
    assert inputs_s[0] - inputs_s[1] == pytest.approx(streamed_s * (9 * 256 - 7168) + DISPATCH_S + 3.8e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("us", "kept"),
    [
        ([7, 7, 7, 9, 11], {4, 8, 16}),  # at the beginning: the copy beside the next measurement
        ([7, 9, 11, 11, 11], {1, 2, 4}),
        ([7, 7, 7, 7, 7], set()),
        ([5, 7, 7, 9, 11], {1, 8, 16}),
        ([5, 6, 7, 8, 9], {1, 2, 4, 8, 16}),
    ],
)
def test_copies_of_one_record_are_left_out(tmp_path: Path, us: list[int], kept: set[int]) -> None:
    rows = [LAYER.format(1 << i, FP8, "per_1x128", 1.0, each) for i, each in enumerate(us)]
    text = LAYERS + "".join(rows) + LAYER.format(64, FP8, "per_Token", 1.0, 3.0)
    found = read([write(tmp_path, "tuned_fmoe.csv", text)])
    layers = [each for each in found.tables if each.name.op == "moe_layer:fp8_block"]
    assert {shape[0] for each in layers for shape in each.shapes.tolist() if shape[-1] == 1} == kept
    assert any("copies" in said for said in found.skipped) == (len(kept) < len(us))


def test_columns_that_are_not_used_and_unknown_kinds_are_named(tmp_path: Path) -> None:
    text = "gfx,cu_num,M,N,K,us,kind,mood\ngfx950,256,1,2,3,4.0,a6w4,good\ngfx950,256,1,2,3,4.0,bf16,good\n"
    found = read([write(tmp_path, "gemm.csv", text)])
    assert found.gpu == "mi355x"
    assert any("mood" in said for said in found.skipped)
    assert any("a6w4" in said and "1 record" in said for said in found.skipped)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("g.csv", JOINED.replace("11.9", "quick").replace("950", "942"), "g.csv:2: us: found 'quick'"),
        ("g.csv", JOINED.replace("16,2112", "16.5,2112").replace("950", "942"), "g.csv:2: m: found '16.5'"),
        ("g.csv", JOINED.replace(",us,", ",time,"), "g.csv:1: column us of a matmul is missing"),
        ("g.csv", JOINED + "gfx950,256\n", "g.csv:4: found 2 values"),
        ("g.csv", JOINED, "of several GPUs; choose one with --gpu"),
        (
            "g.csv",
            JOINED.replace("gfx942,304", "gfx942,80").replace("gfx950,256", "gfx942,80"),
            "of no GPU that is known",
        ),
        (
            "g.csv",
            "gfx,cu_num,M,N,K,us,kind\ngfx950,256,1,2,3,4.0,a6w4\n",
            "g.csv: no record prices an operator; skipped",
        ),
        ("g.csv.gz", "", "column cu_num or compute_units of a matmul is missing"),
        ("tuned_fmoe.csv", LAYERS.replace(",topk", "") + "1\n", "column topk of an expert layer is missing"),
    ],
)
def test_bad_input_is_named_with_its_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        read([write(tmp_path, name, text)])
    assert said in str(error.value)


def test_other_files_of_a_folder_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a8w8_blockscale_tuned_gemm.csv", OF_REPOSITORY)
    write(tmp_path, "a8w8_blockscale_untuned_gemm.csv", "M,N,K\n1,2,3\n")
    write(tmp_path, "asm_kernels.csv", "tile_m,tile_n,name\n1,2,x\n")
    found = read([tmp_path])
    assert len(table(found, "gemm:fp8_block")) == 1
    assert any("asm_kernels.csv: column cu_num" in said for said in found.skipped)


@pytest.mark.parametrize(("gpu", "said"), [("h100-sxm", "--gpu: found 'h100-sxm'"), ("mi355x", "no record of gfx950")])
def test_a_gpu_without_records_is_refused(tmp_path: Path, gpu: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read([write(tmp_path, "a8w8_blockscale_tuned_gemm.csv", OF_REPOSITORY)], gpu)


def test_of_two_records_of_a_shape_the_faster_counts(tmp_path: Path) -> None:
    text = (
        JOINED.splitlines()[0]
        + "\n"
        + "".join(
            f"gfx942,304,{kind},,1,8,64,64,{us},ck\n"
            for kind, us in (("a8w8_blockscale", 7.0), ("a8w8_blockscale_bpreshuffle", 5.0))
        )
    )
    (seconds,) = table(read([write(tmp_path, "g.csv", text)]), "gemm:fp8_block").values()
    assert np.isclose(seconds, 5e-6 + DISPATCH_S, rtol=1e-3)
