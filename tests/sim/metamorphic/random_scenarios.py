"""Random legal scenarios of training and of serving, and relations that hold for each of them.

`python -m tests.sim.metamorphic.random_scenarios --seed N --count M` draws M scenarios and prints as YAML what is
left of each one that breaks its relation when all that does not matter is taken away.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from sim.core.errors import InputError
from sim.emit import TRAINERS, emit
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.models.balance import with_balanced_stages
from sim.schedules import FORMS
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.variants.engines import ENGINES
from sim.variants.frameworks.records import FRAMEWORKS
from tests.sim.convert.converting import converted
from tests.sim.convert.test_emitted import decides, sizes, trained
from tests.sim.inputs.test_keys_each_changed import CHANGES

Data = dict[str, Any]
DENSE = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 1000, "mlp": "swiglu", "norm": "rmsnorm"}
MODELS: tuple[Data, ...] = (
    {**DENSE, "positions": "rope"},
    {"layers": 5, "hidden": 128, "heads": 4, "vocab": 999, "tied_embeddings": True},
    {**DENSE, "positions": "rope", "window": 64, "attention_pattern": ["sliding", "full"], "dropout": 0.1},
    {**DENSE, "moe": {"experts": 8, "top_k": 2, "ffn": 128}},
    {**DENSE, "mtp_layers": 1, "moe": {"experts": 8, "top_k": 2, "ffn": 64, "shared_experts": 1, "dense_layers": 1}},
    {**DENSE, "moe": {"experts": 4, "top_k": 1, "ffn": 128, "capacity_factor": 1.25, "imbalance": {"zipf": 1.0}}},
    {
        **{key: value for key, value in DENSE.items() if key != "kv_heads"},
        "positions": "rope",
        "mla": {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        "moe": {"experts": 8, "top_k": 2, "ffn": 64, "imbalance": {"seed": 1, "zipf": 0.5}},
    },
)
CLUSTER_KEYS: dict[str, tuple[Any, ...]] = {
    "nodes": (2, 4),
    "gpus_per_node": (2, 4),
    "gpu": ({"power_limit_w": 400.0}, {"memory_bytes": 2e9}),
    "intra_node": ({"bandwidth_bytes_per_s": 1e11}, {"nvls_efficiency": 0.8}),
    "inter_node": ({"nics_per_node": 2}, {"oversubscription": 2.0}, {"nic_bandwidth_bytes_per_s": 5e9}),
    "nvlink_domain": (2, 16),
}
FAULT_KEYS: dict[str, tuple[Any, ...]] = {
    "stragglers": ([{"rank": 0, "compute_scale": 1.3}], [{"rank": 1, "compute_scale": 2.0}]),
    "jitter": ({"sigma": 0.1, "seed": 1},),
    "links": ([{"between": ["node0", "node0"], "bandwidth_scale": 0.5}],),
    "network_jitter": ({"sigma": 0.2},),
}
MODEL_KEYS: dict[str, tuple[Any, ...]] = {
    "layers": (1, 3),
    "vocab": (1, 7),
    "bias": (True, False),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "relu2"),
    "positions": ("none", "rope", "learned"),
    "qk_norm": (True,),
    "parallel_block": (True,),
    "checkpoint_quantization": ("fp8",),
    "mtp_layers": (1,),
}
TRAINING: dict[str, dict[str, tuple[Any, ...]]] = {
    "parallelism": {
        **CHANGES["parallelism"],
        "schedule": tuple(FORMS),
        "cp_method": ("all_gather", "all_to_all"),
        "cp_split": ("contiguous", "striped"),
        "tp_overlap": ("wgrad", "full"),
        "layers_per_stage": ("balanced",),
        "rank_order": ("tp-cp-pp-dp",),
    },
    "training": {**CHANGES["training"], "framework": tuple(FRAMEWORKS), "zero_grad": ("keep", "none")},
    "model": {**MODEL_KEYS, "dropout": (0.1,), "tied_embeddings": (True, False)},
    "cluster": CLUSTER_KEYS,
    "faults": FAULT_KEYS,
    "processes": {
        "thermal_throttling": ([{"ranks": [0], "at_s": 1e-4, "scale": 0.5, "for_s": None}],),
        "storage_read": ([{"n_bytes": 1e6, "bytes_per_s": 1e9, "ranks": None}],),
    },
    "engine": {"collectives": ("messages",)},
    "distillation": {"teacher": (MODELS[0],), "placement": ("same", "other"), "mode": ("logits", "sequence")},
}
SERVING: dict[str, dict[str, tuple[Any, ...]]] = {
    "parallelism": {
        "zero": (2,),
        "schedule": ("gpipe",),
        "sp": (True,),
        "ep_dispatch_dtype": ("fp8",),
        "dp_sync": ("after_backward",),
        "cp_split": ("contiguous",),
        "expert_tp": (2,),
    },
    "inference": {
        "engine": tuple(ENGINES),
        "batching": ("static",),
        "max_running_requests": (2, 4),
        "max_batch_tokens": (64, 2048),
        "preemption": ("swap", "recompute"),
        "prefix_cache": ("none", "gpu", "cpu"),
        "chunked_prefill": (True, False),
        "cuda_graphs": (True, False),
        "cuda_graph_max_size": (8,),
        "async_scheduling": (True, False),
        "quantization": ("fp8", "int8_weight_only", "int4_weight_only", "mxfp4_experts"),
        "kv_cache": ({"dtype": "fp8"}, {"memory_fraction": 0.5}, {"memory_bytes": 1e7}, {"block_tokens": 8}),
        "router": ("round_robin", "random", "least_loaded"),
        "all2all_backend": ("deepep_low_latency",),
        "dense_over_replicas": (True,),
        "stream_interval": (4,),
        "eplb": ({"redundant_experts": 0},),
        "decode_attention": ("flash2",),
        "speculative": ({"tokens": 2, "acceptance": 0.5, "draft": {**MODELS[0], "layers": 1}},),
        "lora": ({"adapters": 2, "rank": 8},),
        "disaggregated": ({"prefill": {}, "decode": {}},),
        "batch_wait": ({"iterations": 2, "tokens_ratio": 0.5}, {"iterations": 0, "tokens_ratio": 0.5}),
    },
    "model": MODEL_KEYS,
    "cluster": CLUSTER_KEYS,
    "faults": {"stragglers": FAULT_KEYS["stragglers"]},
}
LARGEST_RANKS = 16


def draw(dice: random.Random) -> Data:
    """A legal scenario: a model on a layout, and some keys set to other values, in vain or not."""
    serves = dice.random() < 0.25
    while True:
        data = _serving(dice) if serves else _training(dice)
        if not _loads(data):
            continue
        sections = SERVING if serves else TRAINING
        for _ in range(dice.choice([0, 3, 6, 12])):
            (section,) = dice.choices([*sections], [math.sqrt(len(keys)) for keys in sections.values()])
            key = dice.choice([*sections[section]])
            more = merge(data, {section: {key: deepcopy(dice.choice(sections[section][key]))}})
            data = more if _loads(more) else data
        return data


def _training(dice: random.Random) -> Data:
    one, model = dice.choice, dice.choice(MODELS)
    layout = {key: one([1, 1, 2, 4]) for key in ("dp", "tp", "pp", "cp")}
    if "moe" in model:
        layout["ep"] = one([1, 2, 4])
    layout |= {"zero": one([0, 1, 2, 3]), "sp": one([True, False])}
    micro_batches = one([1, 2, 3]) * (2 * layout["pp"] if layout["pp"] > 1 else 1)
    training = {
        "seq_len": one([128, 128, 512, 1]),
        "global_batch_size": layout["dp"] * micro_batches,
        "precision": one(["bf16", "bf16", "fp8", "fp32"]),
        "recompute": one(["none", "none", "full", "selective"]),
        "framework": one([*FRAMEWORKS]),
    }
    return {
        "model": deepcopy(model),
        "training": training,
        "parallelism": {key: value for key, value in layout.items() if value not in (1, False) or key == "zero"},
        "cluster": {"preset": one(["dgx-a100", "dgx-h100", "dgx-h100", "dgx-b200", "gb200-nvl72", "mi300x-node"])},
    }


def _serving(dice: random.Random) -> Data:
    one = dice.choice
    requests = {"prompt_len": one([10, 300]), "output_len": one([2, 20]), "count": one([1, 4, 12])}
    if one([True, False]):
        requests["rate_per_s"] = one([5.0, 500.0])
    return {
        "model": {key: value for key, value in deepcopy(one(MODELS)).items() if key not in ("dropout", "mtp_layers")},
        "inference": {"requests": requests},
        "parallelism": {"tp": one([1, 2]), "pp": one([1, 1, 2]), "dp": one([1, 1, 2])},
        "cluster": {"preset": one(["dgx-a100", "dgx-h100", "dgx-b200"])},
    }


def _loads(data: Data) -> bool:
    try:
        return parse_scenario(data).parallelism.ranks <= LARGEST_RANKS
    except InputError:
        return False


def result_of(data: Data, engine: Any = None) -> Data:
    """The whole result, by the quicker engine that can unless one is named; an InputError where it is refused."""
    scenario = parse_scenario(data)
    if scenario.training is None:
        return simulate_serving(scenario, engine=engine or "auto").result
    return simulate(scenario, engine=engine or ("static" if scenario.processes is None else "auto")).result


def figures(result: Data) -> Data:
    """What a result says but for the scenario as it was written, and which engine ran how long."""
    unlike = ("scenario", "warnings", "engine", "wall_s")
    return {key: value for key, value in json.loads(json.dumps(result, allow_nan=False)).items() if key not in unlike}


def differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The places where two results differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differing(one[key], other[key], f"{path}.{key}" if path else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(*pair, f"{path}[{number}]")
    elif one != other:
        yield f"{path}: {one} and {other}"


def few(lines: Iterator[str]) -> str:
    return "; ".join(line for line, _ in zip(lines, range(4), strict=False))


NAMED = re.compile(r"^([\w.]+): .*of no effect\b(?! on (?:layernorm|attn_norm|mlp_norm|collectives|times))")


def without(data: Data, path: str) -> Data | None:
    """The scenario without a key; None where it does not have it."""
    less = deepcopy(data)
    *sections, key = path.split(".")
    holder: Any = less
    for section in sections:
        holder = holder.get(section) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or key not in holder:
        return None
    del holder[key]
    return less


def of_no_effect(data: Data, dice: random.Random) -> str:
    """A key that a warning calls of no effect may be left out: no figure changes by a bit."""
    named = [found[1] for text in parse_scenario(data).warnings if (found := NAMED.match(text))]
    less = {key: left for key in named if (left := without(data, key)) is not None and _loads(left)}
    if not less:
        return ""
    whole = figures(result_of(data))
    for key, left in less.items():
        if wrong := few(differing(whole, figures(result_of(left)))):
            return f"{key} is called of no effect; with it and without it: {wrong}"
    return ""


def _times(cluster: Data, section: str, key: str, factor: float) -> Data:
    found = cluster[section][key]
    new = {k: v * factor for k, v in found.items()} if isinstance(found, dict) else found * factor
    return {"cluster": {section: {key: new}}}


def better_is_never_slower(data: Data, dice: random.Random) -> str:
    """More bandwidth, FLOPs, memory or power, or weaker stragglers: no longer step, and what fits still fits."""
    base = result_of(data)
    cluster = base["scenario"]["cluster"]
    ways = [
        ("inter_node", "nic_bandwidth_bytes_per_s", 2.0),
        ("intra_node", "bandwidth_bytes_per_s", 2.0),
        ("inter_node", "latency_s", 0.5),
        ("gpu", "peak_flops_per_s", 2.0),
        ("gpu", "memory_bandwidth_bytes_per_s", 2.0),
        ("gpu", "memory_bytes", 2.0),
        ("gpu", "power_limit_w", 1.25),
    ]
    changes = {f"{factor:g} times cluster.{section}.{key}": _times(cluster, section, key, factor)
               for section, key, factor in ways if cluster[section].get(key)}  # fmt: skip
    if stragglers := (base["scenario"].get("faults") or {}).get("stragglers"):
        weaker = [{**one, "compute_scale": (1.0 + one["compute_scale"]) / 2} for one in stragglers]
        changes["weaker stragglers"] = {"faults": {"stragglers": weaker}}
        changes["no stragglers"] = {"faults": {"stragglers": []}}
    name = dice.choice(list(changes))
    try:
        better = result_of(merge(data, changes[name]))
    except InputError as error:
        return f"with {name} it is refused: {error}"
    took = "step_time_s" if "step_time_s" in base else "duration_s"
    # Who arrives earlier may be served in other company; who sends earlier may meet another message on a link, or share
    # cores with a kernel that loses more by it.
    room = 1.003 if took == "step_time_s" else 1.02
    if better[took] > base[took] * room:
        return f"with {name} {took} is {better[took]}, not {base[took]}"
    return f"with {name} it does not fit any more" if base["fits_in_memory"] > better["fits_in_memory"] else ""


def parts_are_the_whole(data: Data, dice: random.Random) -> str:
    """Seconds of each rank and of the critical path are the step's, shares of sources are 1, bytes lie within peaks."""
    result = result_of(data)
    json.dumps(result, allow_nan=False)
    shares = sum(result["provenance"]["shares"].values())
    checks = {"shares of provenance": math.isclose(shares, 1.0, rel_tol=1e-9)}
    for row in result["memory"]:
        always = sum(row.get(key, 0.0) for key in ("parameters", "gradients", "optimizer"))
        most = sum(row.get(key, 0.0) for key in ("activations", "buffers", "kv_cache", "graphs"))
        checks[f"memory of ranks {row['ranks']}"] = (
            always * (1 - 1e-9) <= row["peak"] <= (always + most) * (1 + 1e-9) if "activations" in row else True
        )
    if "step_time_s" in result:
        step_s = result["step_time_s"]
        for rank in result["ranks"]:
            parts = [rank[k] for k in ("compute_s", "exposed_comm_s", "bubble_s", "waiting_s")]
            own_s = result["distillation"]["student_step_s"] if "distillation" in result else step_s
            checks[f"seconds of rank {rank['rank']}: {parts}, {own_s}"] = min(parts) >= 0 and math.isclose(
                sum(parts), own_s, rel_tol=1e-6
            )
        checks["critical path"] = math.isclose(sum(result["critical_path"].values()), step_s, rel_tol=1e-6)
        low_s, high_s = result["step_time_interval_s"]
        checks["interval"] = low_s <= step_s <= high_s
        checks["utilization"] = 0.0 <= result["mfu"] <= result["hfu"] + 1e-12 <= 1.0 + 1e-9
        checks["bubble"] = 0.0 <= result["bubble_fraction"] <= 1.0
    else:
        requests = result["scenario"]["inference"]["requests"]
        sent = result["requests"] + result["requests_refused"]
        checks[f"requests: {sent}"] = sent == requests["count"]
    return "; ".join(name for name, holds in checks.items() if not holds)


