"""One step of Megatron-Core 0.16 with Transformer Engine 2.11 on an H100, kernel by kernel (`tools/gpu_megatron.py`):
four layers of Llama 3 8B over 8,192 tokens, beside the described step."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate

MEASURED = Path(__file__).parents[3] / "scenarios" / "measured" / "gpu_megatron"
ROW = "llama8b_4l_one"
# Names of the step's operators, and parts of the names of the kernels that they stand for.
ALIKE = [
    (["attention_norm", "mlp_norm", "final_norm"], ["rmsnorm_fwd_tuned"]),
    (["attention_norm_backward", "mlp_norm_backward", "final_norm_backward"], ["rmsnorm_bwd_tuned"]),
    (["rope"], ["fused_rope_forward"]),
    (["rope_backward"], ["fused_rope_backward"]),
    (["split_copies"], ["elementwise_kernel<128, 4"]),
    (["split_copies_backward"], ["CatArrayBatchedCopy_vectorized"]),
    (["swiglu_backward"], ["triton_poi_fused_add_cat_mul_rsub_sigmoid_silu"]),
    (["swiglu", "swiglu_backward"], ["sigmoid_silu_split", "triton_poi_fused_mul_silu_split"]),
    (["cross_entropy"], ["online_softmax", "cross_entropy_kernel"]),
    (["cross_entropy_backward"], ["element_mul_kernel"]),
    (["adamw"], ["AdamFunctor", "bfloat16_copy"]),
    (["grad_norm"], ["L2NormFunctor"]),
    (["grad_scale"], ["ScaleFunctor"]),
]


@cache
def traced() -> tuple[list[tuple[str, float]], list[str]]:
    """Return kernels with their microseconds in the order of their starts, and the operators that launched them."""
    found = json.loads(gzip.decompress((MEASURED / "kernels.json.gz").read_bytes()))[ROW]
    names = found["names"]
    return [(names[k[0]], k[3]) for k in found["kernels"]], [names[k[5]] for k in found["kernels"]]


@cache
def described() -> dict[str, float]:
    """Return the microseconds of each operator of the simulated step."""
    table = json.loads((MEASURED / "table.json").read_text())
    row = next(row for row in table["rows"] if row["id"] == ROW)
    base = table["scenario"]
    training = base["training"] | row["scenario"]["training"]
    scenario = parse_scenario({**base, "model": row["scenario"]["model"], "training": training})
    found: Counter[str] = Counter()
    for operator in simulate(scenario).result["time_by_operator"][0]["operators"]:
        found[operator["operator"]] += operator["seconds"] * 1e6
    return dict(found)


@pytest.mark.parametrize(("operators", "kernels"), ALIKE, ids=lambda names: names[0])
def test_operators_take_what_their_kernels_took(operators: list[str], kernels: list[str]) -> None:
    took = sum(us for name, us in traced()[0] if any(part in name for part in kernels))
    assert sum(described()[name] for name in operators) == pytest.approx(took, rel=0.16)


def test_an_embeddings_gradient_is_added_in_unlike_dtypes() -> None:
    """The largest of torch's sums of a 16-bit gradient and an fp32 one."""
    took = max(us for name, us in traced()[0] if "CUDAFunctor_add<float>" in name)
    assert described()["embedding_accumulate"] == pytest.approx(took, rel=0.06)


def test_matmuls_are_within_a_tenth() -> None:
    """The traced GPU ran at its highest clock; a step of many minutes does not."""
    took = sum(us for name, us in traced()[0] if name.startswith("nvjet"))
    names = ("qkv", "attention_out", "mlp_up", "mlp_down", "output")
    products = sum(
        us for name, us in described().items() if name.removesuffix("_dgrad").removesuffix("_wgrad") in names
    )
    assert 1.0 < products / took < 1.1


def test_twenty_kernels_follow_the_losss_check() -> None:
    """The first read of a number waits for the loss, the second for one kernel more."""
    kernels, operators = traced()
    first = next(i for i, name in enumerate(operators) if name == "aten::_local_scalar_dense")
    loss = next(i for i, (name, _) in enumerate(kernels) if name == "element_mul_kernel")
    between = [name for name in operators[first + 1 : loss] if name != "aten::_local_scalar_dense"]
    assert len(between) == 20
