"""What the pictures of the documentation show: every number comes out of a simulation, none is typed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from docs.figures.svg import COLOURS, Chart, Series
from sim.inputs.scenario import load_scenario
from sim.simulation import Simulation, simulate
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
    """Tokens a second and GPU at every degree; `{}` in an override is the degree."""
    return tuple(run(name, *(o.format(n) for o in overrides)).result["tokens_per_s_per_gpu"] for n in DEGREES)


def loss(values: Sequence[float]) -> float:
    """What of the throughput is lost from degree 8 to 16."""
    return 1 - values[-1] / values[-2]


def tensor_parallel() -> Chart:
    """Throughput a GPU by tensor-parallel degree, on DGX H100 nodes and with a perfect network between them."""
    real = throughput("tp_scaling_llama8b", "parallelism.tp={}")
    fast = throughput("tp_scaling_llama8b", "parallelism.tp={}", *FAST_NETWORK)
    return Chart(
        "Tensor parallelism: throughput per GPU, Llama 3 8B on DGX H100",
        f"Lost from 8 to 16 (a second node): {loss(real):.0%}; "
        f"with an infinitely fast network between nodes {loss(fast):.0%}.",
        "tensor-parallel GPUs", "tokens/s per GPU", tuple(map(str, DEGREES)),
        (Series("DGX H100", real, COLOURS[0]), Series("infinitely fast network between nodes", fast, COLOURS[1])),
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
        "pipeline stages", "tokens/s per GPU", tuple(map(str, DEGREES)),
        (Series("equal stages (8k vocabulary)", small, COLOURS[0]),
         Series("same, infinitely fast network", fast, COLOURS[1]), Series("128k vocabulary", head, COLOURS[2])),
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
        title, note, x_label, "GiB on the fullest GPU", tuple(places),
        tuple(Series(s.label, values, s.fill) for s, values in zip(MEMORY.values(), columns, strict=True)), "stacked",
        (gpu.memory_bytes / 2**30, f"{gpu.memory_bytes / 2**30:.0f} GiB"),
    )


def memory_tensor_parallel() -> Chart:
    """Memory of Llama 3 70B by tensor-parallel degree."""
    degrees = (1, 2, 4, 8, 16)
    runs = [run("memory_tp_llama70b", f"parallelism.tp={n}", f"parallelism.sp={str(n > 1).lower()}") for n in degrees]
    return memory("Memory of Llama 3 70B by tensor-parallel degree",
                  "Sequence parallelism on, 4,096 tokens, AdamW in mixed precision: everything is divided.",
                  "tensor-parallel GPUs", tuple(map(str, degrees)), runs)


def memory_context_parallel() -> Chart:
    """Memory of Llama 3 8B at a long sequence by context-parallel degree."""
    degrees = (1, 2, 4, 8, 16)
    runs = [run("memory_cp_llama8b", f"parallelism.cp={n}") for n in degrees]
    return memory("Memory of Llama 3 8B at 131,072 tokens by context-parallel degree",
                  "Activations and buffers are divided; parameters, gradients and optimizer stay whole.",
                  "context-parallel GPUs", tuple(map(str, degrees)), runs)


def memory_zero() -> Chart:
    """Memory of Llama 3 8B by ZeRO stage."""
    stages = (0, 1, 2, 3)
    runs = [run("memory_zero_llama8b", f"parallelism.zero={n}") for n in stages]
    return memory("Memory of Llama 3 8B over 8 GPUs by ZeRO stage",
                  "Sharded over the replicas: 1 optimizer, 2 gradients as well, 3 parameters as well.",
                  "", [f"ZeRO-{n}" if n else "plain data parallelism" for n in stages], runs)


def bus_bandwidth() -> Chart:
    """Bus bandwidth by number of nodes at 256 MB."""
    nodes = (1, 2, 4, 8, 16, 32, 64)
    network = Network(CLUSTERS["dgx-h100"].model_copy(update={"nodes": nodes[-1]}))
    kinds = {"all-reduce": "all_reduce", "all-gather, reduce-scatter": "all_gather", "all-to-all": "all_to_all"}
    series = []
    for (name, kind), colour in zip(kinds.items(), COLOURS, strict=False):
        costs = (network.collective(kind, range(8 * n), 256e6) for n in nodes)
        series.append(Series(name, tuple(c.bus_bandwidth_bytes_per_s / 1e9 for c in costs), colour))
    return Chart("Bus bandwidth by number of nodes, 256 MB, DGX H100",
                 "Closed forms of topology/collectives.py alone; bus bandwidth as nccl-tests defines it.",
                 "nodes of 8 GPUs", "GB/s", tuple(map(str, nodes)), tuple(series), "lines")


FIGURES: dict[str, Callable[[], Chart]] = {
    "tp_throughput": tensor_parallel,
    "pp_throughput": pipeline_parallel,
    "memory_tp": memory_tensor_parallel,
    "memory_cp": memory_context_parallel,
    "memory_zero": memory_zero,
    "bus_bandwidth": bus_bandwidth,
}
