"""Options that several commands share: the same words, the same meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[str | None, typer.Option(help="write the result as JSON; - for standard output", metavar="FILE|-")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="override a key, repeatable", metavar="KEY=VALUE")]
Page = Annotated[Path | None, typer.Option(help="write an interactive page that opens offline", metavar="FILE")]
Processes = Annotated[int | None, typer.Option(help="processes; by default one a core", min=1, max=4096)]
Dask = Annotated[str | None, typer.Option(help="run on this Dask cluster", metavar="ADDRESS")]
