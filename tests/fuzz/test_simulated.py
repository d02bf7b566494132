"""Small scenarios with keys changed at random: whatever loads is simulated, or refused with one InputError."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.fuzz.breaking import break_tree
from tests.fuzz.test_loaders import COUNT, guard

MODEL = {
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 100,
    "mlp": "swiglu",
    "positions": "rope",
    "mtp_layers": 0,
}
MOE = {
    "experts": 4,
    "top_k": 2,
    "ffn": 64,
    "imbalance": {"seed": 0, "zipf": 1.0},
    "capacity_factor": 1.25,
    "shared_experts": 1,
    "dense_layers": 1,
}
TRAINING = {
    "seq_len": 32,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "precision": "bf16",
    "recompute": "none",
    "optimizer": "adamw",
    "attention": "fused",
    "framework": "eager",
    "activation_offload": False,
    "lora": None,
}
PARALLELISM = {
    "dp": 2,
    "tp": 1,
    "pp": 2,
    "cp": 1,
    "zero": 1,
    "sp": False,
    "schedule": "1f1b",
    "virtual_stages": None,
    "dp_sync": "bucketed",
    "layers_per_stage": None,
    "mtp_stage": None,
    "cp_method": "ring",
    "cp_split": "zigzag",
    "tp_overlap": "none",
    "bucket_bytes": "1MiB",
    "p2p_overlap": None,
    "ep_overlap": False,
    "shard_size": None,
    "reshard_after_forward": True,
    "accumulate_unsharded": False,
}
FAULTS = {
    "stragglers": [{"rank": 1, "compute_scale": 1.3}],
    "jitter": {"sigma": 0.1, "seed": 1},
    "links": [{"between": ["node0", "node0"], "bandwidth_scale": 0.5}],
}
PROCESSES = {
    "thermal_throttling": [{"ranks": [1], "at_s": 1e-4, "scale": 0.5, "for_s": None}],
    "link_flap": [{"ranks": [0], "at_s": 1e-4, "down_s": 1e-3, "link": "nic", "up_s": 1e-3, "times": 2}],
    "storage_read": [{"n_bytes": 1e6, "bytes_per_s": 1e9, "ranks": None}],
}
SERVING = {
    "requests": {"prompt_len": 10, "output_len": 5, "count": 4, "rate_per_s": 2.0},
    "batching": "continuous",
    "max_running_requests": 4,
    "max_batch_tokens": 64,
    "preemption": "recompute",
    "prefix_cache": "none",
    "quantization": "none",
    "kv_cache": {"layout": "paged", "block_tokens": 4, "dtype": "fp8", "memory_fraction": 0.5},
}
H100 = {"preset": "dgx-h100", "nodes": 2, "inter_node": {"nics_per_node": 4, "oversubscription": 2.0}}
BASES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "training": TRAINING, "parallelism": PARALLELISM, "cluster": H100, "faults": FAULTS},
    {
        "model": MODEL,
        "training": TRAINING,
        "parallelism": PARALLELISM,
        "cluster": H100,
        "processes": PROCESSES,
        "engine": {"collectives": "messages"},
    },
    {
        "model": {**MODEL, "moe": MOE},
        "training": TRAINING,
        "parallelism": {**PARALLELISM, "ep": 2, "expert_tp": 1},
        "cluster": H100,
    },
    {
        "model": {**MODEL, "vocab": 50257},
        "training": TRAINING,
        "cluster": "dgx-h100",
        "parallelism": {"tp": 1},
        "distillation": {"teacher": "gpt2", "mode": "logits", "teacher_parallelism": {"tp": 1}, "placement": "same"},
    },
    {"model": MODEL, "inference": SERVING, "cluster": "dgx-h100", "parallelism": {"tp": 1, "pp": 1}},
)
CHOICES: dict[str, list[Any]] = {
    "schedule": [
        "naive",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "zb_search",
        "dualpipe",
        "dualpipe_v",
    ],
    "dp_sync": ["after_backward", "per_parameter", "bucketed"],
    "cp_method": ["ring", "all_gather", "all_to_all"],
    "cp_split": ["contiguous", "zigzag", "striped"],
    "tp_overlap": ["none", "wgrad", "full"],
    "recompute": ["none", "selective", "selective_op", "full", {"mode": "full", "every": 2}],
    "zero": [0, 1, 2, 3],
    "precision": ["fp32", "bf16", "fp8", "nvfp4"],
    "attention": ["fused", "unfused"],
    "mode": ["logits", "sequence"],
    "layers_per_stage": [[1, 3], [0, 4], [1, 1, 1, 1], [0, 2, 2, 0], [2, 2, 0, 0], None],
    "mtp_stage": [1, 2, 3, None],
    "mtp_layers": [1, 2],
    "prefix_cache": ["none", "gpu", "cpu"],
    "batching": ["continuous", "static"],
    "layout": ["paged", "contiguous"],
    "framework": ["megatron", "compiled"],
    "quantization": ["none", "int8_weight_only", "llm_int8", "fp8", "int4_weight_only"],
    "optimizer": ["sgd"],
    "lora": [{"rank": 4}, {"rank": 8, "targets": ["qkv"]}, None],
    "preemption": ["recompute", "swap"],
    "placement": ["same", "other"],
}


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(value)


def changed(base: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """A copy with a few keys set to other legal values and other small numbers."""
    tree = deepcopy(base)
    for _ in range(dice.choice([1, 2, 3, 4, 6])):
        holder, key = dice.choice(list(places(tree)))
        value = holder[key]
        if key in CHOICES:
            holder[key] = deepcopy(dice.choice(CHOICES[key]))
        elif isinstance(value, bool) or value is None:
            holder[key] = dice.choice([True, False, None, 1, 2])
        elif isinstance(value, int):
            holder[key] = dice.choice([0, 1, 2, 3, 4, 6, 8, 16])
        elif isinstance(value, float):
            holder[key] = value * dice.choice([0.1, 2, 10])
    return tree


def small(s: Scenario) -> bool:
    """Whether simulating it takes a moment."""
    if s.parallelism.ranks > 64 or s.model.layers > 32:
        return False
    if s.training is not None:
        return s.micro_batches * s.parallelism.stages < 2000 and s.training.seq_len < 100_000
    assert s.inference is not None
    r = s.inference.requests
    return "count" in type(r).model_fields and r.count * (r.prompt_len + r.output_len) < 20_000  # type: ignore[union-attr]


@pytest.mark.parametrize("base", range(len(BASES)))
def test_what_loads_is_simulated_or_refused(base: int) -> None:
    simulated = 0
    for number in range(max(20, COUNT // 20)):
        dice = random.Random(f"{base} simulated {number}")
        data = (changed if dice.random() < 0.8 else break_tree)(BASES[base], dice) if number else BASES[base]
        try:
            with guard():
                scenario = parse_scenario(data)
                if small(scenario):
                    json.dumps((simulate if scenario.training else simulate_serving)(scenario).result, allow_nan=False)
                    simulated += 1
        except InputError:
            pass
        except BaseException:
            print(json.dumps(data))
            raise
    assert simulated > number // 10


def test_more_stages_than_layers() -> None:
    """Stages without parameters have no gradients to clip."""
    data = {**BASES[0], "parallelism": {"pp": 16}, "faults": None}
    assert simulate(parse_scenario(data)).step_time_s > 0
