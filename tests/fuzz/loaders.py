"""Every loader of files that users give, with valid documents to start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sim.commands.validate import validate_tables
from sim.core.program import Compute, Phase
from sim.inputs.measured_run import load_measured
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.serve.requests import read_trace
from sim.simulation import simulate
from sim.studies.measured import own_profile, parsed_scenario, to_timeline
from sim.traces.chakra_in import read_groups
from sim.traces.chakra_out import write_chakra
from sim.traces.reading import load as load_traces
from sim.traces.replay import replay
from sim.validation.tables import read_table
from tests.sim.measured_runs import recorded
from tests.sim.measured_runs import scenario as small_scenario
from tests.sim.traces import programs
from topology.presets import GPUS

ROOT = Path(__file__).parents[2]


def _scenario(path: Path) -> None:
    load_scenario(path)


def _profile(path: Path) -> None:
    costs = Costs(load_profile(path), GPUS["h100-sxm"])
    for kind, shape in (("gemm", (1, 64, 64, 64)), ("attention_forward", (1, 8, 8, 128, 128, 64, 64, 1))):
        costs.compute(Compute("a", kind, shape, "bf16", 1e6, 1e4, Phase.FORWARD))
    costs.collective("all_reduce", 4, 1e6)


def _measured(path: Path) -> None:
    run = load_measured(path)
    scenario = parsed_scenario(run, str(path), {"preset": "cpu-host"})
    to_timeline(run.actions, scenario.parallelism)
    own_profile(run, str(path))


def _table(path: Path) -> None:
    validate_tables([read_table(path)], jobs=1)


def _traces(path: Path) -> None:
    replay(load_traces([path]))


def _groups(path: Path) -> None:
    read_groups(path)


def _requests(path: Path) -> None:
    read_trace(path)


def _huggingface(path: Path) -> None:
    training = {"seq_len": 64, "global_batch_size": 1}
    parse_scenario({"model": str(path), "training": training, "cluster": "dgx-h100"})


class Loader(NamedTuple):
    """`use` reads a file and does with it what commands do first; `suffix` of its files; `json`: they are JSON."""

    use: Callable[[Path], None]
    suffix: str
    json: bool


LOADERS = {
    "scenario": Loader(_scenario, ".yaml", False),
    "scenario_json": Loader(_scenario, ".json", True),
    "profile": Loader(_profile, ".json", True),
    "measured": Loader(_measured, ".json", True),
    "table": Loader(_table, ".json", True),
    "kineto": Loader(_traces, ".json", True),
    "chakra": Loader(_traces, ".et", False),
    "groups": Loader(_groups, ".json", True),
    "requests": Loader(_requests, ".csv", False),
    "huggingface": Loader(_huggingface, ".json", True),
}


@cache
def seeds(name: str) -> tuple[bytes, ...]:
    """Valid files of a loader."""
    return tuple(x if isinstance(x, bytes) else json.dumps(x).encode() for x in _SEEDS[name]())


def _scenario_files() -> list[Any]:
    names = ("dualpipe_deepseek_v3", "moe_mixtral", "straggler_tp", "serve_llama8b", "cp_ring_131k")
    return [(ROOT / "scenarios" / f"{n}.yaml").read_bytes() for n in names]


def _scenario_trees() -> list[Any]:
    moe = {"experts": 8, "top_k": 2, "ffn": 256, "imbalance": {"seed": 0, "zipf": 1.0}}
    return [
        {
            "model": {
                "layers": 8,
                "hidden": 256,
                "heads": 8,
                "kv_heads": 4,
                "vocab": 1000,
                "moe": moe,
                "mlp": "swiglu",
            },
            "training": {"seq_len": 128, "global_batch_size": 32, "recompute": {"mode": "full", "layers": 2}},
            "parallelism": {"dp": 2, "pp": 2, "ep": 2, "layers_per_stage": [4, 4], "bucket_bytes": "25MiB"},
            "cluster": {"preset": "dgx-h100", "nodes": 2, "inter_node": {"nics_per_node": 4}},
            "faults": {
                "stragglers": [{"rank": 3}],
                "links": [{"between": ["node0", "node1"]}],
                "jitter": {"sigma": 0.1},
                "failures": {"kinds": [{"name": "x", "mtbf_s_per_gpu": 1e7}], "spare_nodes": 2},
            },
            "processes": {
                "link_flap": [{"ranks": [0, 1], "at_s": 0.1, "down_s": 0.01}],
                "background_traffic": [{"source": 0, "target": 1, "n_bytes": 1e6}],
                "checkpoint": [{"n_bytes": 1e6}],
            },
            "engine": {"collectives": "messages"},
        },
        {
            "model": "llama3-8b",
            "cluster": "dgx-a100",
            "inference": {
                "requests": {"prompt_len": 10, "output_len": 5, "rate_per_s": 2.0},
                "kv_cache": {"dtype": "fp8"},
            },
        },
        {
            "model": "gpt2",
            "training": {"seq_len": 64, "global_batch_size": 2},
            "cluster": "dgx-h100",
            "distillation": {"teacher": "gpt2-large", "teacher_parallelism": {"tp": 1}},
        },
    ]


def _profiles() -> list[Any]:
    full = json.loads((ROOT / "sim/presets/profiles/h100-sxm.json").read_text())
    few = {k: v[:: max(1, len(v) // 12)] if isinstance(v, list) else v for k, v in full.items()}
    blocks = [{"key": "layer", "phase": "forward", "run": 0, "seconds": 1e-3, "spread": 0.1}]
    return [few | {"blocks": blocks}]


def _runs() -> list[Any]:
    return [recorded(small_scenario())[0]]


def _tables() -> list[Any]:
    source = {"citation": "c", "where": "w", "license": "l"}
    cluster = {"cluster": {"preset": "dgx-h100", "nodes": 4}, "calibration": "h100-sxm"}
    kernels = [
        {
            "id": "a",
            "op": "gemm",
            "m": 512,
            "n": 512,
            "k": 512,
            "batch": 1,
            "dtype": "bf16",
            "measured": {"seconds": 1e-5},
        },
        {
            "id": "b",
            "op": "attention_forward",
            "batch": 1,
            "heads": 8,
            "kv_heads": 8,
            "head_dim": 128,
            "seq_len": 1024,
            "causal": True,
            "impl": "flash",
            "dtype": "bf16",
            "measured": {"seconds": 1e-4},
        },
        {
            "id": "c",
            "op": "rms_norm",
            "provider": "liger",
            "m": 1024,
            "n": 4096,
            "dtype": "bf16",
            "measured": {"seconds": 1e-5},
        },
    ]
    collectives = [
        {
            "id": "d",
            "op": "all_reduce",
            "bytes": 1 << 20,
            "ranks": 16,
            "nodes": 2,
            "dtype": "fp32",
            "measured": {"seconds": 1e-3},
        }
    ]
    shared = {"format": "measurements/1", "name": "t", "title": "T", "source": source, "scenario": cluster}
    return [shared | {"kind": "kernel", "rows": kernels}, shared | {"kind": "collective", "rows": collectives}]


def _kineto() -> list[Any]:
    items = [
        programs.Kernel(10, 5, 100, 7),
        programs.Wait(1, 7, 20),
        programs.Kernel(3, 5, 80, 20, True),
        programs.Sync(2, 4),
        programs.Kernel(3, 5, 9, 7),
    ]
    return programs.run([items, items])[1]


def _chakra() -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sim = simulate(small_scenario(dp=2, pp=1), expand=True)
        write_chakra(sim, Path(folder) / "step")
        return [p.read_bytes() for p in sorted(Path(folder).glob("*.et"))[:2]]


def _configs() -> list[Any]:
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
    }
    mixtral = llama | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 1000,
        "n_positions": 128,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
    }
    deepseek = llama | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    return [llama, mixtral, gpt2, deepseek]


_SEEDS: dict[str, Callable[[], list[Any]]] = {
    "scenario": _scenario_files,
    "scenario_json": _scenario_trees,
    "profile": _profiles,
    "measured": _runs,
    "table": _tables,
    "kineto": _kineto,
    "chakra": _chakra,
    "huggingface": _configs,
    "groups": lambda: [{"0": [0, 1], "1": [2, 3]}],
    "requests": lambda: [b"arrival_s,prompt_tokens,output_tokens,prefix_id\n0.0,10,5,a\n1.5,20,6,\n2,3,4,b\n"],
}
