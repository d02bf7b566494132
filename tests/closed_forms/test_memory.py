"""Bytes on each rank against the ZeRO table, Korthikanti's stair and the dtypes' arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.actions import Kind
from sim.core.program import BLOCK_END, Comm, Compute, Program, Wait
from sim.models.parameters import count_parameters
from sim.prices.operator_prices import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.programs.host_copies import on_device
from sim.ranks.plan import make_plan
from sim.results.memory import AtMost, levels, over_steps
from sim.results.memory_changes import backward_peaks, changes_of
from sim.results.states import states
from sim.schedules import FORMS
from sim.simulation import prepare, simulate
from tests.sim.cases import case, scenario_with
from tests.sim.measured_runs import scenario as small_pipeline


def memory(parallelism: dict[str, Any] | None = None, rank: int = 0, **training: Any) -> dict[str, float]:
    return simulate(case(parallelism, training)).result["memory"][rank]  # type: ignore[no-any-return]


PSI = count_parameters(case().model).total


@pytest.mark.parametrize(
    ("precision", "grad_dtype", "param_dtype", "bytes_each"),
    [
        ("fp32", "fp32", None, 16),
        ("bf16", "bf16", None, 16),
        ("fp16", "fp16", None, 16),
        ("bf16", "fp32", None, 18),
        ("bf16", "fp32", "fp32", 16),
        ("fp8", "fp32", None, 18),
    ],
)
def test_bytes_per_parameter(precision: str, grad_dtype: str, param_dtype: str | None, bytes_each: int) -> None:
    """Exactly 16 in fp32 and with 16-bit gradients, 18 with fp32 ones (Rajbhandari 2020, section 3.1)."""
    m = memory(precision=precision, grad_dtype=grad_dtype, param_dtype=param_dtype)
    assert m["parameters"] + m["gradients"] + m["optimizer"] == bytes_each * PSI


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        ({"grad_dtype": "bf16", "optimizer_dtype": "bf16", "master_weights": False}, 2 + 2 + 4),
        ({"grad_dtype": "bf16", "optimizer_dtype": "bf16"}, 2 + 2 + 4 + 4),
        ({"grad_dtype": "bf16", "master_weights": False}, 2 + 2 + 8),
        ({"precision": "fp32", "optimizer_dtype": "bf16", "master_weights": False}, 4 + 4 + 4),
        ({"optimizer": "sgd", "optimizer_dtype": "bf16"}, 2 + 4 + 4),
        ({"optimizer": "sgd", "master_weights": False}, 2 + 4),
    ],
)
def test_bytes_per_parameter_of_other_optimizer_states(keys: dict[str, Any], bytes_each: int) -> None:
    m = memory(**keys)
    assert m["parameters"] + m["gradients"] + m["optimizer"] == bytes_each * PSI


@pytest.mark.parametrize(
    ("cluster", "style", "mib"),
    [
        ("dgx-h100", "eager", 64),
        ("dgx-b200", "megatron", 96),
        ("dgx-a100", "megatron", 20.25),
        ("cpu-host", "eager", 0),
    ],
)
def test_cublas_workspaces(cluster: str, style: str, mib: float) -> None:
    """torch's for forward and backward, Transformer Engine's under Megatron: 32 MiB each, 8.125 and 4 before Hopper."""
    scenario = case(None, {"framework": style, "global_batch_size": 1}, cluster=cluster)
    stages = list(simulate(scenario).stages[0].values())
    empty = max(b.workspace_bytes for b in stages[0].blocks)
    assert states(make_plan(scenario), stages).gathered - empty == mib * 2**20


@pytest.mark.parametrize("tied", [False, True])
def test_copies_that_autocast_makes_stay_for_the_backward(tied: bool) -> None:
    """2 bytes of every matmul's weight beside the fp32 parameters; looked-up tables are not cast."""

    def left(param_dtype: str, kind: Kind) -> float:
        """What an action leaves in buffers, or frees of what was left there."""
        training = {"param_dtype": param_dtype, "global_batch_size": 1}
        (stage,) = simulate(case(None, training, {"tied_embeddings": tied})).stages[0].values()
        return sum(buffers for _, _, buffers, _ in changes_of(stage, kind, True, False))

    copies = 2 * (PSI - 1024 * 1024)
    assert [left("fp32", kind) for kind in (Kind.F, Kind.B)] == [copies, -copies]
    assert [left("bf16", kind) for kind in (Kind.F, Kind.B)] == [0.0, 0.0]


