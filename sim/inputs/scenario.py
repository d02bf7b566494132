"""The scenario: what a user wrote, checked, with every preset and default filled in.

`load_scenario` reads a YAML file, `parse_scenario` a mapping (a row of a table, a result's own `scenario`).
Both raise `InputError` for the first thing wrong. A resolved scenario's dump parses to itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel

from sim.core.errors import InputError
from sim.core.files import STANDARD_INPUT, read_text
from sim.inputs.calibration_input import resolve_calibration, resolve_calibrations, unknown_architecture
from sim.inputs.cluster_input import network_note, resolve_cluster
from sim.inputs.engine_options import EngineOptions
from sim.inputs.file_kinds import CONVERTS, OF_OTHER_KINDS, refuse_foreign, refuse_other_kind, refuse_recording
from sim.inputs.input_source import Source, check_plain, show, unknown_key, validate
from sim.inputs.layout_defaults import with_defaults
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import as_trained, resolve_model, with_positions
from sim.inputs.nccl_input import with_nccl
from sim.inputs.notes import notes, prediction_note
from sim.inputs.overrides import with_overrides, with_present_names
from sim.inputs.parallelism import Parallelism
from sim.inputs.rare_sections import (
    read_distillation,
    read_faults,
    read_inference,
    read_processes,
    read_rl,
    sequence_length,
    with_engine_defaults,
    with_engine_dispatch,
    with_engine_split,
    with_rl_engine,
)
from sim.inputs.rules.ranks import check_rules, check_size
from sim.inputs.rules.without_effect import with_zero_in_effect
from sim.inputs.sections import Sections
from sim.inputs.shipped import scenario_file
from sim.inputs.training_config import Training
from sim.inputs.units import with_units
from sim.inputs.yaml_input import MAX_BYTES, KeyPath, parse_yaml
from sim.inputs.zero_keys import as_reduced
from sim.variants.frameworks.records import framework_of
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from sim.inputs.distillation_config import Distillation
    from sim.inputs.faults_config import Faults
    from sim.inputs.processes_input import Processes
    from sim.inputs.rl_config import Rl
    from sim.inputs.workloads import Inference

Overrides: TypeAlias = "Sequence[str] | Mapping[str, Any]"
SECTIONS = ("training", "parallelism", "model", "inference")  # those that a key may have been meant for


class Scenario(Struct, frozen=True, kw_only=True, eq=False):
    """A checked scenario: no preset names and no nulls that stand for a default are left.

    `training` is None for a serving workload, `inference` for a training step; `warnings` is no input. `calibration`
    is the profile of the cluster's usual GPU, `calibrations` those of its others, by the GPU's name. `source` has the
    file and the lines of its keys, for messages. Its sections are pydantic models, each checked when it was read.
    """

    version: int = 1
    name: str
    model: ModelConfig
    training: Training | None = None
    parallelism: Parallelism = Parallelism.model_construct()
    cluster: ClusterSpec
    calibration: str
    calibrations: dict[str, str] = {}
    inference: Inference | None = None
    distillation: Distillation | None = None
    rl: Rl | None = None
    faults: Faults | None = None
    processes: Processes | None = None
    engine: EngineOptions = EngineOptions.model_construct()
    warnings: tuple[str, ...] = ()
    source: Source | None = None

    def __eq__(self, other: object) -> bool:
        """Tell whether all but the source is equal."""
        if not isinstance(other, Scenario):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in (*KEYS, "warnings"))

    __hash__ = None  # type: ignore[assignment]

    def error(self, path: KeyPath, problem: str) -> InputError:
        """The one message for what a simulation finds wrong at `path`: file, line or option, key, problem."""
        return (self.source or Source(self.name, {})).error(path, problem)

    def with_overrides(self, overrides: Overrides) -> Scenario:
        """The scenario with some keys changed, read and checked anew from what was written.

        Raises:
            InputError: for a key or value that is wrong, and without what was written.
        """
        if self.source is None:
            raise InputError(f"{self.name}: was not read from a file or mapping, so no key of it can be overridden")
        return resolve(with_overrides(self.source, listed(overrides)), self.name)

    def unchecked_copy(self, *, update: Mapping[str, Any]) -> Scenario:
        """The scenario with some fields changed, which a simulation's own steps need; nothing is checked."""
        return replace(self, **update)

    def model_copy(self, **_: object) -> NoReturn:
        """Refused: it would make a scenario that nothing has checked.

        Raises:
            InputError: always.
        """
        raise self.error(
            (), "model_copy checks nothing; with_overrides({'parallelism.pp': 4}) makes a checked scenario"
        )

    def model_dump(self, mode: Literal["json", "python"] = "python") -> dict[str, Any]:
        """Return plain data, which parses to an equal scenario without notes on keys that were left out; `mode` as
        pydantic has it."""
        out = {}
        for name in KEYS:
            value = getattr(self, name)
            out[name] = value.model_dump(mode=mode) if isinstance(value, BaseModel) else value
        return out

    @property
    def for_training(self) -> Training:
        """The section `training`.

        Raises:
            InputError: for a serving workload, which has none.
        """
        if self.training is None:
            raise self.error(("training",), "is missing; this scenario serves requests")
        return self.training

    @property
    def for_serving(self) -> Inference:
        """The section `inference`.

        Raises:
            InputError: for a training step, which has none.
        """
        if self.inference is None:
            raise self.error(("inference",), "is missing; this scenario trains")
        return self.inference

    @property
    def ranks(self) -> int:
        """GPUs of the workload: those of `parallelism`, or all of a served one."""
        return _ranks(self.parallelism, self.inference, self.rl)

    @property
    def gpus(self) -> int:
        """`ranks`, and the GPUs of a teacher that has its own."""
        return self.ranks + (0 if self.distillation is None else self.distillation.own_gpus)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank and step: global batch / (micro-batch · dp); 1 without training."""
        if self.training is None:
            return 1
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallelism.dp)

    @property
    def deferred_micro_batches(self) -> int:
        """Micro-batches of which the last stage puts a weight gradient off (`wgrad_deferral_limit`)."""
        limit = self.parallelism.wgrad_deferral_limit
        return 0 if limit is None else min(limit or self.micro_batches, self.micro_batches)

    @property
    def sums_unsharded(self) -> bool:
        """Whether `accumulate_unsharded` has an effect: whole gradients wait for the step's last reduction.

        The last micro-batch reduces as it goes, so one alone adds nothing up (transformers/trainer.py: `no_sync` up to
        the last one), except in a pipeline, which reduces a stage's gradients behind its last backward
        (torch/distributed/pipelining/stage.py: `backward_maybe_with_nosync`).
        """
        return self.parallelism.accumulate_unsharded and (self.parallelism.pp > 1 or self.micro_batches > 1)

    @property
    def uneven_experts(self) -> bool:
        """Whether it matters which experts are popular: not to a rank that computes all copies of its tokens, and drops
        none, whose grouped matmuls take as long as all rows together."""
        moe = self.model.moe
        uneven = moe is not None and moe.imbalance != "balanced"
        return uneven and (self.parallelism.ep > 1 or (moe is not None and moe.capacity_factor is not None))

    @property
    def sum_dtype(self) -> str:
        """The dtype of whole gradients: that of their reduction where torch's FSDP adds them up before it
        (`ZeroEngine.adds_up_as_sent`), else `training.grad_dtype`."""
        t, p = self.for_training, self.parallelism
        as_sent = p.zero >= 2 and p.shards(self.model.may_have_experts) and not p.reduces_rows
        return t.grad_reduce_dtype if as_sent and framework_of(t).zero.adds_up_as_sent else t.grad_dtype

    @property
    def precision(self) -> str:
        """The precision of matmuls, of whichever workload this is."""
        workload = self.training or self.for_serving
        return workload.precision


KEYS = tuple(name for name in Scenario.__struct_fields__ if name not in ("warnings", "source"))


def listed(overrides: Overrides) -> Sequence[str]:
    """Overrides as `KEY=VALUE`, from those or from a mapping of keys to values."""
    if isinstance(overrides, str):
        raise InputError(
            f"overrides: found {show(overrides)}; must be a list of KEY=VALUE, such as ['parallelism.pp=4'], or a "
            "mapping, such as {'parallelism.pp': 4}"
        )
    if not isinstance(overrides, Mapping):
        return [*overrides]
    return [f"{key}={as_value(value)}" for key, value in overrides.items()]


def as_value(value: Any) -> str:
    """A value as `KEY=VALUE` has it."""
    return value if isinstance(value, str) else json.dumps(value)


def load_scenario(path: str | Path, overrides: Overrides = ()) -> Scenario:
    """The scenario in a YAML file or of a shipped scenario's name, with overrides applied first: `KEY=VALUE` or a
    mapping."""
    path, overrides = scenario_file(Path(path)), listed(overrides)
    if path != STANDARD_INPUT and not path.suffix and not os.path.exists(path):  # False also for one that is too long
        raise InputError(f"{path}: no such file or shipped scenario (`stepsim scenarios` lists them)")
    source = read_source(path, overrides)
    return resolve(source, name_of(path))


def name_of(path: str | Path) -> str:
    """The name of a scenario that has none of its own: that of its file."""
    return "standard input" if Path(path) == STANDARD_INPUT else Path(path).stem


def parse_scenario(data: dict[str, Any], where: str = "scenario", folder: str = "") -> Scenario:
    """The scenario in a mapping; `where` starts error messages, and is its name if the mapping gives none. Files
    that it names are looked up in `folder` first."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: found {show(data)}; a scenario is a mapping")
    return resolve(Source(where, data, folder=folder), where)


def load_mapping(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a scenario file says, overrides applied, nothing filled in; vary it with
    `sim.inputs.overrides.merge`."""
    return read_source(path, overrides).data


def read_source(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """A YAML file as data with the line of each key, and overrides applied."""
    file = Path(path)
    refuse_recording(file, "a scenario is wanted")
    data, lines = parse_yaml(read_text(file, MAX_BYTES), str(path))
    if data is None:
        raise Source(str(path), {}).error((), "is empty; a scenario needs at least model, training and cluster")
    if not isinstance(data, dict):
        raise Source(str(path), {}, lines).error((), f"found {show(data)}; a scenario is a mapping; {CONVERTS}")
    refuse_foreign(path, data, (*KEYS, *OF_OTHER_KINDS))
    if data.keys() & set(OF_OTHER_KINDS):
        refuse_other_kind(path, data, "a scenario is wanted")
    return with_overrides(Source(str(path), data, lines, str(file.parent)), overrides)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a scenario file, with the defaults of every key."""
    from sim.inputs.schema import scenario_schema

    return scenario_schema()


def _plain_numbers(source: Source) -> Source:
    """The source with numbers that have units as plain ones; the cluster's are read with its presets."""
    sections = ("training", "parallelism", "inference", "rl", "faults", "processes")
    plain = {key: with_units(source.data[key], source, (key,)) for key in sections if key in source.data}
    return Source(source.label, {**source.data, **plain}, source.origins, source.folder)


def resolve(source: Source, name: str) -> Scenario:
    """The scenario that a source describes; `name` is used if the source gives no name."""
    check_plain(source)
    written_source = source
    source = _plain_numbers(with_present_names(source))
    data = {key: value for key, value in source.data.items() if value is not None}
    _check_sections(source, data)
    sections, rl, written = _read_sections(data, source)
    check_rules(sections, source, evenly="layers_per_stage" not in written.parallelism.model_fields_set)
    rl, rl_notes = (None, ()) if rl is None else with_rl_engine(rl, sections, source)
    calibration, unknown = resolve_calibration(data, sections.cluster, source)
    calibrations, more_unknown = resolve_calibrations(data, sections.cluster, source)
    return Scenario(
        name=data.get("name", name),
        model=sections.model,
        training=sections.training,
        parallelism=with_zero_in_effect(sections, written.parallelism),
        cluster=sections.cluster,
        calibration=calibration,
        calibrations=calibrations,
        inference=sections.inference,
        distillation=sections.distillation,
        rl=rl,
        faults=sections.faults,
        processes=read_processes(data, sections.training, sections.parallelism, source),
        engine=_engine(data, source),
        warnings=(
            *(*unknown, *more_unknown, *unknown_architecture(sections.cluster, written.ranks)),
            *network_note(data["cluster"], sections.cluster, written.ranks),
            *prediction_note(written.model, sections.model),
            *_record_notes(data),
            *notes(sections, written.parallelism, written.of_inference, rl is not None),
            *rl_notes,
        ),
        source=written_source,
    )


def _record_notes(data: dict[str, Any]) -> Iterator[str]:
    if "inference" in data or "rl" in data:
        from sim.inputs.engine_file import record_notes

        yield from record_notes(data)


class _Written(NamedTuple):
    """Hold what a file says before defaults that follow from other keys. `of_inference`: keys that it gives there;
    `ranks`: GPUs that it asks for."""

    model: ModelConfig
    parallelism: Parallelism
    of_inference: frozenset[str]
    ranks: int


def _read_sections(data: dict[str, Any], source: Source) -> tuple[Sections, Rl | None, _Written]:
    """Each section checked for itself, with the defaults that follow from others; the rules between sections and the
    engine of `rl` are for the caller."""
    whole = resolve_model(data["model"], source, ("model",))
    training = _training(data, whole, source)
    inference = read_inference(data, source)
    of_inference = frozenset() if inference is None else frozenset(inference.model_fields_set)
    seq_len = sequence_length(training, inference)
    model = with_positions(as_trained(whole, training), seq_len)
    written = _parallelism(data.get("parallelism", {}), source)
    training = training and as_reduced(training, written)
    parallelism = with_defaults(written, model, training or inference)
    if inference is not None:
        parallelism = with_engine_split(parallelism, inference, model)
    rl = read_rl(data, model, training, parallelism, source)
    ranks = _ranks(parallelism, inference, rl)
    cluster = with_nccl(resolve_cluster(data["cluster"], ranks, source), training)
    if inference is not None:
        inference = with_engine_defaults(inference, model, parallelism, cluster.gpu)
        parallelism = with_engine_dispatch(parallelism, inference, cluster.gpu)
    faults, distillation = read_faults(data, source), read_distillation(data, source, seq_len)
    sections = Sections(model, training, parallelism, cluster, inference, distillation, faults, seq_len)
    return sections, rl, _Written(whole, written, of_inference, ranks)


def _check_key(path: KeyPath, data: dict[str, Any], own: Sequence[str], source: Source) -> None:
    """Raise for a key that another section has, and at the top for any that is unknown."""
    for key in data:
        if key not in own:
            home = next((section for section in SECTIONS if key in _class_of(section).model_fields), None)
            if home is not None:
                raise source.error((*path, key), f"unknown key; it belongs in {home}")
            if not path:
                raise source.error((key,), unknown_key(key, own))


def _class_of(section: str) -> type[BaseModel]:
    """The class of one of `SECTIONS`."""
    if section == "inference":
        from sim.inputs.workloads import Inference

        return Inference
    classes: dict[str, type[BaseModel]] = {"training": Training, "parallelism": Parallelism, "model": ModelConfig}
    return classes[section]


def _check_sections(source: Source, data: dict[str, Any]) -> None:
    _check_key((), source.data, KEYS, source)
    for section in SECTIONS:
        if isinstance(data.get(section), dict):
            _check_key((section,), data[section], (*_class_of(section).model_fields, "preset"), source)
    version = data.get("version", 1)
    if isinstance(version, bool) or version != 1:
        raise source.error(("version",), f"found {show(version)}; this program reads version 1")
    for key in ("name", "calibration"):
        value = data.get(key, "x")
        if not isinstance(value, str) or not 1 <= len(value) <= 4096:
            raise source.error((key,), f"found {show(value)}; must be text of 1 to 4,096 characters")
    for key in ("model", "cluster"):
        if key not in data:
            raise source.error((key,), "is required and missing")
    if "training" not in data and "inference" not in data:
        hint = "it describes the updates of rl" if "rl" in data else "or give inference for a serving workload"
        raise source.error(("training",), f"is required and missing ({hint})")
    if "training" in data and "inference" in data and "rl" not in data:
        raise source.error(("inference",), "cannot be given with training; a scenario has one of the two")
    if "distillation" in data and "training" not in data:
        raise source.error(("distillation",), "needs training, which describes the student")


def _training(data: dict[str, Any], model: ModelConfig, source: Source) -> Training | None:
    if "training" not in data:
        return None
    if model.program is not None:
        from sim.inputs.captured_input import captured_training

        return captured_training(data["training"], model.program, source)
    return validate(Training, data["training"], source, ("training",))


def _engine(data: dict[str, Any], source: Source) -> EngineOptions:
    """The section.

    Raises:
        InputError: beside `inference`, whose collectives are no messages.
    """
    if "engine" not in data:
        return EngineOptions.model_construct()
    engine = validate(EngineOptions, data["engine"], source, ("engine",))
    if engine.collectives == "messages" and "inference" in data:
        raise source.error(("engine", "collectives"), "found messages; must be closed_form where requests are served")
    return engine


def _ranks(parallelism: Parallelism, inference: Inference | None, rl: Rl | None) -> int:
    """GPUs of a workload; generation that is not colocated has GPUs of its own."""
    if rl is not None and not rl.colocated:
        return parallelism.ranks + rl.generation.ranks
    return parallelism.ranks if inference is None else inference.ranks(parallelism)


def _parallelism(value: Any, source: Source) -> Parallelism:
    """Read the section as the user wrote it, before defaults that follow from other sections."""
    written = validate(Parallelism, value, source, ("parallelism",))
    check_size(written, source)
    return written
