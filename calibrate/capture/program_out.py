"""Writes a recorded step as a file of format "program/1": gzipped JSON of columns and tables, without any weights."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.capture.recorder import Life, RecordedOperator, Recorder
from calibrate.capture.step import Step
from sim.inputs.program_file import FORMAT, PHASES, TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    import torch


class _Table:
    """Numbers distinct values in the order of their appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


def program_data(step: Step, recorder: Recorder) -> dict[str, Any]:
    """Return the file's content."""
    names, modules, tensors, kinds, copies = _Table(), _Table(), _Table(), _Table(), _Table()
    operators = _operators(recorder.rows, names, modules, tensors, copies)
    storages = _storages(recorder.lives, kinds, modules)
    trained = step.optimizer is not None
    parameters = [
        [modules(name), p.numel(), str(p.dtype).removeprefix("torch."), int(p.requires_grad and trained)]
        for name, p in step.model.named_parameters()
    ]
    return {
        "format": FORMAT,
        "seq_len": step.seq_len,
        "micro_batch_size": step.micro_batch_size,
        "autocast": step.autocast,
        "device": recorder.device,
        "clip_grad_norm": step.clip_grad_norm,
        "optimizer": _optimizer_name(step.optimizer),
        "facts": step.facts,
        "parameters": parameters,
        "operators": operators,
        "storages": storages,
        "tables": {
            "phases": list(PHASES),
            "names": names.values(),
            "modules": modules.values(),
            "kinds": kinds.values(),
            "tensors": [[d, list(shape), list(strides)] for d, shape, strides in tensors.values()],
            "host_copies": [
                [TO_DEVICE if c.to_device else TO_HOST, int(c.pinned), int(c.non_blocking)] for c in copies.values()
            ],
        },
    }


def _operators(
    rows: Sequence[RecordedOperator], names: _Table, modules: _Table, tensors: _Table, copies: _Table
) -> dict[str, list[Any]]:
    """Return the operators' columns; the tables get what the columns number."""
    return {
        "name": [names(r.name) for r in rows],
        "phase": [PHASES.index(r.phase) for r in rows],
        "module": [modules(r.module) for r in rows],
        "inputs": [[tensors(t) for t, _ in r.inputs] for r in rows],
        "input_storages": [[s for _, s in r.inputs] for r in rows],
        "outputs": [[tensors(t) for t, _ in r.outputs] for r in rows],
        "output_storages": [[s for _, s in r.outputs] for r in rows],
        "launches": [r.launches for r in rows],
        "causal": [int(r.causal) for r in rows],
        "tf32": [int(r.tf32) for r in rows],
        "host_copy": [-1 if r.host_copy is None else copies(r.host_copy) for r in rows],
        "drops": [int(r.drops) for r in rows],
        "dims_behind": [r.dims_behind for r in rows],
        "graphed": [int(r.graphed) for r in rows],
        "window": [r.window for r in rows],
    }


def _storages(lives: Sequence[Life], kinds: _Table, modules: _Table) -> dict[str, list[int]]:
    """Return the storages' columns; the tables get what the columns number."""
    return {
        "bytes": [x.bytes for x in lives],
        "kind": [kinds(x.kind) for x in lives],
        "born": [x.born for x in lives],
        "died": [x.died for x in lives],
        "module": [modules(x.module) for x in lives],
    }


def _optimizer_name(optimizer: torch.optim.Optimizer | None) -> str:
    if optimizer is None:
        return ""
    kind = type(optimizer).__name__.lower()
    group = optimizer.param_groups[0]
    return kind if group.get("fused") or kind != "adamw" else "adamw_foreach"


def write_program(path: Path, step: Step, recorder: Recorder) -> None:
    """Write the file; equal programs give identical files."""
    text = json.dumps(program_data(step, recorder), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
