"""Training on pairs of answers: a step of next tokens on as many sequences, the reference's forward, and the loss."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Item
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.inputs.training_config import PreferenceLoss
from sim.models.dims import dims
from sim.models.operators import F, forward_of
from sim.models.output.head import head_parts
from sim.models.output.preference import PAIR_KERNELS, pair_loss
from sim.programs.compile import compile_program
from sim.programs.stages import Stage
from sim.results.losses import parts_of_step
from sim.search.space_of_scenario import make_space
from sim.simulation import Simulation, simulate

MODEL: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 2816, "vocab": 32000, "mlp": "swiglu"}
MODEL |= {"norm": "rmsnorm", "bias": False, "positions": "rope"}
LOSSES: tuple[PreferenceLoss, ...] = ("kto", "dpo")
TEXTS: dict[str, Any] = {
    "model": MODEL,
    "training": {"seq_len": 1024, "global_batch_size": 16, "micro_batch_size": 4, "framework": "transformers"},
    "cluster": "dgx-h100",
}


def step(changes: dict[str, Any] | None = None, **preference: str) -> Simulation:
    data = merge(TEXTS, changes or {})
    return simulate(parse_scenario(merge(data, {"training": {"preference": preference}}) if preference else data))


def stage_of(sim: Simulation) -> Stage:
    (stage,) = sim.stages[0].values()
    return stage


def forward_s(sim: Simulation) -> float:
    """Seconds of a micro-batch's forward by itself, behind the first of a step."""
    return compile_program(stage_of(sim).forward(False, False), sim.pricing.on(0)).makespan_s


def loss_s(sim: Simulation) -> float:
    """Seconds of the loss over pairs by itself."""
    part = pair_loss(dims(sim.scenario), "dpo")
    forward = compile_program(part.forward, sim.pricing.on(0)).makespan_s
    return forward + compile_program(part.backward, sim.pricing.on(0)).makespan_s


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 3}, {"dp": 2}])
def test_kto_reads_other_answers_with_both_models(layout: dict[str, int]) -> None:
    """Of four forwards three are without gradients: the reference's two, and the trained model's over other answers."""
    changes = {"parallelism": layout}
    kto, dpo, alone = step(changes, loss="kto"), step(changes, loss="dpo"), step(changes, loss="dpo", reference="none")
    once = forward_s(dpo) - forward_s(alone)
    losses = [compile_program(pair_loss(dims(kto.scenario), x).forward, kto.pricing.on(0)).makespan_s for x in LOSSES]
    assert forward_s(kto) == pytest.approx(forward_s(alone) + 3 * once + losses[0] - losses[1], rel=0.01)
    known = step(changes, loss="kto", reference="precomputed")
    assert forward_s(kto) - forward_s(known) == pytest.approx(2 * once, rel=0.02)
    states = [[row.parameters for row in sim.outcome.memory] for sim in (kto, dpo, known, alone)]
    assert states[0] == states[1] > states[2] == states[3]
    assert kto.outcome.utilization.hfu > dpo.outcome.utilization.mfu
    assert kto.outcome.utilization.hfu / kto.outcome.utilization.mfu > 1.9  # 3 forwards of 3: forward and backward


def test_kto_learns_from_single_answers_and_reads_others_with_its_adapters() -> None:
    single = {"training": {"micro_batch_size": 1}}
    whole, adapted = step(single, loss="kto"), step(merge(single, {"training": {"lora": {"rank": 16}}}), loss="kto")
    assert whole.outcome.step_time_s > 0
    (reading, reference, learned) = stage_of(adapted).read_only()
    assert reference == learned
    assert len(list(reading[1].forward)) > len(list(reference[1].forward))


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 3}, {"tp": 2}, {"dp": 2}])
@pytest.mark.parametrize("loss", ["unfused", "fused", "tiled"])
def test_a_step_is_that_of_texts_and_the_reference_s_forward(layout: dict[str, int], loss: str) -> None:
    """On sequences that keep the device busy; messages of ZeRO-3 and the host's work may hide a little otherwise."""
    if loss == "tiled" and "tp" in layout:
        pytest.skip("tiles are of the whole matrix")
    changes = {"training": {"cross_entropy": loss}, "parallelism": layout}
    texts, pairs, alone = step(changes), step(changes, loss="dpo"), step(changes, loss="dpo", reference="none")
    m = texts.scenario.micro_batches
    most_s = m * loss_s(alone)  # where its launches are not ahead of the device
    assert texts.step_time_s + 0.3 * most_s < alone.step_time_s < texts.step_time_s + most_s
    assert pairs.step_time_s == pytest.approx(alone.step_time_s + m * forward_s(texts), rel=0.01)
    before = step(changes, loss="dpo", reference="precomputed")
    assert before.step_time_s == alone.step_time_s


