"""Arguments and options that several commands share: the same words, the same meaning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from sim.core.files import STANDARD_INPUT, write_text

FILE = click.Path(path_type=Path)


class ScenarioFile(click.Path):
    """A scenario's file, `-` for standard input, or the name of a shipped one (`1f1b_pp8`) where no file has it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; of a shipped scenario's name its file."""
        path = Path(str(super().convert(value, param, ctx)))
        if path.suffix or path == STANDARD_INPUT or path.exists() or "\0" in str(path):
            return path
        from sim.inputs.shipped import shipped_scenarios

        found = shipped_scenarios()
        if path.as_posix() in found:
            return found[path.as_posix()]
        from sim.core.errors import InputError
        from sim.inputs.input_source import nearest

        hint = nearest(path.as_posix(), found)
        raise InputError(f"{path}: no such file or shipped scenario{hint} (`stepsim scenarios` lists them)")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names of shipped scenarios, and files."""
        from sim.inputs.shipped import shipped_scenarios

        names = [CompletionItem(name) for name in shipped_scenarios() if name.startswith(incomplete)]
        return [*names, *super().shell_complete(ctx, param, incomplete)]


SCENARIO = ScenarioFile()


def write_page(path: Path, text: str) -> None:
    """Write a page that a person will open, and say on standard error where it is."""
    write_text(path, text)
    where = path.resolve().as_uri() if path.is_file() else path
    print(f"wrote {path} ({len(text.encode(errors='replace')) / 1e6:.1f} MB): {where}", file=sys.stderr)


scenario_argument = click.argument("scenario", type=SCENARIO, metavar="SCENARIO")
json_option = click.option("--json", metavar="FILE|-", help="write the result as JSON; - for standard output")
overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key, repeatable"
)
page_option = click.option("--html", type=FILE, metavar="FILE", help="write an interactive page that opens offline")
processes_option = click.option(
    "--workers", type=click.IntRange(1, 4096), metavar="N", help="processes; by default one a core"
)
dask_option = click.option("--dask", metavar="ADDRESS", help="run on this Dask cluster")
