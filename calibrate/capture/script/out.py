"""Writes a recorded rank of a script as a file: "program/1" with the key `script` (see docs/programs_inside.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from calibrate.capture.program_out import program_data
from calibrate.capture.script.recorder import ScriptRecorder
from calibrate.capture.script.run import Steps
from calibrate.capture.step import Step
from calibrate.capture.values.known_values import ROUTED
from sim.inputs.script_program import What


def write_script_program(
    path: Path, steps: Steps, recorder: ScriptRecorder, words: Sequence[str], rank: int, world_size: int
) -> None:
    """Write the file; equal programs give identical files."""
    assert steps.optimizer is not None
    roots = recorder.roots
    model = roots[0] if len(roots) == 1 else torch.nn.ModuleList(roots)
    facts = {"command": " ".join(words), "torch": torch.__version__}
    facts |= ROUTED if recorder.known.balanced else {}
    step = Step(model, lambda: torch.zeros(()), steps.optimizer, 0, 0, facts=facts)  # its tokens are unknown
    data = program_data(step, recorder)
    data["script"] = {"rank": rank, "world_size": world_size, "device": recorder.device, **_script(recorder)}
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def _script(recorder: ScriptRecorder) -> dict[str, Any]:
    queue = recorder.queue
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    numbers = [groups.setdefault((c.group, c.ranks), len(groups)) for c in queue.collectives]
    whats = list(What)
    return {
        "streams": recorder.row_streams,
        "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in groups],
        "collectives": {
            "kind": [c.kind for c in queue.collectives],
            "group": numbers,
            "bytes": [c.bytes for c in queue.collectives],
        },
        "entries": {
            "before": [e.before for e in queue.entries],
            "what": [whats.index(e.what) for e in queue.entries],
            "stream": [e.stream for e in queue.entries],
            "value": [e.value for e in queue.entries],
        },
        "whats": [str(w) for w in whats],
        "host_work": list(queue.kinds),
    }
