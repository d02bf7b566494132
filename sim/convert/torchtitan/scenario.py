"""torchtitan's configuration as a scenario: the TOML of 2025, and the Python configs that followed it.

Names and meaning: torchtitan/config/job_config.py of pytorch/torchtitan at 000204a (August 2025), and the release 0.3.0
(September 2026); since that summer batches are numbers of tokens. A Python config is parsed and never run: keyword
arguments that are plain values count, by the name of the class that they are given to.
"""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

from sim.convert.other_trainers import refuse_alike
from sim.convert.settings import ALL_IN_BF16, FSDP_ON_HOST, Converted, Machine, Settings, without_none
from sim.convert.torchtitan.filters import filtered_layers
from sim.convert.torchtitan.older import as_of_2025
from sim.convert.torchtitan.python_configs import UNREAD, WITHOUT_EFFECT, is_job, of_python
from sim.convert.torchtitan.tokens import in_sequences
from sim.core.errors import InputError
from sim.inputs.input_source import Source, show
from sim.inputs.model_input import resolve_model
from sim.inputs.parallelism import split_layers
from sim.inputs.trainer_names import (
    TITAN_DDP_BUCKET,
    TITAN_GATHERS_8_BITS,
    TITAN_MODELS,
    TITAN_POLICIES,
    TITAN_SCHEDULES,
)
from sim.schedules import FORMS

RING = (
    "parallelism.context_parallel_rotate_method: alltoall is simulated; torchtitan since 2026 (pull request 2555) "
    "reads it no more and gathers keys and values: set parallelism.cp_method=all_gather"
)
EACH_REDUCED = "DDP: torchtitan all-reduces gradients in every micro-batch; simulated in the last one alone"  # train.py
FREED = (
    "parallelism.fsdp_reshard_after_forward: always frees the last norm and the output matrix, too; they are simulated "
    "as kept for the backward"  # models/llama3/infra/parallelize.py: apply_fsdp
)
SCHEDULES = {name.lower(): schedule for schedule, name in TITAN_SCHEDULES.items()}
PRECISIONS = {"nvfp4": "nvfp4", "mx": "mxfp8", "float8": "fp8"}  # by a word in a converter's name
# components/quantization/float8.py: `Float8LinearConverter.Config`, since pull request 3127 of May 2026. A config of
# before has a `ModelConvertersContainer`, and where it names no recipe, one scale for a tensor.
RECIPE, USUAL_RECIPE, FORMER_CONVERTERS = "float8.recipe_name", "rowwise", "ModelConvertersContainer"
WIDE_GRADIENTS = "rowwise_with_gw_hp"  # torchao: `Float8LinearRecipeName`
IN_8_BITS = "float8.recipe_name rowwise_with_gw_hp: weight gradients' matmuls, in 16 bits there, are simulated in 8"
GROUPED = "grouped_mm"  # in the name of a converter of experts
IN_16_BITS = (
    "experts: torchtitan leaves them in 16 bits without a grouped_mm converter, as they are no nn.Linear; they are "
    "simulated in {} like the other matmuls"  # components/quantization/float8.py: Float8LinearConverter
)
DISPATCHERS: dict[str, str | None] = {"standard": None, "deepep": "deepep", "hybridep": "hybridep"}
CAPACITY = "model.non_blocking_capacity_factor"  # with which HybridEP does not wait for the CPU
OF_PIPELINES = (  # of no effect without one (distributed/pipeline_parallel.py)
    *("parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_microbatch_size"),
    *("parallelism.pipeline_parallel_first_stage_less_layers", "parallelism.pipeline_parallel_last_stage_less_layers"),
)
CHUNKS = 8  # default of `num_chunks`, components/loss.py
# Flavors that differ in the attention alone, whose mask is block_causal (models/llama3/__init__.py of early 2026).
OWN_ATTENTION = re.compile(r"_(?:flex|varlen)(?:_attn)?$")
REPLICA_GROUPS = (
    "fault_tolerance.enable: the file's GPUs are one of several replica groups, whose all-reduce by torchft is not "
    "simulated"  # components/ft.py of 2025: FTManager
)
WITHIN_TEXTS = "attention stays within a text there; a sequence is simulated as one, training.packing describes several"


