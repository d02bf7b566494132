"""Packages depend one way: topology ← sim ← calibrate; torch is calibrate's alone; heavy libraries are loaded late."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"topology": ("sim", "calibrate", "torch"), "sim": ("calibrate", "torch"), "calibrate": ()}


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def modules(node: ast.AST) -> list[str]:
    """Full names that an import statement may load; none for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_depend_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        wrong = imported(path) & set(FORBIDDEN[package])
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_modules_do_not_need_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types alone count."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in FORBIDDEN
        for path in (ROOT / package).rglob("*.py")
    }
    needs = nx.DiGraph()
    for module, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                needs.add_edges_from((module, name) for name in names & files.keys() - {module, "sim"})
    circles = [part for part in nx.strongly_connected_components(needs) if len(part) > 1]
    assert not circles, circles


def test_building_a_graph_knows_nothing_of_running_it() -> None:
    for folder in ("programs", "graph"):
        for path in (ROOT / "sim" / folder).glob("*.py"):
            modules = [n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
            assert not [m for m in modules if m.startswith("sim.engine")], path


def test_only_commands_show_results() -> None:
    """Nothing but views and commands imports `sim.views`; a notebook asks a result itself for its HTML or plot."""
    for path in (ROOT / "sim").rglob("*.py"):
        if path.relative_to(ROOT / "sim").parts[0] in ("views", "commands"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        html = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name in ("_repr_html_", "plot")]
        allowed = {id(n) for function in html for n in ast.walk(function)}
        wrong = [name for n in nodes if id(n) not in allowed for name in modules(n) if name.startswith("sim.views")]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_one_module_touches_what_simpy_keeps_to_itself() -> None:
    private = {"_ok", "_eid", "_defused"}  # other classes have a `_queue` and a `_value` of their own
    for path in (ROOT / "sim").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & private
        assert not used or path.name == "simpy_events.py", f"{path.relative_to(ROOT)} uses {sorted(used)}"


@pytest.mark.parametrize(("scenario", "engine"), [("1f1b_pp8", "simpy"), ("llama3_405b_16k", "static")])
def test_a_simulation_loads_no_torch_and_nothing_heavy(scenario: str, engine: str) -> None:
    """SimPy for small steps alone, and no class of a section that the scenario lacks."""
    loaded = {"simpy"} if engine == "simpy" else set()
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['sim.run', 'scenarios/{scenario}.yaml']\n"
        "try:\n    runpy.run_module('sim.run', run_name='__main__')\n"
        "except SystemExit as e:\n    assert not e.code, e.code\n"
        "heavy = {'torch', 'bokeh', 'rich', 'scipy', 'networkx', 'simpy', 'numba', 'pandas', 'calibrate'}\n"
        "heavy &= set(sys.modules)\n"
        "rare = {'workloads', 'distillation_config', 'faults_config', 'serving_keys', 'rl_config', 'processes_input'}\n"
        "heavy |= {f'sim.inputs.{name}' for name in rare} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy), file=sys.stderr)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"HEAVY {sorted(loaded)}" in run.stderr
