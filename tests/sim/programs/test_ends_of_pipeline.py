"""The two ends of Megatron-Core's pipelines: weight gradients put off to the flush, parameters gathered beside the
optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Role, Wait
from sim.emit import emit
from sim.inputs.scenario import Scenario
from sim.programs.compile import compile_program
from sim.programs.deferral import drained
from sim.programs.stages import Stage
from sim.programs.step_end import epilogue
from sim.ranks.plan import make_plan
from sim.simulation import Simulation, simulate
from tests.sim.cases import llama_like, scenario_with

M, SEQ, HIDDEN, VOCAB = 8, 4096, 2048, 65536
MODEL = llama_like(8, HIDDEN, 16, VOCAB)
INTERLEAVED = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
EARLY = {**INTERLEAVED, "dp": 8, "zero": 1, "overlap_param_gather_with_optimizer_step": True}


def scenario(parallelism: dict[str, Any], cluster: Any = "dgx-h100", **training: Any) -> Scenario:
    batch = M * parallelism.get("dp", 1)
    own = {"seq_len": SEQ, "global_batch_size": batch, "framework": "megatron", "cross_entropy": "native", **training}
    return scenario_with(own, parallelism, MODEL, cluster)


def put_off(limit: int | None, **more: Any) -> Simulation:
    return simulate(scenario({"pp": 4, "wgrad_deferral_limit": limit, **more}))


def stages_of(used: Scenario) -> list[dict[int, Stage]]:
    return simulate(used).stages


def last_stage(used: Scenario) -> Stage:
    return list(stages_of(used)[-1].values())[-1]


def product_s(found: Simulation) -> float:
    """Return the seconds of the output matrix's weight gradient, for one micro-batch."""
    rows = found.result["time_by_operator"][-1]["operators"]
    return sum(row["seconds"] for row in rows if row["operator"] == "output_wgrad") / M


@pytest.mark.parametrize("limit", [1, 2])
def test_a_slow_last_stage_is_faster_by_each_product_that_fits_into_the_flush(limit: int) -> None:
    """The last stage is the slowest; the flush behind it has room for (p − 1) backwards."""
    now, before = put_off(limit), put_off(None)
    assert before.step_time_s - now.step_time_s == pytest.approx(limit * product_s(before), rel=2e-4)


@pytest.mark.parametrize("limit", [1, 5, M])
def test_each_product_is_computed_once(limit: int) -> None:
    assert product_s(put_off(limit)) == pytest.approx(product_s(put_off(None)))


def test_zero_puts_all_off() -> None:
    assert put_off(0).step_time_s == put_off(M).step_time_s == put_off(100).step_time_s


def test_each_one_keeps_the_layers_input_and_the_logits_gradient() -> None:
    """2 bytes a number, [tokens, hidden] and [tokens, vocab], from a backward's end on. The last backward sees those of
    all before it."""
    peaks = [put_off(limit).result["memory"][-1]["peak"] for limit in (M - 2, M - 1)]
    assert peaks[1] - peaks[0] == pytest.approx(2 * SEQ * (HIDDEN + VOCAB), rel=1e-6)


def test_with_sequence_parallelism_the_input_is_kept_in_pieces_and_gathered_late() -> None:
    layout = {"pp": 2, "tp": 2, "sp": True, "tp_overlap": "wgrad"}
    stage = last_stage(scenario({**layout, "wgrad_deferral_limit": 3}))
    assert stage.deferral is not None
    assert stage.deferral.bytes == SEQ * HIDDEN // 2 * 2 + SEQ * VOCAB // 2 * 2
    program = drained(stage.deferral)
    kinds = ["gather" if isinstance(i, Comm) else "wait" if isinstance(i, Wait) else "product" for i in program]
    assert kinds == ["gather", *["gather", "product", "wait"] * 2, "product"]
    assert [i.blocking for i in program if isinstance(i, Comm)] == [True, False, False]
    for limit in (None, 3):
        found = simulate(scenario({**layout, "wgrad_deferral_limit": limit})).result["communication"]
        gathers = [c["bytes"] for c in found if c["group"] == "tp" and c["kind"] == "all_gather"]
        assert gathers == [c for c in gathers if c]
        assert len(gathers) == 2


