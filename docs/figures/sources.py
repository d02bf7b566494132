"""What the pictures of the documentation show: every number comes out of a simulation, none is typed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from docs.figures.area import Area
from docs.figures.svg import COLOURS, Chart, Series
from sim.inputs.scenario import load_scenario
from sim.simulation import Simulation, simulate
from sim.studies.batch_plan import steps_factor, tokens_factor
from sim.views.palette import MEMORY
from topology.network import Network
from topology.presets import CLUSTERS

SCENARIOS = Path(__file__).parents[2] / "scenarios"
DEGREES = (2, 4, 8, 16)
FAST_NETWORK = ("cluster.inter_node.nic_bandwidth_bytes_per_s=1e18", "cluster.inter_node.latency_s=0")
SMALL_VOCABULARY = ("model.vocab=8192",)


def run(name: str, *overrides: str) -> Simulation:
    """A simulated step of `scenarios/NAME.yaml`."""
    return simulate(load_scenario(SCENARIOS / f"{name}.yaml", overrides))


def throughput(name: str, *overrides: str) -> tuple[float, ...]:
    """Tokens a second and GPU at every degree; `{}` in the name or an override is the degree."""
    return tuple(run(name.format(n), *(o.format(n) for o in overrides)).result["tokens_per_s_per_gpu"] for n in DEGREES)


def loss(values: Sequence[float]) -> float:
    """What of the throughput is lost from degree 8 to 16."""
    return 1 - values[-1] / values[-2]


def tensor_parallel() -> Chart:
    """Throughput a GPU by tensor-parallel degree, on the playbook's nodes and with a perfect network between them."""
    real = throughput("playbook_tp{}_sp")
    fast = throughput("playbook_tp{}_sp", *FAST_NETWORK)
    return Chart(
        "Tensor parallelism: throughput per GPU, the playbook's 3B",
        f"Lost from 8 to 16 (a second node): {loss(real):.0%}; "
        f"with an infinitely fast network between nodes {loss(fast):.0%}.",
        "tensor-parallel GPUs",
        "tokens/s per GPU",
        tuple(map(str, DEGREES)),
        (Series("H100s over EFA", real, COLOURS[0]), Series("infinitely fast network between nodes", fast, COLOURS[1])),
        "grouped",
    )


def pipeline_parallel() -> Chart:
    """Throughput a GPU by pipeline degree: equal stages, and with the output layer of a large vocabulary."""
    small = throughput("pp_scaling_llama8b", "parallelism.pp={}", *SMALL_VOCABULARY)
    fast = throughput("pp_scaling_llama8b", "parallelism.pp={}", *SMALL_VOCABULARY, *FAST_NETWORK)
    head = throughput("pp_scaling_llama8b", "parallelism.pp={}")
    return Chart(
        "Pipeline parallelism: throughput per GPU, Llama 3 8B on DGX H100",
        f"m = 64. Lost from 8 to 16: {loss(small):.0%} with equal stages "
        f"({loss(fast):.0%} on a perfect network), {loss(head):.0%} with the 128k output layer.",
        "pipeline stages",
        "tokens/s per GPU",
        tuple(map(str, DEGREES)),
        (
            Series("equal stages (8k vocabulary)", small, COLOURS[0]),
            Series("same, infinitely fast network", fast, COLOURS[1]),
            Series("128k vocabulary", head, COLOURS[2]),
        ),
        "grouped",
    )


def at_peak(simulation: Simulation) -> tuple[float, ...]:
    """GiB by category on the fullest rank in the moment when it is fullest."""
    curve = max(simulation.memory, key=lambda c: float(c.total.max()))
    moment = int(curve.total.argmax())
    return tuple(float(getattr(curve, category)[moment]) / 2**30 for category in MEMORY)


def memory(title: str, note: str, x_label: str, places: Sequence[str], simulations: Sequence[Simulation]) -> Chart:
    """Stacked bars of memory at the peak, with the device's limit."""
    columns = list(zip(*map(at_peak, simulations), strict=True))
    gpu = simulations[0].scenario.cluster.gpu
    return Chart(
        title,
        note,
        x_label,
        "GiB on the fullest GPU",
        tuple(places),
        tuple(Series(s.label, values, s.fill) for s, values in zip(MEMORY.values(), columns, strict=True)),
        "stacked",
        (gpu.memory_bytes / 2**30, f"{gpu.memory_bytes / 2**30:.0f} GiB"),
    )


