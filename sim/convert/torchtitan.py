"""torchtitan's configuration as a scenario: the TOML of 2025, and the Python configs that followed it.

Names and meaning: torchtitan/config/job_config.py of pytorch/torchtitan at 000204a (August 2025), and the release 0.3.0
(September 2026). A Python config is parsed and never run: keyword arguments that are plain values count, by the name of
the class that they are given to.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from sim.convert.settings import Converted, Machine, Settings, without_none
from sim.convert.torchtitan_older import as_of_2025
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model
from sim.inputs.parallelism import split_layers
from sim.inputs.trainer_names import TITAN_GATHERS_8_BITS, TITAN_MODELS, TITAN_POLICIES, TITAN_SCHEDULES
from sim.schedules import FORMS

SCHEDULES = {name.lower(): schedule for schedule, name in TITAN_SCHEDULES.items()}
CONVERTERS = {  # of a model's matmuls, classes of Python configs
    "Float8LinearConverter": "float8",
    "MXFP8LinearConverter": "mx",
    "NVFP4LinearConverter": "nvfp4",
}
PRECISIONS = {"nvfp4": "nvfp4", "mx": "mxfp8", "float8": "fp8"}  # by a word in a converter's name
FLOAT8 = {"recipe_name", TITAN_GATHERS_8_BITS}  # of [quantize.linear.float8]
# Tables that decide about a step; of a Python config the class names are these, camel-cased, with Config.
OWN = {"model", "training", "parallelism", "activation_checkpoint", "compile", "optimizer"}
TABLES = OWN | {"float8", "mx", "experimental", "loss"}
CHUNKED = ("ChunkedLossWrapper", "ChunkedCELoss")  # of components/loss.py, the later name first
UNREAD = "?"  # stands for a table: keys whose values are no plain ones
CHUNKS = (
    "loss: training.cross_entropy chunked has chunks as Liger chooses them; torchtitan's are num_chunks of a "
    "sequence (8 by default)"
)


def convert_torchtitan(file: Path, text: str, machine: Machine, function: str | None = None) -> Converted:
    """The scenario of a TOML file, or of a Python config's `function` (needed where the file has several).

    Raises:
        InputError: for text that is neither, several functions and none named, or an unknown model.
    """
    tables = _python(file, text, function) if file.suffix == ".py" else _toml(file, text)
    values = {f"{table}.{key}": v for table, keys in tables.items() if table in TABLES for key, v in keys.items()}
    if file.suffix == ".py":
        values.setdefault("activation_checkpoint.selective_ac_option", "op")  # all that Python configs have
    else:
        values = as_of_2025(values)
    s = Settings(file, values)
    s.notes += [
        f"{key} = {show(value)}: is no plain value, so the default is taken; --set says another"
        for key, value in tables.get(UNREAD, {}).items()
    ]
    s.taken |= {"model.name", "model.flavor"}
    model = machine.model or _model(s)
    layout = _layout(s, machine, str(model))
    training = _training(s, layout)
    if layout.get("schedule") == "interleaved_1f1b":
        layout["micro_batch_group"] = _in_a_row(s, _local_batch(s) // training["micro_batch_size"], layout["pp"])
    in_graph = not s.flag("training.disable_cuda_graphs") and layout["pp"] == 1 and layout["ep"] is None
    if file.suffix == ".py" and in_graph:
        training["cuda_graphs"] = "step"
        s.notes.append("training.cuda_graphs: the default of release 0.3.0; before it there was none")
    gathers_8_bits = s.flag(f"float8.{TITAN_GATHERS_8_BITS}")
    tensorwise = training["precision"] == "fp8" and training.get("fp8_recipe", "tensorwise") == "tensorwise"
    if layout["zero"] == 3 and tensorwise and not gathers_8_bits:
        layout["param_gather_dtype"] = "bf16"
    for name, simulated in (("optimizer.name", ("Adam", "AdamW")), ("optimizer.implementation", ("fused",))):
        s.choice(name, dict.fromkeys(simulated, True), simulated[0])
    sections = {"model": model, "training": training, "parallelism": without_none(layout)}
    return s.converted("torchtitan", machine, sections, name=function or "")


def _toml(file: Path, text: str) -> dict[str, dict[str, Any]]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not TOML: {error}") from None
    tables = {name: table for name, table in data.items() if isinstance(table, dict)}
    # The section alone converts nothing: model.converters says what is on.
    linear = tables.pop("quantize", {}).get("linear", {})
    given = linear.items() if isinstance(linear, dict) else ()
    return tables | {name: table for name, table in given if isinstance(table, dict)}


def _python(file: Path, text: str, function: str | None) -> dict[str, dict[str, Any]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{file}: not Python: {error}") from None
    root = _config(file, tree, function)
    tables: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, call in _config_calls(root):
        for keyword in call.keywords:
            if keyword.arg is not None:
                _set(tables, name, keyword.arg, keyword.value)
    for node in (n for n in ast.walk(root) if isinstance(n, ast.Assign)):  # config.training.seq_len = 8192
        match node.targets:
            case [ast.Attribute(value=ast.Attribute(attr=name), attr=key)] if name in TABLES:
                _set(tables, name, key, node.value)
    for call in (n for n in ast.walk(root) if isinstance(n, ast.Call)):  # model_registry("8B") of models/llama3
        _policy(file, call, tables)
        _converter(call, tables)
        _loss(call, tables)
        if _name(call.func) == "model_registry" and call.args and isinstance(call.args[0], ast.Constant):
            tables["model"].setdefault("flavor", str(call.args[0].value))
            tables["model"].setdefault("name", _package(tree) or file.parent.name)
    if not {*tables} - {UNREAD}:
        raise InputError(f"{file}: holds no torchtitan config: no call of a class such as TrainingConfig")
    return tables


def _set(tables: dict[str, dict[str, Any]], table: str, key: str, value: ast.expr) -> None:
    """Take over a plain value; note the key of another, but for None, which decides nothing."""
    found = _plain(value)
    if found is not None:
        tables[table][key] = found
        tables[UNREAD].pop(f"{table}.{key}", None)
    elif not isinstance(value, ast.Constant):
        tables[UNREAD][f"{table}.{key}"] = ast.unparse(value)


def _config(file: Path, tree: ast.Module, function: str | None) -> ast.AST:
    """The function that makes the config; the whole file where none does."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _config_calls(node)}
    if function is None and len(functions) > 1:
        raise InputError(f"{file}: has several configs: give --config with one of {', '.join(functions)}")
    if function is not None and function not in functions:
        raise InputError(f"{file}: --config: found '{function}'; there are {', '.join(functions) or 'none'}")
    return functions[function] if function else next(iter(functions.values()), tree)


