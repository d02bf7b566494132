"""Read the bundles of LLMServingSim 2's profiler: a model's kernels, timed layer by layer inside vLLM.

A bundle (github.com/casys-kaist/LLMServingSim, docs, "Output bundle") is a folder with `meta.yaml` and one folder for
each tensor-parallel degree, `tp1`, `tp2`, …, of CSV files. `time_us` is the time that the kernels of one layer of one
rank occupy the GPU, in microseconds; launches and gaps are not in it, nor messages between ranks. They become parts
of served iterations (`sim.prices.serving_parts`):

- `dense.csv` (layer, tokens) and the layers of an iteration: `dense`;
- `per_sequence.csv` (layer, sequences): `head`;
- `attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode): `prefill`, `decode` and `mixed`. A token that is
  decoded sees itself besides its cache;
- `moe.csv` (tokens, activated_experts): `experts`, of more ranks than one those that ranks split;
- `skew_fit.csv`: `unequal`. `alpha` says how far sequences of unequal length lie between as many of their mean length
  and of their longest. It was fitted in cells of few noisy measurements, so the median is taken over the longest
  length and over what is cached before a prompt. Where `meta.yaml` disables the fit it is not read, as in that
  simulator.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.imports import Imported
from sim.core.errors import InputError
from sim.core.files import MAX_JSON_BYTES, read_text
from sim.inputs.hub import as_model
from sim.inputs.input_source import show
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import MODEL_FILE, load_model
from sim.inputs.yaml_input import parse_yaml
from sim.models.layers import layer_specs
from sim.models.layers.dense_mlp import DenseMlp
from sim.prices.profile import BlockPoint
from sim.prices.serving_parts import MeasuredParts, Points, model_key, part_key
from topology.node_parts import gpu_by_name

SOURCE = "bundles of LLMServingSim 2's profiler (github.com/casys-kaist/LLMServingSim, MIT)"
META = "meta.yaml"
VARIANT = re.compile(r"(bf16|fp16)(-kv\w+)?")
_TP = re.compile(r"tp([1-9]\d*)")
_AT_MOST = re.compile(r"\D*<=(\d+)(k?)%?")  # n<=8, sr<=40%, kvB<=16k
ONCE = ("embedding", "final_layernorm")
IN_LAYERS = {"layernorm": 2, "qkv_proj": 1, "qk_norm": 1, "rotary_emb": 1, "o_proj": 1}  # how often in one
IN_MLPS = ("gate_up_proj", "act_fn", "down_proj")
MAY_LACK = ("qk_norm", "rotary_emb", "act_fn")
HEAD = ("lm_head", "sampler")
SPREAD = 4.0  # longest ÷ shortest sequence of the profiler's unequal batches, where the bundle does not say it


class Bundle(NamedTuple):
    """What `meta.yaml` says. `model`: its name; `unequal`: whether the fit of unequal lengths is in use."""

    folder: Path
    gpu: str
    model: str
    variant: str
    vllm: str
    unequal: bool
    spread: float


def read(paths: Sequence[Path], gpu: str) -> Imported:
    """Read bundles, or all below a folder; `gpu`: the preset in place of the one that the bundles name.

    Raises:
        InputError: if a path has none, they are of several GPUs, or a file is wrong.
    """
    bundles = [_bundle(meta) for path in paths for meta in _metas(path)]
    gpus = {b.folder: gpu or _gpu(b) for b in bundles}
    if len(set(gpus.values())) > 1:
        each = "; ".join(f"{folder}: {name}" for folder, name in gpus.items())
        raise InputError(f"bundles of several GPUs ({each}); a profile is of one, so import each by itself")
    said = _Said([], ["messages between ranks; the engine's host; kernels of drafts and of LoRA adapters"], [])
    served: dict[str, Path] = {}
    blocks = list[BlockPoint]()
    for bundle in bundles:
        if VARIANT.fullmatch(bundle.variant) is None:
            said.skipped.append(f"{bundle.folder}: variant {bundle.variant}; weights in 16 bits are read")
            continue
        model = _model(bundle)
        for tp, folder in _degrees(bundle.folder):
            key = model_key(model, tp, bundle.variant)
            if key in served:
                raise InputError(f"{folder}: measures the same sizes as {served[key]}; name one of them")
            served[key] = folder
            parts = _parts(bundle, model, folder)
            blocks += _blocks(parts, model, tp, bundle.variant)
            said.of_parts(bundle, tp, folder, parts, model.moe is not None)
    if not blocks:
        raise InputError(f"{paths[0]}: nothing to import: {'; '.join(said.skipped)}")
    return Imported(
        SOURCE,
        blocks=tuple(blocks),
        gpu=next(iter(gpus.values())),
        software={"vllm": ", ".join(sorted({bundle.vllm for bundle in bundles}))},
        covered=tuple(said.covered),
        estimated=tuple(said.estimated),
        skipped=tuple(said.skipped),
    )


class _Said(NamedTuple):
    """Sentences of `Imported`."""

    covered: list[str]
    estimated: list[str]
    skipped: list[str]

    def of_parts(self, bundle: Bundle, tp: int, folder: Path, parts: Mapping[str, Points], moe: bool) -> None:
        """Add what one tensor-parallel degree of a bundle covers and what it leaves."""
        what, points = f"{bundle.model}, tp {tp}", ", ".join(f"{part} {len(p):,}" for part, p in parts.items())
        self.covered.append(f"{what}, {bundle.variant}, vLLM {bundle.vllm}: {points} points")
        if moe and "experts" not in parts:
            whole = "" if tp == 1 else " that ranks split; whole ones are those of tp 1, if these were measured"
            self.estimated.append(f"{what}: experts{whole}")
        if not bundle.unequal and (folder / "skew_fit.csv").is_file():
            self.skipped.append(f"{folder / 'skew_fit.csv'}: disabled in {META} (skew_fit.enabled)")


def _blocks(parts: Mapping[str, Points], model: ModelConfig, tp: int, variant: str) -> Iterator[BlockPoint]:
    for part, points in parts.items():
        for sizes, seconds in points.items():
            key = part_key(model, part, *sizes, tp=tp, variant=variant)
            yield BlockPoint(key, "forward", 0, seconds, 0.0)


def _metas(path: Path) -> list[Path]:
    found = [path] if path.name == META else sorted(path.rglob(META)) if path.is_dir() else []
    if not found:
        raise InputError(f"{path}: has no {META}; allowed: a bundle of LLMServingSim 2's profiler, or a folder of such")
    return found


def _bundle(meta: Path) -> Bundle:
    data, lines = parse_yaml(read_text(meta, MAX_JSON_BYTES), str(meta))
    if not isinstance(data, dict):
        raise InputError(f"{meta}:1: found {show(data)}; allowed: a mapping")

    def said(key: str) -> str:
        found = data.get(key)
        if not isinstance(found, str) or not found:
            where = f"{meta}:{lines.get((key,), 1)}: {key}"
            raise InputError(
                f"{where}: is missing" if found is None else f"{where}: found {show(found)}; allowed: text"
            )
        return found

    spread = _inner(data, "skew_profile", "grid", "skew_rep")
    unequal = _inner(data, "skew_fit", "enabled")
    if spread is not None and (isinstance(spread, bool) or not isinstance(spread, int | float) or not spread > 1):
        where = f"{meta}:{lines.get(('skew_profile', 'grid', 'skew_rep'), 1)}: skew_profile.grid.skew_rep"
        raise InputError(f"{where}: found {show(spread)}; allowed: a number above 1")
    gpu, model, variant, vllm = (said(key) for key in ("gpu", "model", "variant", "vllm_version"))
    return Bundle(meta.parent, gpu, model, variant, vllm, unequal is True, spread or SPREAD)


def _inner(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _gpu(bundle: Bundle) -> str:
    found = gpu_by_name(bundle.gpu)
    if found is None:
        raise InputError(
            f"{bundle.folder / META}: gpu: found {bundle.gpu!r}, which is no shipped GPU; name it by --gpu"
        )
    return found


def _model(bundle: Bundle) -> ModelConfig:
    """The bundle's model: of its own `config.json`, or a model of the Hub that is shipped or was downloaded."""
    own = bundle.folder / MODEL_FILE
    try:
        return load_model(str(own) if own.is_file() else as_model(bundle.model))
    except InputError as error:
        why = f"{bundle.folder / META}: model: {bundle.model}: {error}"
        raise InputError(f"{why}; or put the model's {MODEL_FILE} beside {META}") from None


