"""Which record of an engine the words of others mean: a table's software, a product's name and version."""

from __future__ import annotations

import re

from sim.variants.engines import ENGINES
from sim.variants.engines.record import Engine

# How others write a product's name, in lower case, where they do not write it as the record does.
_SPELLINGS = (("tensorrt-llm", r"(?:tensorrt|trt)[-_ ]?llm"),)
_BETWEEN = r"(?:[\W_]*\b(?:v[01](?!\.\d)|engine|version|release|server|serving|openai|backend|benchmark|main)\b)*"
_VERSION = r"v?(\d+)\.(\d+)(?:\.(\d+))?"

OWN_ENGINE = "calibrate.serving measures one (docs/serving_engines.md, an engine of your own); bundled is its bound"
# Engines that have no record: how their names are written, in lower case.
_WITHOUT_RECORD = (
    ("LMDeploy", r"lmdeploy|turbomind"),
    ("Text Generation Inference", r"tgi|text[-_ ]generation[-_ ](?:inference|launcher)"),
    ("llama.cpp", r"llama[-_.]?(?:cpp|server|cli|bench)"),
    ("Ollama", r"ollama"),
    ("MLC LLM", r"mlc(?:[-_ ]llm)?"),
    ("DeepSpeed-MII", r"(?:deepspeed[-_ ])?mii(?:\.serve)?"),
    ("ExLlama", r"exllama(?:v\d)?|tabbyapi"),
)


def product_without_record(text: str) -> str:
    """The engine that a name begins with, if it has no record; else nothing.

    >>> [product_without_record(text) for text in ("TGI 3.3", "lmdeploy-0.6", "vllm-0.14", "tgif")]
    ['Text Generation Inference', 'LMDeploy', '', '']
    """
    found = (name for name, words in _WITHOUT_RECORD if re.match(rf"(?:{words})(?![a-z])", text.lower()))
    return next(found, "")


def engine_named(texts: tuple[str, ...]) -> Engine | None:
    """The record of a product and version as tables of measurements name them; None where no product is known.

    All words of its `product` stand in the texts, and those of no other with more words. Of its records the newest that
    is no newer than the first version (0.17, 0.6.5) or else year (2023) in the texts, in their order; without either
    one that is `called` so (vLLM V1), or else the newest. A version is the number right after the product's name, or a
    text of its own: others are those of CUDA, of a model or of torch.

    >>> texts = ("vLLM 2023", "SGLang", "vLLM V1", "CUDA 12.4, vLLM 0.6.6", "TGI 1.4")
    >>> [found.name if (found := engine_named((text,))) else None for text in texts]
    ['vllm-0.2', 'sglang-0.5.23', 'vllm-v1', 'vllm-0.6.5', None]
    """
    texts = tuple([_recorded_spelling(text.lower()) for text in texts])
    known = [e for e in ENGINES.values() if _named(e.product, texts)]
    if not known:
        return None
    most = max(len(e.product.split()) for e in known)
    records = [e for e in known if len(e.product.split()) == most]
    version = next(filter(None, (_version(text, records[0].product) for text in texts)), None)
    year = next((found[0] for text in texts if (found := re.search(r"\b20\d\d\b", text))), "9999")
    if version is not None:
        older = [e for e in records if e.since <= version]
    else:
        older = [e for e in records if e.date[:4] <= year]
        if year == "9999":
            older = [e for e in records if e.called and _named(e.called, texts)] or older
    return (older or records[:1])[-1]


def record_note(text: str) -> str:
    """What is worth saying of the record that a text is taken for.

    >>> record_note("vllm==0.15.1")
    "found 'vllm==0.15.1'; simulated as vllm-0.14, the record in force at that version"
    >>> record_note("vllm 0.41")
    "found 'vllm 0.41'; simulated as vllm-0.33, the newest record of vLLM"
    >>> record_note("SGLang 0.3.2")
    "found 'SGLang 0.3.2'; no record of SGLang is that old; simulated as the oldest, sglang, of 0.4 (2024-12)"
    """
    found = engine_named((text,))
    assert found is not None, text
    records = [e for e in ENGINES.values() if e.product == found.product]
    version = _version(_recorded_spelling(text.lower()), found.product)
    if version is not None and version < min(e.since for e in records):
        since = ".".join(map(str, found.since))
        oldest = f"{found.name}, of {since} ({found.date})"
        said = f"no record of {found.product} is that old; simulated as the oldest, {oldest}"
    elif version is not None and found is not records[-1]:
        said = f"simulated as {found.name}, the record in force at that version"
    else:
        said = f"simulated as {found.name}, the newest record of {found.product}"
    return f"found {text!r}; {said}"


def _recorded_spelling(text: str) -> str:
    for product, spelling in _SPELLINGS:
        text = re.sub(spelling, product, text)
    return text


def _named(words: str, texts: tuple[str, ...]) -> bool:
    """Whether each of the words stands in one of the texts, as a whole word or beside a number."""
    return all(any(re.search(rf"(?<![a-z0-9]){word}(?![a-z])", t) for t in texts) for word in words.lower().split())


def _version(text: str, product: str) -> tuple[int, ...] | None:
    """The version that a text gives of a product."""
    name = re.escape(product.lower().split()[0])
    found = re.fullmatch(rf"{_VERSION}\S*", text) or re.search(rf"{name}{_BETWEEN}[\W_]*{_VERSION}", text)
    return tuple([int(n) for n in found.groups() if n]) if found else None