def test_the_first_micro_batches_alone_put_it_off() -> None:
    stage = last_stage(scenario({"pp": 2, "wgrad_deferral_limit": 3}))
    for defers, expected in ((True, 0), (False, 1)):
        program = stage.backward(Kind.B, False, False, defers)
        own = [i for i in program if isinstance(i, Compute) and i.role is Role.WEIGHT_GRADIENT and VOCAB in i.shape]
        assert len(own) == expected


@pytest.mark.parametrize("layout", [{"pp": 4}, {**INTERLEAVED, "dp": 2, "zero": 1}])
def test_both_engines_agree(layout: dict[str, Any]) -> None:
    used = scenario({**layout, "wgrad_deferral_limit": 3})
    assert simulate(used, engine="simpy").step_time_s == simulate(used).step_time_s


def test_both_engines_agree_on_early_gathers() -> None:
    used = scenario(EARLY)
    assert simulate(used, engine="simpy").step_time_s == simulate(used).step_time_s


@pytest.mark.parametrize(
    ("layout", "training", "needs"),
    [
        ({}, {}, "pp above 1 with schedule 1f1b or interleaved_1f1b"),
        ({"pp": 2, "schedule": "zb_h1"}, {}, "pp above 1 with schedule 1f1b or interleaved_1f1b"),
        ({"pp": 2}, {"gradient_accumulation_fusion": False}, "framework megatron, "),
        ({"pp": 2}, {"framework": "compiled", "cross_entropy": "unfused"}, "framework megatron, "),
        ({"pp": 2}, {"lora": {"rank": 4}}, "training without lora"),
    ],
)
def test_what_megatron_core_refuses_to_put_off(layout: dict[str, Any], training: dict[str, Any], needs: str) -> None:
    with pytest.raises(InputError, match=f"parallelism.wgrad_deferral_limit: found 2; needs {needs}"):
        scenario({**layout, "wgrad_deferral_limit": 2}, **training)


@pytest.mark.parametrize(
    ("changed", "needs"),
    [
        ({"zero": 0}, "zero 1"),
        ({"param_gather_overlap": False}, "param_gather_overlap true"),
        ({"schedule": "1f1b", "virtual_stages": 1}, "pp above 1 with schedule interleaved_1f1b"),
    ],
)
def test_what_megatron_lm_refuses_to_gather_early(changed: dict[str, Any], needs: str) -> None:
    with pytest.raises(InputError, match=f"overlap_param_gather_with_optimizer_step: found true; needs {needs}"):
        scenario({**EARLY, **changed})


def test_the_refusal_names_frameworks_that_gather_early() -> None:
    """Of the frameworks of Megatron-Core, NeMo's optimizer updates both stages at once."""
    with pytest.raises(InputError, match=r"step: found true; needs framework megatron or megatron_bridge$"):
        scenario(EARLY, framework="nemo")


def test_a_first_stage_is_gathered_behind_its_own_update() -> None:
    """One message of all its parameters, in 16 bits, between two updates whose elements are those of one."""
    plan = make_plan(used := scenario(EARLY))
    stages = tuple(stages_of(used)[0].values())
    program = epilogue(stages, plan, False)
    updates = [i for i, item in enumerate(program) if isinstance(item, Compute) and item.kind == "optimizer"]
    (gather,) = [i for i, item in enumerate(program) if isinstance(item, Comm) and item.kind == "all_gather"]
    (wait,) = [i for i, item in enumerate(program) if isinstance(item, Wait) and item.handle == program[gather].handle]
    assert len(updates) == 2
    assert updates[0] < gather < updates[1] < wait
    assert program[gather].bytes == 2 * sum(b.params for b in stages[0].blocks)
    assert [len(stage.prologue()) for stage in stages] == [0, 1]


