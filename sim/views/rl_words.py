"""A step of reinforcement learning in words and numbers, for pages and, as its summary, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from sim.core.units import allocated_reserved, count, counted, n_bytes, percent, seconds, seconds_between
from sim.inputs.rl_config import Rl
from sim.inputs.scenario import Scenario
from sim.rl.records import PoolUse, RlResult
from sim.views.headline import Number, fit_words, of_gpu_words
from sim.views.scenario_words import gpus_words, layout_words, model_words
from sim.views.summary import numbers_table, print_provenance
from sim.views.terminal import Terminal, plain_table, words_table
from topology.spec import GpuSpec

PHASE_HEAD = ("Phase", "GPUs", "Starts", "Takes", "Of the step")
POOL_HEAD = ("GPUs", "Number", "Busy", "Idle", "Peak / reserved", "Most during")


def rl_line(scenario: Scenario, rl: Rl) -> str:
    """The scenario in one line: model, trainer, engine, answers, cluster."""
    g = rl.generation
    trainer = ", ".join(layout_words(scenario.parallelism.model_dump()))
    engine = f"{g.engine} {g.replicas} × tp {g.tp}" + (f" pp {g.pp}" if g.pp > 1 else "")
    turns = "colocated" if rl.colocated else "one step off" if rl.steps_off else "pools of their own"
    answers = f"{counted(rl.prompts_per_step, 'prompt')} × {counted(rl.generations_per_prompt, 'answer')}"
    words = (model_words(scenario.model), f"trained {trainer}", engine, turns, answers, gpus_words(scenario))
    return " · ".join(words)


def rl_headline(result: RlResult) -> list[Number]:
    """Step time, throughput, the answers' tail, the updates' MFU, idle GPUs, memory."""
    step_s, (low, high) = result.step_time_s, result.step_time_interval_s
    g, t = result.generation, result.training
    return [
        Number("Step time", seconds(step_s), f"90 % interval {seconds_between(low, high, step_s)}"),
        Number("Tokens/s per GPU", count(result.tokens_per_s_per_gpu), f"{count(result.tokens_per_s)} in all"),
        Number("Generation", seconds(g.duration_s), f"the last tenth of the answers takes {seconds(g.tail_s)} longer"),
        Number("Training", seconds(t.updates * t.update_s), f"{counted(t.updates, 'update')}, MFU {percent(t.mfu)}"),
        *[Number(f"Idle, {p.name} GPUs", percent(p.idle_share), f"of {count(p.gpus)}") for p in result.pools],
        *[_memory(p, result.scenario.cluster.gpu) for p in result.pools],
    ]


def _memory(pool: PoolUse, gpu: GpuSpec) -> Number:
    reserved = pool.peak_reserved_bytes
    share = f"{n_bytes(reserved)} reserved, {of_gpu_words(reserved, pool.memory_limit_bytes, gpu)}, {pool.name} GPUs"
    return Number("Peak memory", n_bytes(pool.peak_memory_bytes), *fit_words(pool.fit, share))


def phase_rows(result: RlResult) -> list[tuple[str, ...]]:
    """A row for each phase, under `PHASE_HEAD`."""
    step_s, names = result.step_time_s, {"both": "all"}
    if len(result.pools) == 1:  # trainer and engine take turns on the same GPUs
        names |= {"training": "all", "generation": "all"}
    return [
        (
            p.name,
            names.get(p.pool, p.pool),
            seconds(p.start_s),
            seconds(p.seconds),
            percent(p.seconds / step_s),
        )
        for p in result.phases
    ]


def pool_rows(pools: Sequence[PoolUse]) -> list[tuple[str, ...]]:
    """A row for each pool, under `POOL_HEAD`."""
    return [
        (
            p.name,
            count(p.gpus),
            seconds(p.busy_s),
            percent(p.idle_share),
            allocated_reserved(p.peak_memory_bytes, p.peak_reserved_bytes),
            max(p.peak_by_turn, key=lambda turn: p.peak_by_turn[turn]),
        )
        for p in pools
    ]


def fact_lines(result: RlResult) -> list[tuple[str, str]]:
    """Return what was written, trained on and transferred, as (name, value)."""
    g, t, w = result.generation, result.training, result.weight_transfer
    mean = g.output_tokens / g.answers
    written = (
        f"{counted(g.answers, 'answer')} of {counted(round(mean), 'token')} in the mean, "
        f"{count(g.longest_output)} at most, "
        f"by {counted(g.replicas, 'replica')}, computing {percent(g.busy_share)} of the time"
    )
    trained = (
        f"{counted(t.updates, 'update')} of {counted(t.micro_batches, 'micro-batch')} a replica, "
        f"each of {count(t.micro_batch_size)} × {counted(t.seq_len, 'token')}, {percent(t.filled)} filled"
    )
    moved = (
        f"{n_bytes(w.bytes)} gathered over {counted(w.gathered_over, 'rank')} in {seconds(w.gather_s)}, "
        + (f"broadcast in {seconds(w.broadcast_s)}, " if w.broadcast_s else "")
        + f"copied into place in {seconds(w.load_s)} ({w.how})"
    )
    return [("answers", written), ("training", trained), ("weights", moved)]


def print_rl(result: RlResult, terminal: Terminal, numbers: Sequence[Number] = ()) -> None:
    """Print a result for a person; `numbers` come after its own."""
    rl = result.scenario.rl
    assert rl is not None
    terminal.print(result.scenario.name, "bold")
    terminal.print(rl_line(result.scenario, rl), "dim")
    phases = plain_table([name.lower() for name in PHASE_HEAD], phase_rows(result))
    pools = plain_table([name.lower() for name in POOL_HEAD], pool_rows(result.pools))
    for table in (numbers_table([*rl_headline(result), *numbers]), phases, pools, words_table(fact_lines(result))):
        terminal.print()
        terminal.print_table(table)
    terminal.print()
    print_provenance(result, terminal)