def memory_tensor_parallel() -> Chart:
    """Memory of Llama 3 70B by tensor-parallel degree."""
    degrees = (1, 2, 4, 8, 16)
    runs = [run("memory_tp_llama70b", f"parallelism.tp={n}", f"parallelism.sp={str(n > 1).lower()}") for n in degrees]
    return memory(
        "Memory of Llama 3 70B by tensor-parallel degree",
        "Sequence parallelism on, 4,096 tokens, AdamW in mixed precision: everything is divided.",
        "tensor-parallel GPUs",
        tuple(map(str, degrees)),
        runs,
    )


def memory_context_parallel() -> Chart:
    """Memory of Llama 3 8B at a long sequence by context-parallel degree."""
    degrees = (1, 2, 4, 8, 16)
    runs = [run("memory_cp_llama8b", f"parallelism.cp={n}") for n in degrees]
    return memory(
        "Memory of Llama 3 8B at 131,072 tokens by context-parallel degree",
        "Activations and buffers are divided; parameters, gradients and optimizer stay whole.",
        "context-parallel GPUs",
        tuple(map(str, degrees)),
        runs,
    )


def memory_zero() -> Chart:
    """Memory of Llama 3 8B by ZeRO stage."""
    stages = (0, 1, 2, 3)
    runs = [run("memory_zero_llama8b", f"parallelism.zero={n}") for n in stages]
    return memory(
        "Memory of Llama 3 8B over 8 GPUs by ZeRO stage",
        "Sharded over the replicas: 1 optimizer, 2 gradients as well, 3 parameters as well.",
        "",
        [f"ZeRO-{n}" if n else "plain data parallelism" for n in stages],
        runs,
    )


def memory_steps() -> Area:
    """Memory over the first four steps of a 1B model."""
    step = simulate(load_scenario(SCENARIOS / "memory_steps_llama1b.yaml"), expand=True)
    curve = step.memory_over(4)[0]
    return Area(
        "Memory over the first four steps of Llama 3.2 1B",
        f"Two micro-batches of one sequence of 4,096 tokens, unfused attention: {curve.total.max() / 1e9:.1f} GB.",
        curve,
        step.step_time_s,
        4,
    )


SEQUENCES = (1024, 2048, 4096, 8192, 16384)


def memory_by_sequence(model: str, name: str) -> Chart:
    """Memory of a model by sequence length, attention unfused."""
    runs = [run("memory_seq_len", f"model={model}", f"training.seq_len={n}") for n in SEQUENCES]
    share = [at_peak(r)[list(MEMORY).index("activations")] / sum(at_peak(r)) for r in (runs[0], runs[-1])]
    return memory(
        f"Memory of {name} by sequence length, one sequence",
        f"Unfused attention, 16 bytes a parameter. Activations are {share[0]:.0%} of it at 1,024 tokens, "
        f"{share[1]:.0%} at 16,384.",
        "tokens",
        [f"{n:,}" for n in SEQUENCES],
        runs,
    )


def data_parallel_scaling() -> Chart:
    """Throughput a GPU by data-parallel degree: as many sequences on each GPU, and the same batch over all."""
    degrees = (8, 32, 128, 512, 1024)

    def rates(*overrides: str) -> tuple[float, ...]:
        runs = (run("dp_scaling_llama1b", f"parallelism.dp={n}", *(o.format(n) for o in overrides)) for n in degrees)
        return tuple(r.result["tokens_per_s_per_gpu"] for r in runs)

    weak, calm, jitter = rates("training.global_batch_size={}"), rates("faults=null"), rates()
    lost = 1 - jitter[-1] / jitter[0]
    return Chart(
        "Data parallelism: throughput per GPU, Llama 3.2 1B on DGX H100",
        f"Of 4M tokens a step over 1,024 GPUs {lost:.0%} is lost; with jitter each step waits for the slowest.",
        "data-parallel GPUs",
        "tokens/s per GPU",
        tuple(f"{n:,}" for n in degrees),
        (
            Series("one sequence a GPU, jitter", weak, COLOURS[0]),
            Series("4M tokens a step, no jitter", calm, COLOURS[1]),
            Series("4M tokens, jitter of 2 %", jitter, COLOURS[2]),
        ),
        "grouped",
    )