def _degrees(folder: Path) -> list[tuple[int, Path]]:
    found = [(int(match[1]), sub) for sub in folder.iterdir() if (match := _TP.fullmatch(sub.name)) and sub.is_dir()]
    if not found:
        raise InputError(f"{folder}: has no folder tp1, tp2, … of a tensor-parallel degree")
    return sorted(found)


def _parts(bundle: Bundle, model: ModelConfig, folder: Path) -> dict[str, Points]:
    parts = {"dense": _dense(model, folder / "dense.csv"), "head": _head(folder / "per_sequence.csv")}
    parts |= _attention(folder / "attention.csv")
    if (folder / "moe.csv").is_file():
        rows = _rows(folder / "moe.csv", ("tokens", "activated_experts"))
        parts["experts"] = {sizes: seconds for sizes, seconds, _ in rows}
    if bundle.unequal and (folder / "skew_fit.csv").is_file():
        parts["unequal"] = _unequal(folder / "skew_fit.csv", MeasuredParts(parts), bundle.spread)
    return parts


def _dense(model: ModelConfig, path: Path) -> Points:
    """Seconds of all of an iteration that depends on its tokens, save what attention, experts and the head take."""
    layers = _by_layer(path, "tokens", (*ONCE, *IN_LAYERS, *IN_MLPS))
    mlps = sum(isinstance(spec.mlp, DenseMlp) for spec in layer_specs(model))
    often = dict.fromkeys(ONCE, 1) | {name: n * model.layers for name, n in IN_LAYERS.items()}
    often |= dict.fromkeys(IN_MLPS, mlps)
    return _summed(layers, often, path)


