"""Bytes that parallel schemes send, counted from the simulated step, against their closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.actions import Kind
from sim.core.dtypes import dtype_bytes
from sim.core.program import Comm, Compute, Phase, Wait
from sim.inputs.parallelism import Parallelism
from sim.programs.data_parallel import make_data_parallel
from sim.programs.stages import stage_blocks
from sim.programs.step_end import epilogue
from sim.programs.updated_parameters import gather_after_optimizer, gather_units, prologue, prologue_waits
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from tests.sim.cases import case

LAYERS, TOKENS, HIDDEN = 8, 512, 1024  # of `cases.GPT` with one sequence of 512 tokens
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


def traffic(groups: tuple[str, ...], parallelism: dict[str, Any], **training: Any) -> dict[str, float]:
    """Bytes by kind that rank 0 hands to collectives of these groups."""
    result = simulate(case(parallelism, {"gradient_clipping": False, **training})).result
    out: dict[str, float] = {}
    for row in result["communication"]:
        if row["rank"] == 0 and row["group"] in groups:
            out[row["kind"]] = out.get(row["kind"], 0.0) + row["bytes"]
    return out


def passes(parallelism: dict[str, Any], k: int = 1, **training: Any) -> float:
    """Data-parallel traffic in passes of Ψ, all elements being two bytes."""
    training = {"global_batch_size": 8 * k, "grad_dtype": "bf16", **training}
    sent = traffic(("shard", "dp_cp", "replica"), {"dp": 8, **parallelism}, **training)
    params = simulate(case({"dp": 8}, {"global_batch_size": 8})).result["memory"][0]["parameters"]
    return sum(PASSES[kind] * size for kind, size in sent.items()) / params


@pytest.mark.parametrize("sync", ["after_backward", "per_parameter", "bucketed"])
@pytest.mark.parametrize(("zero", "want"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_passes_with_one_micro_batch(zero: int, want: int, sync: str) -> None:
    """2Ψ, 2Ψ, 2Ψ, 3Ψ (Rajbhandari 2020, section 7)."""
    assert passes({"zero": zero, "dp_sync": sync}) == pytest.approx(want)


def test_per_parameter_sends_every_tensor_by_itself() -> None:
    """12 tensors a layer: four matrices with their biases, two norms of two each; in all what `params` counts."""
    plan = make_plan(case({"dp": 8, "dp_sync": "per_parameter"}, model={"bias": True}))
    blocks, phases = stage_blocks(plan, plan.parts[0], 0), frozenset((Phase.INPUT_GRAD, Phase.WEIGHT_GRAD))
    woven = weave_backward(blocks, make_data_parallel(plan), phases, last=True)
    sent = [[i.bytes for i in items if isinstance(i, Comm) and i.group == "dp_cp"] for items in woven]
    assert [len(s) for s in sent[1:-1]] == [12] * LAYERS
    assert [sum(s) for s in sent[::-1]] == [b.params * dtype_bytes("fp32") for b in blocks]


def test_zero_3_without_overlap() -> None:
    """`after_backward`: every gather and reduction holds up computing, so that their seconds all show."""
    layout = {"dp": 8, "zero": 3}
    exposed, hidden = (case({**layout, "dp_sync": s}, {"global_batch_size": 8}) for s in ("after_backward", "bucketed"))
    plan = make_plan(exposed)
    blocks, phases = stage_blocks(plan, plan.parts[0], 0), frozenset((Phase.INPUT_GRAD, Phase.WEIGHT_GRAD))
    woven = weave_backward(blocks, make_data_parallel(plan), phases, last=True)
    sent = [i for items in woven for i in items if isinstance(i, Comm)]
    assert len(sent) == 2 * len(blocks)
    assert all(i.blocking for i in sent)
    assert simulate(exposed).result["exposed_comm_s"] > 1.5 * simulate(hidden).result["exposed_comm_s"]


@pytest.mark.parametrize("bucket_bytes", [1_000, 3_000_000, 100_000_000, 10**12])
def test_gathers_go_in_buckets_of_gradients(bucket_bytes: int) -> None:
    """All parameters once, the first block's first; each block waits for every bucket that brings it something."""
    plan = make_plan(case({"dp": 8, "zero": 1, "bucket_bytes": bucket_bytes}, model={"bias": True}))
    blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
    units = gather_units(blocks, dp)
    assert sum(dense for dense, _, _ in units) == sum(b.params for b in blocks)
    for i in range(len(blocks)):
        there = sum(dense for dense, _, first in units if first <= i)
        assert there >= sum(b.params for b in blocks[: i + 1])
    full = [4 * dense >= bucket_bytes for dense, _, _ in units]
    assert all(full[1:])
    handles = [w.handle for waiting in prologue_waits(blocks, dp) for w in waiting if isinstance(w, Wait)]
    assert sorted(handles) == sorted(i.handle for i in prologue(blocks, dp) if isinstance(i, Comm))