def test_the_other_kernels_are_those_of_texts() -> None:
    """The very program, with the loss over pairs behind the head's forward and before its backward."""
    texts, pairs = stage_of(step()), stage_of(step(loss="dpo", reference="none"))
    assert [b.forward for b in pairs.blocks[:-1]] == [b.forward for b in texts.blocks[:-1]]
    assert [b.backward for b in pairs.blocks[:-1]] == [b.backward for b in texts.blocks[:-1]]
    head, plain = pairs.blocks[-1], texts.blocks[-1]
    assert head.forward[: len(plain.forward)] == plain.forward
    assert head.backward[1:] == plain.backward
    assert head.saved == plain.saved


@pytest.mark.parametrize(("layout", "shards"), [({}, 1), ({"dp": 2, "zero": 2}, 1), ({"dp": 4, "zero": 3}, 4)])
def test_the_reference_s_weights(layout: dict[str, int], shards: int) -> None:
    """Two bytes a parameter, sharded with ZeRO-3 alone; no gradient and no optimizer state."""
    changes = {"parallelism": layout}
    texts, pairs = step(changes).outcome.memory[0], step(changes, loss="dpo").outcome.memory[0]
    n = sum(b.params for b in stage_of(step(changes)).blocks)
    assert pairs.parameters - texts.parameters == pytest.approx(2 * n / shards)
    assert (pairs.gradients, pairs.optimizer) == (texts.gradients, texts.optimizer)
    assert pairs.activations == texts.activations


def test_fp32_weights_have_a_reference_of_fp32_weights() -> None:
    """And of 16-bit copies while its forward runs under autocast."""
    changes = {"training": {"param_dtype": "fp32"}}
    texts, pairs = step(changes), step(changes, loss="dpo")
    n = sum(b.params for b in stage_of(texts).blocks)
    assert pairs.outcome.memory[0].parameters - texts.outcome.memory[0].parameters == 4 * n
    table = MODEL["vocab"] * MODEL["hidden"]  # looked up in fp32
    peaks = [b.forward_peak_bytes for b in stage_of(pairs).reference]
    assert peaks[-1] - peaks[0] > 2 * (n - table) - max(peaks[0], 0.0) - 1


@pytest.mark.parametrize("zero", [0, 3])
def test_adapters_off_hold_nothing_and_gather_again(zero: int) -> None:
    changes: dict[str, Any] = {"training": {"lora": {"rank": 8}}, "parallelism": {"dp": 4, "zero": zero}}
    texts, pairs = step(changes), step(changes, loss="dpo")
    assert pairs.scenario.for_training.reference == "adapters_off"
    assert pairs.outcome.memory[0].parameters == texts.outcome.memory[0].parameters
    assert pairs.step_time_s > texts.step_time_s
    gathered = [sum(isinstance(i, Comm) for i in stage_of(sim).forward(False, False)) for sim in (texts, pairs)]
    assert gathered == ([0, 0] if zero == 0 else [gathered[0], 2 * gathered[0]])
    flops = sum(i.flops for i in items(stage_of(pairs), True) if i.kind == "gemm")
    whole = sum(i.flops for i in items(stage_of(step({"parallelism": {"dp": 4}})), False) if i.kind == "gemm")
    assert flops == whole


def items(stage: Stage, reference: bool) -> list[Compute]:
    blocks = stage.reference if reference else stage.blocks
    program: list[Item] = [i for b in blocks for i in b.forward]
    return [i for i in program if isinstance(i, Compute)]


def test_a_reward_model_has_one_output() -> None:
    texts, pairs = step(), step(loss="reward")
    n, less = (sum(b.params for b in stage_of(s).blocks) for s in (texts, pairs))
    hidden, vocab = MODEL["hidden"], MODEL["vocab"]
    assert n - less == hidden * (vocab - 1)
    assert pairs.step_time_s < texts.step_time_s
    per_token = [s.outcome.utilization.model_flops_per_s_per_gpu * s.step_time_s / (16 * 1024) for s in (texts, pairs)]
    assert per_token[0] - per_token[1] == pytest.approx(6 * hidden * (vocab - 1))
    assert not stage_of(pairs).reference
    tied = step({"model": {"tied_embeddings": True}}, loss="reward")
    assert sum(b.params for b in stage_of(tied).blocks) == less