def test_early_gathers_send_the_same_bytes() -> None:
    off = {**EARLY, "overlap_param_gather_with_optimizer_step": False}
    found = [
        {(c["kind"], c["group"]): c["bytes"] for c in simulate(scenario(x)).result["communication"] if c["rank"] == 0}
        for x in (EARLY, off)
    ]
    assert found[0].keys() == found[1].keys()
    assert all(found[0][key] == pytest.approx(found[1][key]) for key in found[0])


def test_the_step_is_shorter_by_what_the_other_stages_update_hides() -> None:
    """Without it the first rank waits for the first stage's gather as the step begins. Buckets are so large that both
    sides have one message to a stage."""
    one_message = {**EARLY, "bucket_bytes": 10**12}
    early, late = (
        simulate(scenario({**one_message, "overlap_param_gather_with_optimizer_step": on})) for on in (True, False)
    )
    gather_s = next(max(p.ends_s) for p in late.built.programs[0] if {t.kind for t in p.tasks} == {"all_gather"})
    ends_s = [
        max(max(p.ends_s) for p in found.built.programs[0] if p.makespan_s and "adamw" in p.parts)
        for found in (early, late)
    ]
    gained = late.step_time_s - early.step_time_s
    assert gained == pytest.approx(gather_s - (ends_s[0] - ends_s[1]), rel=1e-4)
    assert 0 < gained < gather_s


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ({**EARLY, "rank_order": "tp-cp-dp-pp"}, {"--overlap-param-gather-with-optimizer-step"}),
        ({"pp": 2, "wgrad_deferral_limit": 0}, {"--defer-embedding-wgrad-compute", "--wgrad-deferral-limit 0"}),
        ({"pp": 2}, set()),
    ],
)
def test_flags_are_written_for_megatron_lm(layout: dict[str, Any], flags: set[str]) -> None:
    words = ("--defer", "--wgrad", "--overlap-param-gather-with")
    written = {line.strip(" \\") for line in emit(scenario(layout), "megatron").splitlines()}
    assert {line for line in written if line.startswith(words)} == flags


def test_torchtitan_has_neither() -> None:
    with pytest.raises(InputError, match="wgrad_deferral_limit: found 2; torchtitan computes weight gradients in each"):
        emit(scenario({"pp": 2, "wgrad_deferral_limit": 2}), "torchtitan")


def gathers_of(sim: Simulation) -> list[Comm]:
    """Return what each rank behind the first gathers in the step's first forward."""
    first_forwards = [next(iter(held.values())).forward(True, False) for held in sim.stages[1:]]
    return [i for program in first_forwards for i in program if isinstance(i, Comm) and i.kind == "all_gather"]


def test_a_stage_behind_the_first_gathers_its_parameters_when_its_first_input_has_arrived() -> None:
    """core/distributed/distributed_data_parallel.py, `_make_forward_pre_hook`. Each rank of the warm-up waits for the
    gather of its stage, so the step is longer by all these gathers. Before Megatron-Core 0.9 they started with the
    step, beside the forwards of the ranks before."""
    layout = {"pp": 4, "dp": 8, "zero": 1}
    now, before = (simulate(scenario(layout, software_date=date)) for date in ("2024-10", "2024-09"))
    assert [[bool(s.prologue()) for s in held.values()] for held in now.stages] == [[True], [False], [False], [False]]
    assert now.built.traffic == before.built.traffic
    gathers = gathers_of(now)
    later = [s for held in now.stages[1:] for s in held.values()]
    assert [c.bytes for c in gathers] == [2 * sum(b.params for b in s.blocks) for s in later]
    waited = sum(now.pricing.comm(c, 8 * r).seconds for r, c in enumerate(gathers, 1))
    assert now.step_time_s - before.step_time_s == pytest.approx(waited, rel=1e-6)


