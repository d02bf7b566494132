"""Shell files that a launch script reads with `source` or `.` (bash's manual, "Bourne Shell Builtins"), or gives its
variables and no arguments by `sbatch` (sbatch's manual, `--export`), put in their places."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from sim.core.errors import InputError
from sim.core.files import read_text

OUTPUT = r"\$\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\)|`[^`\n]*`"  # `$(cd "$(dirname $0)" && pwd)`, of a command
SOURCE = re.compile(
    rf"(?m)(?:^|(?<=[;&]))[ \t]*(?:source|\.)[ \t]+((?:{OUTPUT}|[^\n;&|<>#])+?)[ \t]*(?=$|[;&|]|[ \t]#)"
)
SUBMIT = re.compile(r"(?m)^[ \t]*sbatch(?=[ \t\\])(?:\\\n|[^\n;&|#])*?[ \t]([^\s;&|]+\.(?:sh|slurm|sbatch))[ \t]*$")
FOLDER = re.compile(rf"(?:{OUTPUT}|\$\{{[^{{}}]*\}}|\$\w+)/?")
OF_ENVIRONMENT = re.compile(r"activate|conda|bashrc|profile|/etc/|/opt/|\.env$|setvars|cargo/env|modules?/init")
AT_LINE = re.compile(r"(.*?):(\d+): ")
MAX_BYTES = 2**20
MOST = 20  # files


class Sourced(Struct, frozen=True):
    """A script with the files in it, and those that are not there, by the words of the script. `read`: the files and
    their own texts, the script first; none where it reads no other."""

    text: str
    absent: tuple[str, ...] = ()
    read: tuple[tuple[Path, str], ...] = ()

    def placed(self, message: str) -> str:
        """A message that begins with the script's name and a line of `text`, with the file and line of that line."""
        found = AT_LINE.match(message)
        lines = self.text.splitlines()
        if found is None or not self.read or found[1] != str(self.read[0][0]) or int(found[2]) > len(lines):
            return message
        line, said = lines[int(found[2]) - 1], message[found.end() :]
        for path, text in self.read:
            if line in (own := text.splitlines()):
                return f"{path}:{own.index(line) + 1}: {said}"
        return f"{found[1]}: {said}"


def with_sourced(file: Path, text: str) -> Sourced:
    """The script with the files that it reads, which are looked for by their names beside it.

    Raises:
        InputError: for a file that reads itself, or more than 20 of them.
    """
    absent: list[str] = []
    read: list[tuple[Path, str]] = []
    whole = _with(file, text, absent, (), read)
    return Sourced(whole, tuple(dict.fromkeys(absent)), ((file, text), *read) if read else ())


def advice(absent: tuple[str, ...]) -> str:
    """Return the advice on files that a script reads and that are absent; it follows an error, or is a note."""
    return f"the script reads {', '.join(absent)}, not found beside it: put it there, or give what it sets by --var"


def _with(file: Path, text: str, absent: list[str], readers: tuple[Path, ...], read: list[tuple[Path, str]]) -> str:
    def inner(found: re.Match[str]) -> str:
        words = found[1]
        path = _path(file.parent, words)
        if path is None:
            if found.re is SOURCE and not OF_ENVIRONMENT.search(words):
                absent.append(words)
            return found[0]
        if path in readers or len(readers) == MOST:
            raise InputError(f"{file}: reads {words}, which reads itself or more than {MOST} files")
        more = _directive(found) if found.re is SUBMIT else ""
        own = read_text(path, MAX_BYTES)
        read.append((file.parent / path.name, own))
        return "\n" + _with(path, own, absent, (*readers, path), read) + more + "\n"

    return SUBMIT.sub(inner, SOURCE.sub(inner, text))


def _directive(found: re.Match[str]) -> str:
    """The options of a command `sbatch` as a directive behind those of the script, which they go before (sbatch's
    manual, "Options")."""
    options = found[0][: found.start(1) - found.start()].replace("\\\n", " ").replace("sbatch", "", 1)
    return f"\n#SBATCH {' '.join(options.split())}"


def _path(folder: Path, words: str) -> Path | None:
    """The file of a name, without quotes, what a command or a variable says of its folder, and arguments behind it."""
    plain = FOLDER.sub("", words.replace('"', "").replace("'", "").strip()).split()
    if not plain or "$" in plain[0]:
        return None
    name = plain[0]
    tries = (folder / name, folder / Path(name).name)
    return next((path.resolve() for path in tries if path.is_file()), None)
