"""A step of reinforcement learning: its parts are those of the other workloads, and its closed forms hold."""

from __future__ import annotations

from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.core.units import n_bytes
from sim.inputs.overrides import merge
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.inputs.serving_keys import Sampling
from sim.models.parameters import count_parameters
from sim.ranks.plan import make_plan
from sim.rl.answers import draw_answers, requests_of
from sim.rl.batches import make_batch
from sim.rl.forward import policy_forward
from sim.rl.parts import engine_scenario, update_scenario
from sim.rl.simulation import RlSimulation, simulate_rl
from sim.rl.transfer import holders_of_a_copy
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.validation.predict import predict
from sim.validation.records import Measurement
from sim.views.rl_page import replicas_drawn, rl_page
from sim.views.rl_words import print_rl
from sim.views.terminal import Terminal

SCENARIOS = Path(__file__).parents[3] / "scenarios"
SMALL: dict[str, Any] = {
    "model": "llama3.2-1b",
    "cluster": "dgx-h100",
    "training": {"seq_len": 1024, "global_batch_size": 32},
    "parallelism": {"dp": 4, "zero": 1},
    "rl": {
        "prompts_per_step": 16,
        "generations_per_prompt": 4,
        "prompt_len": 64,
        "output_len": {"mean": 200, "sigma": 0.7},
    },
}
APART = {"rl": {"colocated": False, "generation": {"replicas": 4}}}


@cache
def ran(*overrides: str) -> RlSimulation:
    """The small scenario with YAML-like overrides, `APART` among them."""
    data = SMALL
    for text in overrides:
        data = merge(data, CHANGES[text])
    return simulate_rl(parse_scenario(data, "small"))


CHANGES: dict[str, dict[str, Any]] = {
    "apart": APART,
    "off": {"rl": {"steps_off": 1}},
    "equal": {"rl": {"output_len": 200}},
    "longer": {"rl": {"output_len": {"mean": 500, "sigma": 1.0}}},
    "slow trainer": {"parallelism": {"dp": 1}, "rl": {"generation": {"replicas": 4}}},
    "no copies": {"rl": {"sleep_level": 0, "offload_training": False, "reference": "gpu"}},
    "plain": {"rl": {"reference": "none"}},
    "of engine": {"rl": {"log_probs": "engine"}},
    "epochs": {"rl": {"epochs": 3}},
    "critic": {"rl": {"critic": "gpu"}},
    "critic on host": {"rl": {"critic": "host"}},
    "tp": {"parallelism": {"dp": 2, "tp": 2, "sp": True}},
}


def seconds(sim: RlSimulation) -> dict[str, float]:
    return {p.name: p.seconds for p in sim.phases}


def test_a_synchronous_step_is_the_sum_of_its_parts_simulated_alone() -> None:
    sim = ran()
    rl, scenario = sim.rl, sim.scenario
    answers = draw_answers(rl, 1024)
    batch = make_batch(scenario, scenario.rl, answers)
    served = simulate_serving(engine_scenario(scenario, rl, answers), requests=requests_of(answers, rl)).end_s
    update = simulate(update_scenario(scenario, batch))
    parts = seconds(sim)
    assert parts["generation"] == served
    assert parts["training"] == 2 * update.step_time_s
    forward = policy_forward(update, 2 * batch.micro_batches).seconds
    assert parts["policy log-probabilities"] == parts["reference log-probabilities"] == forward
    copies = [s for name, s in parts.items() if name.startswith(("engine", "training states", "reference swapped"))]
    assert len(copies) == 5
    whole = served + 2 * update.step_time_s + 2 * forward + sum(copies) + sim.transfer.seconds
    assert sim.step_time_s == pytest.approx(whole, rel=1e-12)
    assert sim.outcome.critical_path == pytest.approx(parts)


def test_log_probabilities_of_the_engine_spare_the_trainer_a_forward() -> None:
    sim, usual = ran("of engine"), ran()
    assert "policy log-probabilities" not in seconds(sim)
    assert usual.step_time_s - sim.step_time_s == pytest.approx(usual.forward.seconds)
    assert "reference log-probabilities" in seconds(sim)


