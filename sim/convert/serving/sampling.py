"""How a benchmark's requests ask a server to choose tokens, as `inference.sampling`."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Settings, without_none
from sim.variants.engines import ENGINES

# vLLM, benchmarks/serve.py: until 0.14 a temperature of 0 stands for one that is left out, since 0.15 the model's own
SERVER_DECIDES = (0, 14)


def sampling_of(b: Settings, s: Settings, engine: str, usual: float | None) -> dict[str, Any] | None:
    """`inference.sampling` of a benchmark's settings `b`, or None: the largest logit. `usual`: its own temperature,
    None: the server decides. What the reader of the scenario should know becomes a note of `s`."""
    record, temperature = ENGINES[engine], b.number("temperature", usual)
    asked = without_none(
        {key: b.number(key) for key in ("top_p", "repetition_penalty")}
        | {"top_k": b.whole("top_k"), "logprobs": b.whole("logprobs")}
    )
    if temperature is None and (asked or (record.product == "vLLM" and record.since >= SERVER_DECIDES)):
        s.notes.append(
            "inference.sampling: the benchmark gives no temperature, so vLLM since 0.15 takes that of the model's "
            "generation_config.json; the choice of the largest logit is simulated"
        )
    if not temperature and asked.get("repetition_penalty", 1) == 1 and "logprobs" not in asked:
        return None
    if record.sampler.filters is None:
        s.notes.append(f"--temperature {temperature}: engine {engine} is simulated with the largest logit's choice")
        return None
    if record.sampler.penalties is None and asked.pop("repetition_penalty", 1) != 1:
        s.notes.append(f"--repetition-penalty: engine {engine} has no penalties")
    if record.sampler.logprobs is None and "logprobs" in asked:
        s.notes.append(f"--logprobs {asked.pop('logprobs')}: not simulated with engine {engine}")
    return {"temperature": temperature or 0.0, **asked}
