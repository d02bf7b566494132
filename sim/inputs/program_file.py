"""Reads a captured program: format "program/1", gzipped JSON of columns and tables (see docs/programs_inside.md).

Everything is checked before it is used, and reading runs no code of the file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from sim.core.errors import InputError
from sim.core.files import unreadable
from sim.core.json_text import parse_json
from sim.core.outputs import refuse_output
from sim.inputs.file_kinds import other_format
from sim.inputs.plain_data import listed, mapping, one_of, rows_of, text, whole

FORMAT = "program/1"
MAX_BYTES = 512 * 1024 * 1024  # of the JSON itself
PHASES = ("forward", "recomputed", "backward", "clip", "optimizer")
BYTES = {
    "complex128": 16,
    **dict.fromkeys(("fp64", "int64", "complex64"), 8),
    **dict.fromkeys(("fp32", "int32"), 4),
    **dict.fromkeys(("bf16", "fp16", "int16"), 2),
    **dict.fromkeys(("fp8", "int8", "uint8", "bool"), 1),
}
ROW_KEYS = (
    "name",
    "phase",
    "module",
    "inputs",
    "input_storages",
    "outputs",
    "output_storages",
    "launches",
    "causal",
    "tf32",
    "host_copy",
    "drops",
    "dims_behind",
    "graphed",
    "window",
)
DEVICES = ("cpu", "cuda")
TO_DEVICE, TO_HOST = "host_to_device", "device_to_host"
SHORT_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
T = TypeVar("T")
STORAGE_KEYS = ("bytes", "kind", "born", "died", "module")


class Tensor(NamedTuple):
    """A tensor's dtype, shape, and strides where it is not contiguous (else empty)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements that lie in memory: an expanded dimension (stride 0) counts once."""
        count = 1
        for i, n in enumerate(self.shape):
            count *= n if not self.strides or self.strides[i] else 1
        return count

    @property
    def bytes(self) -> int:
        """Bytes that reading it once moves; dtypes that are not known count 4 bytes an element."""
        return self.elements * BYTES.get(self.dtype, 4)


# Operators that cuDNN may compute in tf32: convolutions, and whole recurrent layers as the capture writes them.
CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")
CUDNN_RECURRENT = ("calibrate.rnn", "calibrate.rnn_backward")


class HostCopy(NamedTuple):
    """A copy between the host's memory and the GPU's. `pinned`: the host's memory is page-locked."""

    to_device: bool
    pinned: bool
    non_blocking: bool

    @property
    def host_waits(self) -> bool:
        """Tell whether the host waits for the copy, and so for its stream.

        torch does so unless the code says `non_blocking=True` (ATen/native/cuda/Copy.cu), and CUDA's driver for memory
        that is not pinned.
        """
        return not (self.pinned and self.non_blocking)


class CapturedOperator(NamedTuple):
    """One ATen operator. `launches` 0: a view or an allocation. `reads`, `writes`: numbers of its tensors' storages.

    `tf32`: its fp32 numbers are rounded to tf32 on a GPU that has it. `host_copy`: of a copy between the host's memory
    and the GPU's, which moves the bytes of its outputs. `drops`: an attention that drops probabilities at random.
    `dims_behind`: how many dimensions lie behind the one that a sort, a top-k, a softmax or a sum so far goes
    along. `graphed`: a CUDA graph launches it, so that the host takes no time for it. `window`: places of a pool's
    window; 0: not known, or no pool.
    """

    name: str
    phase: str
    module: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    launches: int
    causal: bool
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    tf32: bool = False
    host_copy: HostCopy | None = None
    drops: bool = False
    dims_behind: int = 0
    graphed: bool = False
    window: int = 0


class Storage(NamedTuple):
    """Bytes that live from operator `born` until before operator `died`; None: beyond the step.

    `kind`: parameter, frozen parameter, gradient, optimizer state, buffer, activation (alive when the forward ends),
    temporary, or host, which lies in the host's memory. `name`: a parameter's, else the module that made it.
    """

    bytes: int
    kind: str
    born: int
    died: int | None
    name: str = ""


class Parameter(NamedTuple):
    """A parameter of the model; `trained`: it has a gradient."""

    name: str
    elements: int
    dtype: str
    trained: bool