@pytest.mark.parametrize("others", [(), ("critic",)])
def test_epochs_repeat_the_updates_and_no_other_part(others: tuple[str, ...]) -> None:
    sim, usual = ran(*others, "epochs"), ran(*others)
    repeated = ("training", "critic training")
    assert {name for name, s in seconds(sim).items() if s != seconds(usual)[name]} <= {*repeated}
    assert all(seconds(sim)[name] == pytest.approx(3 * s) for name, s in seconds(usual).items() if name in repeated)
    assert sim.outcome.training.updates == 3 * usual.outcome.training.updates
    assert sim.outcome.tokens == usual.outcome.tokens


def test_a_critic_takes_a_forward_and_updates_of_the_policys_size_without_logits() -> None:
    sim, alone = ran("critic"), ran()
    parts = seconds(sim)
    assert sim.critic is not None
    assert parts["values"] == sim.critic.forward.seconds < sim.forward.seconds
    assert parts["critic training"] == 2 * sim.critic.update.step_time_s < parts["training"]
    added = parts["values"] + parts["critic training"] + parts["generation"] - seconds(alone)["generation"]
    assert sim.step_time_s - alone.step_time_s == pytest.approx(added, rel=1e-9)
    model = sim.scenario.model
    params = count_parameters(model).total + model.hidden  # its output, of one number, is no embedding
    assert sim.critic.states.parameters == pytest.approx(2 * params, rel=0.01)


def test_a_critic_on_the_host_comes_twice_and_leaves_the_gpu_to_the_engine() -> None:
    """Of ZeRO-1 over four ranks 2 + 12/4 bytes a parameter: its parameters both ways, then all states both ways."""
    sim, kept = ran("critic on host"), ran("critic")
    assert sim.critic is not None
    states = 2 * (sim.critic.states.parameters * (1 + 2.5))
    bandwidth = sim.scenario.cluster.gpu.host_bandwidth_bytes_per_s
    assert seconds(sim)["critic swapped in and out"] == pytest.approx(states / bandwidth, rel=0.02)
    assert "critic swapped in and out" not in seconds(kept)
    peaks = [one.outcome.pools[0].peak_by_turn for one in (sim, kept, ran())]
    lasting = kept.critic.states.lasting if kept.critic is not None else 0.0
    assert peaks[1]["training"] - peaks[0]["training"] == pytest.approx(lasting)
    assert peaks[0]["training"] == peaks[2]["training"]
    assert peaks[1]["weights"] - peaks[0]["weights"] == pytest.approx(lasting)
    assert peaks[0]["critic training"] == peaks[1]["critic training"] > 0


@pytest.mark.parametrize(("engine", "of_free"), [("vllm-v1", False), ("sglang-0.5", True)])
def test_a_resident_trainer_is_no_part_of_the_engines_share(engine: str, of_free: bool) -> None:
    """vLLM's share is of the whole memory, SGLang's of what is free when it starts."""
    blocks, states = [], 0.0
    for more in ({"offload_training": False}, {"offload_training": True}):
        kept = {"reference": "none", "generation": {"engine": engine, "kv_cache": {"memory_fraction": 0.4}}}
        sim = simulate_rl(parse_scenario(merge(SMALL, {"rl": {**kept, **more}}), "small"))
        blocks.append(sim.served.capacity.blocks)
        states = sim.states.lasting
    block_bytes = max(sim.served.capacity.token_bytes) * sim.served.scenario.for_serving.kv_cache.block_tokens
    fewer = 0.4 * states / block_bytes if of_free else 0.0
    assert blocks[1] - blocks[0] == pytest.approx(fewer, abs=1.01)


def test_copies_take_their_bytes_over_pcie() -> None:
    """Weights of 16 bits; of ZeRO-1 over four ranks 2 + 12/4 bytes a parameter, three of two for the reference."""
    sim = ran()
    weights = 2 * count_parameters(sim.scenario.model).total
    bandwidth = sim.scenario.cluster.gpu.host_bandwidth_bytes_per_s
    parts = seconds(sim)
    assert parts["engine sleeps"] == parts["engine wakes"] == pytest.approx(weights / bandwidth, rel=0.02)
    assert parts["training states to host"] == pytest.approx(weights * 2.5 / bandwidth, rel=0.02)
    assert parts["reference swapped in and out"] == pytest.approx(weights * 3 / bandwidth, rel=0.02)


