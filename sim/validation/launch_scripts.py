"""What a trainer's launch scripts set for a model and a GPU, release by release, and a table of its steps leaves out.

A published table names the trainer, the release, the model's sizes and the layout; recomputed modules, captured graphs
and hidden exchanges are in the launch script alone. Each record holds these for one model of one trainer, with the
file that says so. Keys that a row states itself stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sim.inputs.model_input import load_model, model_presets
from sim.inputs.overrides import merge
from sim.inputs.parallelism import form_of
from sim.schedules import FORMS
from sim.validation.expert_scripts import expert_scripts
from sim.validation.script_records import (
    BLACKWELL,
    BRIDGE,
    DEEPSEEK_V3,
    GPT3_5B,
    GPT3_20B,
    GPT3_175B,
    GPT_OSS_120B,
    H100,
    LLAMA2_13B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA31_405B,
    QWEN3_30B,
    QWEN3_235B,
    WHOLE_GRAPH,
    LaunchScript,
    Sizes,
    graphs_of,
)
from sim.variants.optimizers import REMAINDERS
from topology.presets import CLUSTERS

# Layers whose activations wait on the host, by GPU and precision. The 405B's on GB200 are those of autumn 2025, when
# tables have it in this layout; later they were 95 and 92.
OFFLOADED_LAYERS = {
    LLAMA3_70B: {
        ("gb200", "bf16"): 20,
        ("gb200", "fp8"): 40,
        ("gb300", "bf16"): 30,
        ("gb300", "fp8"): 20,
        ("b200-sxm", "fp8"): 5,
        ("vr200", "bf16"): 30,
    },
    LLAMA31_405B: {
        ("gb200", "fp8"): 80,
        ("gb300", "bf16"): 40,
        ("b300-sxm", "bf16"): 40,
        ("vr200", "bf16"): 40,
        ("gb300", "fp8"): 10,
    },
}


def _parameters() -> Iterator[LaunchScript]:
    """What recipes of all releases say of parameters, their gradients and the optimizer's states."""
    kept = {"training": {"fp8_param_gather": True}}
    in_8_bits = partial(LaunchScript, BRIDGE, changes=kept, source="training/mixed_precision.py: fp8_param_gather")
    remainders, bf16 = {"training": {"master_weights": REMAINDERS}}, ("bf16",)
    # Until recipes of 0.6 run by themselves: use_precision_aware_optimizer (before 26.02 in utils/helpers.py).
    aware = partial(LaunchScript, BRIDGE, changes=remainders, source="utils/overrides.py: set_post_overrides")
    for model in (DEEPSEEK_V3, QWEN3_30B, QWEN3_235B, GPT_OSS_120B, LLAMA3_8B, LLAMA3_70B, LLAMA31_405B):
        yield in_8_bits(model, precisions=("fp8", "mxfp8"), recipes=("default", "tensorwise", "mxfp8"), zero=(1,))
        yield aware(model, until="2026-08", precisions=bf16, zero=(1,))
    script = partial(LaunchScript, BRIDGE, DEEPSEEK_V3)
    yield script({"training": {"optimizer_dtype": "bf16"}}, "recipes/deepseek/deepseek_v3.py: exp_avg_dtype")
    yield script(remainders, "the same: use_precision_aware_optimizer", precisions=bf16, zero=(1,))
    yield script({"parallelism": {"dp_sync": "after_backward"}}, "configs/deepseek: overlap_grad_reduce False", H100)


def _llama() -> Iterator[LaunchScript]:
    """The offloads are of the scripts with `use_megatron_fsdp`."""
    script = partial(LaunchScript, BRIDGE)
    wider = ("bf16", "fp8", "mxfp8")  # than nvfp4
    yield script(LLAMA3_8B, WHOLE_GRAPH, "configs/llama: 16 and 8 bits", BLACKWELL, "2026-01", precisions=wider)
    yield script(LLAMA3_8B, WHOLE_GRAPH, "configs/llama", ("gb300",), since="2026-01")
    yield script(
        LLAMA3_8B,
        {"training": {"recompute": {"mode": "full", "layers": 5}}},
        "configs/llama: recompute_num_layers",
        H100,
        precisions=("fp8",),
        layouts=((1, 1),),
        zero=(1,),
    )
    nvfp4 = graphs_of("attn", "mlp")
    yield script(LLAMA3_70B, nvfp4, "4127", ("gb200",), since="2026-06", precisions=("nvfp4",))
    yield script(LLAMA3_70B, WHOLE_GRAPH, "configs/llama", ("b200-sxm",), since="2026-01", precisions=("bf16",))
    for model, offloaded in OFFLOADED_LAYERS.items():
        for (gpu, precision), layers in offloaded.items():
            offload = {"training": {"activation_offload": {"layers": layers}}}
            source = "configs/llama: cpu_offloading_num_layers"
            yield script(model, offload, source, (gpu,), precisions=(precision,), layouts=((1, 1),), zero=(3,))


