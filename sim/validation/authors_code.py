"""What the authors' own code says of runs, where the maker of a table found nothing stated and chose a value.

A table names its authors' repository in `source.where`. Each record holds keys that this repository decides, and words
of an assumption by which the table's maker says that the value is a choice, or that it is known. No record rests on a
measured step time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sim.inputs.overrides import merge
from sim.validation.stated import SUMS, facts_of


class Decided(NamedTuple):
    """A key that the authors' code decides.

    `chosen`: words of an assumption without which the table's value stands; `known`: words with which it stands.
    """

    section: str
    key: str
    value: object
    source: str
    chosen: re.Pattern[str] | None = None
    known: re.Pattern[str] | None = None


AUTHORS: Mapping[str, Sequence[Decided]] = {
    "github.com/sail-sg/zero-bubble-pipeline-parallelism": (
        Decided(
            "model",
            "vocab",
            32000,
            "examples/pretrain_zero_bubble.sh: --tokenizer-type GPTSentencePieceTokenizer with the sample dataset's "
            "tokenizer.model, LLaMA's kind; a profile in their auto_schedule.py has 140 MB more in its last stage: 4 "
            "bytes for each of 32,000 logits of 1,024 tokens, and the last norm's input",
            chosen=re.compile(r"vocabulary not stated", re.IGNORECASE),
        ),
        Decided(
            "training",
            "grad_dtype",
            "fp16",
            "the same script has --fp16 alone; megatron/arguments.py sums gradients in fp32 with --bf16, or if "
            "--accumulate-allreduce-grads-in-fp32 is given",
            known=SUMS,
        ),
    ),
}


def with_authors_code(scenario: dict[str, Any], where: str, assumptions: object) -> dict[str, Any]:
    """Return a row's scenario with what the repository that `where` names decides and the table's maker chose.

    >>> said = [{"fact": "GPT-3-like model; vocabulary not stated", "basis": "stated"}]
    >>> repository = "code https://github.com/sail-sg/zero-bubble-pipeline-parallelism"
    >>> with_authors_code({"model": {"vocab": 51200}, "training": {}}, repository, said)
    {'model': {'vocab': 32000}, 'training': {'grad_dtype': 'fp16'}}
    >>> with_authors_code({"model": {"vocab": 51200}}, repository, [{"fact": "gradients in FP32"}])
    {'model': {'vocab': 51200}}
    """
    facts = facts_of(assumptions)
    for decided in (d for name, record in AUTHORS.items() if name in where for d in record):
        said = decided.chosen is None or any(map(decided.chosen.search, facts))
        known = decided.known is not None and any(map(decided.known.search, facts))
        if said and not known and isinstance(scenario.get(decided.section, {}), Mapping):
            scenario = dict(merge(scenario, {decided.section: {decided.key: decided.value}}))
    return scenario
