"""Messages of ranks: shown on the terminal at once; warnings are also kept for the run's file.

A rank's standard error is full of output of torch and its profiler, so it is shown only if the rank fails. Messages to
the user take another way. Each rank writes them to a file in the ranks' folder, and the command that started the ranks
prints them line by line while they run. Under torchrun, which starts ranks itself, messages go to standard error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

FOLDER = "STEPSIM_RENDEZVOUS"  # environment variable with the ranks' folder
_said: set[str] = set()
_warned: list[str] = []


def words_file(folder: str, rank: int) -> Path:
    """Return the file to which a rank writes its messages."""
    return Path(folder) / f"rank{rank}.words"


def say(text: str) -> None:
    """Show a line to the user at once; a line that was shown before is not shown again."""
    if text in _said:
        return
    _said.add(text)
    folder = os.environ.get(FOLDER)
    if folder is None or "RANK" not in os.environ:
        print(text, file=sys.stderr, flush=True)
        return
    with words_file(folder, int(os.environ["RANK"])).open("a", encoding="utf-8") as file:
        file.write(text.replace("\n", " ") + "\n")


def warn(text: str) -> None:
    """Show a warning as `say` does, and keep it for the run's file."""
    _warned.append(text)
    say(f"warning: {text}")


def warned() -> list[str]:
    """Return the warnings of this rank, each once."""
    return list(dict.fromkeys(_warned))


def hear_warnings() -> None:
    """From now on pass Python's own warnings (torch's among them) to `warn`, each once."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: TextIO | str | None) -> None:
        text = " ".join(str(message).split())
        if text not in _warned:
            warn(text)

    warnings.showwarning = show  # type: ignore[assignment]


@dataclass(slots=True)
class Listener:
    """Prints the messages of all ranks; a line of several ranks is printed once."""

    paths: Sequence[Path]
    read_bytes: dict[Path, int] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)

    def pass_on(self) -> None:
        """Print the lines that were written since the last call."""
        for path in self.paths:
            for line in self._new_lines(path):
                if line not in self.heard:
                    self.heard.add(line)
                    print(line, file=sys.stderr, flush=True)

    def _new_lines(self, path: Path) -> list[str]:
        """Return the new whole lines; a line that is still being written comes with a later call."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.read_bytes.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self.read_bytes[path] = self.read_bytes.get(path, 0) + len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []
