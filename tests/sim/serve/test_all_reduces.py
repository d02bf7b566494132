"""All-reduces in engines' own kernels: which messages they take, and whose measurements price them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.program import Comm, Phase
from sim.inputs.scenario import parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.faults import replica_costs
from sim.variants.engines import ENGINES
from sim.variants.engines.own_all_reduce import KIB, MIB


def costs(
    engine: str, tp: int, cluster: Any = "dgx-h100", faults: Any = None, model: str = "llama3-70b"
) -> IterationCosts:
    section = {"engine": engine, "precision": "fp16", "requests": {"prompt_len": 8, "output_len": 8, "count": 1}}
    data = {"model": model, "cluster": cluster, "parallelism": {"tp": tp}, "inference": section}
    s = parse_scenario({**data, "faults": faults})
    return replica_costs(iteration_costs(s, load_profile(s.calibration)), s, 0)


def all_reduce(priced: IterationCosts, size_bytes: float) -> tuple[float, float]:
    """Seconds of an all-reduce as the engine does it, and as NCCL does."""
    prices = priced.prices
    comm = Comm("sum", "all_reduce", "tp", size_bytes, Phase.FORWARD)
    return prices.priced((comm,)).seconds, prices.pricing.comm(comm, 0).seconds


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_measured_message_takes_what_was_measured(tp: int) -> None:
    """Of the nearest release: vLLM 0.14's kernels were measured, older ones take them, too."""
    tables = {(t.source, t.ranks): t for t in load_profile("h100-sxm").collectives}
    for engine, source in (("vllm-v1", "vLLM 0.14.0"), ("vllm-0.14", "vLLM 0.14.0"), ("vllm-0.21", "vLLM 0.19.0")):
        table = tables[source, tp]
        size, seconds = next(p for p in zip(table.bytes.tolist(), table.seconds.tolist(), strict=True) if p[0] >= 8192)
        own, nccl = all_reduce(costs(engine, tp), size)
        assert own == pytest.approx(seconds, rel=1e-12)
        assert own < nccl


@pytest.mark.parametrize(
    ("engine", "tp", "below"),
    [
        ("vllm-v1", 8, 8 * MIB),
        ("vllm-0.14", 8, 256 * KIB),
        ("vllm-0.29", 8, 512 * KIB),
        ("sglang", 8, 8 * MIB),
        ("trtllm-1.0", 8, 500e3),
    ],
)
def test_larger_messages_are_nccls(engine: str, tp: int, below: float) -> None:
    priced = costs(engine, tp, model="qwen3-32b")
    small, large = (all_reduce(priced, size) for size in (below - 16, below))
    assert small[0] != small[1]
    assert large[0] == large[1]


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-b200"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_kernel_whose_sizes_were_chosen_by_comparison_is_not_slower_than_nccls(cluster: str, tp: int) -> None:
    priced = costs("vllm-0.14", tp, cluster)
    for size in (8 * KIB, 512 * KIB, 2 * MIB - 16):
        own, nccl = all_reduce(priced, size)
        assert own <= nccl


@pytest.mark.parametrize("engine", ["bundled", "vllm-0.2", "trtllm"])
def test_engines_without_kernels_of_their_own_have_nccls(engine: str) -> None:
    own, nccl = all_reduce(costs(engine, 8), 64 * KIB)
    assert own == pytest.approx(nccl + ENGINES[engine].host_on("hopper").collective_s, rel=1e-12)


@pytest.mark.parametrize(
    ("tp", "cluster"),
    [
        (16, "dgx-h100"),  # two nodes
        (2, {"preset": "dgx-h100", "intra_node": {"kind": "pcie"}}),
        (4, "dgx-v100"),  # no measured kernel
    ],
)
def test_ranks_that_do_not_read_each_other_over_nvlink_have_nccls(tp: int, cluster: Any) -> None:
    own, nccl = all_reduce(costs("vllm-v1", tp, cluster), 64 * KIB)
    assert own == nccl


def test_a_slow_link_slows_them_as_it_slows_nccls() -> None:
    faults = {"links": [{"between": ["node0", "node0"], "bandwidth_scale": 0.1}]}
    size = 4 * MIB
    (own, nccl), (slow, slow_nccl) = (all_reduce(costs("vllm-v1", 4, faults=f), size) for f in (None, faults))
    assert slow > 2 * own
    assert slow / own == pytest.approx(slow_nccl / nccl, rel=1e-9)


