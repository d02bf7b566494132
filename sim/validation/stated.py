"""What a table says beside its scenario, in a scenario's words: release dates, trainers, switches, dropout, other jobs.

A scenario that was published years ago names no `training.framework` of ours, no `software_date` and no switches of the
launch script; the table's `software` and a row's `run.settings` do. How fp8 is scaled a row's `id` alone tells. That
other jobs used the network while collectives were measured, its `assumptions` say. Keys that a row states itself stand,
unless the table's maker concluded them and the trainer's source says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct

from sim.inputs.cluster_input import same_nics
from sim.inputs.overrides import merge, with_present_keys
from sim.inputs.training_config import USUAL_FRAMEWORK
from sim.variants.frameworks.records import FRAMEWORKS

# Trainers that have a record of their own in `sim.variants.frameworks`, by the name that tables have for them. NeMo has
# one with a release: without one it is MLPerf's, whose rounds have launch scripts of their own.
TRAINERS = {
    r"nemo(?= 2\d\.\d\d)": "nemo",
    "nanotron": "nanotron",
    "composer": "composer",
    "deepspeed": "deepspeed",
    "megatron-bridge": "megatron_bridge",
    "meta's in-house training stack": "meta_llama3",
}
RELEASES = files("sim") / "presets" / "releases.yaml"
# What NVIDIA's MLPerf submissions call their switches, the wider first.
GRAPHS = {"FULL_CUDA_GRAPH": "step", "MCORE_CUDA_GRAPH": "layers", "LAYER_CUDA_GRAPH": "layers"}
ON = ("1", "true")
# Those that are keys of `training`, by the names of several rounds (conf/*.yaml).
SWITCHES = {
    "FP8_DPA": "fp8_dot_product_attention",
    "FP8_ACTIVATION": "activation_func_fp8_input_store",
    "FP8_ACT": "activation_func_fp8_input_store",
}
EIGHT_BIT_PARAMETERS = ("FP8_PARAM_GATHER", "FP8_PARAMS")  # those that say `fp8_param_gather`
# Words of a row's id that say how fp8 is scaled, which a table states nowhere else: torchao's, and
# NVIDIA's fp8-cs (current scaling) and fp8-sc (sub-channel scaling).
RECIPES = {"rowwise": "rowwise", "tensorwise": "tensorwise", "fp8-cs": "tensorwise", "fp8-sc": "blockwise"}

# Megatron-LM's tests set it in deterministic mode (tests/functional_tests, model_config.yaml: ENV_VARS).
DETERMINISTIC_WORKSPACE = ":4096:8"
# NVIDIA's MLPerf submissions without adapters, since this round (conf/custom.yaml: CROSS_ENTROPY_LOSS_FUSION).
FUSES_LOSS_SINCE = "v4.1"
# NVIDIA's MLPerf submissions with adapters until this round (llama2_70b_lora, conf/*.yaml: fp8_params).
FROZEN_IN_8_BITS_UNTIL = "v5.0"
# Part of a row's id in tables of llm-foundry's benchmark: `precision` and `fsdp_config.mixed_precision`. The month is
# that of the software that has such values. Composer called it amp_bf16 from December 2022 on (pull request 1761), and
# submit_benchmarks.py of mosaicml/examples has bf16, PURE and an image of torch 1.13.1. That of llm-foundry writes
# `amp_` and leaves DEFAULT; its sweep.sh names images of torch 2.0.1 and 2.1.
COMPOSER_DATES = {"_amp_": "2023-10", "_bf16_pure_": "2023-02"}
# What a table's maker concluded of a trainer's models, in words, and the key of `model` that the trainer's source sets
# otherwise. llm-foundry, models/mpt/configuration_mpt.py: `no_bias` is false; no file of scripts/train/yamls sets it.
CONCLUDED = {"composer": ("no biases", "bias")}
# Trainers whose launch scripts say in what type gradients are summed (`Framework.sums_in_fp32`, launch_scripts.py), and
# words of an assumption that says it instead.
SCRIPTED_SUMS = ("megatron_bridge", "nemo")
SUMS = re.compile(r"grad_dtype|gradients (?:are |were )?(?:reduced |summed )?in (?:fp|bf)\d", re.IGNORECASE)
# Words of an assumption that is stated: many jobs, whose messages delayed each other.
SHARED = "shared cluster"


class _Product(Struct, frozen=True):
    """The spelling of a product's name, and the month of each release."""

    written: str
    months: str


