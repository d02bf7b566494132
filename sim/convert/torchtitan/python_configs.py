"""torchtitan's Python configs as tables of TOML. The file is parsed and never run.

Keyword arguments that are plain values count, by the name of the class that they are given to, and so do assignments
to a config's parts, also to what another function of the file returns.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.inputs.trainer_names import TITAN_GATHERS_8_BITS, TITAN_POLICIES

CONVERTERS = {  # of a model's matmuls, classes of Python configs
    "Float8LinearConverter": "float8",
    "MXFP8LinearConverter": "mx",
    "NVFP4LinearConverter": "nvfp4",
}
GROUPED = re.compile(r"\w+Grouped\w*Converter")  # of experts, such as Float8GroupedMMConverter
WHOLE_LAYERS = ["layers"]  # a converter's `fqns` for the matmuls of all layers
FLOAT8 = {"recipe_name", "filter_fqns", TITAN_GATHERS_8_BITS}  # of [quantize.linear.float8]
# Tables that decide about a step; of a Python config the class names are these, camel-cased, with Config.
OWN = {"model", "training", "parallelism", "activation_checkpoint", "compile", "optimizer"}
TABLES = OWN | {"float8", "mx", "experimental", "loss", "debug"}
# Tables that need no key; what others have that nothing reads, such as those of forks, a note names.
WITHOUT_EFFECT = {
    *("job", "profiling", "metrics", "lr_scheduler", "checkpoint", "validation", "comm", "memory_estimation"),
    "fault_tolerance",
}
JOB = "JobConfig"  # of early 2026: a TOML's tables as arguments of it, `training=Training(seq_len=8192)`
PLAIN_OPTIMIZERS = ("Config", "Optimizer")  # whose `name` says which
OF_REGISTRY = ("moe_comm_backend", "attn_backend", "non_blocking_capacity_factor")  # arguments of `model_registry`
CHUNKED = ("ChunkedLossWrapper", "ChunkedCELoss")  # of components/loss.py, the later name first
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}
LARGEST = 2**62
UNREAD = "?"  # stands for a table: keys whose values are no plain ones
OF_RL = re.compile(r"(?m)^\s*(from|import) torchtitan\.experiments\.rl\b")
# Of other programs a Python script is not executed to read what it sets.
RECORDED = "a script's own step can be recorded instead (docs/programs_script.md)"
OTHER_TRAINERS = (
    "unsloth",  # whose scripts import TRL's trainer, too
    "trl",
    "transformers",
    "deepspeed",
    "megatron",
    "axolotl",
    "torchtune",
    "litgpt",
    "nemo_rl",
)  # whose scripts are no config


def is_job(text: str) -> bool:
    """Whether a Python config has the tables of a TOML as arguments, of releases before the functions of 0.3.0."""
    return f"{JOB}(" in text and "Trainer.Config" not in text


def of_python(file: Path, text: str, function: str | None) -> dict[str, dict[str, Any]]:
    """The tables that a function says, with the words of TOML; `UNREAD` among them.

    Raises:
        InputError: for text that is no Python or has no config, and several functions where none is named.
    """
    if OF_RL.search(text):
        problem = "a step of reinforcement learning, of which a training step is a part"
        raise InputError(f"{file}: {problem}: a scenario with `rl` describes it (docs/rl.md)")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{file}: not Python: {error}") from None
    root = _config(file, tree, function)
    tables = _tables(file, tree, root)
    if not {*tables} - {UNREAD}:
        other = next((name for name in OTHER_TRAINERS if re.search(rf"^\s*(from|import) {name}\b", text, re.M)), None)
        way = f"of {other}, give its command, or a YAML or JSON with its arguments; " if other else ""
        no_config = "holds no torchtitan config: no call of a class such as TrainingConfig"
        raise InputError(f"{file}: {no_config}; {way}{RECORDED}")
    return tables


def _tables(file: Path, tree: ast.Module, root: ast.AST, above: tuple[ast.AST, ...] = ()) -> dict[str, dict[str, Any]]:
    """The tables of a function, over those of another that it begins with (`config = llama3_8b()`). `above`: functions
    that begin with this one."""
    tables: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, call in _config_calls(root):
        for keyword in call.keywords:
            if keyword.arg is not None:
                _set(tables, name, keyword.arg, keyword.value)
    for call in (n for n in ast.walk(root) if isinstance(n, ast.Call)):  # model_registry("8B") of models/llama3
        for given in call.keywords:
            _part(file, given.arg or "", given.value, tables)
        _converter(call, tables)
        if _name(call.func) == "model_registry" and call.args and isinstance(call.args[0], ast.Constant):
            tables["model"].setdefault("flavor", str(call.args[0].value))
            tables["model"].setdefault("name", _package(tree) or file.parent.name)
            for keyword in call.keywords:
                if keyword.arg in OF_REGISTRY:
                    _set(tables, "model", keyword.arg, keyword.value)
    whole = _assigned(file, root, tables)
    others = (other for name, other in _configs(tree).items() if name in _begun(root))
    base = next((other for other in others if other not in (root, *above)), None)
    found = defaultdict(dict) if base is None else _tables(file, tree, base, (root, *above))
    for name, own in tables.items():
        found[name] = own if name in whole else {**found[name], **own}
    return found


def _assigned(file: Path, root: ast.AST, tables: dict[str, dict[str, Any]]) -> set[str]:
    """Take over what is assigned to parts of a config, and return the tables of which it replaces the whole."""
    whole = set()
    for node in (n for n in ast.walk(root) if isinstance(n, ast.Assign)):
        match node.targets:
            case [ast.Attribute(value=ast.Attribute(attr=name), attr=key)] if name in TABLES:
                _set(tables, name, key, node.value)  # config.training.seq_len = 8192
            case [ast.Attribute(attr=name)]:
                whole |= {name} & TABLES
                _part(file, name, node.value, tables)
    return whole


def _begun(root: ast.AST) -> set[str]:
    """Names of functions whose result has a name in this one."""
    made = (n.value for n in ast.walk(root) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call))
    return {call.func.id for call in made if isinstance(call.func, ast.Name) and not call.args}


def _configs(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions that make a config, by the classes of its parts, or from another one's."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {name for name, node in functions.items() if _config_calls(node)}
    for _ in functions:
        found |= {name for name, node in functions.items() if found & _begun(node) - {name}}
    return {name: node for name, node in functions.items() if name in found}


def _set(tables: dict[str, dict[str, Any]], table: str, key: str, value: ast.expr) -> None:
    """Take over a plain value; note the key of another, but for None, which decides nothing."""
    found = _plain(value)
    if found is not None:
        tables[table][key] = found
        tables[UNREAD].pop(f"{table}.{key}", None)
    elif not isinstance(value, ast.Constant):
        tables[UNREAD][f"{table}.{key}"] = ast.unparse(value)


def _config(file: Path, tree: ast.Module, function: str | None) -> ast.AST:
    """The function that makes the config; the whole file where none does."""
    functions = _configs(tree)
    if function is None and len(functions) > 1:
        raise InputError(f"{file}: has several configs: give --config with one of {', '.join(functions)}")
    if function is not None and function not in functions:
        known = f"there are {', '.join(functions)}" if functions else "no function of this file makes a config"
        calls = _of_other_files(tree, function)
        more = f"; it begins with {' and '.join(calls)} of other files: convert these" if calls else ""
        raise InputError(f"{file}: --config: found '{function}'; {known}{more}")
    return functions[function] if function else next(iter(functions.values()), tree)


def _of_other_files(tree: ast.Module, function: str) -> list[str]:
    """Names of functions that a function calls without arguments, and the file imports."""
    imported = {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    body = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function), None)
    calls = (n for n in ast.walk(body or ast.Module([], [])) if isinstance(n, ast.Call) and not n.args)
    return sorted(n for call in calls if (n := _name(call.func)) in imported and n.islower())


def _part(file: Path, name: str, given: ast.expr, tables: dict[str, dict[str, Any]]) -> None:
    """Take over a part of a config that is no table: the policy of recomputation (a `Config()`, or None), a loss in
    chunks or not, and an optimizer whose function names another than Adam."""
    made = given if isinstance(given, ast.Call) else None
    if name == "activation_checkpoint" and isinstance(given, ast.Constant) and given.value is None:
        tables[name]["mode"] = "none"
    if name == "activation_checkpoint" and made and _name(made.func) == "Config":
        policy = TITAN_POLICIES.get(_owner(made.func))
        if policy is None:
            allowed = ", ".join(TITAN_POLICIES)
            raise InputError(f"{file}: activation_checkpoint: found {_owner(made.func)}; can be simulated: {allowed}")
        tables[name]["mode"] = policy
        for keyword in made.keywords:  # which nothing reads, and a note names
            if keyword.arg is not None:
                _set(tables, name, keyword.arg, keyword.value)
    if name == "loss" and made:
        tables[name]["chunked"] = _owner(made.func) in CHUNKED
        for keyword in made.keywords:
            if keyword.arg == "num_chunks":
                _set(tables, name, keyword.arg, keyword.value)
    if (
        name == "optimizer"
        and made
        and (word := _name(made.func)) not in PLAIN_OPTIMIZERS
        and "adam" not in word.lower()
    ):
        tables[name]["name"] = word


def _converter(call: ast.Call, tables: dict[str, dict[str, Any]]) -> None:
    """Add the model converter that a call configures, and the keys of 8-bit matmuls that it is given."""
    owner = _owner(call.func)
    converter = CONVERTERS.get(owner)
    if converter is None:
        if GROUPED.match(owner):
            tables["model"].setdefault("converters", []).append(f"grouped_mm.{owner.lower()}")
        return
    tables["model"].setdefault("converters", []).append(converter)
    named = next((k.value for k in call.keywords if k.arg == "fqns"), None)
    if named is not None and _plain(named) != WHOLE_LAYERS:
        tables["model"]["converters.fqns"] = ast.unparse(named)  # which nothing reads
    given = {k.arg: _plain(k.value) for k in call.keywords if converter == "float8" and k.arg in FLOAT8}
    tables["float8"] |= {str(k): v for k, v in given.items() if v is not None}


def _owner(function: ast.expr) -> str:
    """Return the name B of `a.B.Config`."""
    return _name(function.value) if isinstance(function, ast.Attribute) and function.attr == "Config" else ""


def _package(tree: ast.Module) -> str:
    """The model's folder that a registry is imported from; nothing where that is the file's own."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            return (node.module or "").rpartition(".")[2]
    return ""


def _config_calls(root: ast.AST) -> list[tuple[str, ast.Call]]:
    """Calls of classes such as `ParallelismConfig`, under the name of the table."""
    found = []
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and (match := re.fullmatch(r"(\w+?)Config", _name(node.func))):
            table = re.sub(r"(?<!^)(?=[A-Z])", "_", match[1]).lower()
            if table in TABLES:
                found.append((table, node))
            given = node.keywords if _name(node.func) == JOB else []
            found += [(k.arg, k.value) for k in given if k.arg in TABLES and isinstance(k.value, ast.Call)]
    return found


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _plain(node: ast.expr) -> Any:
    """A literal, or a product, sum or quotient of whole numbers; None for all else."""
    if isinstance(node, ast.BinOp) and (compute := ARITHMETIC.get(type(node.op))):
        left, right = _plain(node.left), _plain(node.right)
        known = type(left) is type(right) is int and max(abs(left), abs(right)) < LARGEST
        return compute(left, right) if known and (right or compute is not operator.floordiv) else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
