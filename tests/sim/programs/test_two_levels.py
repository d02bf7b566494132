"""Shards on two levels: Megatron's hybrid sharding with a shared optimizer, and ZeRO++."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block
from sim.models.parameters import count_parameters
from sim.programs.two_levels import quantized_gradients, quantized_messages, second_copy
from sim.simulation import simulate

MODEL = {"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 32000, "bias": False}
MODEL |= {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope"}


def case(framework: str, training: dict[str, Any] | None = None, nodes: int = 4, **parallelism: Any) -> Scenario:
    batch = {
        "seq_len": 512,
        "global_batch_size": 2 * parallelism.get("dp", 32),
        "framework": framework,
        **(training or {}),
    }
    return parse_scenario(
        {
            "model": MODEL,
            "training": batch,
            "parallelism": {"dp": 32, "zero": 3, **parallelism},
            "cluster": {"preset": "dgx-h100", "nodes": nodes},
        }
    )


def sent(scenario: Scenario) -> dict[tuple[str, str], float]:
    """Bytes of a rank's messages in a step, as nccl-tests counts them, by kind and group."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for row in simulate(scenario).result["communication"]:
        found[row["kind"], row["group"]] += row["bytes"]
    return found


def parameters(scenario: Scenario) -> int:
    return count_parameters(scenario.model).total


HYBRID = {"shard_size": 8}
SHARED = {**HYBRID, "outer_dp_sharding_strategy": "optim"}


def test_replicas_that_share_the_optimizer_scatter_gradients_and_gather_parameters_once_a_step() -> None:
    """An all-reduce of a shard's gradients over replicas becomes a reduce-scatter; each shard's parameters are gathered
    over replicas for the first forward and the first backward, but embedding and output, which stay, once. Messages
    within shards stay."""
    hybrid, shared = case("megatron", **HYBRID), case("megatron", **SHARED)
    before, after = sent(hybrid), sent(shared)
    n = before["all_reduce", "replica"]
    assert n > 0
    assert after["reduce_scatter", "replica"] == n
    assert ("all_reduce", "replica") not in {key for key, size in after.items() if size > 1000}
    # Parameters of 2 bytes, gradients of 4.
    passes = 2 * after["all_gather", "replica"] / n
    stay = 2 * MODEL["vocab"] * MODEL["hidden"] + MODEL["hidden"]
    assert passes == pytest.approx(2 - stay / parameters(shared))
    for kind in ("all_gather", "reduce_scatter"):
        assert after[kind, "shard"] == before[kind, "shard"]


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_shared_parameters_are_gathered_over_replicas_until_the_first_backward_has_ended(micro_batches: int) -> None:
    """Megatron's `microbatch_count` is raised by a backward's end, so later ones gather within shards alone."""
    found = sent(case("megatron", {"global_batch_size": 32 * micro_batches, "micro_batch_size": 1}, **SHARED))
    once = sent(case("megatron", {"global_batch_size": 32, "micro_batch_size": 1}, **SHARED))
    assert found["all_gather", "replica"] == once["all_gather", "replica"]


@pytest.mark.parametrize(("micro_batches", "engine"), [(2, "simpy"), (4, "static"), (8, "simpy")])
def test_a_pipelines_warmup_gathers_over_replicas_too(micro_batches: int, engine: str) -> None:
    """Stage s of 2 runs 2 - s forwards before its first backward ends; both keep embedding or output."""
    layout: dict[str, Any] = {**SHARED, "dp": 16, "shard_size": 8, "pp": 2}
    scenario = case("megatron", {"global_batch_size": 16 * micro_batches, "micro_batch_size": 1}, **layout)
    programs = simulate(scenario, engine=engine).result["communication"]
    found = {row["rank"]: row["bytes"] for row in programs if (row["kind"], row["group"]) == ("all_gather", "replica")}
    layers = 2 * 2 * layer_block_parameters(scenario) / 8
    ends = 2 * MODEL["vocab"] * MODEL["hidden"] / 8
    assert found[0] == pytest.approx(3 * layers + ends, rel=1e-3)
    assert found[max(found)] == pytest.approx(2 * layers + ends, rel=1e-3)


def layer_block_parameters(scenario: Scenario) -> int:
    return (parameters(scenario) - 2 * MODEL["vocab"] * MODEL["hidden"] - MODEL["hidden"]) // MODEL["layers"]


def test_replicas_that_share_the_optimizer_keep_a_part_of_its_states() -> None:
    hybrid, shared = (simulate(case("megatron", **keys)).result["memory"][0] for keys in (HYBRID, SHARED))
    assert shared["optimizer"] == pytest.approx(hybrid["optimizer"] / 4)
    assert shared["parameters"] == hybrid["parameters"]
    assert shared["gradients"] == hybrid["gradients"]
    whole = simulate(case("megatron")).result["memory"][0]
    assert shared["optimizer"] == pytest.approx(whole["optimizer"])


def test_the_update_of_a_shared_optimizer_is_as_short_as_that_of_all_shards() -> None:
    def update_s(**keys: Any) -> float:
        (of_rank, *_) = simulate(case("megatron", **keys)).result["time_by_operator"]
        return sum(row["seconds"] for row in of_rank["operators"] if row["operator"] == "adamw")

    assert update_s(**SHARED) == pytest.approx(update_s())
    assert update_s(**HYBRID) > update_s()