def test_orpo_also_learns_the_chosen_answers_next_tokens() -> None:
    """The head of DPO without a reference, and a cross-entropy of half the tokens."""
    orpo, dpo = step(loss="orpo"), step(loss="dpo", reference="none")
    forward = [forward_of(head_parts(s.scenario, dims(s.scenario))) for s in (orpo, dpo)]
    more, own = (
        [i.shape[0] for i in program if isinstance(i, Compute) and i.name == "cross_entropy"] for program in forward
    )
    assert own == [4 * 1024 * 32000]
    assert more == [*own, own[0] // 2]
    own_loop: dict[str, Any] = {"training": {"framework": "eager"}}  # the Trainer waits for metrics of DPO alone
    assert step(own_loop, loss="orpo").step_time_s > step(own_loop, loss="dpo", reference="none").step_time_s


def test_small_kernels_are_counted() -> None:
    d = dims(step(loss="dpo").scenario)
    small = [i for i in pair_loss(d, "dpo").forward if isinstance(i, Compute)]
    assert small[0].kernels == PAIR_KERNELS["dpo"][0]
    assert all(i.phase is F for i in small)
    assert len(small) == 2  # and metrics, with Transformers' Trainer
    alone = dims(step({"training": {"framework": "eager"}}, loss="dpo").scenario)
    assert len([i for i in pair_loss(alone, "dpo").forward if isinstance(i, Compute)]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"micro_batch_size": 1}}, "training.micro_batch_size: found 1; with training.preference a pair"),
        ({"parallelism": {"pp": 2}}, "parallelism.pp: found 2; a reference (training.preference.reference model)"),
        ({"parallelism": {"cp": 2}}, "parallelism.cp: found 2; a loss over pairs needs whole sequences"),
        ({"training": {"cross_entropy": "chunked"}}, "is not simulated with training.cross_entropy chunked"),
        ({"training": {"cuda_graphs": "step"}}, "is not simulated with training.cuda_graphs step beside a reference"),
        ({"training": {"precision": "fp8"}}, "is not simulated with training.precision fp8 beside a reference"),
        ({"training": {"packing": {"lengths": [8]}}}, "is not simulated with training.packing"),
        ({"model": {"mtp_layers": 1}, "training": {"framework": "megatron"}}, "is not simulated with model.mtp_layers"),
        ({"distillation": {"teacher": MODEL}}, "is not simulated with distillation"),
        ({"training": {"preference": {"reference": "adapters_off"}}}, "found 'adapters_off'; needs training.lora"),
        ({"training": {"preference": {"loss": "reward", "reference": "model"}}}, "a loss reward has no reference"),
        ({"training": {"preference": {"loss": "bco"}}}, "found 'bco'; must be 'dpo', 'kto', 'orpo' or 'reward'"),
        ({"training": {"preference": {"loss": "kto", "reference": "none"}}}, "a loss kto compares with a reference"),
        (
            {"training": {"preference": {"loss": "kto", "reference": "precomputed"}}, "parallelism": {"pp": 2}},
            "parallelism.pp: found 2; loss kto, which also reads answers that it does not learn from, needs pp 1",
        ),
        (
            {"parallelism": {"dp": 2, "zero": 3, "reshard_after_forward": False}},
            "is not simulated with parallelism.reshard_after_forward false beside a reference",
        ),
        (
            {"training": {"preference": {"loss": "orpo"}, "cross_entropy": "tiled"}},
            "is not simulated with training.cross_entropy tiled: of loss orpo",
        ),
        ({"parallelism": {"tp": 2}, "training": {"cross_entropy": "tiled"}}, "its tiles need the whole matrix"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    data = merge(merge(TEXTS, {"training": {"preference": {"loss": "dpo"}}}), changes)
    with pytest.raises(InputError) as refused:
        parse_scenario(data)
    assert message in str(refused.value)


def test_pipeline_stages_without_a_reference() -> None:
    changes = {"parallelism": {"pp": 2}}
    pairs, texts = step(changes, loss="dpo", reference="precomputed"), step(changes)
    assert texts.step_time_s < pairs.step_time_s < texts.step_time_s + 4 * loss_s(step(loss="dpo"))


def test_tiles_save_their_input_and_multiply_twice() -> None:
    """2·rows·hidden·vocab for each product: one forward, three backward; frozen, two. No logits are kept."""
    (_, output, _) = head_parts(s := step({"training": {"cross_entropy": "tiled"}}).scenario, dims(s))
    n = 2.0 * 4 * 1024 * 1024 * 32000
    passes = (output.forward, output.backward)
    flops = [sum(i.flops for i in p if isinstance(i, Compute) and i.kind == "gemm") for p in passes]
    assert flops == [n, 3 * n]
    assert sum(x.bytes for x in output.saved) == 2 * 4 * 1024 * 1024
    assert output.forward_bytes == 2 * 4096 * 32768
    assert output.backward_bytes == 2 * 4096 * 32768 + 4 * (4 * 1024 * 1024 + 32000 * 1024) + 2 * 4 * 1024 * 1024


def test_a_search_is_refused() -> None:
    source = Source("a.yaml", merge(TEXTS, {"training": {"preference": {"loss": "dpo"}}}))
    with pytest.raises(InputError, match="preference: a search covers training on next tokens"):
        make_space(source, 8, "a")


def test_a_reference_is_work_of_the_hardware_and_no_slow_kernel() -> None:
    """Without recomputation a reference adds a forward to the three that a model's own FLOPs are: HFU is 4/3 of MFU."""
    dpo, alone = step(loss="dpo"), step(loss="dpo", reference="none")
    use, own = dpo.outcome.utilization, alone.outcome.utilization
    assert use.hfu / use.mfu == pytest.approx(4 / 3, rel=2e-3)
    assert own.hfu == own.mfu
    named = {p.label: p.seconds for p in parts_of_step(dpo.outcome, dpo.timeline)}
    assert named["Frozen reference"] == pytest.approx((dpo.step_time_s - alone.step_time_s), rel=0.2)
    assert "Frozen reference" not in {p.label for p in parts_of_step(alone.outcome, alone.timeline)}