def emitted_is_converted_back(data: Data, dice: random.Random) -> str:
    """What `--emit` writes for a trainer that can do this is the same scenario to `stepsim convert`."""
    trainer = dice.choice(list(TRAINERS))
    data = {**data, "cluster": data["cluster"]["preset"]}
    try:
        before = with_balanced_stages(parse_scenario(data))
        text = emit(before, trainer)
    except InputError:
        return ""
    suffix = {"megatron": "sh", "torchtitan": "toml", "torchtitan-python": "py"}[trainer]
    options = ("--cluster", before.cluster.name, "--gpus", str(before.parallelism.ranks))
    with tempfile.TemporaryDirectory() as folder:
        after = parse_scenario(converted(Path(folder), f"x.{suffix}", text, *options)[0])
    named = {found[1].rpartition(".")[2] for text in before.warnings if (found := NAMED.match(text))}
    found = [*differing(sizes(before), sizes(after))]
    found += [line for line in differing(trained(before), trained(after)) if line.split(":")[0] not in named]
    found += [
        f"parallelism.{key}: {value} and {getattr(after.parallelism, key)}"
        for key, value in before.parallelism.model_dump().items()
        if getattr(after.parallelism, key) != value and decides(before, key)
    ]
    return f"written for {trainer} and read back: {few(iter(found))}" if found else ""