def convert_torchtitan(
    file: Path, text: str, machine: Machine, function: str | None = None, data: dict[str, Any] | None = None
) -> Converted:
    """The scenario of a TOML file, or of a Python config's `function` (needed where the file has several). `data`: the
    TOML's keys, where a command overrides some.

    Raises:
        InputError: for text that is neither, several functions and none named, or an unknown model.
    """
    tables = of_python(file, text, function) if file.suffix == ".py" else _toml(file, text, data)
    of_classes = file.suffix == ".py" and not is_job(text)  # since release 0.3.0
    s = _settings(file, text, tables, of_classes)
    s.taken |= {"model.name", "model.flavor"}
    s.choice("model.attn_backend", {"sdpa": True}, "sdpa")  # kernels of others are named
    model = machine.model or _model(s)
    layout = _layout(s, machine, model, of_classes)
    training = _training(s, layout)
    several = training["global_batch_size"] > training["micro_batch_size"] * layout["dp"]
    s.notes += [EACH_REDUCED] if layout["zero"] == 0 and layout["dp"] > 1 and several else []
    if layout.get("schedule") == "interleaved_1f1b":
        layout["micro_batch_group"] = _in_a_row(s, _local_batch(s) // training["micro_batch_size"], layout["pp"])
    if of_classes and _in_graph(s, layout):
        training |= {"cuda_graphs": "step", "zero_grad": "keep"}  # trainer.py of 0.3.0, train_step
        s.notes.append("training.cuda_graphs: the default of release 0.3.0; before it there was none")
    if training["precision"] in PRECISIONS.values():
        training |= _low_precision(s, training["precision"], model)
    if _gathers_16_bits(s, training) and layout["zero"] == 3:
        layout["param_gather_dtype"] = "bf16"
    s.choice("optimizer.name", dict.fromkeys(("Adam", "AdamW"), True), "Adam")
    if s.choice("optimizer.implementation", {"fused": "fused", "foreach": "foreach"}, "fused") == "foreach":
        training["adamw_kernels"] = "foreach"
    sections = {"model": model, "training": training, "parallelism": without_none(layout)}
    return s.converted("torchtitan", machine, sections, name=function or "")


def _settings(file: Path, text: str, tables: dict[str, dict[str, Any]], of_classes: bool) -> Settings:
    """The file's settings by table and key, named as release 0.3.0 or the TOML of 2025 names them."""
    read = tables.keys() - WITHOUT_EFFECT - {UNREAD}
    values = {f"{table}.{key}": v for table, keys in tables.items() if table in read for key, v in keys.items()}
    if of_classes:
        values.setdefault("activation_checkpoint.selective_ac_option", "op")  # all that Python configs have
        if "float8" in values.get("model.converters", ()) and FORMER_CONVERTERS not in text:
            values.setdefault(RECIPE, USUAL_RECIPE)
    else:
        values = as_of_2025(values)
    s = Settings(file, in_sequences(file, values))
    s.notes += [
        f"{key} = {show(value)}: is no plain value, so the default is taken; --set says another"
        for key, value in tables.get(UNREAD, {}).items()
    ]
    s.notes += [REPLICA_GROUPS] if tables.get("fault_tolerance", {}).get("enable") is True else []
    return s


def _low_precision(s: Settings, precision: str, model: str | dict[str, Any]) -> dict[str, Any]:
    """Keys of the layers that a converter leaves in 16 bits; notes experts that it leaves so, too."""
    described = resolve_model(model, Source("model", {}), ())
    if described.moe is not None and GROUPED not in str(s.values.get("model.converters")):
        s.notes.append(IN_16_BITS.format(precision))
    return filtered_layers(s, precision, described.layers)


def _gathers_16_bits(s: Settings, training: dict[str, Any]) -> bool:
    """Tell whether a step with one fp8 scale for a tensor gathers its parameters in 16 bits all the same."""
    gathers_8_bits = s.flag(f"float8.{TITAN_GATHERS_8_BITS}")
    tensorwise = training["precision"] == "fp8" and training.get("fp8_recipe", "tensorwise") == "tensorwise"
    return tensorwise and not gathers_8_bits


def _in_graph(s: Settings, layout: dict[str, Any]) -> bool:
    """Tell whether a step is one CUDA graph (trainer.py of 0.3.0: `_validate_cuda_graphs`)."""
    without_cpu = layout["ep_dispatcher"] == "hybridep" and s.values.get(CAPACITY) is not None
    return not s.flag("training.disable_cuda_graphs") and layout["pp"] == 1 and (layout["ep"] is None or without_cpu)


def _toml(file: Path, text: str, data: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    try:
        data = tomllib.loads(text) if data is None else data
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not TOML: {error}") from None
    refuse_alike(file, data)
    tables = {name: table for name, table in data.items() if isinstance(table, dict)}
    # The section alone converts nothing: model.converters says what is on.
    linear = tables.pop("quantize", {}).get("linear", {})
    given = linear.items() if isinstance(linear, dict) else ()
    return tables | {name: table for name, table in given if isinstance(table, dict)}


def _model(s: Settings) -> str | dict[str, Any]:
    name, flavor = s.take("model.name", "llama3"), s.take("model.flavor")
    plain = OWN_ATTENTION.sub("", f"{name} {flavor}".lower())
    found = TITAN_MODELS.get(plain)
    if found is not None and plain != f"{name} {flavor}".lower():
        s.notes.append(f"model.flavor {flavor}: {WITHIN_TEXTS}")
    if found is None:
        raise InputError(
            f"{s.file}: model: found {name} {flavor}; not among the shipped ones ({', '.join(TITAN_MODELS)}): "
            "give --model with a name of `stepsim models` or a Hugging Face config.json"
        )
    return found


def _dispatcher(s: Settings) -> str | None:
    """Who takes tokens to their experts: an argument of `model_registry`, before that of [parallelism]."""

    names = ("model.moe_comm_backend", "parallelism.expert_parallel_comm_backend")
    return next((found for name in names if (found := s.choice(name, DISPATCHERS, "standard"))), None)


def _layout(s: Settings, machine: Machine, model: str | dict[str, Any], of_classes: bool) -> dict[str, Any]:
    """Keys of `parallelism`. `of_classes`: a release that applies FSDP on one shard, too, for its casts to 16 bits
    (0.3.0: models/llama3/parallelize.py; distributed/parallel_dims.py, `_mesh_exist`)."""

    def degree(name: str) -> int:
        return s.size(f"parallelism.{name}", 1)

    tp, cp = degree("tensor_parallel_degree"), degree("context_parallel_degree")
    pp, ep = degree("pipeline_parallel_degree"), degree("expert_parallel_degree")
    replicate = degree("data_parallel_replicate_degree")
    shard = s.integer("parallelism.data_parallel_shard_degree", -1)
    if shard == -1:
        shard = s.ranks(None, machine, tp * cp * pp * replicate, "tp · cp · pp · data_parallel_replicate_degree")
    elif machine.gpus not in (None, gpus := replicate * shard * tp * cp * pp):  # `ParallelDims`, parallel_dims.py
        raise InputError(f"{s.file}: {machine.gpus} GPUs; must be {gpus}, the product of the file's degrees")
    sharded = of_classes or shard * cp > 1
    expert_tp = degree("expert_tensor_parallel_degree")
    s.taken |= {name for name in OF_PIPELINES if pp == 1}
    asynchronous = [s.flag(f"{table}.enable_async_tensor_parallel") for table in ("parallelism", "compile")]
    reshard = s.take("parallelism.fsdp_reshard_after_forward", "default")
    rotate = s.take("parallelism.context_parallel_rotate_method", "allgather")
    s.notes += [FREED] if sharded and reshard == "always" else []
    if cp > 1 and rotate == "alltoall":
        s.notes.append(RING)
    return {
        "dp": replicate * shard,
        "tp": tp,
        "sp": s.flag("parallelism.enable_sequence_parallel", True) and tp > 1,
        "cp": cp,
        "pp": pp,
        "ep": ep if ep > 1 else None,
        "ep_dispatcher": _dispatcher(s) if ep > 1 else None,
        "expert_tp": expert_tp if ep > 1 else None,
        "zero": 3 if sharded else 0,
        "bucket_bytes": TITAN_DDP_BUCKET if not sharded and replicate > 1 else None,
        "shard_size": shard * cp if sharded and replicate > 1 else None,
        "accumulate_unsharded": pp > 1 if sharded else None,
        "reshard_after_forward": None if not sharded else reshard == "always" or (reshard == "default" and pp == 1),
        "tp_overlap": "full" if tp > 1 and any(asynchronous) else None,
        "cp_method": None if cp == 1 else "ring" if rotate == "alltoall" else "all_gather",
        **(_pipeline(s, pp, resolve_model(model, Source("model", {}), ()).layers) if pp > 1 else {}),
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
    whole = s.integer("training.global_batch_size", -1)
    compiles = s.flag("training.compile") or s.flag("compile.enable")
    parts = (s.listed("compile.components") or ["model", "loss"]) if compiles else []
    dtype = str(s.take("training.dtype", "float32"))
    precision, recipe = _precision(s, layout, dtype)
    s.take("training.steps")
    framework = "compiled" if "model" in parts else "eager"
    low_parameters = dtype == "bfloat16"
    reduced = {"bfloat16": "bf16", "float32": "fp32" if low_parameters else None}
    reduces = s.choice("training.mixed_precision_reduce", reduced, "float32")  # FSDP's; a DDP has none
    return {
        "seq_len": s.integer("training.seq_len", 2048),
        "micro_batch_size": split if layout["pp"] > 1 else local,
        "global_batch_size": whole if whole > 0 else local * layout["dp"],
        "precision": precision,
        **({"fp8_recipe": recipe} if precision == "fp8" and recipe else {}),
        **(ALL_IN_BF16 if low_parameters else {"param_dtype": "fp32"}),
        **({"grad_reduce_dtype": reduces} if layout["zero"] == 3 and reduces else {}),
        "framework": framework,
        **_cross_entropy(s, "loss" in parts),
        "gradient_clipping": (s.number("training.max_norm", 1.0) or 0.0) > 0,
        "recompute": _recompute(s, framework),
        **_offload(s, layout["zero"] == 3),
    }


def _precision(s: Settings, layout: dict[str, Any], dtype: str) -> tuple[str, str | None]:
    """Number format of the matmuls, and the recipe of fp8 where the file names one; `dtype`: the parameters' own."""
    given = s.take("model.converters")
    converters = given if isinstance(given, str) else " ".join(s.listed("model.converters"))  # a text in older files
    sixteen = s.take("training.mixed_precision_param", "bfloat16") != "float32"
    if sixteen and layout["zero"] == 0 and layout["tp"] * layout["pp"] > 1:  # `maybe_enable_amp`, distributed/utils.py
        sixteen = dtype == "bfloat16"
        if not sixteen:
            s.notes.append("precision fp32: with tp or pp above 1 torchtitan casts to 16 bits under FSDP only")
    low = next((p for word, p in PRECISIONS.items() if word in converters), None)
    precision = low or ("bf16" if sixteen else "fp32")
    recipe = s.take(RECIPE)
    if recipe == WIDE_GRADIENTS:
        recipe = USUAL_RECIPE
        s.notes.append(IN_8_BITS)
    if low is None and (off := {name for name in s.values if name.startswith(("float8.", "mx."))}):
        s.taken |= off
        sections = " and ".join(sorted({f"[{name.partition('.')[0]}]" for name in off}))
        s.notes.append(f"{sections} without effect, precision {precision}: model.converters does not name it")
    return precision, None if recipe is None else str(recipe)


def _offload(s: Settings, sharded: bool) -> dict[str, Any]:
    return FSDP_ON_HOST if s.flag("training.enable_cpu_offload") and sharded else {}


def _cross_entropy(s: Settings, compiled: bool) -> dict[str, Any]:
    """The loss: in chunks, of one kernel where it is compiled by itself, or of separate ones (components/loss.py)."""
    chunks = s.size("loss.num_chunks", CHUNKS)
    if s.flag("loss.chunked"):
        return {"cross_entropy": "chunked", "loss_chunks": chunks}
    return {"cross_entropy": "fused"} if compiled else {}


def _recompute(s: Settings, framework: str) -> Any:
    early = s.flag("activation_checkpoint.early_stop")
    stops = {"early_stop": False} if not early and framework == "eager" else {}
    mode = str(s.take("activation_checkpoint.mode", "selective"))
    option = str(s.take("activation_checkpoint.selective_ac_option", "2"))
    if mode not in ("none", *TITAN_POLICIES.values()):
        allowed = ", ".join(("none", *TITAN_POLICIES.values()))
        raise InputError(f"{s.file}: activation_checkpoint.mode: found {show(mode)}; can be simulated: {allowed}")
    if mode != "selective":
        return {"mode": mode, **stops} if mode == "full" and stops else mode
    if option.isdigit():
        return {"mode": "full", "every": int(option), **stops}
    return "none" if option != "op" else {"mode": "selective_op", **stops} if stops else "selective_op"