def _head(path: Path) -> Points:
    return _summed(_by_layer(path, "sequences", HEAD), dict.fromkeys(HEAD, 1), path)


def _summed(layers: Mapping[str, dict[int, float]], often: Mapping[str, int], path: Path) -> Points:
    """The sum of layers, each as often, at the sizes at which all were measured."""
    wanted = {name for name, n in often.items() if n and (name in layers or name not in MAY_LACK)}
    if missing := sorted(wanted - layers.keys()):
        raise InputError(f"{path}: has no row of layer {missing[0]}; wanted: {', '.join(sorted(wanted))}")
    shared = set.intersection(*(set(layers[name]) for name in wanted))
    if not shared:
        raise InputError(f"{path}: no size has a row of each of {', '.join(sorted(wanted))}")
    return {(size,): sum([often[name] * layers[name][size] for name in sorted(wanted)]) for size in sorted(shared)}


def _by_layer(path: Path, size: str, known: Sequence[str]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for (n,), seconds, (line, row) in _rows(path, (size,), ("layer",)):
        if row["layer"] not in known:
            # How often a layer that nobody knows runs in an iteration is unknown, too.
            raise InputError(f"{path}:{line}: layer: found {show(row['layer'])}; allowed: {', '.join(known)}")
        found[row["layer"]][n] = seconds
    return found


def _attention(path: Path) -> dict[str, Points]:
    parts: dict[str, Points] = {"prefill": {}, "decode": {}, "mixed": {}}
    for (chunk, before, n, kv), seconds, (line, _) in _rows(
        path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), least=0
    ):
        if chunk and n:
            parts["mixed"][chunk, before, n, kv + 1] = seconds
        elif chunk:
            parts["prefill"][chunk, before] = seconds
        elif n:
            parts["decode"][n, kv + 1] = seconds
        else:
            raise InputError(f"{path}:{line}: prefill_chunk and n_decode: found 0 and 0; allowed: at least one above 0")
    if empty := [part for part, points in parts.items() if not points]:
        raise InputError(f"{path}: has no {empty[0]} row (prefill_chunk, n_decode or both above 0)")
    return parts