@pytest.mark.parametrize(("zero", "reshard", "layers"), [(0, True, 8), (2, True, 8), (3, True, 2), (3, False, 8)])
def test_quantized_weights_are_kept_for_the_step(zero: int, reshard: bool, layers: int) -> None:
    """Those of every layer; with ZeRO-3 of the layers that are gathered."""
    layout = {"dp": 2, "zero": zero, "reshard_after_forward": reshard}

    def held(precision: str) -> tuple[float, float]:
        training = {"precision": precision, "framework": "megatron", "global_batch_size": 2}
        scenario = case(layout, training)
        stages = list(simulate(scenario).stages[0].values())
        return states(make_plan(scenario), stages).gathered, stages[0].blocks[1].quantized_bytes

    (plain, none), (fp8, one) = held("bf16"), held("fp8")
    assert none == 0 < one
    assert fp8 - plain == layers * one


@settings(deadline=None, max_examples=20)
@given(zero=st.integers(0, 3), n=st.sampled_from([1, 2, 4, 8]))
def test_zero_shards(zero: int, n: int) -> None:
    """2Ψ + 2Ψ + 12Ψ, the states of each stage and those before it divided by n (Rajbhandari 2020, figure 1)."""
    m = memory({"dp": n, "zero": zero}, grad_dtype="bf16", global_batch_size=8)
    assert m["parameters"] == pytest.approx(2 * PSI / (n if zero == 3 else 1))
    assert m["gradients"] == pytest.approx(2 * PSI / (n if zero >= 2 else 1))
    assert m["optimizer"] == pytest.approx(12 * PSI / (n if zero >= 1 else 1))


def test_unsharded_accumulation_keeps_whole_gradients() -> None:
    once = {"dp": 8, "zero": 3, "accumulate_unsharded": True}
    m = memory(once, grad_dtype="bf16", global_batch_size=16, micro_batch_size=1)
    assert (m["parameters"], m["gradients"]) == pytest.approx((2 * PSI / 8, 2 * PSI))
    # The last micro-batch reduces as it goes, and one alone is the last; not so in a pipeline.
    sizes: dict[str, Any] = {"grad_dtype": "bf16", "global_batch_size": 8, "micro_batch_size": 1}
    assert memory(once, **sizes) == memory({"dp": 8, "zero": 3}, **sizes)
    staged, each = (memory({**way, "pp": 2}, **sizes)["gradients"] for way in (once, {"dp": 8, "zero": 3}))
    assert staged == pytest.approx(8 * each)


def test_a_row_of_micro_batches_has_whole_gradients_of_its_stage_beside_the_shards() -> None:
    layout = {"dp": 2, "pp": 2, "zero": 2, "schedule": "interleaved_1f1b", "virtual_stages": 4}
    each, row, once = (
        memory({**layout, **way}, grad_dtype="bf16", global_batch_size=16)
        for way in ({}, {"accumulate_in_a_row": True}, {"accumulate_unsharded": True})
    )
    layer = 2 * (12 * 1024**2 + 13 * 1024)  # each stage is one layer, the first has the embedding besides
    assert row["gradients"] - each["gradients"] == pytest.approx(layer + 2 * 1024**2, rel=1e-3)
    assert once["gradients"] == pytest.approx(2 * each["gradients"])
    assert each["peak"] < row["peak"] < once["peak"]


@pytest.mark.parametrize(("zero", "each"), [(1, True), (2, True), (3, True), (3, False)])
def test_gradients_on_their_way_are_held_until_the_next_blocks(zero: int, each: bool) -> None:
    """FSDP2: 4 bytes a parameter beside the next block's backward, 4 + 2 while a block's own are copied there."""
    layout = {"dp": 2, "zero": zero, "accumulate_unsharded": not each}
    stage = simulate(case(layout, {"global_batch_size": 4, "seq_len": 256, "micro_batch_size": 1})).stages[0][0]
    order = stage.blocks[::-1]
    alone = [b.backward_peak_bytes for b in order]
    held = [sum(s.bytes for s in b.saved) for b in order]
    if zero == 1 or not each:
        assert backward_peaks(stage, Kind.B) == alone
        return
    before = [0, *(4 * b.params for b in order)]
    copied = [6 * b.params - size for b, size in zip(order, held, strict=True)]
    assert backward_peaks(stage, Kind.B) == [max(a + b, c) for a, b, c in zip(alone, before, copied, strict=False)]
    assert copied[1] > alone[1] + before[1]  # few tokens: a layer's end is its worst moment
    assert backward_peaks(stage, Kind.I) == [*alone[:-1], 0.0]  # an embedding has a weight half alone