@settings(deadline=None, max_examples=12)
@given(k=st.integers(1, 5))
def test_passes_with_accumulation(k: int) -> None:
    assert passes({"zero": 0}, k) == pytest.approx(2)
    assert passes({"zero": 1}, k) == pytest.approx(2)
    assert passes({"zero": 2}, k) == pytest.approx(k + 1)
    assert passes({"zero": 3}, k) == pytest.approx(3 * k)
    assert passes({"zero": 2, "accumulate_unsharded": True}, k) == pytest.approx(2)
    assert passes({"zero": 3, "accumulate_unsharded": True}, k) == pytest.approx(2 * k + 1)
    kept = {"zero": 3, "reshard_after_forward": False}
    assert passes(kept, k) == pytest.approx(2 * k)
    assert passes({**kept, "accumulate_unsharded": True}, k) == pytest.approx(k + 1)


def test_torchs_first_fsdp_alone_keeps_parameters_while_gradients_add_up() -> None:
    """torch/distributed/fsdp: `_should_free_in_backward` in _runtime_utils.py; `post_backward` of FSDP2 reshards."""
    kept = {"zero": 3, "reshard_after_forward": False, "accumulate_unsharded": True}
    found = {f: passes(kept, 4, framework=f, grad_reduce_dtype="bf16") for f in ("composer", "transformers")}
    assert found == pytest.approx({"composer": 2, "transformers": 5})


def test_a_pipeline_keeps_what_it_gathered_until_the_steps_end() -> None:
    """torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`: `set_reshard_after_backward(False)`."""
    layout = {"dp": 4, "pp": 2, "zero": 3, "reshard_after_forward": False}
    few, many = (traffic(("shard",), layout, global_batch_size=4 * k)["all_gather"] for k in (4, 8))
    assert few == many


@pytest.mark.parametrize(("m", "group", "rows"), [(8, 8, 1), (8, 4, 2), (10, 4, 3)])
def test_a_stage_reduces_once_for_the_micro_batches_that_it_takes_in_a_row(m: int, group: int, rows: int) -> None:
    layout = {"dp": 4, "pp": 2, "zero": 2, "schedule": "interleaved_1f1b", "micro_batch_group": group}
    each, in_a_row = (
        traffic(("shard",), {**layout, "accumulate_in_a_row": once}, global_batch_size=4 * m) for once in (False, True)
    )
    assert in_a_row["reduce_scatter"] == pytest.approx(each["reduce_scatter"] * rows / m)
    assert in_a_row["all_gather"] == each["all_gather"]