def test_pools_of_equal_size_differ_from_turns_by_the_transfer_alone() -> None:
    """With nothing copied to the host and room for every cache, where the engine runs changes no other time."""
    turns, pools = ran("no copies"), ran("no copies", "apart")
    assert pools.step_time_s - pools.transfer.seconds == pytest.approx(
        turns.step_time_s - turns.transfer.seconds, rel=1e-12
    )
    assert [p.gpus for p in pools.outcome.pools] == [4, 4]
    busy = [p.busy_s for p in pools.outcome.pools]
    whole = turns.outcome.pools[0].busy_s - turns.transfer.seconds
    assert sum(busy) - 2 * pools.transfer.seconds == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("change", [(), ("longer",), ("slow trainer",), ("plain", "equal"), ("tp",)], ids=str)
def test_one_step_off_is_the_longer_pool_and_never_slower(change: tuple[str, ...]) -> None:
    sync, off = ran("apart", *change), ran("apart", "off", *change)
    assert off.step_time_s < sync.step_time_s
    of = {pool: sum(p.seconds for p in off.phases if p.pool == pool) for pool in ("generation", "training", "both")}
    assert off.step_time_s == pytest.approx(max(of["generation"], of["training"]) + of["both"], rel=1e-12)
    assert sync.step_time_s == pytest.approx(sum(of.values()), rel=1e-12)
    assert sync.step_time_s <= 2 * off.step_time_s
    assert all(0 <= p.idle_share < 1 for p in off.outcome.pools)


def test_answers_of_one_length_have_no_tail() -> None:
    """All prompts of a replica fit into one iteration, and all end with the same token."""
    equal, unlike = ran("equal").outcome.generation, ran().outcome.generation
    assert equal.tail_s == 0 < unlike.tail_s
    assert equal.busy_share == pytest.approx(1, rel=1e-9)
    assert unlike.busy_share < 1


def test_lengths_have_the_stated_mean_and_fit_the_sequence() -> None:
    rl = ran("longer").rl.model_copy(update={"prompts_per_step": 5000})
    answers = draw_answers(rl, 100_000)
    assert answers.output_tokens.max() <= 1024  # cut at seq_len, which stood as `max`
    free = rl.model_copy(update={"output_len": rl.output_len.model_copy(update={"max": 100_000})})
    assert draw_answers(free, 200_000).output_tokens.mean() == pytest.approx(500, rel=0.03)
    assert draw_answers(rl, 300).tokens.max() == 300
    again = draw_answers(rl, 100_000)
    assert np.array_equal(again.output_tokens, answers.output_tokens)


def test_each_replica_gets_neighbours() -> None:
    sim = ran()
    requests = requests_of(sim.answers, sim.rl)
    for i in range(4):
        names = [r.prefix_id for r in requests[i::4]]
        assert names == [f"prompt {n // 4}" for n in range(16 * i, 16 * i + 16)]
    assert sorted(r.output_tokens for r in requests) == sorted(sim.answers.output_tokens.tolist())


@pytest.mark.parametrize("how", ["packed", "mean", "padded"])
def test_micro_batches_hold_all_tokens(how: str) -> None:
    scenario = parse_scenario(merge(SMALL, {"rl": {"sequences": how}}), "small")
    assert scenario.rl is not None
    answers = draw_answers(scenario.rl, 1024)
    b = make_batch(scenario, scenario.rl, answers)
    computed = b.updates * b.micro_batches * b.micro_batch_size * b.seq_len * 4
    assert computed >= b.useful_tokens == answers.tokens.sum()
    assert b.filled == b.useful_tokens / computed
    if how == "padded":
        assert b.seq_len == answers.tokens.max()
        return
    assert b.filled > 0.97
    if how == "packed":
        lengths = answers.tokens.astype(float)
        squares = computed * b.seq_len  # sequences · length²
        assert squares == pytest.approx((lengths**2).sum(), rel=0.35)  # whole sequences in a pack of about four
        assert abs(squares / (lengths**2).sum() - 1) < abs((lengths.sum() ** 2 / 64) / (lengths**2).sum() - 1)