def _policy(file: Path, call: ast.Call, tables: dict[str, dict[str, Any]]) -> None:
    """Take over what `activation_checkpoint=` is given: a policy's `Config()`, or None."""
    for given in (k.value for k in call.keywords if k.arg == "activation_checkpoint"):
        if isinstance(given, ast.Constant) and given.value is None:
            tables["activation_checkpoint"]["mode"] = "none"
        if isinstance(given, ast.Call) and _name(given.func) == "Config":
            policy = TITAN_POLICIES.get(_owner(given.func))
            if policy is None:
                raise InputError(
                    f"{file}: activation_checkpoint: found {_owner(given.func)}; "
                    f"can be simulated: {', '.join(TITAN_POLICIES)}"
                )
            tables["activation_checkpoint"]["mode"] = policy


def _converter(call: ast.Call, tables: dict[str, dict[str, Any]]) -> None:
    """Add the model converter that a call configures, and the keys of 8-bit matmuls that it is given."""
    converter = CONVERTERS.get(_owner(call.func))
    if converter is None:
        return
    tables["model"].setdefault("converters", []).append(converter)
    given = {k.arg: _plain(k.value) for k in call.keywords if converter == "float8" and k.arg in FLOAT8}
    tables["float8"] |= {str(k): v for k, v in given.items() if v is not None}


def _loss(call: ast.Call, tables: dict[str, dict[str, Any]]) -> None:
    """Take over a loss that is computed in chunks, and an optimizer whose function names another than Adam."""
    if _owner(call.func) in CHUNKED:
        tables["loss"]["chunked"] = True
    for made in (k.value for k in call.keywords if k.arg == "optimizer" and isinstance(k.value, ast.Call)):
        if "adam" not in (name := _name(made.func)).lower() and name != "Config":
            tables["optimizer"]["name"] = name


def _owner(function: ast.expr) -> str:
    """Return the name B of `a.B.Config`."""
    return _name(function.value) if isinstance(function, ast.Attribute) and function.attr == "Config" else ""