def test_a_second_copy_is_gathered_from_in_all_but_the_first_forward() -> None:
    """ZeRO++'s hpZ: of 2k gathers of all parameters one is over all ranks. The copy takes 2 bytes over its ranks."""
    plain, second = case("deepspeed"), case("deepspeed", zero_hpz_partition_size=8)
    before, after = sent(plain), sent(second)
    gathered = before["all_gather", "shard"]
    rest = after["all_gather", "secondary"]
    assert after["all_gather", "shard"] + rest == pytest.approx(gathered)
    passes = gathered / (2 * parameters(plain))
    assert after["all_gather", "shard"] == pytest.approx(gathered / passes)
    memory = [simulate(s).result["memory"][0]["parameters"] for s in (plain, second)]
    assert memory[1] - memory[0] == pytest.approx(2 * parameters(plain) / 8, rel=1e-3)


def test_four_bit_gradients_are_exchanged_within_nodes_and_then_between_them() -> None:
    """qgZ: half a byte a number within the node, an eighth of that between nodes, in each of two micro-batches; of 16
    bits a reduce-scatter sends two bytes."""
    plain, four = case("deepspeed"), case("deepspeed", zero_quantized_gradients=True)
    before, after = sent(plain), sent(four)
    n = before["reduce_scatter", "shard"] / 2
    assert n == pytest.approx(2 * parameters(plain), rel=1e-2)
    assert after["all_to_all", "local"] == pytest.approx(n / 2, rel=0.02)  # the rest are scales
    assert after["all_to_all", "between"] == pytest.approx(after["all_to_all", "local"] / 8)
    assert ("reduce_scatter", "shard") not in after


def test_each_tensor_has_four_exchanges_in_4_bits() -> None:
    """`all_to_all_quant_reduce`: numbers and scales, within nodes and between them, and seven kernels on two nodes:
    copied, quantized, reduced, dequantized, two sums (from 0), divided."""
    messages = quantized_messages("layer", 4 * 1024**2, 4, (8, 2), "g")
    assert [(c.group, c.bytes) for c in messages] == 4 * [
        ("local", 1024**2 / 2),
        ("local", 4 * 1024),
        ("between", 1024**2 / 2 / 8),
        ("between", 4 * 1024 / 8),
    ]
    assert len({c.handle for c in messages}) == len(messages)
    (made,) = quantized_gradients(4 * 1024**2, 4, (8, 2), 2.0)
    assert made.kernels == 4 * 7
    # Bytes of a number: copied (4), quantized (2.5), read (0.5); of an eighth of them: written (0.5),
    # dequantized (2.5), summed (7).
    assert made.bytes == pytest.approx(4 * 1024**2 * (7 + (0.5 + 2.5 + 7) / 8))
    assert quantized_messages("nothing", 0, 1, (8, 2), "g") == []


def test_a_second_copy_has_two_kernels_for_each_tensor() -> None:
    (made,) = second_copy(1024.0, 7, 8, 2.0)
    assert (made.kernels, made.bytes) == (14, 3 * 128 * 2.0)


@pytest.mark.parametrize(
    ("framework", "keys", "message"),
    [
        ("eager", SHARED, "needs zero 3 with framework megatron, megatron_bridge or nemo, and its own FSDP"),
        ("megatron", {"outer_dp_sharding_strategy": "optim"}, "needs shard_size below"),
        ("eager", {"zero_hpz_partition_size": 8}, "needs zero 3 with framework deepspeed"),
        ("deepspeed", {"zero_hpz_partition_size": 5}, "needs a divisor of dp"),
        ("eager", {"zero_quantized_gradients": True}, "needs zero 3 with framework deepspeed"),
        ("deepspeed", {"zero_quantized_gradients": True, "dp": 12}, "needs whole nodes"),
    ],
)
def test_what_no_trainer_has_is_refused(framework: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        case(framework, **keys)


@pytest.mark.parametrize("experts", [False, True])
def test_megatrons_fsdp_shards_and_gathers_parameters_in_8_bits(experts: bool) -> None:
    """Matrices of layers are gathered in one byte in place of two, forward and backward, and their shards kept so."""
    training = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    moe = {"moe": {"experts": 8, "top_k": 2, "ffn": 512}} if experts else {}
    layout = {"ep": 4} if experts else {}
    scenarios = [
        parse_scenario(
            {
                "model": MODEL | moe,
                "training": {"seq_len": 512, "global_batch_size": 32, "framework": "megatron", **training, **more},
                "parallelism": {"dp": 32, "zero": 3, **layout},
                "cluster": {"preset": "dgx-h100", "nodes": 4},
            }
        )
        for more in ({}, {"fp8_param_gather": True})
    ]
    wide, narrow = ([layer_block(s, 0), sent(s), simulate(s).result["memory"][0]] for s in scenarios)
    block = wide[0]
    matrices = sum(m.elements for m in block.matrices)
    own = sum(m.elements for m in block.expert_matrices)
    # Each of four layers is gathered twice.
    assert wide[1]["all_gather", "shard"] - narrow[1]["all_gather", "shard"] == pytest.approx(4 * 2 * matrices)
    if experts:
        saved = wide[1]["all_gather", "expert_shard"] - narrow[1]["all_gather", "expert_shard"]
        assert saved == pytest.approx(4 * 2 * own)
    kept = 4 * (matrices / 32 + own / 8)
    assert wide[2]["parameters"] - narrow[2]["parameters"] == pytest.approx(kept)
    assert narrow[2]["buffers"] < wide[2]["buffers"]
