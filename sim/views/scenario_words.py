"""A scenario in words, for the line that every view opens with: model, layout, batch, cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.core.units import billions, counted, n_bytes, rate
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import preset_name
from sim.inputs.scenario import Scenario
from sim.models.parameters import count_parameters
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from sim.inputs.serving_keys import Sampling
    from sim.inputs.training_config import PreferenceLoss, Recompute, Reference, Training

PAIR_LOSSES: dict[PreferenceLoss, str] = {"dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "reward": "reward model"}
REFERENCES: dict[Reference, str] = {
    "model": " (reference: a second model)",
    "adapters_off": " (reference: the model without adapters)",
    "precomputed": " (reference: computed before)",
    "none": "",
}


FROZEN_BITS = {None: "", "nf4": " on 4-bit weights (QLoRA)", "int8": " on 8-bit weights"}


def layout_words(layout: Mapping[str, Any], short: bool = False) -> list[str]:
    """A mesh and its ZeRO stage, by the keys of `parallelism`; degrees of one are left out.

    >>> layout = {"tp": 8, "sp": True, "cp": 1, "pp": 4, "dp": 2, "ep": 1, "zero": 1}
    >>> layout_words(layout), layout_words(layout, short=True)
    (['tp 8 with sp', 'pp 4', 'dp 2', 'ZeRO-1'], ['tp8+sp', 'pp4', 'dp2', 'z1'])
    """
    space, sp, zero = ("", "+sp", "z") if short else (" ", " with sp", "ZeRO-")
    degrees = [k for k in ("tp", "cp", "pp", "dp", "ep") if layout[k] > 1]
    words = [f"{k}{space}{layout[k]}{sp * (k == 'tp' and layout['sp'])}" for k in degrees]
    words += [] if degrees or short else ["one device"]
    return words + [f"{zero}{layout['zero']}"] * bool(layout["zero"] or short)


def layout_line(scenario: Scenario) -> str:
    """The scenario in one line: model, layout, batch, cluster."""
    layout, training, inference = scenario.parallelism, scenario.training, scenario.inference
    pools = None if inference is None else inference.disaggregated
    states = {} if training is not None else {"zero": 0}  # serving has no optimizer states to shard
    shape = layout_words({**layout.model_dump(), **states})
    if pools is not None:  # what computes prompts, and what adds tokens
        named = (("prefill", pools.prefill), ("decode", pools.decode))
        shape = [f"{name} {p.replicas} × tp {p.tp}" + f", ep {p.ep}" * (p.ep > 1) for name, p in named]
    if inference is not None and inference.afd is not None:
        shape.append(f"experts on {inference.afd.expert_gpus} other GPUs")
    words = [model_words(scenario.model), *shape]
    if layout.pp > 1 and inference is None:
        words.append(layout.schedule)
    if training is not None:
        words.append(
            f"batch {training.global_batch_size} × {counted(training.seq_len, 'token')} "
            f"in micro-batches of {training.micro_batch_size}"
        )
        words += [training.precision, *recompute_words(training.recompute), f"framework {training.framework}"]
        words += learning_words(training)
    if inference is not None:
        words.append(f"{inference.batching} batching")
        words.append(inference.precision if inference.quantization == "none" else inference.quantization)
        words.append(f"engine {Path(inference.engine).name}")
        words += [] if inference.sampling is None else [sampling_words(inference.sampling)]
    return " · ".join([*words, gpus_words(scenario)])


def recompute_words(recompute: Recompute) -> list[str]:
    """What is computed again before the backward, if anything is.

    >>> from sim.inputs.training_config import Recompute
    >>> recompute_words(Recompute(mode="none")), recompute_words(Recompute(mode="full", layers=8))
    ([], ['recompute full (8 layers of a stage)'])
    >>> recompute_words(Recompute(mode="selective", modules=("moe_act", "layernorm")))
    ['recompute selective (moe_act, layernorm)']
    """
    if recompute.mode == "none":
        return []
    of = [] if recompute.layers is None else [f"{counted(recompute.layers, 'layer')} of a stage"]
    of += [] if recompute.every is None else [f"one layer in {recompute.every}"]
    of += recompute.modules if recompute.mode == "selective" else ()
    return [f"recompute {recompute.mode}" + f" ({', '.join(of)})" * bool(of)]


def learning_words(training: Training) -> list[str]:
    """What is trained and from what, where that is not all weights and the next tokens of texts.

    >>> from sim.inputs.scenario import load_scenario
    >>> learning_words(load_scenario("scenarios/dpo_lora_llama3_8b.yaml").for_training)
    ['LoRA of rank 16', 'DPO (reference: the model without adapters)']
    """
    lora = training.lora
    words = [] if lora is None else [f"LoRA of rank {lora.rank}" + FROZEN_BITS[lora.weights]]
    if training.pair_loss is None:
        return words
    return [*words, PAIR_LOSSES[training.pair_loss] + REFERENCES[training.reference]]


def sampling_words(sampling: Sampling) -> str:
    """How tokens are chosen.

    >>> from sim.inputs.serving_keys import Sampling
    >>> sampling_words(Sampling(temperature=0.6, top_p=0.9))
    'temperature 0.6, top-p 0.9'
    """
    given = [f"temperature {sampling.temperature:g}"]
    given += [f"top-k {sampling.top_k}"] if sampling.top_k is not None else []
    given += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    given += [f"repetition penalty {sampling.repetition_penalty:g}"] if sampling.repetition_penalty != 1 else []
    given += [f"{sampling.logprobs} logprobs"] if sampling.logprobs is not None else []
    given += ["structured outputs"] if sampling.structured_outputs else []
    return ", ".join(given)


def model_words(model: ModelConfig) -> str:
    """A model's name, if it is a shipped one, and size.

    >>> from sim.inputs.model_input import load_model
    >>> model_words(load_model("llama3-8b"))
    'llama3-8b (8.03B parameters, 32 layers)'
    """
    name = preset_name(model)
    return f"{name} ({size_words(model)})" if name else size_words(model)


def size_words(model: ModelConfig) -> str:
    """A model's parameters and layers.

    >>> from sim.inputs.model_input import load_model
    >>> size_words(load_model("mixtral-8x7b"))
    '46.7B parameters, 12.9B active, 32 layers'
    """
    if model.program is not None:
        from sim.inputs.program_file import read_program

        program = read_program(Path(model.program))
        elements = sum(p.elements for p in program.parameters)
        alone = ", a forward alone" if program.forward_alone else ""
        return f"{Path(model.program).name}: {billions(elements)} parameters, {counted(model.layers, 'block')}{alone}"
    sizes = count_parameters(model)
    active = "" if sizes.active == sizes.total else f", {billions(sizes.active)} active"
    return f"{billions(sizes.total)} parameters{active}, {counted(model.layers, 'layer')}"


def gpus_words(scenario: Scenario) -> str:
    """Return how many GPUs of which cluster."""
    cluster, gpus = scenario.cluster, counted(scenario.gpus, "GPU")
    name = "" if cluster.name == "custom" else f"{cluster.name}: "
    kinds = " and ".join(gpu.name for gpu in cluster.gpus)
    return f"{gpus} ({name}{kinds}, {cluster.gpus_per_node} to a node)"


def cluster_words(cluster: ClusterSpec) -> str:
    """A node's GPUs and links; of the most usual node, where they differ.

    >>> from topology.presets import CLUSTERS
    >>> cluster_words(CLUSTERS["dgx-h100"])
    '8 × h100-sxm of 80.00 GiB; nvswitch 450.0 GB/s, 8 NICs of 50.00 GB/s a node (per direction)'
    """
    inside, outside = cluster.intra_node, cluster.inter_node
    links = f"{inside.kind} {rate(inside.bandwidth_bytes_per_s, 'B/s')}"
    nics = counted(outside.nics_per_node, "NIC")
    domain = f", NVLink domains of {cluster.nvlink_domain}" if cluster.nvlink_domain != cluster.gpus_per_node else ""
    kinds = " or ".join(f"{gpu.name} of {n_bytes(gpu.memory_bytes)}" for gpu in cluster.gpus)
    return (
        f"{cluster.gpus_per_node} × {kinds}{domain}; {links}, "
        f"{nics} of {rate(outside.nic_bandwidth_bytes_per_s, 'B/s')} a node (per direction)"
    )