def _package(tree: ast.Module) -> str:
    """The model's folder that a registry is imported from; nothing where that is the file's own."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            return (node.module or "").rpartition(".")[2]
    return ""


def _config_calls(root: ast.AST) -> list[tuple[str, ast.Call]]:
    """Calls of classes such as `ParallelismConfig`, under the name of the table."""
    found = []
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and (match := re.fullmatch(r"(\w+?)Config", _name(node.func))):
            table = re.sub(r"(?<!^)(?=[A-Z])", "_", match[1]).lower()
            if table in TABLES:
                found.append((table, node))
    return found


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _plain(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _model(s: Settings) -> str:
    name, flavor = s.take("model.name", "llama3"), s.take("model.flavor")
    found = TITAN_MODELS.get(f"{name} {flavor}".lower())
    if found is None:
        raise InputError(
            f"{s.file}: model: found {name} {flavor}; not among the shipped ones ({', '.join(TITAN_MODELS)}): "
            "give --model with a name of `stepsim models` or a Hugging Face config.json"
        )
    return found


def _layout(s: Settings, machine: Machine, model: str) -> dict[str, Any]:
    def degree(name: str) -> int:
        return s.size(f"parallelism.{name}", 1)

    tp, cp = degree("tensor_parallel_degree"), degree("context_parallel_degree")
    pp, ep = degree("pipeline_parallel_degree"), degree("expert_parallel_degree")
    replicate = degree("data_parallel_replicate_degree")
    shard = s.integer("parallelism.data_parallel_shard_degree", -1)
    if shard == -1:
        shard = s.ranks(None, machine, tp * cp * pp * replicate, "tp · cp · pp · data_parallel_replicate_degree")
    sharded = shard * cp > 1
    asynchronous = [s.flag(f"{table}.enable_async_tensor_parallel") for table in ("parallelism", "compile")]
    reshard = s.take("parallelism.fsdp_reshard_after_forward", "default")
    rotate = s.take("parallelism.context_parallel_rotate_method", "allgather")
    return {
        "dp": replicate * shard,
        "tp": tp,
        "sp": s.flag("parallelism.enable_sequence_parallel", True) and tp > 1,
        "cp": cp,
        "pp": pp,
        "ep": ep if ep > 1 else None,
        "expert_tp": degree("expert_tensor_parallel_degree") if ep > 1 else None,
        "zero": 3 if sharded else 0,
        "shard_size": shard * cp if sharded and replicate > 1 else None,
        "accumulate_unsharded": pp > 1 if sharded else None,
        "reshard_after_forward": None if not sharded else reshard == "always" or (reshard == "default" and pp == 1),
        "tp_overlap": "full" if tp > 1 and any(asynchronous) else None,
        "cp_method": None if cp == 1 else "ring" if rotate == "alltoall" else "all_gather",
        **(_pipeline(s, pp, load_model(model).layers) if pp > 1 else {}),
    }


def _pipeline(s: Settings, pp: int, layers: int) -> dict[str, Any]:
    named = str(s.take("parallelism.pipeline_parallel_schedule", "1F1B"))
    schedule = SCHEDULES.get(named.lower().replace("_", ""))  # interleaved_1f1b, before 2025
    if schedule is None:
        raise InputError(
            f"{s.file}: pipeline_parallel_schedule: found '{named[:40]}'; can be simulated: "
            f"{', '.join(TITAN_SCHEDULES.values())}"
        )
    parts = s.listed("parallelism.module_fqns_per_model_part", list)
    points = s.listed("parallelism.pipeline_parallel_split_points")
    if parts:
        counts = [sum(str(name).startswith("layers.") for name in part) for part in parts]
    elif points:
        starts = [str(name).rpartition(".")[2] for name in points]  # norm and output are behind all layers
        begins = [0, *(int(start) if start.isdigit() else layers for start in starts), layers]
        counts = [end - begin for begin, end in pairwise(begins)]
    else:
        counts = _usual_stages(s, pp, FORMS[schedule].stages_per_rank, layers)
    if min(counts) < 0:
        why = f"split points must rise, up to the {layers} layers of the model, and stages not outnumber them"
        raise InputError(f"{s.file}: pipeline stages: found {counts} layers; {why}")
    return {"schedule": schedule, "virtual_stages": len(counts) // pp, "layers_per_stage": counts}


def _in_a_row(s: Settings, micro_batches: int, pp: int) -> int | None:
    """Micro-batches that a stage takes in a row (`ScheduleInterleaved1F1B`, torch/distributed/pipelining/schedules.py);
    None for pp."""
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds:
        why = f"Interleaved1F1B takes a multiple of {micro_batches} // {pp} = {rounds}"
        raise InputError(f"{s.file}: training.local_batch_size: makes {micro_batches} micro-batches; {why}")
    return None if micro_batches == rounds * pp else micro_batches // rounds


def _local_batch(s: Settings) -> int:
    return s.size("training.local_batch_size", s.size("training.batch_size", 8))


def _usual_stages(s: Settings, pp: int, stages_per_rank: int, layers: int) -> list[int]:
    """Layers of each stage where none are named: embedding and output count as layers.

    distributed/pipeline_parallel.py: _get_pipeline_metadata, _generate_llm_fqn_per_model_part.
    """
    first, last = (s.integer(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last"))
    each = s.whole("parallelism.pipeline_parallel_layers_per_stage")
    stages = -(-(layers + first + last) // each) if each else pp * stages_per_rank
    if each and stages % pp:
        where, counted_in = f"{s.file}: parallelism.pipeline_parallel_layers_per_stage", f"{layers} + {first} + {last}"
        why = f"{counted_in} layers, embedding and output among them, make {stages} stages, no multiple of pp {pp}"
        raise InputError(f"{where}: found {each}; {why}")
    counts = list(split_layers(layers + first + last, stages))
    counts[0] -= first
    counts[-1] -= last
    return counts


def _training(s: Settings, layout: dict[str, Any]) -> dict[str, Any]:
    local = _local_batch(s)
    split = s.size("parallelism.pipeline_parallel_microbatch_size", 1)
    micro = split if layout["pp"] > 1 else local
    whole = s.integer("training.global_batch_size", -1)
    compiles = s.flag("training.compile") or s.flag("compile.enable")
    components = s.listed("compile.components") or ["model", "loss"]
    parts = components if compiles else []
    given = s.take("model.converters")
    converters = given if isinstance(given, str) else " ".join(s.listed("model.converters"))  # a text in older files
    dtype = str(s.take("training.dtype", "float32"))
    sixteen = s.take("training.mixed_precision_param", "bfloat16") != "float32"
    if sixteen and layout["zero"] == 0 and layout["tp"] * layout["pp"] > 1:  # `maybe_enable_amp`, distributed/utils.py
        sixteen = dtype == "bfloat16"
        if not sixteen:
            s.notes.append("precision fp32: with tp or pp above 1 torchtitan casts to 16 bits under FSDP only")
    low = next((p for word, p in PRECISIONS.items() if word in converters), None)
    precision = low or ("bf16" if sixteen else "fp32")
    recipe = s.take("float8.recipe_name")
    if low is None and (off := {name for name in s.values if name.startswith(("float8.", "mx."))}):
        s.taken |= off
        sections = " and ".join(sorted({f"[{name.partition('.')[0]}]" for name in off}))
        s.notes.append(f"{sections} without effect, precision {precision}: model.converters does not name it")
    s.take("training.steps")
    reduced = {"bfloat16": {"grad_reduce_dtype": "bf16"}, "float32": {}}  # FSDP's `reduce_dtype`; a DDP has none
    reduces = s.choice("training.mixed_precision_reduce", reduced, "float32") or {}
    return {
        "seq_len": s.integer("training.seq_len", 2048),
        "micro_batch_size": micro,
        "global_batch_size": whole if whole > 0 else local * layout["dp"],
        "precision": precision,
        **({"fp8_recipe": str(recipe)} if precision == "fp8" and recipe else {}),
        "param_dtype": "bf16" if dtype == "bfloat16" else "fp32",
        **(reduces if layout["zero"] == 3 else {}),
        "framework": "compiled" if "model" in parts else "eager",
        **_cross_entropy(s, "loss" in parts, layout["tp"]),
        "gradient_clipping": (s.number("training.max_norm", 1.0) or 0.0) > 0,
        "recompute": _recompute(s),
    }


def _cross_entropy(s: Settings, compiled: bool, tp: int) -> dict[str, str]:
    """The loss: in chunks, of one kernel where it is compiled by itself, or of separate ones (components/loss.py)."""
    chunked = s.flag("loss.chunked")
    if chunked and tp == 1:
        s.notes.append(CHUNKS)
        return {"cross_entropy": "chunked"}
    if chunked:
        s.notes.append("loss: in chunks, but all logits at once are simulated with tp, so the peak memory is higher")
    return {"cross_entropy": "fused"} if compiled else {}


def _recompute(s: Settings) -> Any:
    s.take("activation_checkpoint.early_stop")  # what a layout's framework does, no key says
    mode = str(s.take("activation_checkpoint.mode", "selective"))
    option = str(s.take("activation_checkpoint.selective_ac_option", "2"))
    if mode not in ("none", *TITAN_POLICIES.values()):
        allowed = ", ".join(("none", *TITAN_POLICIES.values()))
        raise InputError(f"{s.file}: activation_checkpoint.mode: found {show(mode)}; can be simulated: {allowed}")
    if mode != "selective":
        return mode
    return "selective_op" if option == "op" else {"mode": "full", "every": int(option)} if option.isdigit() else "none"
