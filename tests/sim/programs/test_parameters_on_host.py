"""`training.parameter_offload`: ZeRO-3's shards come from host memory before each gather, and gradients go there."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.models.parameters import count_parameters
from sim.prices.rank_prices import HOST_EFFICIENCY
from sim.simulation import Simulation, simulate
from tests.sim.cases import scenario_with

GB = 1e9


def scenario(
    away: bool = True, dp: int = 8, batches: int = 1, pcie: float = 55 * GB, layout: Any = None, **training: Any
) -> Scenario:
    """Llama 3.2 1B with its optimizer on the host, on GPUs with a PCIe of `pcie` bytes/s."""
    keys = {"optimizer_offload": "cpu", "parameter_offload": away, "global_batch_size": dp * batches, **training}
    return scenario_with(
        {"seq_len": 1024, **keys},
        {"dp": dp, "zero": 3, **(layout or {})},
        model="llama3.2-1b",
        cluster={"preset": "dgx-h100", "gpu": {"host_bandwidth_bytes_per_s": pcie}},
    )


def copied(step: Simulation) -> tuple[float, float]:
    """Return the bytes that rank 0 copies from the host and to it."""
    rows = {r["kind"]: r["bytes"] for r in step.result["communication"] if r["rank"] == 0 and r["group"] == "host"}
    return rows.get("reload", 0.0), rows.get("offload", 0.0)


SHARD = count_parameters(scenario().model).total / 8
FIRST_FSDP = {"fsdp_version": 1}
DEEPSPEED = {"framework": "deepspeed"}
KEPT = {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("layout", "training", "batches", "from_host", "to_host"),
    [
        ({}, {}, 1, 2 * 2, 4),  # gathered for the forward and for the backward, in bf16
        ({}, {}, 3, 6 * 2, 3 * 4),
        ({}, {"param_dtype": "fp32"}, 1, 2 * 4, 4),  # cast on the GPU, so that fp32 is copied
        ({}, {"grad_dtype": "bf16"}, 1, 2 * 2, 2),
        (KEPT, {}, 1, 2, 4),
        ({"accumulate_unsharded": True}, {}, 3, 6 * 2, 4),
        ({"shard_size": 4, "all_reduce_once": True}, {}, 3, 2 * 6 * 2, 2 * 4),
        # Of gathered parameters a billion stay for the backward; sums of gradients visit the GPU, and leave it in fp32.
        (KEPT, DEEPSPEED, 1, 2 + 2, 2 + 4),
        (KEPT, DEEPSPEED, 2, 2 * 2 + 2 * 2, 2 * 2 + 4),
    ],
)
def test_shards_come_before_each_gather_and_gradients_go_behind_each_reduction(
    layout: dict[str, Any], training: dict[str, Any], batches: int, from_host: float, to_host: float
) -> None:
    step = simulate(scenario(batches=batches, layout=layout, **training))
    assert copied(step) == pytest.approx((from_host * SHARD, to_host * SHARD), rel=1e-3)


def test_the_first_fsdp_copies_its_root_once_and_sums_on_the_gpu() -> None:
    """`_post_forward_reshard`: the root stays; `_accumulate_sharded_grad`: sums do, too."""
    used = scenario(batches=2, layout=FIRST_FSDP, framework="transformers")
    step, model = simulate(used), used.model
    root = (model.vocab * model.hidden + model.hidden) / 8  # tied, beside the last norm
    assert copied(step) == pytest.approx(((4 * SHARD - 2 * root) * 2, 2 * SHARD * 4), rel=1e-3)
    assert step.result["memory"][0]["gradients"] == pytest.approx(SHARD * 4, rel=1e-3)


@pytest.mark.parametrize("framework", ["eager", "transformers", "compiled", "deepspeed"])
def test_the_gpu_keeps_neither_parameters_nor_gradients(framework: str) -> None:
    here, away = (simulate(scenario(away, framework=framework)) for away in (False, True))
    assert here.result["memory"][0]["parameters"] > 0
    assert away.result["memory"][0]["parameters"] == away.result["memory"][0]["gradients"] == 0
    assert away.peak_memory_bytes < here.peak_memory_bytes


def test_frozen_parameters_of_adapters_lie_on_the_host_too() -> None:
    """In 4 bits half a byte each is copied; their scales are no parameters and stay on the GPU."""
    few: dict[str, Any] = {"lora": {"rank": 8, "targets": ["qkv"], "weights": "nf4"}}
    plain, quantized = simulate(scenario(lora={"rank": 8, "targets": ["qkv"]})), simulate(scenario(**few))
    here = simulate(scenario(False, **few))
    model = scenario().model
    layers = count_parameters(model).total - model.vocab * model.hidden - (2 * model.layers + 1) * model.hidden
    saved = 2 * layers * (2 - 0.5) / 8
    assert copied(plain)[0] - copied(quantized)[0] == pytest.approx(saved, rel=1e-3)
    left = quantized.result["memory"][0]["parameters"]
    assert left == pytest.approx(layers * (1 / 64 + 4 / (64 * 256)), rel=1e-3)
    assert left < here.result["memory"][0]["parameters"] / 5


def test_a_step_that_pcie_limits_takes_as_long_as_the_copies() -> None:
    """With adapters the gradients are few, so both passes take the time of their shards, one after another."""
    adapters: dict[str, Any] = {"lora": {"rank": 1, "targets": ["qkv"]}}
    step = simulate(scenario(pcie=0.1 * GB, **adapters))
    assert step.step_time_s == pytest.approx(copied(step)[0] / (0.1 * GB), rel=0.03)
    assert step.step_time_s > copied(step)[0] / (0.1 * GB)


def test_gradients_go_to_the_host_beside_the_parameters_of_the_next_layer() -> None:
    pcie = 0.1 * GB
    step = simulate(scenario(pcie=pcie, grad_dtype="bf16"))
    pass_s = SHARD * 2 / pcie
    assert 2 * pass_s < step.step_time_s < 2.7 * pass_s
    wide = simulate(scenario(pcie=pcie))  # in fp32 the way to the host is the longer one
    assert 3 * pass_s < wide.step_time_s < 3.7 * pass_s


def test_without_overlap_all_copies_are_exposed() -> None:
    steps = [simulate(scenario(pcie=pcie, layout={"dp_sync": "after_backward"})) for pcie in (10 * GB, 40 * GB)]
    slow, fast = (step.step_time_s for step in steps)
    assert slow - fast == pytest.approx(sum(copied(steps[0])) * (1 / (10 * GB) - 1 / (40 * GB)), rel=1e-6)


def test_a_fast_host_hides_the_copies() -> None:
    times = [simulate(scenario(pcie=pcie, seq_len=8192)).step_time_s for pcie in (5 * GB, 20 * GB, 80 * GB, 1e18)]
    assert times == sorted(times, reverse=True)
    alone = simulate(scenario(False, pcie=1e18, seq_len=8192)).step_time_s
    norm_s = 8 * SHARD * 4 / (614.4e9 * HOST_EFFICIENCY)
    assert times[2] < 1.05 * times[3]
    assert times[3] == pytest.approx(alone + norm_s, rel=3e-3)


def host_s(step: Simulation, name: str) -> float:
    rows = {row["operator"]: row["seconds"] for row in step.result["time_by_operator"][0]["operators"]}
    return float(rows.get(name, 0.0))


@pytest.mark.parametrize(("layout", "batches", "sums"), [({}, 1, 0), ({}, 3, 2), (FIRST_FSDP, 3, 0)])
def test_fsdp2_adds_gradients_up_on_the_host(layout: dict[str, Any], batches: int, sums: int) -> None:
    """`to_accumulate_grad` in `foreach_reduce`: two numbers of fp32 are read, one is written."""
    used = scenario(batches=batches, layout=layout)
    each_s = 8 * SHARD * 12 / (614.4e9 * HOST_EFFICIENCY)
    assert host_s(simulate(used), "gradients on the host") == pytest.approx(sums * each_s, rel=1e-3)


@pytest.mark.parametrize(("framework", "each"), [("eager", 46), ("deepspeed", 42)])
def test_torch_takes_the_norm_of_gradients_on_the_host(framework: str, each: int) -> None:
    step = simulate(scenario(framework=framework))
    assert host_s(step, "adamw on the host") == pytest.approx(8 * SHARD * each / (614.4e9 * HOST_EFFICIENCY), rel=1e-3)


@pytest.mark.parametrize("framework", ["eager", "deepspeed"])
def test_one_gpu_copies_whole_parameters(framework: str) -> None:
    step = simulate(scenario(dp=1, framework=framework, layout=KEPT))
    whole = 8 * SHARD
    visits = framework == "deepspeed"
    assert copied(step) == pytest.approx((whole * (2 + 2 * visits), whole * (4 + 2 * visits)), rel=1e-3)
    assert step.result["memory"][0]["parameters"] == 0
    if not visits:  # FSDP2 copies on the stream that computes
        slow, fast = (simulate(scenario(dp=1, pcie=p, layout=KEPT, lora={"rank": 1})) for p in (10 * GB, 40 * GB))
        more_s = copied(slow)[0] * (1 / (10 * GB) - 1 / (40 * GB))
        assert slow.step_time_s - fast.step_time_s >= 0.999 * more_s


@pytest.mark.parametrize("framework", ["eager", "deepspeed"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2, "dp": 4, "shard_size": 2}])
def test_both_engines_give_the_same_times(framework: str, layout: dict[str, Any]) -> None:
    used = scenario(batches=2, framework=framework, layout=layout)
    quick, clocked = (simulate(used, engine=engine).step_time_s for engine in ("static", "simpy"))
    assert quick == pytest.approx(clocked, rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "training", "said"),
    [
        ({"zero": 2}, {}, "needs parallelism.zero 3"),
        ({}, {"optimizer_offload": False}, "needs training.optimizer_offload cpu"),
        ({}, {"framework": "megatron"}, "needs torch's FSDP or DeepSpeed's ZeRO"),
        ({"param_gather_dtype": "int8"}, DEEPSPEED, "than int8"),
        ({"zero_hpz_partition_size": 2}, DEEPSPEED, "needs no parallelism.zero_hpz_partition_size"),
        ({"zero_quantized_gradients": True}, DEEPSPEED, "zero_quantized_gradients false"),
    ],
)
def test_what_cannot_be_simulated_is_named(layout: dict[str, Any], training: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"training\.parameter_offload: found true; .*{said}"):
        scenario(layout=layout, **training)
