"""Writes a small model and conversations, so that TRL's own command can fine-tune without downloads.

    python -m calibrate.sft_files FOLDER

FOLDER/model holds a Qwen2 of four layers with random weights, and a tokenizer trained on the conversations.
FOLDER/data holds their train and test parts. TRL's `sft.py` takes both in the place of Qwen2-0.5B and Capybara.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from sim.commands.command import Command, run_command
from sim.core.errors import InputError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"  # as Qwen's chats
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS, HIDDEN, LAYERS = 512, 256, 4


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Return 324 questions about products, each with its answer repeated eight times."""
    out = []
    for a in range(2, 20):
        for b in range(2, 20):
            answer = f"It is {a * b}, since {a} groups of {b} make it. " * 8
            question = f"What is {a} times {b}?"
            out.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return out


def write(folder: Path) -> None:
    """Write model, tokenizer and conversations into `folder`, which exists.

    Raises:
        InputError: if Transformers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    except ImportError:
        raise InputError("transformers is not installed (pip install 'stepsim[huggingface]')") from None
    talk = conversations()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet, special_tokens=list(SPECIAL))
    tokenizer.train_from_iterator((m["content"] for row in talk for m in row["messages"]), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=len(wrapped),
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir(exist_ok=True)
    for name, rows in (("train", talk[:300]), ("test", talk[300:])):
        lines = "\n".join(json.dumps(row) for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(lines + "\n", "utf-8")


@click.command("sft_files", cls=Command)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Write a small model and conversations into FOLDER."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    write(folder)


if __name__ == "__main__":
    run_command(main)