def test_long_answers_in_packs_of_two_keep_all_tokens() -> None:
    """One sequence of the mean pack's 4,619 tokens would fit its squares best, but is longer than seq_len."""
    long = {
        "training": {"seq_len": 4096, "global_batch_size": 16, "micro_batch_size": 2},
        "parallelism": {"dp": 8},
        "rl": {
            "prompts_per_step": 64,
            "generations_per_prompt": 8,
            "prompt_len": 16,
            "output_len": {"mean": 3500, "sigma": 1.0},
        },
    }
    scenario = parse_scenario(merge(SMALL, long), "small")
    assert scenario.rl is not None
    b = make_batch(scenario, scenario.rl, draw_answers(scenario.rl, 4096))
    computed = b.updates * b.micro_batches * b.micro_batch_size * b.seq_len * 8
    assert (b.micro_batch_size, b.seq_len) == (2, 2310)
    assert 0.95 < b.filled == b.useful_tokens / computed <= 1


def test_equal_prompts_may_take_all_but_the_answer() -> None:
    scenario = parse_scenario(merge(SMALL, {"rl": {"prompt_len": 900, "output_len": 100}}), "small")
    assert scenario.rl is not None
    answers = draw_answers(scenario.rl, 1024)
    assert set(answers.prompt_tokens.tolist()) == {900}
    assert set(answers.output_tokens.tolist()) == {100}


@pytest.mark.parametrize("sizes", [{"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 4, "layers_per_stage": [2, 6, 5, 3]}], ids=str)
def test_forwards_through_a_pipeline_are_gpipes(sizes: dict[str, Any]) -> None:
    """GPipe runs all forwards first: its last one ends when forward passes alone end."""
    layout = {"dp": 1, "zero": 0, "schedule": "gpipe", "p2p_overlap": True, **sizes}
    scenario = parse_scenario(merge(SMALL, {"parallelism": layout, "rl": {"sequences": "mean"}}), "small")
    assert scenario.rl is not None
    step = simulate(update_scenario(scenario, make_batch(scenario, scenario.rl, draw_answers(scenario.rl, 1024))))
    ends = [end for spans in step.spans for action, (_, end) in spans.items() if action.kind is Kind.F]
    assert policy_forward(step, scenario.micro_batches).seconds == pytest.approx(max(ends), rel=1e-12)


def test_a_cache_that_cannot_be_shared_is_not() -> None:
    contiguous = {"rl": {"generation": {"kv_cache": {"layout": "contiguous"}}}}
    found = [parse_scenario(merge(SMALL, change), "small").rl for change in ({}, contiguous)]
    assert [rl.generation.prefix_cache for rl in found if rl is not None] == ["gpu", "none"]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"dp": 4}, [0]),
        ({"dp": 2, "tp": 2, "pp": 2}, [0, 1, 4, 5]),
        ({"dp": 4, "zero": 3}, [0, 1, 2, 3]),
        ({"dp": 4, "zero": 3, "shard_size": 2}, [0, 1]),
    ],
)
def test_a_copy_of_the_parameters_lies_on(layout: dict[str, Any], ranks: list[int]) -> None:
    scenario = parse_scenario({**SMALL, "parallelism": layout}, "small")
    assert holders_of_a_copy(make_plan(scenario)) == ranks


def test_a_transfer_takes_its_bytes_over_the_links() -> None:
    """All-gathered over n ranks of a node M·(n−1)/n bytes a GPU, broadcast M bytes, copied 2·M/tp."""
    data = merge(SMALL, {**APART, "parallelism": {"dp": 4, "zero": 3}, "calibration": "roofline"})
    sim = simulate_rl(parse_scenario(data, "small"))
    size, cluster = 2 * count_parameters(sim.scenario.model).total, sim.scenario.cluster
    link = cluster.intra_node.usable_bytes_per_s
    found = sim.transfer
    assert (found.bytes, found.gathered_over, found.how) == (size, 4, "broadcast")
    assert size * 3 / 4 / link < found.gather_s < 1.3 * size * 3 / 4 / link
    assert size / link < found.broadcast_s < 1.5 * size / link
    assert found.load_s == pytest.approx(2 * size / cluster.gpu.memory_bandwidth_bytes_per_s, rel=0.02)


