"""Choices in the explorer, as overrides of a scenario and as a link, and back.

Every choice is one of a control's stated options, so nothing that a browser sends is taken as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, get_args

from msgspec import Struct

from sim.core.dtypes import Precision
from sim.inputs.model_input import model_presets
from sim.inputs.parallelism import split_layers
from sim.inputs.training_config import RecomputeMode
from sim.schedules import FORMS
from sim.variants.frameworks.records import FRAMEWORKS
from topology.presets import CLUSTERS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from sim.inputs.scenario import Scenario

AS_IN_FILE = "as in the file"
EVEN = "even"  # layers_per_stage: null
LAYERS = "parallelism.layers_per_stage"
MOST_ACTIONS = 20_000  # forwards and backwards of all pipeline ranks that are drawn live
MOST_REQUESTS = 20_000  # that are served live
_POWERS = tuple(2**i for i in range(18))


class Control(Struct, frozen=True):
    """A slider or menu over `options`; `initial` is what the file says."""

    key: str  # of the scenario
    label: str
    options: tuple[str, ...]
    initial: str
    slider: bool


DEGREES = ("parallelism.dp", "parallelism.pp", "parallelism.cp", "parallelism.tp")  # that make the number of GPUs
Choices = Mapping[str, str]  # option by key, all controls


def controls_of(scenario: Scenario) -> tuple[Control, ...]:
    """The controls for a scenario, each with its own value among the options."""
    return _of_training(scenario) if scenario.training is not None else _of_serving(scenario)


def _of_training(scenario: Scenario) -> tuple[Control, ...]:
    t, p = scenario.for_training, scenario.parallelism
    return (
        _degrees("parallelism.tp", "Tensor parallel (tp)", p.tp, 64),
        _menu("parallelism.sp", "Sequences (sp)", ("false", "true"), str(p.sp).lower()),
        _degrees("parallelism.cp", "Context parallel (cp)", p.cp, 64),
        _degrees("parallelism.pp", "Pipeline parallel (pp)", p.pp, 64),
        _menu("parallelism.schedule", "Schedule", tuple(FORMS), p.schedule),
        _layers(scenario),
        _degrees("parallelism.dp", "Data parallel (dp)", p.dp, 1024),
        _menu("parallelism.zero", "ZeRO", tuple("0123"), str(p.zero)),
        _degrees("parallelism.ep", "Expert parallel (ep)", p.ep, 256),
        _degrees("training.seq_len", "Sequence length (tokens)", t.seq_len, 131_072, 512),
        _degrees("training.global_batch_size", "Global batch (sequences)", t.global_batch_size, 4096),
        _degrees("training.micro_batch_size", "Micro-batch (sequences)", t.micro_batch_size, 64),
        _menu("model", "Model", (AS_IN_FILE, *model_presets()), AS_IN_FILE),
        _menu("training.precision", "Precision", get_args(get_args(Precision)[0]), t.precision),
        _menu("training.framework", "Framework", tuple(FRAMEWORKS), t.framework),
        _menu("training.recompute", "Recompute", (AS_IN_FILE, *get_args(RecomputeMode)), AS_IN_FILE),
        _menu("cluster", "Cluster", (AS_IN_FILE, *CLUSTERS), AS_IN_FILE),
    )


def _layers(scenario: Scenario) -> Control:
    p = scenario.parallelism
    even = p.layers_per_stage == split_layers(scenario.model.layers, p.stages, p.mtp_stage)
    written = "balanced" if p.layers_per_stage == "balanced" else EVEN if even else AS_IN_FILE
    return _menu(LAYERS, "Layers by stage", tuple(dict.fromkeys((written, EVEN, "balanced"))), written)


def _of_serving(scenario: Scenario) -> tuple[Control, ...]:
    i, p = scenario.for_serving, scenario.parallelism
    rate, clients = getattr(i.requests, "rate_per_s", None), i.requests.max_concurrency
    return (
        _degrees("parallelism.tp", "Tensor parallel (tp)", p.tp, 64),
        _degrees("parallelism.pp", "Pipeline parallel (pp)", p.pp, 16),
        _degrees("parallelism.dp", "Replicas (dp)", p.dp, 64),
        *((_degrees("parallelism.ep", "Expert parallel (ep)", p.ep, 256),) if scenario.model.moe is not None else ()),
        *((_degrees("inference.requests.rate_per_s", "Requests a second", rate, 1024),) if rate is not None else ()),
        *((_degrees("inference.requests.max_concurrency", "Requests under way", clients, 1024),) if clients else ()),
        _degrees("inference.max_running_requests", "Sequences at once", i.max_running_requests, 4096),
        _degrees("inference.max_batch_tokens", "Tokens an iteration", i.max_batch_tokens, 65_536),
        _menu("model", "Model", (AS_IN_FILE, *model_presets()), AS_IN_FILE),
        _listed("inference.batching", "Batching", i),
        _listed("inference.quantization", "Quantization", i),
        _listed("inference.kv_cache.layout", "Cache layout", i.kv_cache),
        _listed("inference.prefix_cache", "Prefix cache", i),
        _menu("cluster", "Cluster", (AS_IN_FILE, *CLUSTERS), AS_IN_FILE),
    )


def _degrees(key: str, label: str, value: float, most: int, least: int = 1) -> Control:
    options = sorted({value, *(n for n in _POWERS if least <= n <= max(most, value))})
    return Control(key, label, tuple(map(_plain, options)), _plain(value), True)


def _plain(number: float) -> str:
    """A whole number without a point: options are told apart by their text.

    >>> _plain(20.0), _plain(0.5), _plain(65536)
    ('20', '0.5', '65536')
    """
    return str(int(number)) if number == int(number) else repr(number)


def _menu(key: str, label: str, options: Sequence[str], value: str) -> Control:
    return Control(key, label, tuple(options), value, False)


def _listed(key: str, label: str, section: BaseModel) -> Control:
    """A menu of all values that a key of `section` may have."""
    name = key.rpartition(".")[2]
    return _menu(key, label, get_args(type(section).model_fields[name].annotation), getattr(section, name))


def overrides(choices: Choices, controls: Iterable[Control]) -> list[str]:
    """`--set` options that turn the file's scenario into the chosen one.

    What the file derived from a value that is changed (stages' layers from pp, shards from dp, a profile from the
    cluster) goes back to its default.
    """
    changed = {c.key for c in controls if choices[c.key] != c.initial}
    out = [f"{key}={'null' if choices[key] == EVEN else choices[key]}" for key in choices if key in changed]
    if changed & {"parallelism.pp", "parallelism.schedule"}:
        out += [f"parallelism.{k}=null" for k in ("virtual_stages", "p2p_overlap")]
        out += [f"{LAYERS}=null"] if choices.get(LAYERS) == AS_IN_FILE else []
    if changed & {"parallelism.dp", "parallelism.cp"}:
        out.append("parallelism.shard_size=null")
    if "cluster" in changed:
        out.append("calibration=null")
    return out


def to_query(name: str, choices: Choices, controls: Iterable[Control]) -> list[tuple[str, str]]:
    """The part of a link that restores a panel: `a.parallelism.tp=4`, only what differs from the file."""
    return [(f"{name}.{c.key}", choices[c.key]) for c in controls if choices[c.key] != c.initial]


def from_query(name: str, arguments: Mapping[str, Sequence[bytes]], controls: Iterable[Control]) -> dict[str, str]:
    """Choices out of a link; what is no option of a control is passed over."""
    chosen = {}
    for control in controls:
        given = [v.decode("utf-8", "replace") for v in arguments.get(f"{name}.{control.key}", ())]
        chosen[control.key] = given[-1] if given and given[-1] in control.options else control.initial
    return chosen


def keeping_gpus(choices: Choices, changed: str, gpus: int, controls: Iterable[Control]) -> dict[str, str]:
    """The choices with other degrees so changed that tp · cp · pp · dp is `gpus` again: dp first, then pp, cp and tp.

    Where no options make that number, the choices come back as they are.

    >>> controls = [_degrees(key, "", 1, 64) for key in DEGREES]
    >>> keeping_gpus(dict.fromkeys(DEGREES, "1") | {"parallelism.tp": "4", "parallelism.pp": "8"}, "parallelism.tp", 8,
    ...     controls)
    {'parallelism.dp': '1', 'parallelism.pp': '2', 'parallelism.cp': '1', 'parallelism.tp': '4'}
    """
    options = {c.key: c.options for c in controls}
    new = {key: int(choices[key]) for key in DEGREES if key in options}
    for key in tuple(new):
        others = prod(n for k, n in new.items() if k != key)
        if key == changed or new[key] * others == gpus:
            continue
        new[key] = gpus // others if others < gpus and gpus % others == 0 else 1
    if prod(new.values()) != gpus or any(str(n) not in options[key] for key, n in new.items()):
        return dict(choices)
    return {**choices, **{key: str(n) for key, n in new.items()}}


def too_large(scenario: Scenario) -> str | None:
    """Why a step is not drawn live, if it is not."""
    p, i = scenario.parallelism, scenario.inference
    if i is not None:
        count = getattr(i.requests, "count", 0)
        if count <= MOST_REQUESTS:
            return None
        most = f"at most {MOST_REQUESTS:,}"
        return f"{count:,} requests are too many to serve live ({most}): fewer, or sim.run for these"
    actions = 2 * scenario.micro_batches * p.pp * p.virtual_stages
    if actions <= MOST_ACTIONS:
        return None
    return (
        f"{actions:,} forwards and backwards are too many to draw live (at most {MOST_ACTIONS:,}): "
        "fewer micro-batches, or sim.run for this one"
    )