def test_hybrid_sharding_divides_by_the_shard_group() -> None:
    m = memory({"dp": 8, "zero": 3, "shard_size": 2}, grad_dtype="bf16")
    assert m["parameters"] == pytest.approx(2 * PSI / 2)


@pytest.mark.parametrize(
    ("zero_grad", "reduced", "once", "bytes_each"),
    [
        (None, "fp32", False, 2),
        (None, "fp32", True, 4),  # the sum in the place of the gradients
        (None, "bf16", True, 2),
        ("set_to_none", "fp32", True, 4),
        ("keep", "fp32", True, 2 + 4),
        ("keep", "bf16", True, 2 + 2),
    ],
)
def test_a_shards_sum_that_waits_for_its_replicas_is_kept_as_it_is_reduced(
    zero_grad: str | None, reduced: str, once: bool, bytes_each: int
) -> None:
    """torch's FSDP2, `foreach_reduce`: `partial_reduce_output` is there before `sharded_param.grad` is."""
    layout = {"dp": 8, "zero": 3, "shard_size": 2, "all_reduce_once": once}
    dtypes = {"grad_dtype": "bf16", "grad_reduce_dtype": reduced, "zero_grad": zero_grad}
    assert memory(layout, global_batch_size=16, **dtypes)["gradients"] == pytest.approx(bytes_each * PSI / 2)
    alone = memory(layout, global_batch_size=8, **dtypes)["gradients"]  # one micro-batch
    assert alone == pytest.approx(2 * PSI / 2)


def test_the_stair_of_1f1b() -> None:
    """Rank r keeps the activations of p − r micro-batches, GPipe all of them (Narayanan 2021, figure 4)."""
    p, m = 4, 8
    rows = simulate(case({"pp": p, "schedule": "1f1b"}, {"global_batch_size": m})).result["memory"]
    one = rows[1]["activations"] / 3
    assert rows[2]["activations"] == pytest.approx(2 * one)
    assert rows[0]["activations"] == pytest.approx(4 * one, rel=0.05)  # and the embedding's
    flat = simulate(case({"pp": p, "schedule": "gpipe"}, {"global_batch_size": m})).result["memory"]
    assert [flat[r]["activations"] for r in (1, 2)] == pytest.approx([m * one, m * one])
    double = simulate(case({"pp": p, "schedule": "1f1b"}, {"global_batch_size": 2 * m})).result["memory"]
    assert double[1]["activations"] == pytest.approx(rows[1]["activations"])


def test_tied_embeddings_are_held_at_both_ends() -> None:
    one = memory(None, grad_dtype="bf16")
    table = 1024 * 1024
    tied = case({"pp": 2}, {"grad_dtype": "bf16"}, {"tied_embeddings": True})
    rows = simulate(tied).result["memory"]
    assert sum(r["parameters"] for r in rows) == one["parameters"]  # two copies, as untied
    whole = simulate(case(None, {"grad_dtype": "bf16"}, {"tied_embeddings": True})).result["memory"][0]
    assert whole["parameters"] == one["parameters"] - 2 * table


def test_first_step_has_no_optimizer_states_until_its_end() -> None:
    sim = simulate(case(None, {"global_batch_size": 2}))
    curve = over_steps(sim.memory[0], sim.step_time_s, 0.9 * sim.step_time_s, 4)
    before = curve.time_s < 0.9 * sim.step_time_s
    assert curve.optimizer[before].max() == 0
    assert set(curve.optimizer[~before]) == {12.0 * PSI}
    assert curve.time_s[-1] > 3 * sim.step_time_s
    assert list(curve.time_s) == sorted(curve.time_s)
    assert (curve.parameters > 0).all()


def test_recompute_and_offload_keep_less() -> None:
    kept = {k: memory(None, recompute=k)["activations"] for k in ("none", "selective", "full")}
    unfused = {k: memory(None, recompute=k, attention="unfused")["activations"] for k in ("none", "selective", "full")}
    assert kept["full"] < 0.2 * kept["none"]
    assert unfused["full"] < unfused["selective"] < unfused["none"]
    assert memory(None, activation_offload=True)["activations"] < 0.5 * kept["none"]