def test_what_stays_on_the_gpu_counts_there() -> None:
    freed, kept = ran().outcome.pools[0], ran("no copies").outcome.pools[0]
    sim = ran("no copies")
    weights, states = 2 * count_parameters(sim.scenario.model).total, sim.states
    assert kept.peak_by_turn["generation"] - freed.peak_by_turn["generation"] == pytest.approx(
        states.lasting + states.parameters
    )
    room = sim.served.capacity.blocks * 16 * sim.served.capacity.stage_token_bytes
    more = kept.peak_by_turn["training"] - freed.peak_by_turn["training"]
    assert more == pytest.approx(states.parameters + weights + room, rel=0.02)


def test_a_reward_model_reads_every_answer() -> None:
    """At least 2 flops a weight and token, the vocabulary left out; the policy's own size takes about a forward."""
    data = merge(SMALL, {"rl": {"reward": {"model": "llama3.2-1b", "tp": 2}}})
    sim = simulate_rl(parse_scenario(data, "small"))
    model = sim.scenario.model
    weights = count_parameters(model).total - model.vocab * model.hidden
    least = 2 * weights * sim.batch.useful_tokens / 4 / sim.scenario.cluster.gpu.peak_flops_per_s["bf16"]
    parts = seconds(sim)
    assert least < parts["reward"] < 2 * parts["policy log-probabilities"]
    assert sim.outcome.pools[0].peak_by_turn["reward"] > weights


def test_all_replicas_of_a_reward_model_have_answers_before_any_packs_more() -> None:
    """Eight replicas and eight answers, which the policy trains on in two packs: six replicas would have none."""
    more = {
        "parallelism": {"dp": 1, "tp": 8},
        "training": {"seq_len": 8192, "global_batch_size": 4},
        "rl": {"prompts_per_step": 2, "output_len": 1000, "reward": {"model": "llama3-8b", "tp": 1}},
    }
    packed, padded = (
        simulate_rl(parse_scenario(merge(SMALL, merge(more, {"rl": {"sequences": how}})), "small"))
        for how in ("packed", "padded")
    )
    assert packed.batch.updates * packed.batch.micro_batches == 2
    assert seconds(packed)["reward"] == pytest.approx(seconds(padded)["reward"], rel=1e-6)


TABLE = (  # of docs/rl.md, row by row
    ("rl_grpo_llama8b",),
    ("rl_grpo_llama8b", "rl.output_len=830"),
    ("rl_grpo_llama8b", "rl.output_len.max=1792"),
    ("rl_grpo_llama8b", "rl.generation.tp=2"),
    ("rl_grpo_llama8b", "rl.sequences=padded"),
    ("rl_grpo_llama8b_one_step_off", "rl.steps_off=0"),
    ("rl_grpo_llama8b_one_step_off",),
)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "case"), list(enumerate(TABLE)), ids=str)
def test_shipped_steps_are_those_of_the_documentation(row: int, case: tuple[str, ...]) -> None:
    name, *overrides = case
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", overrides)
    result = simulate_rl(scenario, engine="static").outcome
    page = (SCENARIOS.parent / "docs" / "rl.md").read_text(encoding="utf-8")
    section = page.partition("## Example")[2]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:][row]
    g = result.generation
    stated = [float(cell.removesuffix(" ms").removesuffix(" s").replace(",", "")) for cell in cells[1:]]
    stated = [value / 1e3 if cell.endswith(" ms") else value for value, cell in zip(stated, cells[1:], strict=True)]
    found = [g.duration_s, g.tail_s, result.step_time_s, result.tokens_per_s_per_gpu]
    assert stated == pytest.approx(found, rel=0.02)
    read = parse_scenario(result.to_json()["scenario"])  # its keys are all written, and no note is of a default
    assert read.unchecked_copy(update={"warnings": ()}) == scenario.unchecked_copy(update={"warnings": ()})
    assert result.tokens_per_s == pytest.approx(result.tokens / result.step_time_s)
    low, high = result.step_time_interval_s
    assert low < result.step_time_s < high
    assert sum(result.provenance.shares.values()) == pytest.approx(1)
    assert result.fits_in_memory