@pytest.mark.parametrize("sync", ["after_backward", "bucketed"])
def test_with_one_stage_a_rank_all_micro_batches_are_a_row(sync: str) -> None:
    layout, batch = {"dp": 4, "pp": 2, "zero": 2, "dp_sync": sync}, 4 * 6
    once = traffic(("shard",), {**layout, "accumulate_unsharded": True}, global_batch_size=batch)
    assert traffic(("shard",), {**layout, "accumulate_in_a_row": True}, global_batch_size=batch) == once


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("framework", ["eager", "megatron"])
def test_the_tied_outputs_copy_is_reduced_gathered_and_updated_as_a_matrix_of_its_own(
    zero: int, framework: str
) -> None:
    """The last stage's copy of the embedding is a parameter of its own (Megatron-LM, core/models/common/
    language_module/language_module.py: setup_embeddings_and_output_layer), with a gradient to sum with
    the first."""

    ends = []
    for tied in (True, False):
        sizes = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 4096, "tied_embeddings": tied, "bias": False}
        sim = simulate(case({"pp": 2, "dp": 2, "zero": zero}, {"framework": framework}, sizes))
        sent = {key: n for key, n in sim.built.traffic[-1].items() if key[1] != "embedding"}
        optimizer = [
            i.bytes for i in epilogue(tuple(sim.stages[-1].values()), sim.plan, False) if isinstance(i, Compute)
        ]
        ends.append((sent, optimizer, sim.result["memory"][-1]["optimizer"]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("framework", "zero", "alone"), [("megatron", 0, True), ("megatron", 1, True), ("eager", 1, False)]
)
@pytest.mark.parametrize("layout", [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b"}])
def test_megatron_has_buckets_on_the_first_ranks_first_stage_alone(
    framework: str, zero: int, alone: bool, layout: dict[str, Any]
) -> None:
    """core/distributed/distributed_data_parallel.py: no buckets where `pp_rank > 0` or `disable_bucketing`, which
    training/training.py says of model chunks after the first."""
    parallelism = {"pp": 2, "dp": 2, "zero": zero, "bucket_bytes": 10_000, **layout}
    sim = simulate(case(parallelism, {"framework": framework}))
    for rank, stages in enumerate(sim.stages):
        for stage, held in stages.items():
            kinds = ("all_reduce", "reduce_scatter")
            program = held.backward(Kind.B, True, False)
            reduced = [i for i in program if isinstance(i, Comm) and i.group in ("dp_cp", "shard") and i.kind in kinds]
            gathered = [i for i in held.prologue() if isinstance(i, Comm)]
            first = (rank, stage) == (0, 0)
            assert (len(reduced) > 1) == (first or not alone), (rank, stage)
            assert (len(gathered) > 1) == ((first or not alone) and zero == 1), (rank, stage)
            last = max(n for n, i in enumerate(program) if isinstance(i, Compute))
            late = all(n > last for n, i in enumerate(program) if i in reduced)
            assert late == (not (first or not alone) or (alone and "interleaved" in layout["schedule"])), (rank, stage)
            sent = sum(c.bytes for c in reduced) / held.dp.gradient_bytes
            assert sent == pytest.approx(sum(b.params for b in held.blocks))


@pytest.mark.parametrize(("framework", "apart"), [("eager", True), ("megatron", True), ("deepspeed", False)])
def test_experts_have_buckets_of_their_own(framework: str, apart: bool) -> None:
    """Megatron-Core's `expert_parallel_buffers`; the bundled implementation's `ExpertDataParallel`; not DeepSpeed's
    `ipg_buckets`. Each bucket but the last of its kind has at least the limit, of its own kind alone."""
    limit = 40_000
    sizes: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 256, "bias": False}
    sizes["moe"] = {"experts": 4, "top_k": 1, "ffn": 32}
    parallelism = {
        "dp": 4,
        "ep": 2,
        "zero": 1,
        "dp_sync": "bucketed",
        "bucket_bytes": limit,
        "gather_bucket_bytes": None,
    }
    sim = simulate(case(parallelism, {"framework": framework}, sizes))
    (stage,) = sim.stages[0].values()
    sent = [i for i in stage.backward(Kind.B, True, False) if isinstance(i, Comm) and i.phase is Phase.WEIGHT_GRAD]
    for group, params in (("shard", "params"), ("expert_shard", "expert_params")):
        groups = {"shard": ("shard", "dp_cp"), "expert_shard": ("expert_shard", "expert_dp")}[group]
        found = [c.bytes for c in sent if c.group in groups]
        assert sum(found) == pytest.approx(stage.dp.gradient_bytes * sum(getattr(b, params) for b in stage.blocks))
        assert (min(found[:-1]) >= limit) == apart
    if apart and stage.dp.gather_overlap:
        units = gather_units(stage.blocks, stage.dp)
        assert not any(dense and experts for dense, experts, _ in units)
        assert [i for _, _, i in units] == sorted(i for _, _, i in units)


def test_hybrid_sharding_adds_an_all_reduce_of_the_shard() -> None:
    assert passes({"zero": 3, "shard_size": 4}) == pytest.approx(3 + 2 / 4)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("zero", "of_shards"), [(2, lambda k: k + 1), (3, lambda k: 3 * k)])
def test_replicas_all_reduce_each_micro_batchs_shard_or_their_sum_once(
    zero: int, of_shards: Callable[[int], int], pp: int
) -> None:
    """2kΨ/n, or 2Ψ/n (torch's FSDP2, `set_requires_all_reduce`); what shards send is the same."""
    n, k = 4, 6
    layout = {"dp": 8, "pp": pp, "zero": zero, "shard_size": n}
    each, once = (
        traffic(("shard", "replica"), {**layout, "all_reduce_once": o}, global_batch_size=8 * k, grad_dtype="bf16")
        for o in (False, True)
    )
    params = simulate(case({"dp": 8, "pp": pp}, {"global_batch_size": 8})).result["memory"][0]["parameters"]
    assert each["all_reduce"] == pytest.approx(k * params / n, rel=1e-4)
    assert once["all_reduce"] == pytest.approx(params / n, rel=1e-4)
    for way in (each, once):
        sent = way["reduce_scatter"] + way["all_gather"]
        assert sent == pytest.approx(of_shards(k) * params, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        ({"dp": 32, "ep": 8, "shard_size": 8}, (8, 1)),  # experts whole in each of four replicas
        ({"dp": 32, "ep": 4, "shard_size": 16}, (16, 4)),
        ({"dp": 16, "tp": 2, "sp": True, "ep": 4, "shard_size": 4}, (4, 2)),  # ep also over tp
        ({"dp": 32, "ep": 8}, (32, 4)),
        ({"dp": 32, "ep": 16, "shard_size": 8}, (8, 2)),  # replicas that do not divide those of experts
    ],
)
def test_experts_have_the_replicas_of_dense_layers(layout: dict[str, Any], shards: tuple[int, int]) -> None:
    """torchtitan/distributed/parallel_dims.py: mesh [dp_replicate, efsdp, ep], efsdp = fsdp·tp / ep; megatron/core/
    parallel_state.py: `intra_partial_expert_data_parallel_size`."""
    assert Parallelism(**{"zero": 3} | layout).sharded_over == shards


