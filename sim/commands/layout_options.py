"""The options of a search about layouts: values of keys, alone or linked, GPUs, bytes, prices, clusters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from sim.core.errors import InputError

if TYPE_CHECKING:
    from sim.emit import Trainer
    from sim.search.space import Linked

_OUTER_COMMAS = re.compile(r",(?![^{]*\})")  # not those inside of braces
LINK = ":"  # between the values of keys that are given together


def parse_only(options: Sequence[str]) -> tuple[dict[str, list[Any]], list[Linked]]:
    """`KEY=VALUE,…` options as values of fields of Layout, and `KEY,KEY=VALUE:VALUE,…` as rows of linked ones.

    >>> parse_only(["tp=4,8", "schedule=1f1b", "tp=1"])
    ({'tp': [4, 8, 1], 'schedule': ['1f1b']}, [])
    >>> parse_only(["tp,pp=8:1,4:2"])[1][0].rows
    ((8, 1), (4, 2))

    Raises:
        InputError: for another key, or a value that the key never has.
    """
    from sim.search.space import Layout, Linked

    single: dict[str, list[Any]] = {}
    linked: list[Linked] = []
    for option in options:
        text, sign, listed = option.partition("=")
        keys = [key.strip().removeprefix("parallelism.").removeprefix("training.") for key in text.split(",")]
        if not sign or not set(keys) <= set(Layout._fields) or len(set(keys)) < len(keys):
            raise InputError(f"--only {option}: must be KEY=VALUE,… with KEY one of {', '.join(Layout._fields)}")
        if len(keys) == 1:
            values = single.setdefault(keys[0], [])
            values += [v for word in listed.split(",") if (v := _value(keys[0], word, option)) not in values]
            continue
        rows = linked_rows(listed, len(keys), f"--only {option}")
        made = [tuple([_value(k, word, option) for k, word in zip(keys, row, strict=True)]) for row in rows]
        linked.append(Linked(tuple(keys), tuple(made)))
    return single, linked


def linked_rows(listed: str, count: int, label: str) -> list[list[str]]:
    """Return the rows that an option lists for several keys at once.

    >>> linked_rows("8:1,4:2", 2, "--only tp,pp=8:1,4:2")
    [['8', '1'], ['4', '2']]

    Raises:
        InputError: begins with `label`; for a row that has not `count` values.
    """
    rows = [row.split(LINK) for row in listed.split(",")]
    if any(len(row) != count for row in rows):
        example = LINK.join(map(str, range(1, count + 1)))
        raise InputError(f"{label}: must be rows of {count} values joined by '{LINK}', such as {example}")
    return rows


def _value(key: str, word: str, option: str) -> Any:
    """A value of a field of Layout.

    Raises:
        InputError: where the field never has it.
    """
    from sim.inputs.input_source import nearest, show
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.yaml_input import parse_yaml
    from sim.schedules import FORMS
    from sim.search.space import RECOMPUTE, TP_OVERLAPS

    words = {"schedule": tuple(FORMS), "recompute": RECOMPUTE, "tp_overlap": TP_OVERLAPS}
    if key in words:
        if word.strip() not in words[key]:
            hint = nearest(word.strip(), words[key])
            raise InputError(f"--only {option}: found '{word.strip()}'; must be one of {', '.join(words[key])}{hint}")
        return word.strip()
    value = parse_yaml(word, f"--only {option}")[0]
    stages = get_args(Parallelism.model_fields["zero"].annotation)
    allowed, kind = {
        "sp": (isinstance(value, bool), "true or false"),
        "zero": (type(value) is int and value in stages, f"one of {', '.join(map(str, stages))}"),
    }.get(key, (type(value) is int and value >= 1, "an integer, at least 1"))
    if not allowed:
        raise InputError(f"--only {option}: found {show(value)}; must be {kind}")
    return value


def with_trainer(only: dict[str, list[Any]], name: str, trainer: Trainer) -> dict[str, list[Any]]:
    """The values of --only that a trainer has, and the trainer's own for other fields.

    Raises:
        InputError: where none of a field's values are among the trainer's.
    """
    out: dict[str, list[Any]] = dict(only)
    for key, has in trainer.only.items():
        out[key] = [value for value in only.get(key, has) if value in has]
        if not out[key]:
            found = ",".join(map(str, only[key]))
            raise InputError(f"--only {key}={found}: {name} has {', '.join(map(str, has))}")
    return out


def parse_gpus(text: str) -> list[int]:
    """Numbers of GPUs, written between commas, in ascending order.

    >>> parse_gpus("64,8")
    [8, 64]

    Raises:
        InputError: for anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 8 and int(word) > 0 for word in words):
        raise InputError(f"--gpus: found {text!r}; must be whole numbers above 0 between commas, such as 8,64,512")
    return sorted({int(word) for word in words})