def engines_agree(data: Data, dice: random.Random) -> str:
    """SimPy's event queue and one pass over the tasks give the same figures; so does the scenario that a result has."""
    if "inference" in data:
        data = merge(data, {"inference": {"router": "round_robin"}})
        if not _loads(data):
            return ""
    try:
        static = result_of(data, "static")
    except InputError:  # serving whose replicas affect each other
        return ""
    again = json.loads(json.dumps(static["scenario"]))
    return few(differing(figures(static), figures(result_of(again, "simpy"))))


RELATIONS: tuple[Callable[[Data, random.Random], str], ...] = (
    of_no_effect,
    better_is_never_slower,
    parts_are_the_whole,
    engines_agree,
    emitted_is_converted_back,
)
Relation = Callable[[Data, random.Random], str]


def drawn(seed: int) -> tuple[Data, Relation]:
    """The scenario of this number, and the relation that is asked of it."""
    dice = random.Random(seed)
    data = draw(dice)
    named = any(NAMED.match(text) for text in parse_scenario(data).warnings)
    relations = [*RELATIONS[: -1 if "inference" in data else None]]
    return data, of_no_effect if named and dice.random() < 0.5 else dice.choice(relations)


def broken(seed: int) -> str:
    """What is wrong with the scenario of this number, with the smallest YAML that shows it; "" where nothing is."""
    data, relation = drawn(seed)
    if not _wrong(relation, data, seed):
        return ""
    data = smallest(data, lambda less: bool(_wrong(relation, less, seed)))
    return f"{relation.__name__}, seed {seed}: {_wrong(relation, data, seed)}\n{yaml.safe_dump(data, sort_keys=False)}"


def _wrong(relation: Relation, data: Data, seed: int) -> str:
    """What the relation says; a crash is wrong, a scenario that is refused while it is simulated is not."""
    try:
        return relation(data, random.Random(seed))
    except InputError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def smallest(data: Data, fails: Callable[[Data], bool]) -> Data:
    """What is left when keys are taken away for as long as the scenario still fails."""
    shorter = True
    while shorter:
        shorter = False
        for path in list(_paths(data)):
            less = without(data, path)
            if less is not None and _loads(less) and fails(less):
                data, shorter = less, True
    return data


def _paths(data: Data, above: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield above + key
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{key}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    wrong = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        if text := broken(seed):
            print(text, flush=True)
            wrong += 1
    print(f"{wrong} of {asked.count} scenarios break a relation")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