def test_the_sum_goes_on_to_the_replicas_with_the_last_micro_batch() -> None:
    layout = {"dp": 16, "zero": 3, "shard_size": 8, "all_reduce_once": True}
    result = simulate(case(layout, {"global_batch_size": 16 * 3}, cluster="dgx-h100"), expand=True)
    spans = list(result.timeline.spans())
    shards = [s for s in spans if s.kind == "REDUCE_SCATTER"]
    replicas = [s for s in spans if s.stream == "replica"]
    assert len(shards) == 3 * len(replicas) == 3 * (LAYERS + 2)
    for shard, replica in zip(shards[-len(replicas) :], replicas, strict=True):
        assert replica.start_s >= shard.end_s * (1 - 1e-9)
    assert min(s.start_s for s in replicas) > shards[2 * len(replicas) - 1].end_s


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_reduce_beside_what_shards_send(zero: int) -> None:
    """Each all-reduce over slow links between nodes follows its shard at once, or the all-reduce before it; neither
    gathers nor reductions within a node wait for it."""
    slow = {"preset": "dgx-h100", "inter_node": {"nic_bandwidth_bytes_per_s": 1e9}}
    layout = {"dp": 16, "zero": zero, "shard_size": 8, "dp_sync": "per_parameter"}
    spans = list(simulate(case(layout, {"global_batch_size": 16}, cluster=slow), expand=True).timeline.spans())
    shards = [s for s in spans if s.kind == "REDUCE_SCATTER"]
    replicas = [s for s in spans if s.stream == "replica"]
    assert len(shards) == len(replicas) > LAYERS
    free_s = 0.0
    for shard, replica in zip(shards, replicas, strict=True):
        assert replica.start_s == pytest.approx(max(free_s, shard.end_s), rel=1e-9)
        free_s = replica.end_s
    assert replicas[2].start_s > shards[3].end_s  # the links between nodes are what is slow, and nothing waits for them


def test_tensor_parallel_all_reduces() -> None:
    """4 all-reduces of [tokens, hidden] a layer and micro-batch, 6 with full recompute, 5 if it ends early; and one for
    the embedding's output, one for the head's input gradient, three of a number a token for the loss (Shoeybi 2019,
    section 3)."""
    message = TOKENS * HIDDEN * 2
    ends = 2 * message + 3 * TOKENS * 4
    want = {"all_reduce": 4 * LAYERS * message + ends}
    assert traffic(("tp",), {"tp": 2}, global_batch_size=1) == pytest.approx(want)
    for stops, number in ((False, 6), (True, 5)):
        again = {"all_reduce": number * LAYERS * message + ends}
        recompute = {"mode": "full", "early_stop": stops}
        assert traffic(("tp",), {"tp": 2}, global_batch_size=1, recompute=recompute) == pytest.approx(again)