def limit_bytes(text: str | None) -> float | None:
    """Bytes of --memory-limit; None without it.

    Raises:
        InputError: for no size, or less than any GPU has.
    """
    from sim.inputs.cluster_input import LEAST_MEMORY_BYTES
    from sim.inputs.units import BYTES

    if text is None:
        return None
    try:
        size = BYTES.parse(text)
    except ValueError as error:
        raise InputError(f"--memory-limit: found {text!r}; {error}") from None
    if size < LEAST_MEMORY_BYTES:
        hint = f"; {size} bytes? write {size}GiB" if size > 0 else "; must be above 0"
        raise InputError(f"--memory-limit: found {text!r}{hint}")
    return float(size)


def parse_clusters(text: str) -> list[str]:
    """`--cluster a,b` as names of shipped clusters, or mappings as a scenario's `cluster` has them.

    >>> parse_clusters("dgx-h100,{gpu: l40s, gpus_per_node: 8}")
    ['dgx-h100', '{gpu: l40s, gpus_per_node: 8}']

    Raises:
        InputError: for an unknown one, or one that is given twice.
    """
    from sim.inputs.cluster_names import no_such_cluster
    from topology.presets import CLUSTERS

    names = [name.strip() for name in _OUTER_COMMAS.split(text)]
    for name in names:
        if name not in CLUSTERS and not name.startswith("{"):  # a mapping is checked as the scenario's key
            raise InputError(f"--cluster: found '{name[:60]}'; {no_such_cluster(name)}")
    if len(set(names)) < len(names):
        raise InputError(f"--cluster: found {text!r}; each cluster once")
    return names


class Prices:
    """Prices of a GPU hour: one for all clusters, or one for each (`dgx-h200=2.5,dgx-b200=4`), in any currency.

    Raises:
        InputError: for anything else.
    """

    def __init__(self, text: str | None) -> None:
        self.everywhere: float | None = None
        self.by_cluster: dict[str, float] = {}
        for part in [] if text is None else text.split(","):
            name, sign, value = part.rpartition("=")
            price = _price(value, text or "")
            if sign:
                self.by_cluster[name.strip()] = price
            elif self.everywhere is None and text == part:
                self.everywhere = price
            else:
                raise InputError(f"--price: found {text!r}; must be one number, or CLUSTER=NUMBER,…")

    def of(self, cluster: str) -> float | None:
        """The price on one cluster, if it is given.

        Raises:
            InputError: if prices are given, and none for this cluster.
        """
        if self.by_cluster and cluster not in self.by_cluster:
            named = (
                f"has none for {cluster}" if cluster else "must be one number: the searched cluster has no shipped name"
            )
            raise InputError(f"--price: found prices of {', '.join(self.by_cluster)}; {named}")
        return self.by_cluster.get(cluster, self.everywhere)


def _price(value: str, text: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e9:
        raise InputError(f"--price: found {text!r}; must be a number, the price of a GPU hour, or CLUSTER=NUMBER,…")
    return price
