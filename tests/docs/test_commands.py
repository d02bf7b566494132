"""Commands and programs shown in README and docs: they run.

Fences of `sh` are run line by line, a page's in one temporary folder, where `scenarios` is at hand and each `yaml` or
`toml` fence that opens with `# NAME.yaml` lies as a file. A fence with a line `# not run by the tests: REASON`, fences
of other kinds (`console`, none) and README's table are only parsed: the module is there and knows the options.
`python` fences run where they import this project alone, and compile elsewhere.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from sim.schedules import FORMS
from tests.modules import run_module

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = "# not run by the tests: "
OURS = {"sim", "topology", "json", "pathlib"}


def fences(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text("utf-8"))


def commands(text: str) -> list[list[str]]:
    """Arguments after `python -m`, of each line that is such a command."""
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("python -m ")]


def shown(page: Path) -> list[list[str]]:
    """Every command of a page, in fences and between back-quotes."""
    quoted = [c for c in re.findall(r"`(python -m [^`]+)`", page.read_text("utf-8")) if "…" not in c]
    return [c for _, text in fences(page) for c in commands(text)] + [c for q in quoted for c in commands(q)]


def to_run(page: Path) -> list[list[str]]:
    return [c for kind, text in fences(page) if kind == "sh" and NOT_RUN not in text for c in commands(text)]


FIRST_ON = {tuple(arguments): page for page in reversed(PAGES) for arguments in to_run(page)}


@functools.cache
def options(module: str) -> str:
    return run_module(module, "--help", COLUMNS="200").stdout


@pytest.mark.parametrize("page", [p for p in PAGES if shown(p)], ids=lambda p: p.stem)
def test_commands_are_known(page: Path) -> None:
    for module, *arguments in shown(page):
        assert find_spec(module), f"{page.name} shows python -m {module}, which does not exist"
        for option in (a for a in arguments if a.startswith("--") and module != "pytest"):
            assert option.partition("=")[0] in options(module), f"{page.name}: {module} does not know {option}"
        for path in (a for a in arguments if a.startswith("scenarios/")):
            assert any(ROOT.glob(path)), f"{page.name} names {path}, which does not exist"


@pytest.mark.parametrize("page", [p for p in PAGES if to_run(p)], ids=lambda p: p.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """A command that several pages show runs for the first of them, unless it takes a file of the page's own."""
    prepare(page, tmp_path)
    for arguments in dict.fromkeys(map(tuple, to_run(page))):
        own = any((tmp_path / word).is_file() for word in arguments if not word.startswith("scenarios/"))
        if FIRST_ON[arguments] != page and not own:
            continue
        done = run_module(*arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{page.name}: python -m {shlex.join(arguments)}\n{done.stderr}"


@pytest.mark.parametrize("page", [p for p in PAGES if any(k == "python" for k, _ in fences(p))], ids=lambda p: p.stem)
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for kind, text in fences(page):
        if kind == "python":
            code = compile(text, page.name, "exec")
            if imports(text) <= OURS:
                with patch.dict(FORMS):  # a program may add a schedule
                    exec(code, {})


def imports(program: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def prepare(page: Path, folder: Path) -> None:
    """What a reader has by then: the repository's scenarios, and the page's own files."""
    (folder / "scenarios").symlink_to(ROOT / "scenarios", target_is_directory=True)
    for kind, text in fences(page):
        name = re.match(r"# ([\w-]+\.(?:yaml|toml|sh))$", text.partition("\n")[0])
        if kind in ("yaml", "toml", "bash") and name:
            (folder / name[1]).write_text(text, "utf-8")


def test_a_task_takes_three_commands_at_most() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text("utf-8")
    tasks = text.split("\n## ")[1:]
    assert len(tasks) == 17
    assert all(1 <= len(commands(task)) <= 3 for task in tasks)
