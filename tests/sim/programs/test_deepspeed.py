"""`framework: deepspeed`: its messages are those that DeepSpeed itself sent (tools/record_deepspeed.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Item, Phase
from sim.inputs.scenario import Scenario, parse_scenario
from sim.programs.around_messages import after_backward
from sim.programs.data_parallel import make_data_parallel
from sim.programs.gathered_units import gathered_elements
from sim.programs.stages import stage_blocks
from sim.programs.updated_parameters import gather_after_optimizer
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.plan import make_plan
from sim.results.states import States, states
from sim.simulation import simulate
from tests.sim.cases import llama_like, scenario_with

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "deepspeed_0.19.8.json").read_text(encoding="utf-8"))
MODEL = llama_like(layers=4, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=512, tied_embeddings=False)
LAYER = 43_136  # elements
LARGE = 1_000  # elements; smaller tensors, the norms, travel one by one or stay on every rank
Message = tuple[str, int]


def scenario(zero: int, **parallelism: Any) -> Scenario:
    return scenario_with(
        {"seq_len": RECORDED["tokens"], "global_batch_size": 8, "framework": "deepspeed"},
        {"dp": RECORDED["ranks"], "zero": zero, **parallelism},
        model=MODEL,
    )


def simulated(zero: int, live_elements: int = 0, **parallelism: Any) -> dict[str, list[Message]]:
    """The large messages of each part of a step of two micro-batches, kind and elements."""
    plan = make_plan(scenario(zero, **parallelism))
    blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
    dp = replace(dp, engine=dp.engine._replace(live_elements=live_elements))
    phases = frozenset((Phase.INPUT_GRAD, Phase.WEIGHT_GRAD))

    def sent(items: Any) -> list[Message]:
        found = [i for i in items if isinstance(i, Comm) and i.group in ("shard", "dp_cp")]
        return [(i.kind, round(i.bytes / 2)) for i in found if i.bytes > 2 * LARGE]

    def flat(parts: list[list[Item]]) -> list[Item]:
        return [i for items in parts for i in items]

    out = {}
    for k in (0, 1):
        out[f"forward {k}"] = sent(flat(weave_forward(blocks, dp, k == 0)))
        out[f"backward {k}"] = sent(flat(weave_backward(blocks, dp, phases, last=k == 1)))
    out["backward 1"] += sent(after_backward(blocks, dp))
    out["update 1"] = sent(gather_after_optimizer(blocks, dp))
    return {part: messages for part, messages in out.items() if messages}


def recorded(case: str) -> dict[str, list[Message]]:
    out: dict[str, list[Message]] = {}
    for part, kind, size in RECORDED["cases"][case]["sent"]:
        if size > LARGE:
            out.setdefault(part, []).append((kind, size))
    return out


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_whole_gradients_are_all_reduced_and_parameters_gathered_after_the_update(zero: int) -> None:
    """With ZeRO-2 in every micro-batch: (2k + 1)Ψ where reduce-scatters would send (k + 1)Ψ."""
    assert simulated(zero) == recorded(f"zero {zero}")


@pytest.mark.parametrize(("zero", "kinds"), [(0, {"all_reduce"}), (1, {"reduce"}), (2, {"reduce"}), (3, None)])
@pytest.mark.parametrize("framework", ["deepspeed", "gpt_neox"])
def test_releases_of_2023_reduced_gradients_to_the_rank_that_updates_them(
    zero: int, kinds: set[str] | None, framework: str
) -> None:
    """runtime/zero/stage_1_and_2.py of 0.12.3, `average_tensor`; 0.12.4 has `use_multi_rank_bucket_allreduce`.

    Without ZeRO the engine all-reduced (runtime/engine.py: `allreduce_bucket`), and ZeRO-3 scattered, as today.
    """
    now, then = (
        {c.kind for c in make_data_parallel(make_plan(at)).reduce("", 1000.0, 0.0, "") if c.bytes > 1}
        for at in (
            scenario_with(
                {"seq_len": 64, "global_batch_size": 8, "framework": framework, "software_date": date},
                {"dp": 4, "zero": zero},
                model=MODEL,
            )
            for date in ("2023-12", "2023-11")
        )
    )
    assert now == ({"all_reduce"} if zero < 3 else {"reduce_scatter"})
    assert then == (kinds or now)


def test_overlapped_reductions_are_sent_before_a_bucket_gets_too_large() -> None:
    bucket = RECORDED["cases"]["zero 2, overlap"]["zero_optimization"]["reduce_bucket_size"]
    ours, theirs = simulated(2, dp_sync="bucketed", bucket_bytes=2 * bucket), recorded("zero 2, overlap")
    assert list(ours) == list(theirs)
    for part, messages in theirs.items():
        assert [kind for kind, _ in ours[part]] == [kind for kind, _ in messages]
        # A layer's norms are added at its end here, and in their order there.
        assert [size for _, size in ours[part]] == pytest.approx([size for _, size in messages], abs=2 * 64)


def test_zero_3_gathers_tensor_by_tensor_and_scatters_in_buckets() -> None:
    config = RECORDED["cases"]["zero 3"]["zero_optimization"]
    ours = simulated(
        3,
        bucket_bytes=2 * config["reduce_bucket_size"],
        gather_bucket_bytes=2 * config["stage3_prefetch_bucket_size"],
        reshard_after_forward=True,
        live_elements=config["stage3_max_live_parameters"],
    )
    theirs = recorded("zero 3")

    def of(messages: list[Message], kind: str) -> list[int]:
        return sorted(size for name, size in messages if name == kind)

    for k in (0, 1):
        forward, backward = theirs[f"forward {k}"], theirs[f"backward {k}"]
        # Its last message is the first one of the backward.
        gathered = of(forward[:-1], "all_gather")
        assert of(ours[f"forward {k}"], "all_gather") == pytest.approx(gathered, abs=2 * 64)
        scattered = of(backward, "reduce_scatter")
        assert of(ours[f"backward {k}"], "reduce_scatter") == pytest.approx(scattered, abs=2 * 64)
        # The last layers are still there: whole ones here, tensor by tensor there.
        again = sum(of([forward[-1], *backward], "all_gather"))
        ours_again = sum(of(ours[f"backward {k}"], "all_gather"))
        assert 0 <= ours_again - again < LAYER


def test_gradients_are_joined_before_they_are_sent() -> None:
    """Six accesses of 16 bits for each element, with ZeRO-2 in each micro-batch."""

    def joined(zero: int) -> float:
        plan = make_plan(scenario(zero))
        blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
        phases = frozenset((Phase.INPUT_GRAD, Phase.WEIGHT_GRAD))
        items = [i for part in weave_backward(blocks, dp, phases, last=True) for i in part]
        items += after_backward(blocks, dp)
        return sum(i.bytes for i in items if isinstance(i, Compute) and i.name == "join gradients")

    params = sum(b.params for b in stage_blocks(make_plan(scenario(1)), make_plan(scenario(1)).parts[0], 0))
    assert joined(1) == joined(2) == joined(3) == 6 * 2 * params


def test_the_backward_gathers_what_the_forward_did_not_leave() -> None:
    """`stage3_max_live_parameters` is 1e9, so a small model is gathered once in each micro-batch."""
    small = simulated(3, live_elements=1_000_000_000)
    assert sum(size for kind, size in small["forward 1"] if kind == "all_gather") > 5 * LAYER
    assert {kind for kind, _ in small["backward 1"]} == {"reduce_scatter"}


def test_memory_has_a_bucket_and_an_fp32_copy_of_the_shard() -> None:
    """Against Transformers' modules under torch's FSDP, with the same gradients in 16 bits."""

    def held(framework: str) -> States:
        data = {
            "model": "llama3-8b",
            "training": {"seq_len": 512, "global_batch_size": 8, "framework": framework, "grad_dtype": "bf16"},
            "parallelism": {"dp": 8, "zero": 2},
            "cluster": "dgx-h100",
        }
        step = simulate(parse_scenario(data))
        return states(step.plan, list(step.stages[0].values()))

    ours, plain = held("deepspeed"), held("transformers")
    assert (ours.parameters, ours.optimizer) == (plain.parameters, plain.optimizer)
    assert ours.gathered - plain.gathered == 2e9  # a bucket that stays, and the tensor that it is joined to
    assert ours.at_end == pytest.approx(plain.parameters / 2 / 8 * 4)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 4.0])
def test_zero_3_updates_so_much_of_its_shard_at_a_time(share: float) -> None:
    """Gradients joined in 16 bits and their fp32 copy (sub_group_size), beside which nothing is gathered any more."""
    data = {
        "model": {"preset": "llama3-70b", "layers": 40},
        "training": {"seq_len": 512, "global_batch_size": 16, "framework": "deepspeed"},
        "parallelism": {"dp": 16, "zero": 3},
        "cluster": "dgx-h100",
    }
    step = simulate(parse_scenario(data))
    stage = step.stages[0][0]
    shard = sum(b.params for b in stage.blocks) / 16
    dp = replace(stage.dp, engine=stage.dp.engine._replace(updated_elements=int(share * shard)))
    gathered = 2 * gathered_elements(stage.blocks, dp)
    held = states(step.plan, [replace(stage, dp=dp)])
    assert held.at_end == pytest.approx(max(0.0, 6 * shard * min(1.0, share) - gathered))


@pytest.mark.parametrize(("training", "each"), [({}, (2, 2)), ({"grad_reduce_dtype": "fp32"}, (4, 2))])
def test_default_buckets_are_elements_in_any_dtype(training: dict[str, Any], each: tuple[int, int]) -> None:
    """500 million gradients and 50 million parameters (deepspeed/runtime/zero/config.py)."""
    sizes = {"seq_len": 128, "global_batch_size": 8, "framework": "deepspeed", **training}
    p = scenario_with(sizes, {"dp": 4, "zero": 3}, model=MODEL).parallelism
    assert (p.bucket_bytes, p.gather_bucket_bytes) == (each[0] * 500_000_000, each[1] * 50_000_000)


@pytest.mark.parametrize(("precision", "moved"), [("fp16", 1 + 2 + 4), ("bf16", 1 + 2 + 4 + 4)])
def test_zero_plus_plus_gathers_integers_and_makes_parameters_of_them(precision: str, moved: int) -> None:
    """CUDAQuantizer: a byte a number, an fp32 scale for 8,000; AllGatherCoalescedHandle: fp16, torch.cat, `.to`."""

    def parts(dtype: str | None) -> tuple[list[float], float, int]:
        training = {"seq_len": 512, "global_batch_size": 8, "framework": "deepspeed", "precision": precision}
        layout = {"dp": 4, "zero": 3, "param_gather_dtype": dtype, "gather_bucket_bytes": 20_000}
        plan = make_plan(scenario_with(training, layout, model=MODEL))
        blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
        items = [i for part in weave_forward(blocks, dp, True) for i in part]
        made = [i for i in items if isinstance(i, Compute) and i.name == "unpack"]
        sent = [i.bytes for i in items if isinstance(i, Comm) and i.kind == "all_gather"]
        return sent, sum(i.bytes for i in made), sum(i.kernels for i in made)

    (plain, _, kernels), (sent, bytes_moved, more) = parts(None), parts("int8")
    each = 1 + 4 / 8000
    assert sent == pytest.approx([size * each / 2 for size in plain])
    assert bytes_moved == pytest.approx(sum(plain) / 2 * (moved + 4 / 8000))
    assert more == kernels * (2 if precision == "fp16" else 3)


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        ({}, {"zero": 2}),
        ({"framework": "compiled"}, {}),
        ({"precision": "fp32"}, {}),
        ({"lora": {"rank": 8, "weights": "nf4"}}, {}),
    ],
)
def test_who_gathers_integers(training: dict[str, Any], layout: dict[str, Any]) -> None:
    keys = {"seq_len": 512, "global_batch_size": 8, "framework": "deepspeed", **training}
    with pytest.raises(InputError, match=r"param_gather_dtype: found 'int8'; needs zero 3, a framework of DeepSpeed"):
        scenario_with(keys, {"dp": 4, "zero": 3, "param_gather_dtype": "int8", **layout}, model=MODEL)