@cache
def _releases() -> dict[str, _Product]:
    return msgspec.yaml.decode(RELEASES.read_bytes(), type=dict[str, _Product])


def software_date(text: str) -> str | None:
    """The latest release that a text names: a day, a container of a month, a version of a product whose releases are
    known (torch, Megatron-Core, Transformer Engine, DeepSpeed), or else a year.

    >>> software_date("torch 1963fc8 (2024-12-23)"), software_date("NeMo 24.07"), software_date("PyTorch 1.13 era")
    ('2024-12-23', '2024-07', '2022-10')
    >>> software_date("nanotron (early 2025)"), software_date("Megatron-LM (2021)"), software_date("Megatron-Core")
    ('2025-02', '2021-07', None)
    """
    found = re.findall(r"\b20\d\d-[01]\d-[0-3]\d\b", text)
    found += [f"20{y}-{m}" for y, m in re.findall(r"\b(2[1-9])\.(0[1-9]|1[0-2])\b", text)]
    for product in _releases().values():
        months = dict(pair.split("=") for pair in product.months.split())
        versions = re.findall(rf"\b{product.written}[\W_]*v?(\d+\.\d+)", text, re.IGNORECASE)
        found += [months[version] for version in versions if version in months]
    if not found:
        found = [f"{y}-{'02' if early else '07'}" for early, y in re.findall(r"\b(early )?(20[12]\d)\b", text)]
    return max(found, default=None)


def _row_date(text: str, row: Mapping[str, Any]) -> str | None:
    """The release that a row of a table of several releases ran: in its `id` NVIDIA's container, or in the table's
    `software` that of its round.

    >>> _row_date("(24.09 in v4.1, 25.01-25.04 in v5.0)", {"id": "gpt3", "run": {"round": "v5.0"}})
    '2025-04'
    >>> _row_date("", {"id": "v5.0_H100_n64_ngc24.09_nemo"})
    '2024-09'
    """
    container = re.search(r"ngc(2\d\.\d\d)", str(row.get("id", "")))
    run = row.get("run")
    stated = re.escape(str(run.get("round"))) if isinstance(run, Mapping) else "$^"
    of_round = re.search(rf"(2\d\.\d\d) in {stated}\b", text)
    found = container or of_round
    return software_date(found[1]) if found else None