def replayed(program: Program, names: list[str], saved: list[float], kind: Kind) -> list[float]:
    """The most bytes of saved activations on the device while each block computes, by copies and waits."""
    order = list(range(len(names))) if kind is Kind.F else list(range(len(names)))[::-1]
    there: set[int] = set()
    most, turn = [0.0] * len(names), 0
    for item in program:
        if isinstance(item, Comm) and item.kind == "reload":
            there.add(names.index(item.name.removesuffix(" activations")))
        elif isinstance(item, Wait) and item.handle.startswith("o"):
            there.discard(int(item.handle[1:]))
        elif isinstance(item, Compute):
            there |= {order[turn]} if kind is Kind.F else set()
            most[order[turn]] = max(most[order[turn]], sum(saved[i] for i in there))
        elif item == BLOCK_END:
            there -= set() if kind is Kind.F else {order[turn]}
            turn += 1
    assert turn == len(names)
    assert not there
    return most


def test_offloaded_blocks_on_the_device_are_those_of_the_programs_copies() -> None:
    """Double buffering as the programs write it down: a block's own activations and those of the block before."""
    stage = simulate(case(None, {"activation_offload": True})).stages[0][0]
    names, saved = [b.name for b in stage.blocks], [sum(s.bytes for s in b.saved) for b in stage.blocks]
    assert len(set(saved)) > 2  # embedding, layers and head save different amounts
    assert replayed(stage.forward(False, False), names, saved, Kind.F) == on_device(saved, stage.offload)
    assert replayed(stage.backward(Kind.B, False, False), names, saved, Kind.B) == on_device(saved, stage.offload)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("parallelism", [{}, {"pp": 4}, {"pp": 4, "schedule": "zb_h1"}, {"dp": 8, "zero": 3}])
def test_offloading_never_takes_more(parallelism: dict[str, Any], recompute: str) -> None:
    """With the largest saved blocks counted beside whichever block runs, it would where little is saved."""
    training = {"global_batch_size": 16, "recompute": recompute}
    plain = simulate(case(parallelism, training, {"vocab": 4096})).result["memory"]
    moved = simulate(case(parallelism, {**training, "activation_offload": True}, {"vocab": 4096})).result["memory"]
    assert all(a["peak"] <= b["peak"] for a, b in zip(moved, plain, strict=True))
    assert sum(a["peak"] for a in moved) < sum(b["peak"] for b in plain)


def test_what_a_delayed_weight_half_needs_stays_on_the_device() -> None:
    """No program fetches it again, so a schedule that delays it keeps it for every micro-batch that waits."""
    whole, split = (
        memory({"pp": 4, "schedule": schedule}, rank=2, activation_offload=True, global_batch_size=16)["activations"]
        for schedule in ("1f1b", "zb_h1")
    )
    assert split > 1.5 * whole


