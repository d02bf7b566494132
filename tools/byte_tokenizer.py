"""The tokenizer that the tools give to serving engines: byte-level BPE, trained on sources of this interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCES = Path(os.__file__).parent
BEGIN, END = "<s>", "</s>"
WORDS = [word for word in Path(os.__file__).read_text().split() if word.isalpha()]  # of which tools make prompts


def trained(vocab: int, texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` of at most `vocab` tokens, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BEGIN, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(texts, trainer)
    return made


def texts_of(files: Iterable[Path]) -> Iterator[str]:
    """The text of each file."""
    return (f.read_text("utf-8", errors="ignore") for f in files)
