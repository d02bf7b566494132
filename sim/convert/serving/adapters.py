"""LoRA adapters in command lines of serving engines.

vLLM: config/lora.py, engine/arg_utils.py (--lora-modules: entrypoints/openai/cli_args.py). SGLang: server_args.py.
"""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Settings

RANK = 16  # vLLM's default
PLACES = {"vLLM": 1, "SGLang": 8}  # adapters on a GPU at once by default: max_loras, max_loras_per_batch


def adapters_of(s: Settings, product: str) -> dict[str, Any] | None:
    """`inference.lora`; None where no adapters are served. Memory and kernels are those of the largest rank."""
    modules = s.take("adapters")
    if not s.flag("with_adapters") and modules is None:
        return None
    rank, places = s.whole("adapter_rank"), s.whole("adapter_places")
    places = places or PLACES[product]
    adapters = str(modules).count("{") or len(str(modules).split()) if modules is not None else places  # JSON objects
    if modules is None:
        s.notes.append(f"inference.lora.adapters: no flag says how many adapters requests use; {adapters} are assumed")
    if rank is None:
        s.notes.append(f"inference.lora.rank: no flag gives the rank; {RANK} is assumed")
    return {"adapters": adapters, "rank": rank or RANK, "max_loras": places}
