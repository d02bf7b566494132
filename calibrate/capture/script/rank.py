"""Captures one rank of `--script`: `python -m calibrate.capture.script.rank TASK`, with the task as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from sim.commands.command import bad_input_exits


def main() -> None:
    """Capture the rank, write its file, and print a summary."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    Path(task["out"]).unlink(missing_ok=True)
    begin_s = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the script's own output
        said = _capture(task)
    print(f"{said}, {time.perf_counter() - begin_s:.1f} s", flush=True)
    sys.stderr.flush()
    os._exit(0)  # do not wait for the script's threads and workers


def _capture(task: dict[str, Any]) -> str:
    from calibrate.capture.failure import failure
    from calibrate.capture.script.object_messages import NeedsOthers, ObjectMessages
    from calibrate.capture.script.out import write_script_program
    from calibrate.capture.script.ranks import NEEDS_OTHERS
    from calibrate.capture.script.run import record_script
    from sim.core.errors import InputError
    from sim.inputs.script_program import alone_note

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # `failure` prints its message
    words, rank, world_size = task["words"], task["rank"], task["world_size"]
    folder = None if task["objects"] is None else Path(task["objects"])
    objects = ObjectMessages(rank, task["ranks"], folder)
    try:
        steps, recorder = record_script(
            words, rank, world_size, task["gpus_per_node"], objects, balanced=task["balanced"]
        )
    except InputError:
        raise
    except NeedsOthers:
        sys.stderr.flush()
        os._exit(NEEDS_OTHERS)
    except Exception as error:
        raise failure(error, " ".join(words)) from None
    write_script_program(Path(task["out"]), steps, recorder, words, rank, world_size)
    if world_size > 1 and not recorder.queue.collectives:
        recorder.notes.append(alone_note(world_size))
    for note in recorder.notes:
        print(f"note: {note}", file=sys.stderr)
    launches = sum(r.launches for r in recorder.rows)
    return f"{len(recorder.rows)} operators, {launches} launches, {len(recorder.queue.collectives)} collectives"


if __name__ == "__main__":
    with bad_input_exits():
        main()
