"""Models on the Hugging Face Hub, named as `hf://Qwen/Qwen3-32B`. Nothing is fetched."""

from __future__ import annotations

import difflib
import os
import re
from functools import cache
from pathlib import Path

import yaml

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".json", ".yaml", ".yml", ".gz")
_SUFFIX = r"-(instruct|base|chat|hf|it|fp8)\b.*"
PREFIX = "hf://"
_SHIPPED = Path(__file__).parents[1] / "presets" / "hub_models.yaml"


def is_id(text: str) -> bool:
    """Tell whether a text reads like a Hub id, not like a file's path."""
    return _ID.fullmatch(text) is not None and not text.endswith(_FILES)


def without_site(name: str) -> str:
    """A name as it is, or the id in the address of a model's page, as `hf://` has it.

    >>> without_site("https://huggingface.co/Qwen/Qwen3-32B/tree/main"), without_site("llama3-8b")
    ('hf://Qwen/Qwen3-32B', 'llama3-8b')
    """
    found = re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)", name)
    return PREFIX + found[1] if found else name


def as_model(name: str) -> str:
    """A name or path as other programs take it, as a scenario's `model` has it: a Hub id with its prefix."""
    return PREFIX + name if is_id(name) else name


@cache
def shipped_models() -> dict[str, str]:
    """The shipped model that describes each Hub id; ids in small letters."""
    return {hub_id.lower(): name for name, hub_ids in _hub_ids().items() for hub_id in hub_ids}


@cache
def _hub_ids() -> dict[str, list[str]]:
    return yaml.safe_load(_SHIPPED.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def hub_id_of(model: str) -> str | None:
    """The first Hub id that a shipped model describes; None where none is known."""
    return next(iter(_hub_ids().get(model, ())), None)


def downloaded_config(hub_id: str) -> Path | None:
    """The `config.json` of a model that `hf download` or Transformers put into the Hub's cache, or None.

    The folders are those of `huggingface_hub` ("Understand caching"): `models--ORGANIZATION--NAME/snapshots/COMMIT`,
    where the file `refs/main` holds the commit.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    model = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="utf-8").strip()
        found = model / "snapshots" / commit / "config.json"
        return found if found.is_file() else None
    except (OSError, ValueError):
        return None


def config_of(hub_id: str) -> str | Path | None:
    """The shipped model that describes a Hub id, or its downloaded `config.json`, or None."""
    return shipped_models().get(hub_id.lower()) or downloaded_config(hub_id)


def what_to_write(hub_id: str, presets: tuple[str, ...]) -> str:
    """Return what to write or do where a model is named by a bare Hub id, or by one that nothing describes."""
    found = config_of(hub_id)
    if isinstance(found, str):
        return f"looks like a Hugging Face Hub id: the shipped model is '{found}'; or write '{PREFIX}{hub_id}'"
    if found is not None:
        return f"looks like a Hugging Face Hub id: write '{PREFIX}{hub_id}' for the config in the Hub's cache"
    shipped = {name.replace("-", "").replace(".", ""): name for name in presets}
    word = re.sub(_SUFFIX, "", hub_id.partition("/")[2].lower().removeprefix("meta-"))
    near = difflib.get_close_matches(re.sub(r"[-_.]", "", word), shipped, n=1, cutoff=0.75)
    hint = f"the nearest shipped model is '{shipped[near[0]]}', or " if near else ""
    return (
        f"looks like a Hugging Face Hub id: {hint}run `hf download {hub_id} config.json`, after which "
        f"'{PREFIX}{hub_id}' is found in the Hub's cache"
    )
