"""A trainer's settings while they are read: each is taken once, and what nobody took is reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from sim.core.errors import InputError
from sim.core.units import counted
from sim.inputs.input_source import show

T = TypeVar("T")
DIGITS = re.compile(r"\d")
UNSET_ARGUMENT = re.compile(r"\$\{?\d")
ELEMENT = re.compile(r"\$\{\w+\[[^@*\]]")  # ${SIZES[1]}
ALIKE = 0.9  # difflib's ratio of two names of which one may be the other, mistyped
# Switches that need no note where they are off: torch's deterministic algorithms, with which kernels also wait
# in Transformers (trainer_utils.py: `enable_full_determinism`; torchtitan/distributed/utils.py: `set_determinism`); and
# DeepSpeed's timers, which wait for the GPU in every micro-batch (runtime/engine.py: `engine_timers`); and
# batches of texts of one length, which are off by default (training_args.py).
SLOW_SWITCHES = (
    *("full_determinism", "training.deterministic", "debug.deterministic", "debug.detect_anomaly"),
    *("wall_clock_breakdown", "group_by_length"),
)
# Of rollouts that go to and fro between the model and tools or an environment.
OF_A_PAIR = "batch sizes: each pair of answers counts as two sequences"
ONE_TURN = "{}: an answer is simulated as one, without the waits and prompts between its turns"
_WITHOUT_EFFECT = Path(__file__).with_name("without_effect.yaml")


def lacking(value: object) -> str:
    """Return the end of a message on a value that holds an unknown variable, argument or command, and how the user
    gives it; empty for a plain value."""
    if UNSET_ARGUMENT.search(str(value)):
        return ", an argument of the script: --args 'FIRST SECOND …' gives it"
    if "`" in str(value) or "$(" in str(value).replace("$((", ""):
        return ", the output of a command, which is not run: write its value into the file"
    if ELEMENT.search(str(value)):
        return ", an element of an array that the file does not give: write its value into the file"
    if "$" not in str(value):
        return ""
    name = next(iter(re.findall(r"[A-Za-z_]\w*", str(value))), "NAME")
    return f", in which a variable has no value: --var {name}=VALUE gives one"


# Keys of torch's FSDP with `CPUOffload` or `CPUOffloadPolicy`: parameters, reduced gradients and optimizer on the host.
FSDP_ON_HOST: dict[str, Any] = {"optimizer_offload": "cpu", "parameter_offload": True}

# Keys of parameters that are kept and updated in bf16: torch's optimizers make their moments, and autograd its
# gradients, like the parameters (torch/optim/adam.py: `zeros_like`).
ALL_IN_BF16: dict[str, Any] = {
    "param_dtype": "bf16",
    "master_weights": False,
    "grad_dtype": "bf16",
    "optimizer_dtype": "bf16",
}


class Machine(Struct, frozen=True):
    """Hold the settings that a trainer's file leaves to its launcher. `gpus`: None where the file's own launch command
    says it."""

    cluster: str | dict[str, Any]
    gpus: int | None
    model: str | None


class Converted(Struct, frozen=True):
    """A scenario as a mapping, and notes for its reader: what was assumed, and settings that no key says.
    `missing`: keys that the file leaves open and `--set` must give, each with what would say it. `asked`: names that
    the reader took, or knows to change nothing."""

    scenario: dict[str, Any]
    notes: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()


class Settings(Struct, dict=True):
    """Values by name. `file` starts the messages; `prefix`: what the file writes before a name, `written`: how it
    writes one where that differs; `text`: the file's, to tell a name's line; `environment`: its variables. `notes`,
    `missing`: as `Converted` has them. `unknown`: names whose word has nothing that is ours, or that are the
    trainer's own and of no effect here."""

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""
    written: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    sections: list[Settings] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    text: str = ""
    environment: Callable[[str], str | None] = lambda name: None
    unknown: set[str] = field(default_factory=set)

    def section(self, name: str) -> Settings:
        """The settings of a mapping that is among them, whose notes are these; none where it is something else."""
        value = self.take(name)
        own = Settings(
            self.file, value if isinstance(value, dict) else {}, f"{self.written_as(name)}.", notes=self.notes
        )
        self.sections.append(own)
        return own

    def under(self, prefixes: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
        """Yield the settings directly under each prefix, in the prefixes' order: name without it, whole name, value."""
        for prefix in prefixes:
            for path, value in self.values.items():
                name = path.removeprefix(prefix)
                if path.startswith(prefix) and "." not in name:
                    yield name, path, value

    def take(self, name: str, default: Any = None) -> Any:
        """A value, or the default where there is none."""
        self.taken.add(name)
        return self.values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            InputError: for something else, or where it is missing without a default.
        """
        value = self.take(name, default)
        if value is None:
            raise InputError(f"{self.file}: {self.written_as(name)}: is required and missing")
        try:
            number = float(value)
            if isinstance(value, bool) or number != int(number):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            problem = f"found {show(value)}{lacking(value) or '; must be a whole number'}"
            raise InputError(f"{self.place(name)}: {problem}") from None
        return int(number)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1, read as `integer` reads it."""
        number = self.integer(name, default)
        if number < 1:
            raise InputError(f"{self.place(name)}: found {number}; must be at least 1")
        return number

    def whole(self, name: str) -> int | None:
        """A whole number as `integer` reads it, or None where it is missing."""
        return None if self.take(name) is None else self.integer(name)

    def choice(self, name: str, ours: Mapping[str, T], default: str) -> T | None:
        """Return our value for the word that is given; None, and a note at the end, for a word that `ours` lacks."""
        word = str(self.values.get(name, default)).strip("\"' ")
        (self.taken if word in ours else self.unknown).add(name)
        return ours.get(word)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number, or the default where it is missing.

        Raises:
            InputError: for something else.
        """
        value = self.take(name, default)
        if value is None:
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            raise InputError(f"{self.place(name)}: found {show(value)}; must be a number") from None

    def place(self, name: str) -> str:
        """Where the file writes a name: file, line if it is in the text, name. Of several lines the first that has
        the value, too."""
        parts = map(re.escape, re.split("[-_]", self.written_as(name)))
        written = re.compile(rf"(?<![\w-]){'[-_]'.join(parts)}(?![\w-])")
        lines = [(n, line) for n, line in enumerate(self.text.splitlines(), 1) if written.search(line)]
        value = str(self.values.get(name, ""))
        line = next((n for n, line in lines if value in line), lines[0][0] if lines else None)
        return f"{self.file}{'' if line is None else f':{line}'}: {self.written_as(name)}"

    def written_as(self, name: str) -> str:
        return self.written.get(name, self.prefix + name)

    def listed(self, name: str, of: type = str) -> list[Any]:
        """A list whose entries are of this type; empty where it is missing.

        Raises:
            InputError: for something else.
        """
        value = self.take(name) or []
        if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
            what = "texts" if of is str else "lists"
            raise InputError(f"{self.file}: {self.written_as(name)}: found {show(value)}; must be a list of {what}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch: given without a value, or true."""
        value = self.take(name, default)
        if isinstance(value, str):
            return value.lower() not in ("false", "0", "no", "off")
        return bool(value)

    def left(self) -> list[str]:
        """Names that nothing took, sorted, as the file writes them."""
        own = map(self.written_as, set(self.values) - self.taken)
        return sorted([*own, *(name for section in self.sections for name in section.left())])

    def mistyped(self) -> dict[str, str]:
        """Each name that nothing took and that is almost one that would be taken, with that one. Names that differ in
        digits alone are different settings."""
        meant_by, absent = dict[str, str](), sorted(self.taken - self.values.keys())
        for name in sorted(set(self.values) - self.taken - self.unknown):
            near = next(iter(get_close_matches(_tail(name), list(map(_tail, absent)), 1, ALIKE)), None)
            if near is not None and DIGITS.sub("", near) != DIGITS.sub("", _tail(name)):
                meant = next(known for known in absent if _tail(known) == near)
                section, dot, _ = self.written_as(name).rpartition(".")
                in_yaml = dot and name in self.written  # Megatron-LM's flags in a section of its own
                shown = f"{section}.{meant.replace('-', '_')}" if in_yaml else self.written_as(meant)
                meant_by[self.written_as(name)] = shown
        return meant_by | {name: meant for section in self.sections for name, meant in section.mistyped().items()}

    def converted(
        self, trainer: str, machine: Machine, sections: dict[str, Any], name: str = "", left: list[str] | None = None
    ) -> Converted:
        """The scenario of these sections, with a note of what was not taken (`left`, or all of it) and may matter."""
        listed = without_effect(trainer)
        harmless = {*listed, *(self.written_as(name).lstrip("-") for name in listed)}
        harmless |= {name for name in SLOW_SWITCHES if self.values.get(name) in (False, "false", "False")}
        meant_by = self.mistyped()
        harmless |= {name.lstrip("-") for name in meant_by}
        names = [name for name in (self.left() if left is None else left) if name.lstrip("-") not in harmless]
        asked = [f"{name} is not read: did you mean {meant}?" for name, meant in meant_by.items()]
        notes = [*self.notes, *asked, *([f"not expressed here: {', '.join(names)}"] if names else [])]
        scenario = {"version": 1, "name": name or self.file.stem, **sections, "cluster": machine.cluster}
        return Converted(scenario, tuple(notes), self.missing, frozenset({*self.asked(), *harmless}))

    def asked(self) -> set[str]:
        """Names that were taken, those of sections, too."""
        return self.taken.union(*(section.asked() for section in self.sections))

    def ranks(self, stated: int | None, machine: Machine, divisor: int, words: str) -> int:
        """Ranks over `divisor`: data-parallel replicas.

        Raises:
            InputError: where the number of GPUs is nowhere stated or no multiple of `divisor`.
        """
        gpus = machine.gpus or stated
        if gpus is None:
            raise InputError(f"{self.file}: does not say how many GPUs it runs on: give --gpus N")
        if gpus % divisor:
            raise InputError(f"{self.file}: {counted(gpus, 'GPU')}; must be a multiple of {divisor} ({words})")
        return gpus // divisor


def _tail(name: str) -> str:
    """A name without its sections."""
    return name.rpartition(".")[2]


def without_effect(trainer: str) -> list[str]:
    """Names of a trainer's settings that change no step."""
    return _without_effect()[trainer].split()


@cache
def _without_effect() -> dict[str, str]:
    return msgspec.yaml.decode(_WITHOUT_EFFECT.read_bytes(), type=dict[str, str])


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without keys that are None."""
    return {key: value for key, value in values.items() if value is not None}


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested mappings as one, by the names of their sections and their own; nulls are left out.

    >>> flat({"model": {"hidden": 64, "bias": None}, "seed": 1})
    {'model.hidden': 64, 'seed': 1}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return without_none(found)
