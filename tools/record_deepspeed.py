"""Record the messages that DeepSpeed's ZeRO stages send.

    DS_ACCELERATOR=cpu PYTHON tools/record_deepspeed.py --out tests/sim/data/deepspeed_VERSION.json

The file is of tests/sim/programs/test_deepspeed.py. PYTHON is an interpreter with torch, transformers and deepspeed
(0.19.8 or near it). Four ranks train a small Llama over gloo for three steps, and rank 0's collectives of the last step
are written: the part of the step, kind, and elements of the whole tensor. Sums of one number (the gradients' norm,
checks) are left out.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, STEPS, TOKENS = 4, 3, 32
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
COMMON = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}
# Sizes in elements. The last two cut what is sent as Transformers' integration does for a model of this hidden size
# ("auto": its square, 0.9 of it, ten times it).
CASES: dict[str, dict[str, Any]] = {
    "zero 0": {"stage": 0},
    "zero 1": {"stage": 1},
    "zero 2": {"stage": 2},
    "zero 2, overlap": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000},
    "zero 3": {
        "stage": 3,
        "reduce_bucket_size": 4_096,
        "stage3_prefetch_bucket_size": 3_686,
        "stage3_param_persistence_threshold": 640,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 100_000,
    },
}
KINDS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def _listen(sent: list[list[Any]], part: list[str]) -> None:
    """Let torch's collectives append to `sent` what they are called with."""

    def heard(own: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def send(*args: Any, **more: Any) -> Any:
            size = max(x.numel() for x in (*args, *more.values()) if torch.is_tensor(x))
            if size > 1:
                sent.append([part[0], kind, size])
            return own(*args, **more)

        return send

    for name, kind in KINDS.items():
        setattr(dist, name, heard(getattr(dist, name), kind))


def _rank(rank: int, zero: dict[str, Any], port: int, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    sent: list[list[Any]] = []
    part = [""]
    _listen(sent, part)
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    config = {**COMMON, "zero_optimization": zero}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero["stage"] == 3):
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
    ids = torch.randint(0, MODEL["vocab_size"], (1, TOKENS))
    for _ in range(STEPS):
        sent.clear()
        for k in range(COMMON["gradient_accumulation_steps"]):
            part[0] = f"forward {k}"
            loss = engine(input_ids=ids, labels=ids).loss
            part[0] = f"backward {k}"
            engine.backward(loss)
            part[0] = f"update {k}"
            engine.step()
    if rank == 0:
        Path(out).write_text(json.dumps({"version": deepspeed.__version__, "sent": sent}), encoding="utf-8")


def main() -> None:
    """Run every case and write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    cases: dict[str, Any] = {}
    version = ""
    for i, (name, zero) in enumerate(CASES.items()):
        one = out.with_suffix(".part")
        mp.spawn(_rank, args=(zero, 29_700 + i, str(one)), nprocs=RANKS)
        found = json.loads(one.read_text(encoding="utf-8"))
        one.unlink()
        cases[name], version = {"zero_optimization": zero, "sent": found["sent"]}, found["version"]
    text = {"deepspeed": version, "ranks": RANKS, "tokens": TOKENS, "model": MODEL, "config": COMMON, "cases": cases}
    out.write_text(json.dumps(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
