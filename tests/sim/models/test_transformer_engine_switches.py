"""Switches of Transformer Engine in MXFP8: experts whose matmuls compute the activation and quantize (bytes in closed
form, launches, memory, where allowed), and the output projection."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute, Phase
from sim.inputs.scenario import Scenario
from sim.models.dims import Shard, dims
from sim.models.moe.matmuls import expert_matmuls
from sim.models.moe.routing import routing
from sim.models.operators import Operator
from sim.models.output.head import head_block
from sim.simulation import simulate
from sim.validation.launch_scripts import with_launch_script
from sim.validation.script_records import DEEPSEEK_V3, QWEN3_30B, Sizes
from tests.sim.cases import scenario_with

LAYOUT = {"dp": 8, "ep": 8}
# 2,048 copies of tokens for each expert: a multiple of all tiles, so that no rows are filled up
EVEN = {"preset": "qwen3-30b-a3b", "moe": {"capacity_factor": 1.0, "pad_to_capacity": True}}


def scenario(fused: bool, *, model: Any = EVEN, cluster: str = "gb200-nvl72", **training: Any) -> Scenario:
    keys = {"seq_len": 4096, "global_batch_size": 8, "precision": "mxfp8", "framework": "megatron", **training}
    return scenario_with({**keys, "fused_experts": fused}, LAYOUT, model=model, cluster=cluster)


def experts(s: Scenario) -> tuple[float, dict[str, Operator]]:
    """Copies of tokens that a rank gets, and what it runs on them."""
    d = dims(s)
    r = routing(s, d, 0, Shard())
    return r.fullest, {part.name: part for part in expert_matmuls(s, d.of_experts, r)}


def moved(parts: dict[str, Operator], *phases: Phase) -> float:
    """Bytes moved, but for those of scales that are brought into a matmul's order (`test_swizzles.py`)."""
    return sum(
        i.bytes
        for part in parts.values()
        for i in (*part.forward, *part.backward)
        if isinstance(i, Compute) and i.phase in phases and "swizzle" not in i.name
    )


def matmul_flops(parts: dict[str, Operator]) -> float:
    run = [i for part in parts.values() for i in (*part.forward, *part.backward) if isinstance(i, Compute)]
    return sum(i.flops for i in run if i.kind == "grouped_gemm")