class CapturedProgram(Struct, frozen=True):
    """One micro-batch's forward and backward, clipping and optimizer step, as `calibrate.capture` recorded them.

    The forward may be alone, as inference runs it (`forward_alone`); then no parameter is trained.
    `autocast`: the dtype of its `torch.autocast`, "" without. `device`: whose kernels torch took, cuda or cpu. `facts`:
    how its model was made, where a Hugging Face config made it.
    """

    path: str
    seq_len: int
    micro_batch_size: int
    autocast: str
    device: str
    optimizer: str
    facts: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    operators: tuple[CapturedOperator, ...]
    storages: tuple[Storage, ...]

    @property
    def forward_alone(self) -> bool:
        """Tell whether the program is a forward without a backward."""
        return all(o.phase == "forward" for o in self.operators)

    def __hash__(self) -> int:
        return hash((self.path, self.seq_len, self.micro_batch_size, self.operators))  # `facts` has none


@lru_cache(maxsize=32)
def read_program(path: Path) -> CapturedProgram:
    """The program in a file.

    Raises:
        InputError: naming the file, the key, what was found and what is allowed.
    """
    data = _json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise other_format(path, data, FORMAT)
    least = 0 if "script" in data else 1  # nobody says how much a script's step holds
    seq_len, micro_batch_size = (whole(data.get(k), f"{path}: {k}", least) for k in ("seq_len", "micro_batch_size"))
    tables, rows = mapping(data.get("tables"), f"{path}: tables"), mapping(data.get("operators"), f"{path}: operators")
    autocast, optimizer = (text(data.get(k), f"{path}: {k}") for k in ("autocast", "optimizer"))
    device = one_of(data.get("device", "cuda"), DEVICES, f"{path}: device")
    facts = mapping(data.get("facts"), f"{path}: facts")
    operators = _operators(tables, rows, path)
    storages = _storages(tables, mapping(data.get("storages"), f"{path}: storages"), path)
    for i, op in enumerate(operators):
        if (most := max((*op.reads, *op.writes), default=0)) >= len(storages):
            raise InputError(f"{path}: operators[{i}]: found storage {most}; allowed: 0 to {len(storages) - 1}")
    parameters = _parameters(data.get("parameters"), _words(tables, "modules", path), path)
    return CapturedProgram(
        str(path), seq_len, micro_batch_size, autocast, device, optimizer, facts, parameters, operators, storages
    )


def _storages(tables: Mapping[str, Any], rows: Mapping[str, Any], path: Path) -> tuple[Storage, ...]:
    kinds, modules = _words(tables, "kinds", path), _words(tables, "modules", path)
    found = []
    for i, (size, kind, born, died, module) in enumerate(rows_of(rows, STORAGE_KEYS, f"{path}: storages")):
        where = f"{path}: storages[{i}]"
        end = whole(died, f"{where}.died", -1)
        name, made_by = _pick(kinds, kind, f"{where}.kind"), _pick(modules, module, f"{where}.module")
        size, born = whole(size, f"{where}.bytes", 0), whole(born, f"{where}.born", 0)
        found.append(Storage(size, name, born, None if end < 0 else end, made_by))
    return tuple(found)


def _parameters(value: Any, modules: list[str], path: Path) -> tuple[Parameter, ...]:
    found = []
    for i, row in enumerate(listed(value, f"{path}: parameters")):
        where = f"{path}: parameters[{i}]"
        if not isinstance(row, list) or len(row) != 4:
            raise InputError(f"{where}: found {str(row)[:60]}; allowed: [name, elements, dtype, trained]")
        name = _pick(modules, row[0], where)
        dtype = text(row[2], where)
        trained = bool(whole(row[3], where, 0))
        found.append(Parameter(name, whole(row[1], where, 0), SHORT_DTYPES.get(dtype, dtype), trained))
    return tuple(found)


def _json(path: Path) -> Any:
    refuse_output(path)
    try:
        with gzip.open(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; python -m calibrate.capture writes one") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is not a gzipped file: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: holds more than {MAX_BYTES} bytes, the limit of a program")
    try:
        return parse_json(raw.decode(), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path}: holds what is not UTF-8 text") from None