def _unequal(path: Path, measured: MeasuredParts, spread: float) -> Points:
    """Seconds of sequences of two lengths, the longer `spread` times the shorter, by the fitted `alpha`: of so many
    longer ones that their part is in the middle of the cell's."""
    alphas: dict[tuple[int, int, float], list[float]] = defaultdict(list)
    columns = ("n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")
    table = [(chunk, row, line) for (chunk,), _, (line, row) in _rows(path, ("pc",), columns, 0, timed=False)]
    rates = sorted({_bound(row["skew_rate_label"], path, line) for _, row, line in table})
    for chunk, row, line in table:
        rate = _bound(row["skew_rate_label"], path, line)
        middle = (rate + max([r for r in rates if r < rate], default=0.0)) / 2
        n = _bound(row["n_label"], path, line)
        if math.isfinite(n):
            alphas[chunk, int(n), middle / 100].append(_alpha(row["alpha"], path, line))
    longest = max(sizes[1] for sizes in measured.points["decode"])
    found = Points()
    for (chunk, n, part), values in alphas.items():
        longer, most, least = max(1, round(n * part)), longest, round(longest / spread)
        if longer >= n:
            continue
        mean = (longer * most + (n - longer) * least) / n
        at_mean, at_most = (measured.joint(((chunk, chunk, 1),) if chunk else (), n, kv) for kv in (mean, most))
        seconds = at_mean + statistics.median(values) * (at_most - at_mean)
        if seconds > 0.0:
            found[chunk, n, longer, most, least] = seconds
    return found


def _bound(label: str, path: Path, line: int) -> float:
    """The end of a cell: 8 of `n<=8`, 40 of `sr<=40%`; of the last cell of parts 100, of other last cells infinite."""
    if (match := _AT_MOST.fullmatch(label)) is not None:
        return float(match[1]) * (1024 if match[2] else 1)
    if ">" not in label:
        raise InputError(f"{path}:{line}: found {show(label)}; allowed: a cell's name, as n<=8 or sr>70%")
    return 100.0 if label.endswith("%") else math.inf


def _alpha(text: str, path: Path, line: int) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{path}:{line}: alpha: found {show(text)}; allowed: a number")
    return found


def _rows(
    path: Path, sizes: Sequence[str], texts: Sequence[str] = (), least: int = 1, timed: bool = True
) -> Iterator[tuple[tuple[int, ...], float, tuple[int, dict[str, str]]]]:
    """Sizes and seconds of each row, with its line and its texts.

    Raises:
        InputError: for other columns than these, and for a size or time that is none.
    """
    reader = csv.reader(io.StringIO(read_text(path, MAX_JSON_BYTES)))
    header, wanted = next(reader, []), [*texts, *sizes, *(["time_us"] if timed else [])]
    if sorted(header) != sorted(wanted):
        # A column that is not among these may decide what a layer takes, so none is passed over.
        raise InputError(f"{path}:1: found columns {', '.join(header) or 'none'}; allowed: {', '.join(wanted)}")
    seen = set[tuple[str, ...]]()
    for cells in reader:
        line = reader.line_num
        if not cells:
            continue
        if len(cells) != len(header):
            raise InputError(f"{path}:{line}: found {len(cells)} cells; allowed: {len(header)}, as in line 1")
        row = dict(zip(header, cells, strict=True))
        key = tuple(row[name] for name in (*texts, *sizes))
        if key in seen:
            raise InputError(f"{path}:{line}: is there twice: {', '.join(key)}")
        seen.add(key)
        numbers = tuple([_size(row, name, least, path, line) for name in sizes])
        yield numbers, _seconds(row["time_us"], path, line) if timed else 0.0, (line, row)


def _size(row: Mapping[str, str], name: str, least: int, path: Path, line: int) -> int:
    text = row[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise InputError(f"{path}:{line}: {name}: found {show(text)}; allowed: a whole number, {least} or more")
    return int(text)


def _seconds(text: str, path: Path, line: int) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 < found < 1e12:
        raise InputError(f"{path}:{line}: time_us: found {show(text)}; allowed: microseconds above 0")
    return found * 1e-6