@pytest.mark.parametrize(
    ("engine", "gpu", "below"),
    [
        ("vllm-0.14", "b300-sxm", MIB),
        ("vllm-0.19", "b300-sxm", 4 * MIB),
        ("vllm-0.29", "b300-sxm", 64 * MIB),
        ("vllm-0.33", "b300-sxm", 128 * MIB),
        ("vllm-0.29", "b200-sxm", MIB),
        ("vllm-0.33", "b200-sxm", 128 * MIB),
        ("vllm-0.33", "h100-sxm", 512 * KIB),
    ],
)
def test_eight_ranks_reduce_larger_messages_themselves_by_release(engine: str, gpu: str, below: float) -> None:
    """vLLM's all_reduce_utils.py: CUSTOM_ALL_REDUCE_MAX_SIZES, FI_MNNVL_ALLREDUCE_MAX_SIZE_MB."""
    own = costs(engine, 8, {"gpu": gpu, "gpus_per_node": 8}).prices.own
    assert own is not None
    assert own.own.below[8] == below


@pytest.mark.parametrize(
    ("engine", "cluster", "own"),
    [
        ("trtllm-1.0", "dgx-h100", True),
        ("trtllm-1.1", "dgx-h100", False),
        ("trtllm-1.2", "dgx-h100", True),
        ("trtllm-1.1", "dgx-b200", True),
    ],
)
def test_llamas_layers_had_nccls_before_blackwell(engine: str, cluster: str, own: bool) -> None:
    priced = costs(engine, 8, cluster)
    found, nccl = all_reduce(priced, 64 * KIB)
    assert (found < nccl) is own
    assert (priced.dims.norm_in_sum_bytes > 0) is own


@pytest.mark.parametrize(("family", "own"), [("llama", False), ("mistral", True)])
def test_mistrals_layers_are_not_llamas(tmp_path: Path, family: str, own: bool) -> None:
    """TensorRT-LLM's modeling_mistral.py: MistralDecoderLayer, which norms by itself and takes no strategy."""
    sizes = {"hidden_size": 12288, "num_attention_heads": 96, "num_key_value_heads": 8, "num_hidden_layers": 2}
    config = {"model_type": family, "vocab_size": 32768, "intermediate_size": 28672, "sliding_window": None, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 131072, **config}))
    found, nccl = all_reduce(costs("trtllm-1.1", 8, model=str(tmp_path / "config.json")), 64 * KIB)
    assert (found < nccl) is own
    priced = costs("trtllm-1.2", 8, model=str(tmp_path / "config.json"))
    assert (priced.dims.norm_in_sum_bytes > 0) is not own


def test_other_models_layers_have_their_engines_kernels() -> None:
    found, nccl = all_reduce(costs("trtllm-1.1", 8, model="qwen3-32b"), 64 * KIB)
    assert found < nccl


def test_tables_of_trtllm_have_larger_messages_on_blackwell() -> None:
    """64 tokens of 7,168: of eight ranks NCCL's on Hopper only where they are 1 MiB or more."""
    for cluster, most in (("dgx-h100", MIB), ("dgx-b200", 8 * MIB)):
        assert costs("trtllm-1.3", 8, cluster).dims.norm_in_sum_bytes == most


@pytest.mark.parametrize(
    ("engine", "quantization", "below"), [("trtllm-1.0", "none", 500e3), ("trtllm-1.0", "nvfp4", 8e6)]
)
def test_sums_that_write_few_bits_norm_up_to_the_workspace(engine: str, quantization: str, below: float) -> None:
    """allreduceOp.cpp of 1.0, selectImplementation: MIN_LATENCY for what quantizes, whatever its size."""
    section = {"engine": engine, "quantization": quantization, "requests": {"prompt_len": 8, "output_len": 8}}
    data = {"model": "llama3-70b", "cluster": "dgx-b200", "parallelism": {"tp": 8}, "inference": section}
    s = parse_scenario(data)
    assert iteration_costs(s, load_profile(s.calibration)).dims.norm_in_sum_bytes == below