def test_interleaved_stages_are_gathered_as_the_step_begins() -> None:
    """training/arguments.py: `align_param_gather` is true, but false without virtual stages."""
    sim = simulate(scenario({**INTERLEAVED, "dp": 8, "zero": 1}))
    assert not gathers_of(sim)
    assert all(s.prologue() for held in sim.stages for s in held.values())


FSDP = {"pp": 4, "dp": 8, "zero": 3}


@pytest.mark.parametrize(
    ("framework", "layout", "waits"),
    [
        ("eager", FSDP, ("F",)),
        ("eager", {**FSDP, "fsdp_version": 1}, ("F",)),
        ("eager", {**FSDP, "schedule": "interleaved_1f1b", "virtual_stages": 2}, ()),
        ("megatron", FSDP, ("F", "B")),
        ("megatron", {**FSDP, "schedule": "interleaved_1f1b", "virtual_stages": 2}, ("F", "B")),
    ],
)
def test_gathers_wait_for_an_action_s_input(framework: str, layout: dict[str, Any], waits: tuple[str, ...]) -> None:
    """torch's `_root_pre_forward` has the streams of gathers wait for the stream that computes, which has waited for
    the message; its schedules with several stages a rank gather by actions of their own; Megatron's FSDP always waits.
    """
    sim = simulate(scenario(layout, framework=framework, cross_entropy="unfused"))
    stage = next(iter(sim.stages[1].values()))
    programs = {"F": stage.forward(True, True), "B": stage.backward(Kind.B, False, True)}
    for name, program in programs.items():
        gathers = [i for i in program if isinstance(i, Comm) and i.kind == "all_gather" and i.group == "shard"]
        assert gathers
        assert {c.behind_input for c in gathers} == {name in waits}


def test_the_first_gather_of_a_stage_of_fsdp_delays_its_first_forward() -> None:
    """Between the ends of two first forwards lie the message and the whole program, which begins with a gather."""
    sim = simulate(scenario({**FSDP, "reshard_after_forward": False}, framework="eager", cross_entropy="unfused"))
    ends = [sim.times.end_s[actions.last[0]] for actions in sim.built.actions]
    for rank in (1, 2, 3):
        program = next(iter(sim.stages[rank].values())).forward(True, True)
        message = sim.pricing.send(8 * (rank - 1), 8 * rank, 2 * SEQ * HIDDEN)
        own_s = compile_program(program, sim.pricing.on(8 * rank)).makespan_s
        assert ends[rank] - ends[rank - 1] == pytest.approx(message.seconds + own_s, rel=1e-6)


@pytest.mark.parametrize(
    ("framework", "pp", "behind"), [("compiled", 4, True), ("compiled", 1, False), ("eager", 4, False)]
)
def test_torchs_pipelines_reduce_a_stages_gradients_behind_its_last_backward(
    framework: str, pp: int, behind: bool
) -> None:
    """torch/distributed/pipelining/stage.py: `perform_reduce_grad`. The bundled implementation reduces layer by layer,
    and so does FSDP2 without a pipeline."""
    layout = {"pp": pp, "dp": 8, "zero": 3, "accumulate_unsharded": True}
    sim = simulate(scenario(layout, framework=framework, cross_entropy="unfused"))
    stage = next(iter(sim.stages[-1].values()))
    program = [i for i in stage.backward(Kind.B, True, False) if not isinstance(i, Wait)]
    reduced = [n for n, i in enumerate(program) if isinstance(i, Comm) and i.kind == "reduce_scatter"]
    matmuls = [n for n, i in enumerate(program) if isinstance(i, Compute) and i.kind == "gemm"]
    assert sum(program[n].bytes for n in reduced) == stage.dp.gradient_bytes * sum(b.params for b in stage.blocks)
    assert (reduced[0] > matmuls[-1]) == behind
    before = stage.backward(Kind.B, False, False)
    assert not any(isinstance(i, Comm) and i.kind == "reduce_scatter" for i in before)