def test_sequence_parallel_gathers_and_scatters() -> None:
    """6 all-gathers and 4 reduce-scatters a layer: inputs are saved in shards and gathered for the weight gradient
    (Korthikanti 2022, section 4.2.2)."""
    message = TOKENS * HIDDEN * 2
    sent = traffic(("tp",), {"tp": 2, "sp": True}, global_batch_size=1)
    deeper = simulate(
        case({"tp": 2, "sp": True}, {"global_batch_size": 1, "gradient_clipping": False}, {"layers": 2 * LAYERS})
    ).result["communication"]
    more = {r["kind"]: r["bytes"] - sent.get(r["kind"], 0.0) for r in deeper if r["group"] == "tp"}
    assert more["all_gather"] == pytest.approx(6 * LAYERS * message)
    assert more["reduce_scatter"] == pytest.approx(4 * LAYERS * message)
    assert more.get("all_reduce", 0.0) == 0.0


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_volume(cp: int) -> None:
    """Keys and values go round the ring, cp−1 blocks of 2·[tokens/cp, kv heads·head_dim], forward; backward they go
    round again and their gradients all the way home (Liu 2023, section 3)."""
    sent = traffic(("cp",), {"cp": cp}, global_batch_size=1)["send_recv"]
    block = 2 * TOKENS / cp * HIDDEN * 2
    forward = (cp - 1) * block * LAYERS
    assert forward * 2.9 <= sent <= forward * 5.1
    wide = traffic(("cp",), {"cp": cp}, global_batch_size=1, seq_len=2 * TOKENS)["send_recv"]
    assert wide == pytest.approx(2 * sent)


def test_expert_parallel_all_to_all_volume() -> None:
    """Dispatch and combine, each forward and backward: 4·tokens·top_k·hidden a layer (Lepikhin 2020)."""
    moe = {"moe": {"experts": 8, "top_k": 2, "ffn": 512}, "mlp": "swiglu", "bias": False}
    scenario = case({"dp": 4, "ep": 4}, {"global_batch_size": 4}, moe)
    rows = simulate(scenario).result["communication"]
    sent = sum(r["bytes"] for r in rows if r["group"] == "ep" and r["kind"] == "all_to_all")
    assert sent == pytest.approx(4 * LAYERS * TOKENS * 2 * HIDDEN * 2)


@pytest.mark.parametrize(
    "parallelism",
    [
        {"dp": 8, "zero": 3},
        {"tp": 4, "sp": True},
        {"tp": 8, "tp_overlap": "full"},
        {"cp": 4},
        {"cp": 4, "cp_split": "contiguous"},
        {"pp": 4, "dp": 2, "zero": 1},
        {"tp": 2, "pp": 2, "dp": 2, "zero": 2},
        {"dp": 8, "zero": 2, "shard_size": 4},
    ],
)
def test_one_task_for_an_action_gives_the_same_times(parallelism: dict[str, Any]) -> None:
    scenario = case(parallelism, {"global_batch_size": 16})
    folded, expanded = simulate(scenario), simulate(scenario, expand=True)
    reference = simulate(scenario, expand=True, engine="simpy")
    assert folded.step_time_s == pytest.approx(expanded.step_time_s, rel=1e-12)
    assert np.array_equal(reference.times.end_s, expanded.times.end_s)
    for key in ("exposed_comm_s", "compute_s", "bubble_ratio", "peak_memory_bytes"):
        assert folded.result[key] == pytest.approx(expanded.result[key], rel=1e-9, abs=1e-12)


