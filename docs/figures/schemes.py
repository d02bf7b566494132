"""A picture for each scheme: the same stretch of a step under each of its options, out of simulations."""

from __future__ import annotations

from pathlib import Path

from docs.figures.gantt import Gantt, strip
from docs.figures.sources import memory, run
from docs.figures.svg import Chart
from sim.core.units import seconds
from sim.inputs.scenario import load_scenario
from sim.simulation import Simulation, simulate

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")


def fine(name: str, *overrides: str) -> Simulation:
    """A simulated step, operator by operator."""
    return simulate(load_scenario(SCENARIOS / f"{name}.yaml", overrides), expand=True)


def schedules() -> Gantt:
    """Six schedules of four ranks and eight micro-batches."""
    equal = ("parallelism.pp=4", "training.global_batch_size=8", "model.vocab=8192")
    runs = {s: run("pp_scaling_llama8b", *equal, f"parallelism.schedule={s}") for s in SCHEDULES}
    length_s = max(r.step_time_s for r in runs.values())
    return Gantt(
        "Pipeline schedules: four ranks, eight micro-batches",
        "Llama 3 8B, a small vocabulary, four H100s.",
        length_s,
        tuple(
            strip(f"{name}: {seconds(r.step_time_s)}", r, 0.0, length_s, {"compute": "rank {}"}, 4)
            for name, r in runs.items()
        ),
    )


def _layer(title: str, note: str, runs: dict[str, Simulation], stream: str, layers: float) -> Gantt:
    """The forward of so many layers in the middle of a model, computation above communication."""
    forward = {name: r.result["layer_forward_s"] for name, r in runs.items()}
    length_s = layers * max(forward.values())
    strips = []
    for name, r in runs.items():
        middle_s = r.scenario.model.layers // 2 * forward[name]
        said = f"{name}: a layer {seconds(forward[name])}"
        strips.append(strip(said, r, middle_s, length_s, {"compute": "compute", stream: stream}))
    return Gantt(title, note, length_s, tuple(strips))


def tensor_overlap() -> Gantt:
    """What tp_overlap does to a layer's forward."""
    options = ("sp=false", "sp=true", "tp_overlap=full")
    runs = {o.replace("=", ": "): fine("playbook_tp8_sp", f"parallelism.{o}") for o in options}
    return _layer("Tensor parallelism: two layers forward", "The playbook's 3B on eight H100s, tp 8.", runs, "tp", 2)


def context_methods() -> Gantt:
    """What cp_method does to a layer's forward."""
    runs = {
        m: fine("cp_ring_131k", "parallelism.cp=8", f"parallelism.cp_method={m}")
        for m in ("ring", "all_gather", "all_to_all")
    }
    note = "Llama 3 8B at 131,072 tokens on eight H100s, cp 8, zigzag."
    return _layer("Context parallelism: a layer forward", note, runs, "cp", 1.2)


def expert_exchange() -> Gantt:
    """A layer of a mixture of experts: dispatch and combine."""
    plain = ("model.moe.imbalance=balanced", "training.global_batch_size=64", "parallelism.zero=0")
    runs = {f"ep {n}": fine("moe_mixtral", f"parallelism.ep={n}", *plain) for n in (1, 8)}
    runs["ep 8, fp8 dispatch"] = fine("moe_mixtral", "parallelism.ep_dispatch_dtype=fp8", *plain)
    note = "Mixtral 8x7B, 4,096 tokens on an H200, experts over the eight GPUs of a node."
    return _layer("Expert parallelism: two layers forward", note, runs, "ep", 2)


def data_sync() -> Gantt:
    """The end of a step under each dp_sync."""
    runs = {
        s: fine("dp8", "training.global_batch_size=16", f"parallelism.dp_sync={s}")
        for s in ("after_backward", "per_parameter", "bucketed")
    }
    first = next(iter(runs.values()))
    length_s = 0.45 * first.step_time_s
    return Gantt(
        "Data parallelism: the end of a step",
        "Llama 3.2 1B on eight H100s; the last micro-batch's backward, then the optimizer.",
        length_s,
        tuple(
            strip(
                f"{name}: step {seconds(r.step_time_s)}",
                r,
                first.step_time_s - length_s,
                length_s,
                {"compute": "compute", "dp": "dp"},
            )
            for name, r in runs.items()
        ),
    )


def memory_recompute() -> Chart:
    """Memory by what is computed again."""
    modes = ("none", "selective", "full")
    runs = [run("recompute_selective", f"training.recompute={m}") for m in modes]
    times = ", ".join(f"{m} {seconds(r.step_time_s)}" for m, r in zip(modes, runs, strict=True))
    return memory("Memory of the 22B model of Korthikanti et al. by recomputation", f"Steps: {times}.", "", modes, runs)
