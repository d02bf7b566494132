"""Tables of published measurements: format measurements/1, read and checked.

A row's scenario is the table's scenario with the row's merged over it, key by key. Either may be the name of a
scenario's file. Of a training step it also has what the table says of its software (`sim.validation.stated`) and what
that trainer's launch script sets (`sim.validation.launch_scripts`), unless the row says so itself. A row's `program`
says which Hugging Face model ran (`sim.validation.what_ran`). A batch limit that
a row's own figures disprove is left out of all rows of its server (`sim.validation.running_requests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.inputs.file_kinds import other_format, read_data, refuse_other_kind
from sim.inputs.input_source import Source, file_named, show
from sim.inputs.overrides import merge
from sim.inputs.plain_data import listed, mapping
from sim.inputs.recorded import Recorded
from sim.validation.launch_scripts import with_launch_script
from sim.validation.records import Measurement, Table
from sim.validation.running_requests import without_false_limits
from sim.validation.stated import (
    with_adapter_dropout,
    with_eight_bit_parameters,
    with_other_jobs,
    with_stated,
    without_assumed_sums,
    without_concluded,
)
from sim.validation.what_ran import with_what_ran

FORMAT = "measurements/1"
KINDS = ("training_step", "kernel", "collective", "inference")


def read_table(path: str | Path, limit: int | None = None) -> Table:
    """A table from a file; of its rows the first `limit`.

    Raises:
        InputError: naming the file, the key, what was found and what is allowed.
    """
    data = read_data(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        refuse_other_kind(path, data, "a table of measurements is wanted", own="measurements")
        raise other_format(path, data, FORMAT)
    if data.get("kind") not in KINDS:
        said = f"found {str(data['kind'])[:60]!r}" if "kind" in data else "is required and missing"
        raise InputError(f"{path}: kind: {said}; allowed: {', '.join(KINDS)}")
    rows = listed(data.get("rows"), f"{path}: rows")
    if not rows:
        raise InputError(f"{path}: rows: is an empty list; a table has one row or more")
    name = str(data.get("name") or Path(path).stem)
    shared = with_other_jobs(_scenario(data.get("scenario"), f"{path}: scenario"), data.get("assumptions"))
    source = {str(k): str(v) for k, v in _mapping(data.get("source"), f"{path}: source").items()}
    software = (str(data.get("software", "")), source.get("citation", ""))
    facts = data.get("assumptions")
    shared = without_assumed_sums(shared, software[0], facts)
    whole = _Whole(name, data["kind"], shared, software, facts, str(Path(path).parent))
    made = [_row(r, f"{path}: rows[{i}]", whole) for i, r in enumerate(rows)]
    if whole.kind == "collective" and all(row.data.get("nodes", 1) == 1 for row in made):
        made = [replace(row, one_process=True) for row in made]
    shown = without_false_limits(made)[:limit]
    return Table(name, str(data.get("title", name)), data["kind"], source, shown, str(path))


# Keys of rows that say where figures come from, what was published beside them, or what a capture takes (`program`).
_DESCRIBES = (
    *(
        "note",
        "notes",
        "comment",
        "source",
        "citation",
        "page",
        "figure",
        "table",
        "url",
        "date",
        "also",
        "system",
        "gpu",
    ),
    *("published", "published_predictions", "predicted_before", "derived", "reading", "conditions", "population"),
    *("spread", "statistic", "tuned", "program", "measured_rank", "engine", "liger_version", "flops", "tflops"),
    *("efficiency", "provider", "impl", "run.submitter", "run.system", "run.nodes", "run.gpus", "run.config"),
    *("run.commit", "run.config_basis", "run.step_time_from", "run.step_time_from_blocks_s", "run.result_files"),
    *("run.spread_of_runs", "run.max_memory_usage_as_logged"),
)


def unread_keys(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a row that nothing has read and that do not only describe it."""
    places = (place for place, _ in row.unread()) if isinstance(row, Recorded) else ()
    return tuple([place for place in places if place not in _DESCRIBES and place.partition(".")[0] not in _DESCRIBES])


