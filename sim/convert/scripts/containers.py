"""Files of Docker Compose, Kubernetes and job launchers as the shell script of what they start.

Compose's specification (services: `entrypoint`, `command`, `environment`; interpolation: `$$` is a dollar), and
Kubernetes' "Define a Command and Arguments for a Container": `command` stands for the image's ENTRYPOINT, `args` follow
it, and `$(NAME)` is a variable. Images whose own ENTRYPOINT is an engine are told by the reader of their flags.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct

from sim.convert.scripts.jobs import job_script
from sim.convert.yaml_aliases import parsed
from sim.core.errors import InputError

DOCUMENTS = re.compile(r"(?m)^---(?:[ \t].*)?$")
JOB = re.compile(r"(?m)^(?:run|commands)[ \t]*:")  # of SkyPilot, of dstack
COMPOSE, OBJECT = "services", ("apiVersion", "kind")
REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_]\w*)\)")  # Kubernetes' `$(NAME)`
SHELLS = ("sh", "bash")
OF_SHELL = re.compile(r"-[a-z]*c")  # `-c`, `-lc`, `-exc`: the next word is a script
HELM = re.compile(r"\{\{-?\s*(?:\.|include|if|range|define|end|with|default|toYaml|\$)")
CONTAINERS, MANY = ("containers", "mainContainer"), "replicas"  # the latter Dynamo's, of one container
PREDICTOR, KSERVE = "predictor", "huggingfaceserver"  # of KServe's InferenceService
PLAIN = re.compile(r"[\w@%+=:,./${}?-]+")  # needs no quotes


class Started(Struct, frozen=True):
    """Hold the shell script that a file's containers run, and notes on how many copies of each there are."""

    script: str
    notes: tuple[str, ...] = ()


def started(file: Path, text: str) -> Started | None:
    """Return the script that the containers of a Compose or Kubernetes file run, or a job; None for another YAML.

    Raises:
        InputError: for YAML that cannot be read, and where no container has a command.
    """
    if JOB.search(text) and (job := _of_job(parsed(text, str(file)))) is not None:
        return Started(job)
    if not re.search(rf"(?m)^(?:{COMPOSE}|{OBJECT[0]})[ \t]*:", text):
        return None
    if HELM.search(text):
        raise InputError(f"{file}: is a template of Helm: convert what `helm template` writes of it")
    documents = [parsed(part, str(file)) for part in DOCUMENTS.split(text) if part.strip()]
    mappings = [document for document in documents if isinstance(document, dict)]
    if not any(COMPOSE in data or {*OBJECT} <= data.keys() for data in mappings):
        return None
    commands: list[str] = []
    notes: list[str] = []
    for data in mappings:
        found = list(_of_compose(data)) if isinstance(data.get(COMPOSE), dict) else list(_of_pods(data))
        commands += found
        spec = data.get("spec")
        many = spec.get(MANY) if isinstance(spec, dict) else None
        if found and type(many) is int and many > 1:
            notes.append(f"{data.get('kind')}: {MANY} {many}: the scenario is what the flags of one pod say")
    if not commands:
        problem = "no container has a command of its own: write the command that its image starts into a .sh file"
        raise InputError(f"{file}: {problem}, and convert that file")
    return Started("\n".join(commands), tuple(notes))


def _of_job(data: Any) -> str | None:
    """The script of a job's file, its variables before it."""
    job = job_script(data) if isinstance(data, dict) else None
    if job is None:
        return None
    script, environments = job
    variables = [pair for environment in environments for pair in _variables(environment)]
    return "\n".join([*(f"export {name}={_quoted(value)}" for name, value in variables), script])


def _of_compose(data: dict[str, Any]) -> Iterator[str]:
    for service in data[COMPOSE].values():
        if isinstance(service, dict):
            own = [word.replace("$$", "$") for word in _words(service.get("entrypoint"))]
            words = [word.replace("$$", "$") for word in _words(service.get("command"))]
            yield from _command(service.get("image"), own, words, service.get("environment"))


def _of_pods(data: Any) -> Iterator[str]:
    """Commands of all containers at any depth: of a Deployment, a Job, a LeaderWorkerSet, …"""
    if isinstance(data, list):
        for item in data:
            yield from _of_pods(item)
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if key not in CONTAINERS:
            yield from _of_predictor(value) if key == PREDICTOR else ()
            yield from _of_pods(value)
            continue
        for container in value if isinstance(value, list) else [value]:
            if isinstance(container, dict):
                own, words = (
                    [REFERENCE.sub(r"${\1}", word) for word in _words(container.get(k))] for k in ("command", "args")
                )
                yield from _command(container.get("image"), own, words, container.get("env"))


def _of_predictor(predictor: object) -> Iterator[str]:
    """The command of KServe's runtime for models of the Hub, which has vLLM's flags (python/huggingfaceserver)."""
    model = predictor.get("model") if isinstance(predictor, dict) else None
    if isinstance(model, dict) and (words := _words(model.get("args"))):
        yield from (f"export {name}={_quoted(value)}" for name, value in _variables(model.get("env")))
        yield " ".join([KSERVE, *(_quoted(REFERENCE.sub(r"${\1}", word)) for word in words)])


def _words(value: object) -> list[str]:
    """The words of a list, or of a text that Compose splits as a shell does."""
    if isinstance(value, list):
        return [str(word) for word in value if isinstance(word, str | int | float)]
    try:
        return shlex.split(value) if isinstance(value, str) else []
    except ValueError:
        return str(value).split()


def _command(image: object, own: list[str], words: list[str], environment: object) -> Iterator[str]:
    """A container's variables and command: `own`, or else what the image starts, and behind it `words`. The image's
    tag stands before the former as a package's version."""
    if not (own or words):
        return
    yield from (f"export {name}={_quoted(value)}" for name, value in _variables(environment))
    name, tagged, tag = str(image or "").rpartition(":")
    if own and tagged:
        yield f"pip install {name}=={tag}"
    all_words = own + words
    if (script := _of_a_shell(all_words)) is not None:
        yield script
    else:
        yield " ".join([*([] if own or not image else [str(image)]), *map(_quoted, all_words)])


def _of_a_shell(words: list[str]) -> str | None:
    """The script of `bash -x -c SCRIPT`; None for another command."""
    if words[0].rpartition("/")[2] not in SHELLS:
        return None
    flags = list(takewhile(lambda word: word.startswith("-"), words[1:]))
    behind = words[1 + len(flags) :]
    return behind[0] if behind and any(map(OF_SHELL.fullmatch, flags)) else None


def _quoted(word: str) -> str:
    """A word in quotes of a shell, in which variables still have their values."""
    if PLAIN.fullmatch(word):
        return word
    return f"'{word}'" if "'" not in word and "$" not in word else '"' + word.replace('"', '\\"') + '"'


def _variables(environment: object) -> Iterator[tuple[str, str]]:
    """Names and values of Compose's mapping or list (`NAME=value`), or of Kubernetes' list."""
    if isinstance(environment, dict):
        yield from ((str(name), str(value)) for name, value in environment.items() if value is not None)
    for item in environment if isinstance(environment, list) else []:
        if isinstance(item, str) and "=" in item:
            yield item.partition("=")[0], item.partition("=")[2]
        elif isinstance(item, dict) and item.get("value") is not None:
            yield str(item.get("name")), str(item["value"])