def test_reduce_and_broadcast_send_every_byte_twice_and_take_longer_than_the_all_reduce() -> None:
    """One rank gets the sum and gives it to all: 2S over every hop of the ring, an all-reduce 2S·(n−1)/n."""
    sent = traffic(("dp_cp",), {"dp": 8, "dp_sync": "reduce_broadcast"}, global_batch_size=8)
    whole = traffic(("dp_cp",), {"dp": 8, "dp_sync": "after_backward"}, global_batch_size=8)
    assert sent == {"reduce": whole["all_reduce"], "broadcast": whole["all_reduce"]}
    by_one, by_all = (
        simulate(case({"dp": 8, "dp_sync": s}, {"global_batch_size": 8})).result["exposed_comm_s"]
        for s in ("reduce_broadcast", "after_backward")
    )
    assert by_one > 8 / 7 * by_all


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathers_in_fp32_send_twice_the_bytes_and_are_cast(zero: int, overlap: bool) -> None:
    """The reductions stay as they are; a cast reads four bytes of a parameter and writes two."""
    layout = {"dp": 8, "zero": zero, "param_gather_overlap": overlap}
    small, large = (
        traffic(("shard",), {**layout, "param_gather_dtype": dtype}, global_batch_size=8) for dtype in (None, "fp32")
    )
    assert large["all_gather"] == pytest.approx(2 * small["all_gather"])
    assert large["reduce_scatter"] == small["reduce_scatter"]
    plan = make_plan(case({**layout, "param_gather_dtype": "fp32"}, {"global_batch_size": 8}))
    blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
    programs = [*weave_forward(blocks, dp, True), *prologue_waits(blocks, dp), gather_after_optimizer(blocks, dp)]
    casts = [i.bytes for items in programs for i in items if isinstance(i, Compute) and i.name == "unpack"]
    params = sum(b.params for b in blocks)
    assert sum(casts) == pytest.approx((4 + 2) * params)


@pytest.mark.parametrize("framework", ["megatron", "megatron_bridge"])
@pytest.mark.parametrize(
    ("optimizer", "date", "kinds"),
    [
        ("muon", "2026-05", {"all_reduce", "all_gather"}),
        ("muon", "2024-08", {"all_reduce", "all_gather"}),
        ("muon", "2026-06", {"reduce_scatter", "all_gather"}),
        ("adamw", "2026-05", {"reduce_scatter", "all_gather"}),
    ],
)
def test_megatron_core_reduced_whole_gradients_for_muon(
    framework: str, optimizer: str, date: str, kinds: set[str]
) -> None:
    """optimizer/layer_wise_optimizer.py of 0.17 ("Megatron DDP handle allreduce grad"); 0.18.0 is of June 2026."""
    training = {"framework": framework, "software_date": date, "optimizer": optimizer}
    sent = traffic(("shard", "dp_cp"), {"dp": 8, "zero": 1}, **training, global_batch_size=8)
    assert {kind for kind, size in sent.items() if size > 0} == kinds
    params = sent["all_gather"] / 2
    (gradients,) = (size for kind, size in sent.items() if kind != "all_gather")
    assert gradients == pytest.approx(params * {"megatron": 4, "megatron_bridge": 2}[framework])


@pytest.mark.parametrize(("ep", "holders"), [(1, 8), (4, 2), (8, 1)])
def test_experts_are_gathered_from_the_ranks_that_hold_the_same_ones(ep: int, holders: int) -> None:
    """ZeRO-3 over 8 ranks of which dp / ep hold an expert: forward and backward gather each rank's 1 / ep of all
    experts (bytes of the gathered output), and where one rank alone holds it nothing."""
    experts, ffn, layers = 8, 256, 4
    model = {"layers": layers, "hidden": HIDDEN, "moe": {"experts": experts, "top_k": 2, "ffn": ffn}}
    changed = case({"dp": 8, "ep": ep, "zero": 3}, {"gradient_clipping": False, "global_batch_size": 8}, model)
    dp = make_data_parallel(make_plan(changed))
    assert (dp.shard, dp.expert_shard) == (8, holders)
    rows = [row for row in simulate(changed).result["communication"] if row["rank"] == 0]
    found = sum(row["bytes"] for row in rows if (row["kind"], row["group"]) == ("all_gather", "expert_shard"))
    matrices = changed.model.layers * experts / ep * (3 if changed.model.mlp == "swiglu" else 2) * ffn * HIDDEN
    biases = changed.model.layers * experts / ep * (ffn + HIDDEN) if changed.model.bias else 0.0
    assert found == pytest.approx(2 * 2 * (matrices + biases) if holders > 1 else 0.0, rel=1e-9)


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_a_rank_sends_once_for_each_border_of_its_stages_and_micro_batch(schedule: str, stages: int) -> None:
    """A border between stages that lie on different ranks is crossed forward and back, with s·b·h numbers."""
    p, m = 4, 8
    layout = {"pp": p, "schedule": schedule, "virtual_stages": stages}
    rows = simulate(case(layout, {"global_batch_size": m})).result["communication"]
    sent = {row["rank"]: row["bytes"] / (m * TOKENS * HIDDEN * 2) for row in rows if row["kind"] == "send"}
    assert sent == {0: 2 * stages - 1, **dict.fromkeys(range(1, p - 1), 2 * stages), p - 1: 2 * stages - 1}