def test_what_never_reaches_memory() -> None:
    rows, apart = experts(scenario(fused=False))
    same, fused = experts(scenario(fused=True))
    assert rows == same
    ffn = 768
    # The activation reads gate and up, writes its result (2 bytes each); its quantization reads that again.
    assert moved(apart, Phase.FORWARD) - moved(fused, Phase.FORWARD) == pytest.approx(rows * ffn * (6 + 2))
    # Written and read: the activation's gradient, and both halves' gradients for their quantization. The gradient of
    # router weights reads three tensors in a kernel of its own.
    kept = rows * ffn * (2 + (2 + 4 + 4) + 4 + 6)
    read = rows * ffn * 4  # by the fused kernel: gate and up
    gone = moved(apart, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) - moved(fused, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
    assert gone == pytest.approx(kept - read)


def test_a_squared_relu_never_reaches_memory() -> None:
    """Without a gate the first matmul's result is as wide as the second's input (ops/fused/grouped_mlp.py:
    `ScaledSReLU`)."""
    model = EVEN | {"mlp": "relu2"}
    (rows, apart), (_, fused) = (
        experts(scenario(on, model=model, framework="megatron_bridge")) for on in (False, True)
    )
    # The activation reads the result and writes its own; its quantization reads that again.
    assert moved(apart, Phase.FORWARD) - moved(fused, Phase.FORWARD) == pytest.approx(rows * 768 * (4 + 2))
    assert matmul_flops(apart) == matmul_flops(fused)
    with pytest.raises(InputError, match="fused_experts: found true; needs experts with a gated activation or relu2"):
        scenario(True, model=EVEN | {"mlp": "gelu"})


def test_in_nvfp4_the_fused_kernels_write_16_bits() -> None:
    """ops/fused/grouped_mlp.py of Transformer Engine 2.17: the first kernel writes gate, up and the activation's result
    and finds its largest values; the kernel of the activation's backward writes both halves' gradients."""
    (rows, apart), (_, fused) = (experts(scenario(on, precision="nvfp4")) for on in (False, True))
    assert matmul_flops(apart) == matmul_flops(fused)
    # The activation reads gate and up; the quantization of its result reads it once, not twice.
    assert moved(apart, Phase.FORWARD) - moved(fused, Phase.FORWARD) == pytest.approx(rows * 768 * (4 + 2))
    # Written and read: the activation's gradient. The gradient of router weights reads three tensors by itself.
    gone = moved(apart, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) - moved(fused, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
    assert gone == pytest.approx(rows * 768 * (2 + 2 + 6))
    # "NVFP4 generic GEMM fallbacks need the full grouped tensor state, including rowwise data"
    kept = [sum(s.bytes for part in parts.values() for s in part.saved) for parts in (apart, fused)]
    assert kept[1] - kept[0] == pytest.approx(rows * (2048 + 768) * (0.5 + 1 / 16))
    with pytest.raises(InputError, match=r"fused_experts: found true; needs training\.precision mxfp8, or nvfp4 of"):
        scenario(True, precision="nvfp4", software_date="2026-06")


def test_one_kernel_takes_all_experts_and_keeps_the_same() -> None:
    (_, apart), (_, fused) = experts(scenario(fused=False)), experts(scenario(fused=True))
    run = [i for part in fused.values() for i in (*part.forward, *part.backward) if isinstance(i, Compute)]
    assert [i.kernels for i in run if i.kind == "grouped_gemm"] == [1] * 6
    assert {i.kind for i in run if "swizzle" not in i.name} == {"grouped_gemm", "cast"}
    kept = [sum(s.bytes for part in parts.values() for s in part.saved) for parts in (apart, fused)]
    assert kept[0] == pytest.approx(kept[1])


def test_a_step_is_shorter_and_its_flops_are_the_same() -> None:
    apart, fused = (simulate(scenario(fused), engine="static") for fused in (False, True))
    assert 0.7 < fused.step_time_s / apart.step_time_s < 0.98
    (_, one), (_, other) = experts(scenario(fused=False)), experts(scenario(fused=True))
    assert matmul_flops(one) == matmul_flops(other)


@pytest.mark.parametrize(
    ("fused", "date", "dispatcher", "tile", "copied"),
    [
        (True, None, "all_to_all", 256, True),
        (True, None, "hybridep", 256, False),
        (True, "2026-05", "all_to_all", 1, False),
        (True, "2026-05", "hybridep", 32, False),
        (False, None, "all_to_all", 32, True),
        (False, None, "hybridep", 32, False),
    ],
)
def test_rows_of_each_expert_are_filled_up(
    fused: bool, date: str | None, dispatcher: str, tile: int, copied: bool
) -> None:
    """core/transformer/moe/moe_utils.py since 0.18: 256 rows with the fuser of operators, else 32. Of random counts an
    expert lacks half a tile, less half a row; it is sent none of them."""
    s = scenario_with(
        {"seq_len": 4096, "global_batch_size": 8, "precision": "mxfp8", "framework": "megatron", "fused_experts": fused}
        | {"software_date": date},
        LAYOUT | {"ep_dispatcher": dispatcher},
        model="qwen3-30b-a3b",
        cluster="gb200-nvl72",
    )
    none = s.unchecked_copy(
        update={"training": s.for_training.model_copy(update={"precision": "bf16", "fused_experts": False})}
    )
    (_, parts), (_, plain) = experts(s), experts(none)
    more = 16 * (tile - 1) / 2
    assert matmul_flops(parts) - matmul_flops(plain) == pytest.approx(3 * 2 * more * 2048 * 3 * 768)
    assert ("experts_padding" in parts) == copied
    d = dims(s)
    assert routing(s, d, 0, Shard()).wire == routing(none, dims(none), 0, Shard()).wire


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"precision": "bf16"}, "needs training.precision mxfp8"),
        ({"cluster": "dgx-h100"}, "needs GPUs of architecture blackwell"),
        ({"recompute": {"mode": "selective", "modules": ["moe_act"]}}, "needs recompute without module moe_act"),
        ({"framework": "compiled"}, "needs framework megatron, megatron_bridge, nemo or composer"),
    ],
)
def test_where_transformer_engine_has_no_such_kernel(changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(InputError, match=f"training.fused_experts: found true; {needed}"):
        scenario(fused=True, **changes)


@pytest.mark.parametrize(
    ("model", "month", "found"),
    [
        (QWEN3_30B, "2026-02", (None, None)),
        (QWEN3_30B, "2026-06", (True, None)),
        (DEEPSEEK_V3, "2026-02", (None, None)),
        (DEEPSEEK_V3, "2026-06", (True, True)),
    ],
)
def test_scripts_of_megatron_bridge_set_them_since_2026_06(
    model: Sizes, month: str, found: tuple[bool | None, bool | None]
) -> None:
    row = {
        "model": {"layers": model.layers, "hidden": model.hidden, "moe": {"experts": model.experts}},
        "training": {"framework": "megatron_bridge", "software_date": month, "precision": "mxfp8"},
        "parallelism": {"pp": 1, "ep": 8},
        "cluster": {"preset": "gb200-nvl72"},
    }
    training = with_launch_script(row)["training"]
    assert (training.get("fused_experts"), training.get("fp8_output_proj")) == found


@pytest.mark.parametrize(("cluster", "paired"), [("gb200-nvl72", True), ("dgx-h100", None)])
def test_a_row_that_names_a_shipped_model_has_its_launch_script(cluster: str, paired: bool | None) -> None:
    row = {
        "model": {"preset": "gpt-oss-120b"},
        "training": {"framework": "megatron_bridge", "software_date": "2026-02"},
        "parallelism": {"pp": 1, "ep": 64},
        "cluster": cluster,
    }
    assert with_launch_script(row)["parallelism"].get("ep_overlap") is paired


def test_the_output_projection_in_8_bits() -> None:
    """Megatron-Core's `fp8_output_proj`: the three matmuls of the head are the layers' ones; of the loss nothing
    changes."""
    usual, quantized = (head_block(scenario(fused=False, fp8_output_proj=own)) for own in (False, True))
    for block, dtype in ((usual, "bf16"), (quantized, "mxfp8")):
        matmuls = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.kind == "gemm"]
        assert [i.dtype for i in matmuls] == [dtype] * 3
    casts = [i for i in quantized.forward if isinstance(i, Compute) and i.kind == "cast"]
    assert len(casts) == 2  # the input and the weights
    with pytest.raises(InputError, match=r"fp8_output_proj: found true; needs training\.precision mxfp8"):
        scenario(fused=False, fp8_output_proj=True, precision="bf16")