def test_recompute_adds_a_third_of_compute() -> None:
    """Full recomputation runs each forward again: 30-40 % of compute; selective a few per cent."""
    big = {"hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 1024, "layers": 4}
    base, full, selective = (
        simulate(
            case(None, {"global_batch_size": 4, "seq_len": 2048, "attention": "unfused", "recompute": r}, big)
        ).result["compute_s"]
        for r in ("none", {"mode": "full", "early_stop": False}, "selective")
    )
    assert 1.25 < full / base < 1.40
    assert 1.005 < selective / base < 1.15


@pytest.mark.parametrize("parallelism", [{}, {"pp": 4}, {"pp": 4, "schedule": "zb_h1"}, {"dp": 8, "zero": 3}])
def test_block_by_block_has_the_same_peak(parallelism: dict[str, Any]) -> None:
    scenario = case(parallelism, {"global_batch_size": 16, "recompute": "full"})
    coarse, fine = simulate(scenario).memory, simulate(scenario, expand=True).memory
    for a, b in zip(coarse, fine, strict=True):
        assert b.total.max() == pytest.approx(a.total.max(), rel=1e-9)
        assert b.activations[-1] == pytest.approx(0.0, abs=1.0)
        assert len(b.time_s) > len(a.time_s)
        assert (np.diff(b.time_s) > 0).all()


OVERLAPPED = {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe", "ep_overlap": True}
EXPERTS = {"moe": {"experts": 4, "top_k": 2, "ffn": 1024}}


@pytest.mark.parametrize(
    ("parallelism", "model"),
    [
        ({"pp": 4, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, {}),
        ({"pp": 4, "schedule": "zb_h1"}, {}),
        (OVERLAPPED, EXPERTS),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_classes_together_as_one_by_one_and_without_times(
    parallelism: dict[str, Any], model: dict[str, Any], offload: bool
) -> None:
    """No class's bytes change by a bit for the others beside it; peaks are those of the curves, whenever steps run."""
    scenario = case(parallelism, {"global_batch_size": 16, "activation_offload": offload}, model)
    for expand in (False, True):
        step = simulate(scenario, expand=expand)
        for i, (curve, row) in enumerate(zip(step.memory, step.levels.at_most(), strict=True)):
            alone = levels(
                [step.stages[i]],
                [step.built.actions[i]],
                step.times.start_s,
                step.times.end_s,
                [step.states[i]],
                expand or "ep_overlap" in parallelism,
            )
            names = ("time_s", *AtMost._fields[:-1])
            assert all(np.array_equal(getattr(curve, k), getattr(alone.curve(0, 0), k)) for k in names)
            assert row == AtMost(*(getattr(curve, k).max() for k in AtMost._fields[:-1]), curve.total.max())
    peak = prepare(scenario, Costs(load_profile("roofline"), scenario.cluster.gpu)).peak_bytes
    assert peak == simulate(scenario).result["peak_memory_bytes"]


@pytest.mark.parametrize("schedule", [{}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}])
def test_a_pair_s_peak_is_that_of_its_blocks(schedule: dict[str, Any]) -> None:
    """A forward and a backward at once need the most at different moments, however finely they are simulated."""
    scenario = case(OVERLAPPED | schedule, {"global_batch_size": 16}, EXPERTS)
    whole, fine = (simulate(scenario, expand=expand).most_memory for expand in (False, True))
    assert [x.peak for x in fine] == pytest.approx([x.peak for x in whole], rel=1e-9)


def test_states_appear_with_a_rank_s_own_optimizer() -> None:
    """The last stage of 1F1B ends first; the first rank's states come after its own last backward."""
    simulation = simulate(small_pipeline(), Profile("roofline", ""))
    last = {c.rank: 0.0 for c in simulation.timeline.classes}
    for span in simulation.timeline.spans():
        if span.kind == "B":
            last[span.rank] = max(last[span.rank], span.end_s)
    assert last[0] != last[1]
    for curve in simulation.memory_over(2):
        appears_s = float(curve.time_s[np.argmax(curve.optimizer > 0)])
        assert last[curve.rank] <= appears_s < simulation.step_time_s


@pytest.mark.parametrize("schedule", FORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_is_the_same_block_by_block(schedule: str, tied: bool) -> None:
    """Also where a block has no input half, or gradients come when the last block has ended."""
    scenario = scenario_with(
        {"seq_len": 512, "global_batch_size": 16, "grad_dtype": "bf16"},
        {"pp": 4, "dp": 2, "schedule": schedule, "p2p_overlap": None},
        model={"preset": "llama3-8b", "layers": 8, "tied_embeddings": tied},
    )
    whole, fine = (simulate(scenario, expand=expand).most_memory for expand in (False, True))
    assert [x.peak for x in fine] == pytest.approx([x.peak for x in whole], rel=1e-9)


@pytest.mark.parametrize("parallelism", [{"pp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}])
def test_a_result_and_its_page_say_the_same_of_each_category(parallelism: dict[str, Any]) -> None:
    """A page is made from a step whose operators are simulated one by one, a JSON from whole actions."""
    scenario = case(parallelism)
    plain, page = (simulate(scenario, expand=expand).outcome.memory for expand in (False, True))
    for one, other in zip(plain, page, strict=True):
        for category in AtMost._fields:
            assert getattr(one, category) == pytest.approx(getattr(other, category))


def test_a_rank_without_the_head_reserves_each_category_in_whole_segments() -> None:
    """torch's allocator takes 2 MiB segments; Megatron keeps its gradients, so nothing else is idle."""
    segment = 2 * 2**20
    result = simulate(case({"pp": 4}, {"framework": "megatron", "global_batch_size": 8})).result
    row = next(row for row in result["memory"] if row["rank"] == 1)
    held = [row[name] for name in ("parameters", "gradients", "optimizer", "activations", "buffers")]
    assert sum(held) == pytest.approx(row["peak"], rel=1e-12)
    assert row["reserved"] == pytest.approx(sum(segment * math.ceil(size / segment) for size in held), rel=1e-12)
    assert row["reserved"] > row["peak"]
