"""Captures the program of a training step or a forward: `python -m calibrate.capture WHAT --out PROGRAM.json.gz`.

`--script 'train.py ARGS' --world-size N --out PREFIX` captures ranks of a distributed training script.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calibrate.capture.options import Options
from sim.commands.command import Command
from sim.commands.files_named import FILE, OUTPUT
from sim.commands.options import gathered
from sim.core.errors import InputError

if TYPE_CHECKING:
    from calibrate.capture.step import Step
    from sim.validation.records import Measurement


@click.command("capture", cls=Command)
@click.argument("what", required=False, metavar="WHAT")
@click.option("--out", type=OUTPUT, required=True, metavar="FILE", help="program to write; a folder with --table")
@click.option("--table", type=FILE, metavar="TABLE.json", help="capture each row that has the key `program`")
@click.option("--script", metavar="'train.py ARGS'", help="capture ranks of a distributed script")
@click.option("--world-size", type=click.IntRange(1, 1_000_000), metavar="N", help="ranks of --script")
@click.option("--ranks", metavar="R,…", default="0", help="ranks to capture, separated by commas")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, metavar="N", help="ranks of --script on a node")
@gathered(
    Options,
    "options",
    click.option("--seq-len", type=click.IntRange(1), default=1024, metavar="N", help="tokens of a sequence"),
    click.option("--micro-batch-size", type=click.IntRange(1), default=1, metavar="N", help="sequences"),
    click.option("--weights", type=click.Choice(["fp32", "bf16"]), default="fp32", help="dtype of parameters"),
    click.option("--autocast", type=click.Choice(["bf16", "fp16"]), help="run under CUDA's torch.autocast"),
    click.option(
        "--attention", type=click.Choice(["sdpa", "eager"]), help="implementation; by default Transformers' choice"
    ),
    click.option("--gradient-checkpointing", is_flag=True, help="recompute each layer in its backward"),
    click.option("--compile", "compiled", is_flag=True, help="capture the step as torch.compile runs it"),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "adamw_foreach", "sgd"]),
        default="adamw",
        help="whose update is captured",
    ),
    click.option("--forward", is_flag=True, help="capture a forward alone, as inference runs it"),
    click.option(
        "--generate",
        "new_tokens",
        type=click.IntRange(1),
        default=None,
        metavar="N",
        help="capture model.generate of N tokens a sequence",
    ),
    click.option(
        "--lora", "lora_rank", type=click.IntRange(1), metavar="RANK", help="train only adapters of this rank (peft)"
    ),
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="whose kernels are captured")
@click.option("--routing", type=click.Choice(["balanced"]), help="give each expert equally many tokens")
def main(
    what: str | None,
    out: Path,
    table: Path | None,
    script: str | None,
    world_size: int | None,
    ranks: str,
    gpus_per_node: int,
    options: Options,
    device: str,
    routing: str | None,
) -> int:
    """Record the operators of the training step of WHAT, without a GPU. WHAT is a Hugging Face config.json, its
    folder, or package.module:function.

    --forward records a forward alone, without gradients and optimizer; --generate a prompt of --seq-len tokens and N
    new ones. A function whose Step has no optimizer is recorded as a forward alone.
    --script records ranks of an unmodified distributed training script instead. --routing balanced gives each expert
    equally many tokens; models whose code reads the number of an expert's tokens cannot be recorded without it.
    """
    _needs_torch()
    if sum(x is not None for x in (what, table, script)) != 1:
        raise InputError("WHAT: give a config.json, a folder or package.module:function, or --table, or --script")
    _check_forwards(what, options)
    if script is not None:
        from calibrate.capture.script.ranks import capture_ranks

        capture_ranks(script, world_size, ranks, gpus_per_node, out, routing is not None)
        return 0
    if table is not None:
        return _capture_table(table, out)
    assert what is not None
    if options.compiled and routing:
        raise InputError("--compile: cannot be given with --routing; leave one of them out")
    from calibrate.capture.what import maker

    made = maker(what, options)
    compiled = (lambda: replace(made(), compiled=True)) if options.compiled else made
    _capture(compiled, what, out, device, routing is not None)
    return 0


def _check_forwards(what: str | None, options: Options) -> None:
    """Refuse options that a forward alone, or a generation, does not have."""
    if options.forward and options.new_tokens:
        raise InputError(
            "--generate: cannot be given with --forward; it runs the prompt's forward and one for each token"
        )
    name = "--forward" if options.forward else "--generate" if options.new_tokens else ""
    if name and (what is None or ":" in what):
        raise InputError(f"{name}: is for a Hugging Face config; a Step whose optimizer is None is a forward alone")
    for other, also in (("--gradient-checkpointing", options.gradient_checkpointing), ("--compile", options.compiled)):
        if name and also:
            raise InputError(f"{name}: cannot be given with {other}; leave one of them out")


def _needs_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise InputError("capturing needs torch: pip install torch") from None


def _capture(make: Callable[[], Step], what: str, out: Path, device: str = "cuda", balanced: bool = False) -> None:
    from calibrate.capture.failure import failure
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record
    from calibrate.capture.step_checks import StepRefused

    if not out.parent.is_dir():
        raise InputError(f"--out: {out.parent} is not a folder")
    begin_s = time.perf_counter()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # `failure` prints its message
    try:
        step, recorder = record(make, device, balanced)
    except StepRefused as error:
        raise InputError(f"{what}: {error}") from None
    except InputError:
        raise
    except Exception as error:
        raise failure(error, what) from None
    write_program(out, step, recorder)
    for note in recorder.notes:
        print(f"note: {note}", file=sys.stderr)
    kind = "a training step" if step.optimizer is not None else "a forward alone (no backward, no optimizer)"
    operators, launches, storages = len(recorder.rows), sum(r.launches for r in recorder.rows), len(recorder.lives)
    counted = f"{operators} operators, {launches} launches, {storages} storages"
    print(f"{out}: {type(step.model).__name__}: {kind}: {counted}, {time.perf_counter() - begin_s:.1f} s")


def _capture_table(table: Path, out: Path) -> int:
    """Capture each row; report rows that fail, with exit code 1."""
    from calibrate.capture.huggingface.step import huggingface_maker
    from calibrate.capture.table_row import options_of_row
    from sim.inputs.input_source import Source, file_named

    out.mkdir(parents=True, exist_ok=True)
    missing = 0
    for row in _rows(table):
        where = f"{table}: {row.id}"
        try:
            if row.unreadable:
                raise InputError(row.unreadable)
            data = {**row.data, "scenario": dict(row.scenario)}
            config, options = options_of_row(data, where)
            if isinstance(config, str):
                config = str(file_named(config, Source(where, {}, folder=row.folder), "config.json") or config)
            _capture(huggingface_maker(config, options), where, out / f"{row.id}.json.gz")
        except InputError as error:
            missing += 1
            said = str(error)
            print(f"error: {said if said.startswith(where) else f'{where}: {said}'}", file=sys.stderr)
    return 1 if missing else 0


def _rows(path: Path) -> list[Measurement]:
    """Return the rows of a table with the key `program`."""
    from sim.validation.tables import read_table

    found = [row for row in read_table(path).rows if "program" in row.data]
    if not found:
        raise InputError(f"{path}: rows: no row has the key `program`")
    return found