def _operators(tables: Mapping[str, Any], rows: Mapping[str, Any], path: Path) -> tuple[CapturedOperator, ...]:
    names, modules = (_words(tables, key, path) for key in ("names", "modules"))
    where = f"{path}: tables"
    tensors = [
        _tensor(x, f"{where}.tensors[{i}]") for i, x in enumerate(listed(tables.get("tensors"), f"{where}.tensors"))
    ]
    phases = _words(tables, "phases", path)
    for phase in phases:
        one_of(phase, PHASES, f"{where}.phases")
    copies = _host_copies(tables, where)
    found = []
    # Programs that were captured before these columns existed lack them.
    count = len(listed(rows.get("name"), f"{path}: operators.name"))
    absent = {"tf32": 0, "host_copy": -1, "drops": 0, "dims_behind": 0, "graphed": 0, "window": 0}
    rows = {**{key: [value] * count for key, value in absent.items()}, **rows}
    for i, values in enumerate(rows_of(rows, ROW_KEYS, f"{path}: operators")):
        row, where = dict(zip(ROW_KEYS, values, strict=True)), f"{path}: operators[{i}]"
        found.append(
            CapturedOperator(
                _pick(names, row["name"], f"{where}.name"),
                _pick(phases, row["phase"], f"{where}.phase"),
                _pick(modules, row["module"], f"{where}.module"),
                _picked(tensors, row["inputs"], f"{where}.inputs"),
                _picked(tensors, row["outputs"], f"{where}.outputs"),
                whole(row["launches"], f"{where}.launches", 0),
                bool(whole(row["causal"], f"{where}.causal", 0, 1)),
                _counts(row["input_storages"], f"{where}.input_storages"),
                _counts(row["output_storages"], f"{where}.output_storages"),
                bool(whole(row["tf32"], f"{where}.tf32", 0, 1)),
                None if row["host_copy"] == -1 else _pick(copies, row["host_copy"], f"{where}.host_copy"),
                bool(whole(row["drops"], f"{where}.drops", 0, 1)),
                whole(row["dims_behind"], f"{where}.dims_behind", 0),
                bool(whole(row["graphed"], f"{where}.graphed", 0, 1)),
                whole(row["window"], f"{where}.window", 0),
            )
        )
    return tuple(found)


def _host_copies(tables: Mapping[str, Any], where: str) -> list[HostCopy]:
    found = []
    for i, row in enumerate(listed(tables.get("host_copies", []), f"{where}.host_copies")):
        at = f"{where}.host_copies[{i}]"
        if not isinstance(row, list) or len(row) != 3:
            raise InputError(f"{at}: found {str(row)[:60]}; allowed: [direction, pinned, non_blocking]")
        to_device = one_of(row[0], (TO_DEVICE, TO_HOST), at) == TO_DEVICE
        found.append(HostCopy(to_device, *(bool(whole(x, at, 0, 1)) for x in row[1:])))
    return found


def _tensor(value: Any, where: str) -> Tensor:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], str):
        raise InputError(f"{where}: found {str(value)[:60]}; allowed: [dtype, shape, strides]")
    shape, strides = (tuple(whole(n, where, 0) for n in x) if isinstance(x, list) else () for x in value[1:])
    if strides and len(strides) != len(shape):
        raise InputError(f"{where}: found {len(strides)} strides; allowed: none, or one for each of {len(shape)} sizes")
    return Tensor(value[0], shape, strides)


def _words(data: Mapping[str, Any], key: str, path: Path) -> list[str]:
    values = listed(data.get(key), f"{path}: tables.{key}")
    if not all(isinstance(x, str) for x in values):
        raise InputError(f"{path}: tables.{key}: allowed: a list of texts")
    return values


def _counts(values: Any, where: str) -> tuple[int, ...]:
    return tuple(whole(n, where, 0) for n in listed(values, where))


def _picked(values: list[T], numbers: Any, where: str) -> tuple[T, ...]:
    return tuple(_pick(values, n, where) for n in _counts(numbers, where))


def _pick(values: list[T], number: Any, where: str) -> T:
    at = whole(number, where, 0)
    if at >= len(values):
        raise InputError(f"{where}: found {at}; allowed: 0 to {len(values) - 1}")
    return values[at]
