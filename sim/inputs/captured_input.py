"""A scenario whose model is a captured program: `model: {program: FILE}`.

The program says what runs, so it fixes most of `training`; a scenario may repeat what it fixes, and not contradict it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.inputs.input_source import Source, file_named, show, validate
from sim.inputs.model_config import ModelConfig
from sim.inputs.program_blocks import pieces_of, tied_elements
from sim.inputs.program_file import CapturedProgram, read_program
from sim.inputs.training_config import Training
from sim.inputs.yaml_input import KeyPath

# What a program does not say. Its kernels are the same within CUDA graphs.
FREE = ("global_batch_size", "grad_reduce_dtype", "activation_offload", "tokens", "batch_schedule", "cuda_graphs")
FLOATS = ("fp32", "bf16", "fp16")


def captured_config(data: dict[str, Any], source: Source, path: KeyPath) -> ModelConfig:
    """The model of a program: its blocks are the layers. Its sizes are in the program alone, and 1 here.

    Raises:
        InputError: where there is no such program, or other keys contradict it.
    """
    program, file = _program(data["program"], source, (*path, "program"))
    found = ModelConfig(
        program=file,
        layers=pieces_of(program).blocks,
        hidden=1,
        heads=1,
        vocab=1,
        tied_embeddings=tied_elements(program) > 0,
        max_positions=program.seq_len,
    )
    own = found.model_dump(mode="json")
    for key, value in data.items():
        if key not in own:
            raise source.error((*path, key), "unknown key beside program")
        if key != "program" and value is not None and value != own[key]:
            raise source.error((*path, key), f"found {show(value)}; model.program says {show(own[key])}")
    return found


def _program(name: Any, source: Source, path: KeyPath) -> tuple[CapturedProgram, str]:
    if not isinstance(name, str):
        raise source.error(path, f"found {show(name)}; must be a file that python -m calibrate.capture wrote")
    file = file_named(name, source)
    if file is None:
        raise source.error(path, f"found {show(name)}; no such file; python -m calibrate.capture writes one")
    program = read_program(file)
    if not program.seq_len:
        said = "is a rank of a distributed script, whose layout is fixed; python -m sim.replay plays it"
        raise source.error(path, f"found {show(program.path)}; {said}")
    return program, str(file)


def captured_training(data: Any, file: str, source: Source) -> Training:
    """`training` with what the program fixes filled in.

    Raises:
        InputError: where the scenario contradicts the program.
    """
    program, path = read_program(Path(file)), ("training",)
    if not isinstance(data, dict):
        raise source.error(path, f"found {show(data)}; must be a mapping")
    fixed = fixed_by(program)
    for key in ("precision", "param_dtype"):
        if fixed[key] not in FLOATS:
            raise source.error(("model", "program"), f"computes in {fixed[key]}; allowed: {', '.join(FLOATS)}")
    given = {key: value for key, value in data.items() if value is not None}
    found = validate(Training, {**fixed, **given}, source, path)
    for key in given:
        if key not in FREE and key in Training.model_fields:
            captured = getattr(validate(Training, {**fixed, "global_batch_size": 1}, source, path), key)
            if getattr(found, key) != captured:
                shown = captured.mode if key == "recompute" else captured
                raise source.error((*path, key), f"found {show(given[key])}; {file} was captured with {show(shown)}")
    return found


def fixed_by(program: CapturedProgram) -> dict[str, Any]:
    """Keys of `training` that a program says."""
    sizes: dict[str, int] = {}
    for p in program.parameters:
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.elements
    weights = max(sizes, key=lambda dtype: sizes[dtype], default="fp32")
    phases = {o.phase for o in program.operators}
    names = {o.name for o in program.operators}
    fixed: dict[str, Any] = {
        "seq_len": program.seq_len,
        "micro_batch_size": program.micro_batch_size,
        "precision": program.autocast or weights,
        "param_dtype": weights,
        "grad_dtype": weights,
        "optimizer": "adamw" if "adam" in program.optimizer else "sgd",
        "optimizer_dtype": "bf16" if weights == "bf16" else "fp32",
        "master_weights": None if weights == "fp32" else False,
        "gradient_clipping": "clip" in phases,
        "recompute": "full" if "recomputed" in phases else "none",
    }
    if program.forward_alone:
        del fixed["optimizer_dtype"]  # Adam's
    if any(name.startswith("aten._scaled_dot_product") for name in names):
        fixed["attention"] = "fused"
    elif "aten._softmax" in names:
        fixed["attention"] = "unfused"
    return fixed