class _Whole(NamedTuple):
    """What holds for all rows of a table. `shared`: their scenario; `software`: also the citation."""

    name: str
    kind: str
    shared: dict[str, Any]
    software: tuple[str, ...]
    assumptions: object
    folder: str


def _row(data: object, where: str, table: _Whole) -> Measurement:
    """A row; one that cannot be read says why and leaves the rest of its table alone."""
    kind = table.kind
    row = data if isinstance(data, dict) else {}
    name = row.get("id") if isinstance(row.get("id"), str) else where.rpartition(": ")[2]
    group = str(row.get("group") or (name if kind in ("training_step", "inference") else _group(row)))
    try:
        row = Recorded(_mapping(data, where))
        row.accept(("id", "group", "measured", "scenario"))
        if not isinstance(row.get("id"), str):
            said = f"found {str(row['id'])[:60]!r}" if "id" in row else "is required and missing"
            raise InputError(f"{where}.id: {said}; allowed: text that names the row")
        given = _mapping(dict.get(row, "measured"), f"{where}.measured")
        answers = {key: value for key, value in given.items() if isinstance(value, bool)}
        measured = {key: _value(value, f"{where}.measured.{key}") for key, value in given.items() if key not in answers}
        own = _scenario(dict.get(row, "scenario"), f"{where}.scenario")
        scenario = merge(table.shared, own)
        if kind == "training_step" and isinstance(scenario.get("training"), dict):
            training = with_adapter_dropout(scenario["training"], table.assumptions)
            scenario = scenario | {"training": with_stated(training, table.software[0], row)}
            scenario = without_concluded(scenario, table.assumptions)
            scripted = with_launch_script(with_what_ran(scenario, row, where), _not_in(own, table.shared))
            scenario = with_eight_bit_parameters(scripted, row)
    except InputError as error:
        return Measurement(table.name, kind, str(name), group, {}, {}, row, unreadable=str(error))
    return Measurement(
        table.name,
        kind,
        str(name),
        group,
        scenario,
        measured,
        row,
        answers,
        (str(row.get("engine", "")), *table.software),
        folder=table.folder,
    )


def _not_in(own: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The shared keys of each section that a row does not say itself."""
    left = dict[str, Any]()
    for name, section in shared.items():
        said = own.get(name)
        if isinstance(section, Mapping):
            left[name] = {k: v for k, v in section.items() if not isinstance(said, Mapping) or k not in said}
    return left


def _value(value: object, where: str) -> float:
    if not isinstance(value, int | float) or not 0 < value < 1e30:
        raise InputError(f"{where}: found {show(value)}; allowed: a number above 0, below 1e30")
    return float(value)


def _group(row: Mapping[str, Any]) -> str:
    """Rows of kernels and collectives without a group of their own: by operator, provider, GPU, ranks."""
    keys = ("op", "impl", "provider", "pass", "stage", "layout", "system", "gpu", "ranks")
    return " ".join(str(row[k]) for k in keys if k in row) or "rows"


def _scenario(data: object, where: str) -> dict[str, Any]:
    """A scenario's keys, or those of the file that is named: beside the table, from here, or a shipped one."""
    if not isinstance(data, str):
        return _mapping(data, where, "a mapping, or a scenario's file")
    from sim.inputs.absolute_paths import anchored
    from sim.inputs.scenario import read_source
    from sim.inputs.shipped import shipped_scenarios

    beside = Source(where, {}, folder=str(Path(where.partition(": ")[0]).parent))
    file = file_named(data, beside) or shipped_scenarios().get(data)
    if file is None:
        raise InputError(f"{where}: found {show(data)}; no such file or shipped scenario")
    return dict(anchored(read_source(file)))


def _mapping(data: object, where: str, allowed: str = "a mapping") -> dict[str, Any]:
    return mapping({} if data is None else data, where, allowed)