def stated_training(software: object, row: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `training` that the table's `software`, the row's `run.settings` and its `id` say."""
    text = software if isinstance(software, str) else ""
    out: dict[str, Any] = {}
    named = _trainers(text)
    of_composer = COMPOSER_DATES if named[:1] == ["composer"] else {}
    by_precision = [month for words, month in of_composer.items() if words in str(row.get("id", ""))]
    date = next(iter(by_precision), None) or _row_date(text, row) or software_date(text)
    date = date or software_date(str(row.get("group", "")))
    if date is not None:
        out["software_date"] = date
    out |= {"framework": named[0]} if named else {}
    said = [RECIPES[word] for word in re.findall(r"[a-z0-9-]+", str(row.get("id", ""))) if word in RECIPES]
    out |= {"fp8_recipe": said[0]} if said else {}
    run = row.get("run")
    settings = run.get("settings") if isinstance(run, Mapping) else None
    if isinstance(settings, Mapping):
        on = [mode for name, mode in GRAPHS.items() if str(settings.get(name, "")).lower() in ON]
        out |= {"cuda_graphs": on[0]} if on else {}
        out |= {key: True for name, key in SWITCHES.items() if str(settings.get(name, "")).lower() in ON}
    return out


def _trainers(software: str) -> list[str]:
    return [name for words, name in TRAINERS.items() if re.match(rf"\W*{words}\b", software, re.IGNORECASE)]


def with_stated(training: dict[str, Any], software: object, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's `training` with what is stated beside it. If the stated trainer has a record of its own, it replaces
    `eager` and the record of the same code base (`Framework.kin`), which only come near it.

    >>> with_stated({"seq_len": 8, "elementwise": "eager"}, "nanotron (early 2025)", {})
    {'seq_len': 8, 'software_date': '2025-02', 'framework': 'nanotron'}
    """
    stated = stated_training(software, row)
    training = with_present_keys(training, ("training",))
    nearest = training.get("framework", USUAL_FRAMEWORK)
    if "framework" in stated and nearest in (USUAL_FRAMEWORK, FRAMEWORKS[stated["framework"]].kin):
        training.pop("framework", None)
    else:
        stated.pop("framework", None)
    stated |= _stated_by_reading(row)
    found = {**training, **{key: value for key, value in stated.items() if key not in training}}
    return found | _stated_loss(found, row)


def _stated_by_reading(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of what was read of the row's own script, for which no scenario had words.

    >>> _stated_by_reading({"reading": {"deterministic": True, "gradient_accumulation_fusion": True}})
    {'cublas_workspace_config': ':4096:8'}
    """
    reading = row.get("reading")
    if not isinstance(reading, Mapping):
        return {}
    out: dict[str, Any] = {}
    out |= {"cublas_workspace_config": DETERMINISTIC_WORKSPACE} if reading.get("deterministic") is True else {}
    out |= {"gradient_accumulation_fusion": False} if reading.get("gradient_accumulation_fusion") is False else {}
    return out | ({"moe_grouped_gemm": False} if reading.get("grouped_gemm") is False else {})


def _stated_loss(training: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The loss in compiled parts, where the row's own script or its MLPerf round has it and the row says unfused.

    >>> _stated_loss({}, {"run": {"round": "v5.0"}}), _stated_loss({"lora": {}}, {"run": {"round": "v5.0"}})
    ({'cross_entropy': 'native'}, {})
    >>> _stated_loss({"cross_entropy": "unfused"}, {"reading": {"cross_entropy": "native"}})
    {'cross_entropy': 'native'}
    """
    run, reading = (x if isinstance(x := row.get(key), Mapping) else {} for key in ("run", "reading"))
    submitted = str(run.get("round", "")) >= FUSES_LOSS_SINCE and "lora" not in training
    native = submitted or reading.get("cross_entropy") == "native"
    return {"cross_entropy": "native"} if native and training.get("cross_entropy", "unfused") == "unfused" else {}


def with_eight_bit_parameters(scenario: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's scenario with parameters in 8 bits, where its MLPerf submission has them and a scenario can: in fp8 or
    MXFP8 with the distributed optimizer, or frozen beside adapters.

    >>> row = {"run": {"settings": {"FP8_PARAMS": "True"}}}
    >>> training, layout = {"precision": "fp8", "framework": "megatron"}, {"zero": 1}
    >>> with_eight_bit_parameters({"training": training, "parallelism": layout}, row)["training"]["fp8_param_gather"]
    True
    >>> with_eight_bit_parameters({"training": training, "parallelism": {"zero": 0}}, row)["training"] == training
    True
    """
    training, layout, run = (
        x if isinstance(x, Mapping) else {}
        for x in (scenario.get("training"), scenario.get("parallelism"), row.get("run"))
    )
    settings = run.get("settings")
    said = settings if isinstance(settings, Mapping) else {}
    frozen = "lora" in training and "" < str(run.get("round", "")) <= FROZEN_IN_8_BITS_UNTIL
    stated = frozen or any(str(said.get(name, "")).lower() in ON for name in EIGHT_BIT_PARAMETERS)
    of_megatron = FRAMEWORKS[training.get("framework", USUAL_FRAMEWORK)].accumulates_in_matmul
    can = of_megatron and training.get("precision") in ("fp8", "mxfp8")
    can = can and layout.get("zero", 0) in ((0, 1) if "lora" in training else (1,))
    if not (stated and can) or "fp8_param_gather" in training:
        return scenario
    return scenario | {"training": {**training, "fp8_param_gather": True}}


def with_adapter_dropout(training: dict[str, Any], assumptions: object) -> dict[str, Any]:
    """A row's `training` with its adapters' dropout, if the table states one and the row says nothing of it.

    >>> said = [{"fact": "LoRA of rank 16, adapter dropout 0.1", "basis": "stated"}]
    >>> with_adapter_dropout({"lora": {"rank": 16}}, said)
    {'lora': {'dropout': 0.1, 'rank': 16}}
    >>> with_adapter_dropout({}, said)
    {}
    """
    found = [re.search(r"\badapter dropout (0?\.\d+)", fact) for fact in _facts(assumptions, stated=True)]
    stated = [float(match[1]) for match in found if match]
    if not stated or not isinstance(training.get("lora"), Mapping):
        return training
    return training | {"lora": {"dropout": stated[0], **training["lora"]}}


def without_concluded(scenario: dict[str, Any], assumptions: object) -> dict[str, Any]:
    """A row's scenario without keys that its table's maker concluded and the trainer's source sets otherwise.

    >>> said = [{"fact": "GPT with learned positions, no biases", "basis": "definition"}]
    >>> without_concluded({"model": {"bias": False}, "training": {"framework": "composer"}}, said)["model"]
    {}
    """
    training, model = scenario.get("training"), scenario.get("model")
    framework = training.get("framework") if isinstance(training, Mapping) else None
    words, key = CONCLUDED.get(str(framework), ("", ""))
    said = _facts(assumptions, stated=False)
    if not words or not isinstance(model, Mapping) or not any(words in fact for fact in said):
        return scenario
    return scenario | {"model": {name: value for name, value in model.items() if name != key}}


def without_assumed_sums(scenario: dict[str, Any], software: str, assumptions: object) -> dict[str, Any]:
    """A table's scenario, which all rows share, without a type of gradients that no assumption supports, if the
    trainer's launch scripts say it. A row's own type stands.

    >>> shared = {"training": {"grad_dtype": "fp32", "seq_len": 8}}
    >>> without_assumed_sums(shared, "NeMo 24.07", [])["training"]
    {'seq_len': 8}
    >>> without_assumed_sums(shared, "NeMo 24.07", [{"fact": "gradients in FP32"}]) == shared
    True
    """
    training = scenario.get("training")
    facts = [*_facts(assumptions, stated=True), *_facts(assumptions, stated=False)]
    if not isinstance(training, Mapping) or any(map(SUMS.search, facts)):
        return scenario
    if not set(SCRIPTED_SUMS) & set(_trainers(software)):
        return scenario
    return scenario | {"training": {key: value for key, value in training.items() if key != "grad_dtype"}}


def _facts(assumptions: object, stated: bool) -> list[str]:
    """The facts of a table's `assumptions` that its source states, or the others."""
    listed = assumptions if isinstance(assumptions, list) else []
    return [str(x.get("fact")) for x in listed if isinstance(x, Mapping) and (x.get("basis") == "stated") is stated]


def with_other_jobs(scenario: dict[str, Any], assumptions: object) -> dict[str, Any]:
    """A table's scenario with what other jobs take of its NICs, if the table states that it measured beside them.

    >>> nics = {"nics_per_node": 32, "nic_bandwidth_bytes_per_s": 12.5e9, "latency_s": 75e-6}
    >>> said = [{"fact": "many jobs on a shared cluster", "basis": "stated"}]
    >>> with_other_jobs({"cluster": {"inter_node": nics}}, said)["cluster"]["inter_node"]["spread"]
    0.8
    """
    cluster = scenario.get("cluster")
    stated = cluster.get("inter_node") if isinstance(cluster, Mapping) else None
    spread = same_nics(stated).get("spread", 0.0)
    if not spread or not any(SHARED in fact for fact in _facts(assumptions, stated=True)):
        return scenario
    return dict(merge({"cluster": {"inter_node": {"spread": spread}}}, scenario))