# NVIDIA/NeMo-Framework-Launcher of 2024. examples/training/gpt and llama: grad_sync_dtype=bf16; conf/training/gpt3:
# hidden_dropout, attention_dropout. The scripts of Nemotron, whose 8B has as many layers and the same width as Llama's,
# sum in fp32.
BF16_SUMS = {"training": {"grad_dtype": "bf16"}}
NEMO_SCRIPTS = {
    "gelu": ((GPT3_5B, GPT3_20B, GPT3_175B), merge(BF16_SUMS, {"model": {"dropout": 0.1}})),
    "swiglu": ((LLAMA3_8B, LLAMA2_13B, LLAMA3_70B), BF16_SUMS),
}


def _nemo() -> Iterator[LaunchScript]:
    """Llama 2 7B and 70B have as many layers and the same width as Llama 3 8B and 70B."""
    for mlp, (models, changes) in NEMO_SCRIPTS.items():
        for model in models:
            yield LaunchScript("nemo", model, changes, "examples/training", since="2024", until="2025", mlp=(mlp,))


SCRIPTS = (*expert_scripts(), *_parameters(), *_llama(), *_nemo())


def with_launch_script(scenario: dict[str, Any], shared: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row's scenario, and under it what its trainer's script sets for this model, GPU and release.

    The scripts pre-train. A row with adapters, and one whose release or machine is not known, is left as it is.
    `shared`: what all rows of its table have and it does not say itself. A layout there yields to a script's: the table
    says it of all models at once.
    """
    training, model = scenario.get("training"), scenario.get("model")
    if not isinstance(training, Mapping) or not isinstance(model, Mapping):
        return scenario
    framework, date, sizes = training.get("framework"), training.get("software_date"), _sizes(model)
    cluster = CLUSTERS.get(_preset(scenario.get("cluster")))
    if date is None or cluster is None or "lora" in training:
        return scenario
    layout = scenario.get("parallelism")
    layout = layout if isinstance(layout, Mapping) else {}
    cannot = {"ep_overlap"} if not _pairs(layout) else set()
    cannot |= {"tp_overlap"} if layout.get("tp", 1) == 1 else set()
    row = {
        "gpus": cluster.gpu.name,
        "precisions": training.get("precision", "bf16"),
        "recipes": training.get("fp8_recipe") or "default",
        "layouts": (layout.get("pp", 1), layout.get("virtual_stages") or 1),
        "zero": layout.get("zero", 0),
        "mlp": model.get("mlp", "swiglu"),
    }
    said = dict[str, Any]()
    for script in SCRIPTS:
        meant = script.framework == framework and script.model == sizes and script.since <= date < script.until
        meant = meant and not cannot & set(script.changes.get("parallelism", {}))
        if meant and all(value in (getattr(script, key) or [value]) for key, value in row.items()):
            said = merge(script.changes, said)
    general = (shared or {}).get("parallelism") or {}
    yielding = [key for key in said.get("parallelism", {}) if key in general and layout.get(key) == general[key]]
    left = {"parallelism": {key: value for key, value in layout.items() if key not in yielding}} if yielding else {}
    made: dict[str, Any] = merge(said, scenario | left)
    return made


def _pairs(layout: Mapping[str, Any]) -> bool:
    """Tell whether a row's schedule has pairs in which expert exchanges hide: a script that hides them is for no other
    layout."""
    schedule = layout.get("schedule")
    known = schedule if isinstance(schedule, str) and schedule in FORMS else "1f1b"
    return form_of(known, layout.get("pp", 1), True).pairs


def _sizes(model: Mapping[str, Any]) -> Sizes:
    """Return a model's sizes, those of the shipped one that it names where it gives none of its own."""
    if model.get("preset") in model_presets():
        shipped = load_model(model["preset"])
        of_preset: dict[str, Any] = {"layers": shipped.layers, "hidden": shipped.hidden}
        of_preset |= {} if shipped.moe is None else {"moe": {"experts": shipped.moe.experts}}
        model = merge(of_preset, {key: value for key, value in model.items() if key != "preset"})
    moe = model.get("moe")
    experts = moe.get("experts", 0) if isinstance(moe, Mapping) else 0
    return Sizes(model.get("layers", 0), model.get("hidden", 0), experts)


def _preset(cluster: object) -> str:
    return str(cluster.get("preset") if isinstance(cluster, Mapping) else cluster)
