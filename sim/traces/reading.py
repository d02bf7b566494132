"""Read recorded traces of any kind that is known, and captured programs, as one `Recording`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sim.core.errors import InputError
from sim.core.files import read_json
from sim.inputs.file_kinds import (
    NSYS_REPORTS,
    PAGE,
    SQLITE,
    is_page,
    read_yaml_if_any,
    refuse_other_kind,
    starts_as_sqlite,
)
from sim.traces.changes import network_of
from sim.traces.recording import Recording

MAX_TRACES = 4096
WANTED = "a recorded trace is wanted: profiler JSON, Chakra's .et or Nsight Systems' .sqlite"


def are_programs(paths: Sequence[Path]) -> bool:
    """Tell whether the files are captured programs.

    Raises:
        InputError: where some are and some are not.
    """
    from sim.inputs.script_program import is_program

    return _all_are("a captured program", paths, [is_program(p) for p in paths], "files")


def _all_are(kind: str, paths: Sequence[Path], found: Sequence[bool], things: str = "traces") -> bool:
    """Tell whether the files are of a kind, as `found` says of each.

    Raises:
        InputError: where some are and some are not.
    """
    if any(found) and not all(found):
        one, other = paths[found.index(True)], paths[found.index(False)]
        raise InputError(f"{other}: is not {kind}, but {one} is; give {things} of one kind")
    return all(found)


def load_programs(paths: Sequence[Path], cluster: str | None, calibration: str | None = None) -> Recording:
    """One step of captured ranks, priced on a cluster preset.

    Raises:
        InputError: without a cluster, for an unknown one, or a file that is damaged.
    """
    from sim.inputs.script_program import read_rank_program
    from sim.traces.program_in import program_recording
    from sim.traces.program_prices import ProgramPrices

    if cluster is None:
        raise InputError("--cluster: is missing; a captured program has no times until a cluster prices it")
    if len(paths) > MAX_TRACES:
        raise InputError(f"found {len(paths)} programs; at most {MAX_TRACES} are read at once")
    ranks = [read_rank_program(p) for p in paths]
    network = network_of(cluster, max(r.world_size for r in ranks))
    return program_recording(ranks, ProgramPrices(network.cluster, calibration))


def load(paths: Sequence[Path], step: int | None = None, groups: Path | None = None) -> Recording:
    """The recorded step in profiler, Nsight Systems or Chakra traces, which the files' first bytes tell apart.

    Raises:
        InputError: for files that are none of these, or several kinds at once.
    """
    from sim.traces.chakra_in import load as load_chakra
    from sim.traces.chakra_in import read_groups
    from sim.traces.files import read_bytes
    from sim.traces.kineto import looks_like_kineto, read_kineto
    from sim.traces.matching import join

    if len(paths) > MAX_TRACES:
        raise InputError(f"found {len(paths)} traces; at most {MAX_TRACES} are read at once")
    if _all_are("a SQLite file", paths, [starts_as_sqlite(p) for p in paths]):
        return _load_nsys(paths, step, groups)
    contents = [read_bytes(p) for p in paths]
    for path, content in zip(paths, contents, strict=True):
        _refuse_no_trace(path, content)
    if _all_are("JSON", paths, [looks_like_kineto(c) for c in contents]):
        if groups is not None:
            raise InputError("--groups: is for Chakra traces; profiler traces name their groups' ranks")
        return join([read_kineto(p, i, c) for i, (p, c) in enumerate(zip(paths, contents, strict=True))], step)
    if step is not None:
        raise InputError("--step: Chakra traces are not divided into steps")
    try:
        return load_chakra(paths, contents, read_groups(groups) if groups is not None else None)
    except InputError as error:
        wanted = "" if any(".et" in p.suffixes for p in paths) else f"; {WANTED}"
        raise InputError(f"{error}{wanted}") from None


def _load_nsys(paths: Sequence[Path], step: int | None, groups: Path | None) -> Recording:
    """The recorded step in exports of Nsight Systems."""
    from sim.traces.matching import join
    from sim.traces.nsys import read_nsys

    if groups is not None:
        raise InputError("--groups: is for Chakra traces; an Nsight Systems export has none of its ranks")
    return join(read_nsys(paths), step)


def _refuse_no_trace(path: Path, content: bytes) -> None:
    """Raise for an empty file, a scenario or a result of this program, and for what replay reads in another form."""
    if not content.strip():
        raise InputError(f"{path}: is empty; {WANTED}")
    if path.suffix in NSYS_REPORTS:
        raise InputError(f"{path}: is a report of Nsight Systems; export it with `nsys export --type sqlite`")
    if is_page(content[:100]):
        raise InputError(f"{path}: is {PAGE[0]}; {WANTED}")
    if content.startswith(SQLITE):
        raise InputError(f"{path}: is a packed SQLite file; unpack it with gunzip")
    if path.suffix in (".yaml", ".yml"):
        refuse_other_kind(path, read_yaml_if_any(path), WANTED)
    elif path.suffix == ".json" and b'"format"' in content[:100]:
        refuse_other_kind(path, read_json(path), WANTED)
