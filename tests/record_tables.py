"""Tables of the docs that are made of records: `python -m tests.record_tables` prints them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise

from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.parts import AttentionCopies, ContextKernels, RouterKernels, SequenceMessages, UnfusedLoss
from sim.variants.frameworks.records import FRAMEWORKS
from sim.variants.frameworks.userbuffers import UserBuffers
from sim.variants.frameworks.zero import ZeroEngine
from sim.variants.recipes import RECIPES, Pass


def framework_table() -> str:
    """Return a row for each fact, a column for each framework; of docs/operators.md."""
    rows = [["fact", *(f"`{name}`" for name in FRAMEWORKS), "meaning", "source"]]
    for name, text in _texts_of(Framework):
        meaning, source = re.fullmatch(r"(.*?)(?: \[(.*)\])?", text).groups()  # type: ignore[union-attr]
        values = [_shown(getattr(record, name)) for record in FRAMEWORKS.values()]
        rows.append([f"`{name}`", *values, meaning, source or ""])
    return _table(rows)


def former_table() -> str:
    """Return a row for what a framework's releases before a month did in another way; of docs/operators.md."""
    frameworks: dict[tuple[str, str, str], list[str]] = {}
    for name, record in FRAMEWORKS.items():
        for former in record.former:
            facts = ", ".join(f"`{fact}` {_shown_former(value)}" for fact, value in former.facts.items())
            frameworks.setdefault((former.until, facts, former.source), []).append(f"`{name}`")
    rows = [["framework", "before", "facts", "source"]]
    for (until, facts, source), names in sorted(frameworks.items(), reverse=True):
        rows.append([", ".join(names), until, facts, source])
    return _table(rows)


def recipe_table() -> str:
    """Return a row for each recipe; of docs/number_formats.md."""
    first = ("recipe", "of", "one scale for", "activation", "again", "weight", "again")
    rows = [[*first, "kept", "gathered", "since", "source"]]
    for r in RECIPES.values():
        formats = ["the format" if own else "16 bits" for own in (r.keeps_quantized, r.gathers_quantized)]
        passes = [_pass(p) for p in (r.activations, r.activations_again, r.weights, r.weights_again)]
        rows.append([f"`{r.name}`", r.quantizer, r.scaled, *passes, *formats, r.since, r.source])
    return _table(rows)


def _texts_of(record: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class that have a text behind them, and the text on one line."""
    tree = ast.parse(inspect.getsource(record)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, text in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())


def _table(rows: list[list[str]]) -> str:
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(value: object) -> str:
    if isinstance(value, UnfusedLoss):
        return f"{value.forward_kernels} and {value.backward_kernels}, {value.forward_token_kernels} a token"
    if isinstance(value, ContextKernels | SequenceMessages):
        return ", ".join(name for name, default in value._field_defaults.items() if getattr(value, name) != default)
    if isinstance(value, ZeroEngine):
        own = {name: getattr(value, name) for name in ZeroEngine._fields}
        changed = {name: x for name, x in own.items() if x != ZeroEngine._field_defaults[name]}
        return "; ".join(
            f"{name} {str(x).lower() if isinstance(x, bool) else _shown(x)}" for name, x in changed.items()
        )
    if isinstance(value, UserBuffers):
        of_each = (" ".join(map(str, sms)) for sms in (value.attention, value.mlp))
        return "; ".join((*of_each, *(["rings"] if value.rings_of_low_precision else [])))
    if isinstance(value, AttentionCopies):
        of_several = "" if value.of_one_sequence else " of several sequences"
        kernels = "{} and {}".format(*value.kernels)
        return f"{value.tensors}{of_several} by {kernels} kernels" if value.tensors else "0"
    if isinstance(value, RouterKernels):
        return f"{value.forward_kernels} and {value.backward_kernels}"
    if isinstance(value, bool):
        return "yes" if value else ""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join("·".join(each) if isinstance(each, tuple) else str(each) for each in value)


def _shown_former(value: object) -> str:
    return "no" if value is False else str(value) if value == "" or value == 0 else _shown(value)


def _pass(p: Pass) -> str:
    """Kernels, and accesses: 16-bit ones, those of the format."""
    return f"{p.kernels}: {p.sixteen} + {p.copies + p.read_copies}" if p.kernels else ""


if __name__ == "__main__":
    print(framework_table(), former_table(), recipe_table(), sep="\n\n")
