"""Commands that a shell runs itself (bash's manual, "Shell Builtin Commands")."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from sim.convert.scripts import lexer
from sim.convert.scripts.parameters import Status
from sim.convert.scripts.shell import Shell
from sim.convert.scripts.sourced import OF_ENVIRONMENT, found_script
from sim.convert.scripts.state import Break, Continue, Exit, Return, Variable, as_items
from sim.convert.scripts.unknown import known
from sim.convert.scripts.utilities import formatted
from sim.core.errors import InputError

DECLARING = ("export", "declare", "typeset", "local", "readonly")
MAX_BYTES = 2**20


def hide(shell: Shell, name: str) -> None:
    """Remember a variable, to be put back where the function ends."""
    shell.state.frames[-1].setdefault(name, shell.state.variables.get(name))


def script_of(shell: Shell, word: str, by: list[str] | None) -> tuple[Path, str] | None:
    """A script that this one wrote, or that is beside it, and its text; `by`: what starts it."""
    if (text := shell.state.files.get(Path(word).name)) is not None and known(text):
        return shell.folder / Path(word).name, text
    folders = dict.fromkeys((shell.folder, Path(shell.source.file).parent))
    file = next((found for folder in folders if (found := found_script(folder, word))), None)
    if file is None:
        return None
    beside = shell.folder / file.name
    label = beside if beside.is_file() else file
    return label, shell.shared.read(label, by)


def declare(shell: Shell, name: str, words: list[str]) -> Status:
    """`export`, `declare`, `local`, `readonly`."""
    if name == "local" and not shell.called:
        return 1
    flags, plus = "", False
    rest: list[str] = []
    for word in words:
        if re.fullmatch(r"[-+][A-Za-z]+", word) and not rest:
            flags, plus = flags + word[1:], plus or word[0] == "+"
        elif lexer.ASSIGNMENT.match(word):
            rest.append(word)
        else:
            rest += [f"{field}" for field in shell.fields(word)]
    if set(flags) & {"p", "f", "F"}:
        shell.write(shell.unknown(f"$({name} {' '.join(words)})", "the output of a command"))
        return 0
    is_local = shell.state.frames and "g" not in flags and name in ("local", "declare", "typeset")
    for word in rest:
        found = lexer.ASSIGNMENT.match(word)
        target = found[1] if found else word
        if not known(target) or not lexer.NAME.fullmatch(target):
            shell.havoc(f"`{name}` of a name that is not known")
            continue
        before = shell.state.variables.get(target)
        if is_local:
            hide(shell, target)
            own = Variable(exported=bool(before and before.exported)) if target not in shell.shared.given else before
        else:
            target = shell.resolve(target)
            own = before
        own = own or Variable(value=None)
        if {"l", "u", "c"} & {*flags}:
            raise InputError(f":{shell.line}: {name} -{flags}: is not read")
        own = replace(own, integer=own.integer or "i" in flags, keyed=own.keyed or "A" in flags)
        if ("a" in flags or "A" in flags) and own.items is None and own.value is None:
            own = replace(own, items={})
        if before is None and not found and name == "export" and not is_local:
            continue  # of the environment
        shell.state.variables[target] = replace(own, readonly=False) if not before else own
        if "n" in flags and found:
            shell.state.variables[target] = replace(own, refers=shell.text(word[found.end() :]))
            continue
        if found:
            _assigned(shell, word, keyed="A" in flags)
        target = shell.resolve(target)
        own = shell.state.variables.get(target) or Variable()
        exported = not plus and (own.exported or name == "export" or "x" in flags)
        if "n" in flags and name == "export":
            exported = False
        readonly = own.readonly or name == "readonly" or "r" in flags
        shell.state.variables[target] = replace(own, exported=exported, readonly=readonly)
    return 0


def _assigned(shell: Shell, word: str, keyed: bool) -> None:
    if any(not known(part) for part in word):  # of an expansion, which is not expanded again
        found = lexer.ASSIGNMENT.match(word)
        assert found is not None
        shell.set(found[1], found[2], word[found.end() :], bool(found[3]))
    else:
        shell.assignment(word, keyed)


def unset(shell: Shell, words: list[str]) -> Status:
    of_functions = "-f" in words
    for word in words:
        if word.startswith("-"):
            continue
        if not known(word):
            shell.havoc("`unset` of a name that is not known")
            continue
        found = re.fullmatch(r"(\w+)\[(.*)\]", word)
        name = shell.resolve(found[1] if found else word)
        own = shell.state.variables.get(name)
        if of_functions or (own is None and name in shell.state.functions):
            shell.state.functions.pop(name, None)
        elif name in shell.shared.given:
            continue
        elif found is None:
            shell.state.variables[name] = Variable()
        elif own is not None:
            key = found[2] if own.keyed else shell.key(own, found[2])
            every = {} if found[2] in ("@", "*") else {k: v for k, v in as_items(own).items() if k != key}
            shell.state.variables[name] = own.with_items(every)
    return 0


def evaluate(shell: Shell, words: list[str]) -> Status:
    text = " ".join(words)
    shown = shell.unknowns.shown(text)
    if not known(text) and OF_ENVIRONMENT.search(shown):
        return None
    shell.evaluated += 1
    try:
        return shell.run_text(text, shell.source.file, shell.line)
    finally:
        shell.evaluated -= 1


def source(shell: Shell, words: list[str]) -> Status:
    """`source FILE ARGUMENTS`: the file beside the script, whatever is said of its folder."""
    shown = shell.unknowns.shown(words[0]) if words else ""
    file = script_of(shell, words[0], None) if words else None
    if file is None:
        if not OF_ENVIRONMENT.search(shown):
            shell.shared.absent.append(shown)
            shell.havoc(f"{shown}, which the script reads, is not beside it and may set it")
        return None
    if shell.depth > 20:
        raise InputError(f":{shell.line}: reads {shown}, which reads itself or more than 20 files")
    outer = shell.state.arguments
    shell.called += 1
    shell.state.arguments = words[1:] if words[1:] else outer
    try:
        return shell.run_text(file[1], str(file[0]))
    except Return as signal:
        return signal.status
    finally:
        shell.called -= 1
        shell.state.arguments = outer if words[1:] else shell.state.arguments


def positional(shell: Shell, words: list[str]) -> Status:
    """`set`."""
    at = 0
    while at < len(words) and re.match(r"[-+][A-Za-z]", words[at]):
        on, letters = words[at][0] == "-", words[at][1:]
        if letters.endswith("o") and at + 1 < len(words):
            at += 1
            letters += {"errexit": "e", "allexport": "a", "noglob": "f", "pipefail": "|"}.get(words[at], "")
        shell.state.fails = on if "e" in letters else shell.state.fails
        shell.state.exports = on if "a" in letters else shell.state.exports
        shell.state.pipes_fail = on if "|" in letters else shell.state.pipes_fail
        shell.state.globs = (not on) if "f" in letters else shell.state.globs
        at += 1
    if at < len(words):
        shell.state.arguments = words[at + 1 :] if words[at] in ("--", "-") else words[at:]
    return 0


def shift(shell: Shell, words: list[str]) -> Status:
    own = shell.state.arguments
    count = int(words[0]) if words and words[0].isdigit() else 1
    if own is None or count > len(own):
        return 1
    shell.state.arguments = own[count:]
    return 0


def getopts(shell: Shell, words: list[str]) -> Status:
    """The next option, in OPTARG; OPTIND counts words."""
    letters, name = words[0], words[1]
    own = words[2:] or shell.state.arguments or []
    at, inner = int((shell.elements("OPTIND", None) or ["1"])[0]), shell.state.option_at
    word = own[at - 1] if at <= len(own) else ""
    if not inner and (not re.match(r"-.", word) or word == "--"):
        shell.assign("OPTIND", None, str(at + (word == "--")))
        shell.assign(name, None, "?")
        return 1
    inner = inner or 1
    letter, rest = word[inner], word[inner + 1 :]
    place = letters.find(letter)
    takes = place >= 0 and letters[place + 1 : place + 2] == ":"
    shell.state.variables.pop("OPTARG", None)
    if takes:
        value = rest or (own[at] if at < len(own) else "")
        shell.assign("OPTARG", None, value)
        at, inner = at + (1 if rest else 2), 0
    else:
        at, inner = (at, inner + 1) if rest else (at + 1, 0)
    shell.state.option_at = inner
    shell.assign("OPTIND", None, str(at))
    shell.assign(name, None, letter if place >= 0 and letter != ":" else "?")
    return 0


def read(shell: Shell, words: list[str]) -> Status:
    """A line of the input, in variables."""
    raw, array, end, count, names, other = False, "", "\n", None, list[str](), False
    at = 0
    while at < len(words):
        word = words[at]
        if not names and re.fullmatch(r"-[a-zA-Z]+", word):
            raw = raw or "r" in word
            if word[-1] in "adnNptiu":
                at += 1
                value = words[at] if at < len(words) else ""
                array = value if word[-1] == "a" else array
                end = (value[:1] or "\0") if word[-1] == "d" else end
                other = other or word[-1] == "u"
                count = int(value) if word[-1] in "nN" and value.isdigit() else count
        else:
            names.append(word)
        at += 1
    names = names or ([] if array else ["REPLY"])
    text = None if other else shell.take_input()
    if text is None or any(not known(name) for name in names):
        for name in names or [array]:
            shell.set(name, None, shell.unknown(f"${name}", "read from what is not known"), adds=False)
        return None
    line, found, rest = text.partition(end)
    if count is not None and count <= len(line):
        line, found, rest = text[:count], "x", text[count:]
    if not known(line):
        for name in names or [array]:
            shell.set(name, None, shell.unknown(f"${name}", "read from what is not known", line), adds=False)
        shell.input = None
        return None
    shell.input = [rest]
    if not raw:
        line = re.sub(r"\\(.)", r"\1", line.replace("\\\n", ""))
    if array:
        pieces = _pieces(line, shell.separators(), -1)
        shell.state.variables[shell.resolve(array)] = Variable().with_items({str(n): p for n, p in enumerate(pieces)})
        return int(not found)
    pieces = _pieces(line, shell.separators(), len(names))
    for n, name in enumerate(names):
        shell.set(name, None, pieces[n] if n < len(pieces) else "", adds=False)
    return int(not found)


def _pieces(line: str, blanks: str, most: int) -> list[str]:
    """The fields of a line, of which the last has all that is left.

    >>> _pieces(" a  b c ", " \\t", 2), _pieces("1,2,,3", ",", -1)
    (['a', 'b c'], ['1', '2', '', '3'])
    """
    white = "".join(blank for blank in blanks if blank in " \t\n")
    hard = "".join(blank for blank in blanks if blank not in " \t\n")
    line = line.strip(white) if white else line
    if not blanks or most == 1 or not line:
        return [line] if line else []
    space = f"[{re.escape(white)}]" if white else "(?!)"
    sign = f"{space}*[{re.escape(hard)}]{space}*|{space}+" if hard else f"{space}+"
    pieces = re.split(sign, line, maxsplit=max(0, most - 1))
    return pieces[:-1] if most < 0 and pieces[-1] == "" else pieces


def mapfile(shell: Shell, words: list[str]) -> Status:
    name = words[-1] if words and not words[-1].startswith("-") else "MAPFILE"
    text = shell.take_input()
    if text is None or not known(text):
        shell.state.variables[name] = Variable(shell.unknown(f"${name}", "read from what is not known", text or ""))
        return None
    lines = text.splitlines(keepends=not any(word.startswith("-") and "t" in word for word in words[:-1]))
    shell.state.variables[name] = Variable().with_items(dict(zip(map(str, range(len(lines))), lines, strict=True)))
    return 0


def let(shell: Shell, words: list[str]) -> Status:
    status: Status = 1
    for word in words:
        if not known(word) and not lexer.NAME.match(word):
            shell.havoc("`let` of a text that is not known")
        status = shell.sum_status(word)
    return status


def trap(shell: Shell, words: list[str]) -> Status:
    words = [word for word in words if word != "--"]
    for signal in words[1:]:
        if signal in ("DEBUG", "ERR", "RETURN") and words[0] not in ("", "-"):
            if "=" in words[0] or not known(words[0]):
                raise InputError(f":{shell.line}: trap … {signal}: is not read")
        elif signal in ("EXIT", "0"):
            shell.state.traps["EXIT"] = "" if words[0] == "-" else words[0]
    return 0


def printf(shell: Shell, words: list[str]) -> Status:
    target = ""
    if words[:1] == ["-v"]:
        target, words = words[1], words[2:]
    text = formatted(words[1:] if words[:1] == ["--"] else words)
    text = (
        shell.unknown(f"$(printf {' '.join(map(shell.unknowns.shown, words))})", "a text", *words)
        if text is None
        else text
    )
    if target:
        plain, _, index = target.partition("[")
        shell.set(plain, index.rstrip("]") or None, text, adds=False)
    else:
        shell.show(["printf", *words])
        shell.write(text)
    return 0


def execute(shell: Shell, words: list[str]) -> Status:
    if words:
        shell.shared.run(shell, [word for word in words if word != "-a"])
        raise Exit
    return 0


def _status(words: list[str], shell: Shell) -> Status:
    return int(words[0]) % 256 if words and words[0].isdigit() else shell.state.status if not words else None


def leave(shell: Shell, words: list[str]) -> Status:
    shell.state.status = _status(words, shell)
    raise Exit


def come_back(shell: Shell, words: list[str]) -> Status:
    if not shell.called:
        return 1
    raise Return(_status(words, shell))


def end_loop(signal: type[Break] | type[Continue]) -> Callable[[Shell, list[str]], Status]:
    def run(shell: Shell, words: list[str]) -> Status:
        if not shell.looping:
            return 0
        raise signal(min(shell.looping, int(words[0]) if words and words[0].isdigit() else 1))

    return run


def test(shell: Shell, words: list[str]) -> Status:
    verdict = shell.holds(words)
    return None if verdict is None else int(not verdict)


def command(shell: Shell, words: list[str]) -> Status:
    """`command NAME`, without functions; `command -v NAME` asks for it."""
    if words and words[0] in ("-v", "-V"):
        shell.write(shell.unknown(f"$(command {' '.join(words)})", "the output of a command"))
        return 0 if words[1:2] and words[1] in (*shell.state.functions, *BUILTINS) else None
    functions, shell.state.functions = shell.state.functions, {}
    try:
        return shell.shared.run(shell, [word for word in words if word != "-p"])
    finally:
        shell.state.functions = functions


def tee(shell: Shell, words: list[str]) -> Status:
    text = shell.take_input()
    for word in words:
        if not word.startswith("-"):
            given = shell.unknown(f"$(<{shell.unknowns.shown(word)})", "a file") if text is None else text
            name = Path(word).name
            shell.state.files[name] = (shell.state.files.get(name, "") if "-a" in words else "") + given
    shell.write(shell.unknown("$(tee)", "the output of a command") if text is None else text)
    return 0


BUILTINS: Mapping[str, Callable[[Shell, list[str]], Status]] = {
    "unset": unset,
    "eval": evaluate,
    "source": source,
    ".": source,
    "set": positional,
    "shift": shift,
    "getopts": getopts,
    "read": read,
    "mapfile": mapfile,
    "readarray": mapfile,
    "let": let,
    "trap": trap,
    "tee": tee,
    "printf": printf,
    "exec": execute,
    "exit": leave,
    "return": come_back,
    "break": end_loop(Break),
    "continue": end_loop(Continue),
    "test": test,
    "[": lambda shell, words: test(shell, words[:-1]),
    "command": command,
    "builtin": command,
    "false": lambda shell, words: 1,
    **{name: (lambda shell, words, name=name: declare(shell, name, words)) for name in DECLARING},  # type: ignore[misc]
}
