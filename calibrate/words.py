"""What ranks have to say: on the terminal at once, and what casts doubt on a run in its file as well.

A rank's standard error is full of what torch and its profiler write there, and is shown only where the rank fails.
What a person should read goes another way: each rank has a file of words in the ranks' folder, which the command that
started them prints line by line while they run. Under torchrun, which starts ranks itself, words go to standard error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

FOLDER = "STEPSIM_RENDEZVOUS"  # the ranks' folder, in a rank's environment
_said: set[str] = set()
_warned: list[str] = []


def words_file(folder: str, rank: int) -> Path:
    """Where a rank writes what is to be read while it runs."""
    return Path(folder) / f"rank{rank}.words"


def say(text: str) -> None:
    """Show a line to whoever started the command, at once; the same line once only."""
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
    """As `say`, and kept for the file of the run."""
    _warned.append(text)
    say(f"warning: {text}")


def warned() -> list[str]:
    """What this rank has warned of, each once."""
    return list(dict.fromkeys(_warned))


def hear_warnings() -> None:
    """From now on Python's own warnings (torch's among them) are words of this rank, each once."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: TextIO | str | None) -> None:
        text = " ".join(str(message).split())
        if text not in _warned:
            warn(text)

    warnings.showwarning = show  # type: ignore[assignment]


@dataclass(slots=True)
class Listener:
    """Prints the words of all ranks, each line once however many ranks say it."""

    paths: Sequence[Path]
    read_bytes: dict[Path, int] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)

    def pass_on(self) -> None:
        """Print the lines that have come since the last call."""
        for path in self.paths:
            for line in self._new_lines(path):
                if line not in self.heard:
                    self.heard.add(line)
                    print(line, file=sys.stderr, flush=True)

    def _new_lines(self, path: Path) -> list[str]:
        """Whole lines only: the rest of one that is being written comes with the next call."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.read_bytes.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self.read_bytes[path] = self.read_bytes.get(path, 0) + len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []
