"""The JSON Schema of a scenario, made from the very classes that check it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from sim.inputs.distillation_config import Distillation
from sim.inputs.engine_options import EngineOptions
from sim.inputs.faults_config import Faults
from sim.inputs.model_config import ModelConfig
from sim.inputs.overrides import FORMER_NAMES
from sim.inputs.parallelism import Parallelism
from sim.inputs.processes_input import Processes
from sim.inputs.rl_config import Rl
from sim.inputs.training_config import Training
from sim.inputs.units import unit_of
from sim.inputs.workloads import Inference
from topology.spec import ClusterSpec

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_SIZE: Schema = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}]}


def scenario_schema() -> Schema:
    """Return what `sim.inputs.scenario` accepts, as far as one key can say; rules between keys are not in it."""
    definitions: dict[str, Schema] = {}
    classes = (Training, Parallelism, Inference, Distillation, Rl, Faults, Processes)
    sections = {section.__name__.lower(): _section(section, definitions) for section in classes}
    sections["engine"] = _section(EngineOptions, definitions)
    _add_former_names(sections, definitions)
    _add_models(definitions)
    _open_cluster(_section(ClusterSpec, definitions), definitions)
    defaults: dict[str, Any] = {"parallelism": {}, "engine": {}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stepsim scenario",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "cluster"],
        "properties": {
            **_OWN_KEYS,
            **{name: {"anyOf": [schema, _NULL], "default": defaults.get(name)} for name, schema in sections.items()},
        },
        "oneOf": [{"required": ["training"]}, {"required": ["inference"]}],
        "$defs": definitions,
    }


# Keys of a scenario that are no sections.
_OWN_KEYS: Schema = {
    "version": {"const": 1, "default": 1},
    "name": {"type": ["string", "null"], "default": None, "description": "null: the file's own name"},
    "model": {"$ref": "#/$defs/Model"},
    "cluster": {"$ref": "#/$defs/Cluster"},
    "calibration": {
        "type": ["string", "null"],
        "default": None,
        "description": "a profile's name or path, or roofline; null: the GPU's profile, or the nearest measured GPU's",
    },
    "calibrations": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "default": {},
        "description": "in a cluster of several kinds of GPUs: the profile of each less usual one, by the GPU's name",
    },
}


def _add_former_names(sections: dict[str, Schema], definitions: dict[str, Schema]) -> None:
    """Add the former names of keys, which are still read, to their sections' definitions."""
    for (section, former), present in FORMER_NAMES.items():
        known = definitions[sections[section]["$ref"].rpartition("/")[2]]["properties"]
        known[former] = {
            **known[present],
            "default": None,
            "deprecated": True,
            "description": f"the former name of {section}.{present}, still read",
        }


def _add_models(definitions: dict[str, Schema]) -> None:
    """Add the schema of a model (a mapping or a preset's name) to `definitions`, and refer to it from each such key."""
    model = _section(ModelConfig, definitions)
    definitions["Model"] = _or_preset(
        model, definitions["ModelConfig"], "a shipped model's name, or a path to a Hugging Face config.json"
    )
    one = {"$ref": "#/$defs/Model"}
    for owner, key in (("Distillation", "teacher"), ("RewardModel", "model")):
        definitions[owner]["properties"][key] = one
    definitions["Speculative"]["properties"]["draft"] = {"anyOf": [one, _NULL], "default": None}


def _section(model: type[BaseModel], definitions: dict[str, Schema]) -> Schema:
    """A reference to the schema of `model`, which goes into `definitions` with those it needs."""
    schema = model.model_json_schema()
    for name, definition in {**schema.pop("$defs", {}), model.__name__: schema}.items():
        definitions[name] = _with_nulls(definition)
    return {"$ref": f"#/$defs/{model.__name__}"}


def _with_nulls(schema: Schema) -> Schema:
    """The schema of one mapping, where null stands for the default of any key that has one."""
    required = schema.get("required", [])
    properties = {
        key: {k: v for k, v in value.items() if k != "title"} if key in required else _nullable(value)
        for key, value in _with_texts(schema.get("properties", {})).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _with_texts(properties: dict[str, Schema]) -> dict[str, Schema]:
    """The keys of a unit take text such as `400Gbps` too; a peak for each dtype does so for each."""
    found = dict(properties)
    for key, value in properties.items():
        if unit_of(key) is None:
            continue
        if value.get("type") == "object":
            found[key] = {**value, "additionalProperties": _or_text(value["additionalProperties"])}
        elif "$ref" not in value and value.get("type") != "array":
            found[key] = _or_text(value)
    return found


def _nullable(value: Schema) -> Schema:
    notes: Schema = {"description": value["description"]} if "description" in value else {}
    rest = {key: item for key, item in value.items() if key not in ("title", "description", "default")}
    if not (rest.get("anyOf") and _NULL in rest["anyOf"]):
        rest = {"anyOf": [rest, _NULL]}
    return {**rest, **notes, "default": value.get("default")}


def _or_preset(reference: Schema, full: Schema, words: str) -> Schema:
    """A name, a full mapping, or `preset: NAME` with any of the full mapping's keys."""
    properties = {"preset": {"type": "string", "description": words}, **full["properties"]}
    preset = {
        "type": "object",
        "required": ["preset"],
        "properties": properties,
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "string", "description": words}, reference, preset]}


def _or_text(number: Schema) -> Schema:
    """A number, or text such as `400Gbps`; the default stays."""
    outside: Schema = {key: number[key] for key in ("default", "title", "description") if key in number}
    return {"anyOf": [{k: v for k, v in number.items() if k not in outside}, {"type": "string"}], **outside}


def _open_cluster(cluster: Schema, definitions: dict[str, Schema]) -> None:
    """Make optional what follows from elsewhere: the GPU's name, nodes, NVLink domain and NICs."""
    gpu, spec = definitions["GpuSpec"], definitions["ClusterSpec"]
    gpu["required"] = [key for key in gpu["required"] if key != "name"]
    gpu["properties"]["name"] = {"type": ["string", "null"], "default": "custom"}
    gpu["properties"]["memory_bytes"] = _SIZE
    definitions["Gpu"] = _or_preset({"$ref": "#/$defs/GpuSpec"}, gpu, "a shipped GPU's name")
    spec["properties"]["gpu"] = {"$ref": "#/$defs/Gpu"}
    spec["properties"]["nodes"] |= {"default": None, "description": "null: as many as the ranks need"}
    spec["properties"]["nvlink_domain"] |= {"default": None, "description": "null: gpus_per_node"}
    nics = definitions["InterNode"]["properties"]["nics_per_node"]
    nics |= {"default": None, "description": "null: gpus_per_node"}
    definitions["Cluster"] = _or_preset(cluster, spec, "a shipped cluster's name")
    several = {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/Cluster"}}
    mixed = {"type": "object", "required": ["mixed"], "properties": {"mixed": several}, "additionalProperties": False}
    definitions["Cluster"]["anyOf"].append(mixed)