def test_a_pool_that_does_not_fit_says_why_and_an_engines_own_gpus_have_no_trainers_buffers() -> None:
    """The trainer has communicators, which take of its GPUs; the engine's have CUDA's context alone."""
    data = merge(SMALL, {**APART, "training": {"framework": "nanotron"}})
    peak = simulate_rl(parse_scenario(data)).outcome.pools[0].peak_memory_bytes
    gpu = {"preset": "h100-sxm", "memory_bytes": peak + 2**30}
    scenario = parse_scenario(merge(data, {"cluster": {"preset": "dgx-h100", "gpu": gpu}}))
    result, left = simulate_rl(scenario).outcome, scenario.cluster.gpu.shown_bytes - 2**29
    training, generation = result.pools
    assert (training.name, training.fits_in_memory, result.fits_in_memory) == ("training", False, False)
    assert training.memory_limit_bytes < training.peak_reserved_bytes
    assert training.memory_limit_bytes < generation.memory_limit_bytes == left
    limit = training.memory_limit_bytes / 2**30
    assert any("the training GPUs need most" in text and f"of {limit:.1f} GiB" in text for text in result.warnings)
    out = StringIO()
    print_rl(result, Terminal(200, file=out))
    said = " ".join(out.getvalue().split())
    assert f"of {n_bytes(training.memory_limit_bytes)} beside CUDA and NCCL" in said


def test_every_row_has_a_case() -> None:
    page = (SCENARIOS.parent / "docs" / "rl.md").read_text(encoding="utf-8")
    section = page.partition("## Example")[2].partition("\n## ")[0]
    assert len([line for line in section.splitlines() if line.startswith("| ")]) - 1 == len(TABLE)


def test_a_page_and_a_summary_name_every_phase() -> None:
    sim, out = ran("apart", "off"), StringIO()
    print_rl(sim.outcome, Terminal(120, file=out))
    page = rl_page(sim)
    assert len(sim.phases) == 6
    for phase in sim.phases:
        assert phase.name in out.getvalue()
        assert phase.name in page
    starts, ends = sim.timeline.start_s, sim.timeline.end_s
    assert ends.max() == pytest.approx(sim.step_time_s)
    assert starts.min() == 0


def test_a_table_of_measurements_may_hold_steps() -> None:
    sim = ran()
    measured = {"step_time_s": sim.step_time_s, "generation_s": 1.0, "log_probabilities_s": 1.0, "unknown_s": 1.0}
    row = Measurement("table", "training_step", "a", "all", SMALL, measured, {})
    found = predict(row).found
    assert found["step_time_s"].value == pytest.approx(sim.step_time_s, rel=1e-9)
    assert found["generation_s"].value == pytest.approx(sim.served.end_s, rel=1e-9)
    assert found["log_probabilities_s"].value == pytest.approx(2 * sim.forward.seconds, rel=1e-9)
    assert "unknown_s" not in found


def test_answers_are_drawn_where_the_engines_sampler_is_simulated() -> None:
    """With a temperature of 1, which takes longer than the largest logit's choice; `bundled` has that alone."""
    drawn, greedy = (
        simulate_rl(parse_scenario(merge(SMALL, {"rl": {"generation": {"engine": "vllm-v1", **own}}})))
        for own in ({}, {"sampling": {"temperature": 0}})
    )
    assert drawn.rl.generation.sampling == Sampling(temperature=1.0)
    assert seconds(drawn)["generation"] > seconds(greedy)["generation"]
    alone = parse_scenario(merge(SMALL, {"rl": {"generation": {"engine": "bundled"}}}))
    assert alone.rl is not None
    assert alone.rl.generation.sampling is None
    with pytest.raises(InputError, match=r"rl\.generation\.sampling: engine bundled is simulated with"):
        parse_scenario(merge(SMALL, {"rl": {"generation": {"engine": "bundled", "sampling": {}}}}))


def test_the_page_says_which_of_many_replicas_are_drawn() -> None:
    assert replicas_drawn(16) == ""
    assert replicas_drawn(32) == "32 replicas, the 8 that end first and the 8 that end last are drawn"