def pipeline_micro_batches() -> Chart:
    """Throughput a GPU by pipeline degree for m = p - 1 and 32 micro-batches, equal stages."""

    def rate(stages: int, micro_batches: int) -> float:
        batch = f"training.global_batch_size={micro_batches}"
        step = run("pp_scaling_llama8b", f"parallelism.pp={stages}", *SMALL_VOCABULARY, batch)
        return float(step.result["tokens_per_s_per_gpu"])

    few, many = (tuple(rate(n, n - 1 if m is None else m) for n in DEGREES) for m in (None, 32))
    return Chart(
        "Pipeline parallelism: throughput per GPU by number of micro-batches",
        f"Llama 3 8B, 1F1B, equal stages. With m = p - 1 half of every step is bubble; with 32 micro-batches "
        f"{1 - many[-1] / many[0]:.0%} is lost from 2 to 16.",
        "pipeline stages",
        "tokens/s per GPU",
        tuple(map(str, DEGREES)),
        (Series("m = p - 1", few, COLOURS[0]), Series("m = 32", many, COLOURS[1])),
        "grouped",
    )


def batch_ends() -> Chart:
    """Steps, tokens and time to a loss of small and large batches, each in multiples of its least."""
    critical, batches = 512.0, (8, 32, 128, 512, 2048, 8192)
    steps = tuple(steps_factor(b, critical) for b in batches)
    tokens = tuple(tokens_factor(b, critical) for b in batches)
    seconds = [
        s * run("zero1_llama8b_dp8", f"training.global_batch_size={b}").step_time_s
        for s, b in zip(steps, batches, strict=True)
    ]
    return Chart(
        "Small and large batches: steps, tokens and time to a loss",
        "Critical batch of 512 sequences (McCandlish et al. 2018); Llama 3 8B on eight H100s; multiples of the least.",
        "sequences a step",
        "multiples of the least",
        tuple(f"{b:,}" for b in batches),
        (
            Series("steps", steps, COLOURS[0]),
            Series("tokens", tokens, COLOURS[1]),
            Series("time on the same GPUs", tuple(s / min(seconds) for s in seconds), COLOURS[2]),
        ),
        "grouped",
    )


def bus_bandwidth() -> Chart:
    """Bus bandwidth by number of nodes at 256 MB."""
    nodes = (1, 2, 4, 8, 16, 32, 64)
    network = Network(CLUSTERS["dgx-h100"].model_copy(update={"nodes": nodes[-1]}))
    kinds = {"all-reduce": "all_reduce", "all-gather, reduce-scatter": "all_gather", "all-to-all": "all_to_all"}
    series = []
    for (name, kind), colour in zip(kinds.items(), COLOURS, strict=False):
        costs = (network.collective(kind, range(8 * n), 256e6) for n in nodes)
        series.append(Series(name, tuple(c.bus_bandwidth_bytes_per_s / 1e9 for c in costs), colour))
    return Chart(
        "Bus bandwidth by number of nodes, 256 MB, DGX H100",
        "Closed forms of topology/collectives.py alone; bus bandwidth as nccl-tests defines it.",
        "nodes of 8 GPUs",
        "GB/s",
        tuple(map(str, nodes)),
        tuple(series),
        "lines",
    )


FIGURES: dict[str, Callable[[], Chart]] = {
    "tp_throughput": tensor_parallel,
    "pp_throughput": pipeline_parallel,
    "memory_tp": memory_tensor_parallel,
    "memory_cp": memory_context_parallel,
    "memory_zero": memory_zero,
    "memory_seq_1b": partial(memory_by_sequence, "llama3.2-1b", "Llama 3.2 1B"),
    "memory_seq_8b": partial(memory_by_sequence, "llama3-8b", "Llama 3 8B"),
    "memory_seq_70b": partial(memory_by_sequence, "llama3-70b", "Llama 3 70B"),
    "dp_scaling": data_parallel_scaling,
    "pp_micro_batches": pipeline_micro_batches,
    "batch_ends": batch_ends,
    "bus_bandwidth": bus_bandwidth,
}
