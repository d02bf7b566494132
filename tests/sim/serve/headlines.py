"""Headline figures of every shipped serving scenario: `python -m tests.sim.serve.headlines` records them anew.

It writes `tests/sim/serve/data/headlines.json`, which `test_headlines.py` compares with today's figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.inputs.scenario import load_scenario
from sim.serve.simulation import simulate_serving

FOLDER = Path(__file__).parents[3] / "scenarios"
RECORDED = Path(__file__).parent / "data" / "headlines.json"
RENEW = "python -m tests.sim.serve.headlines"
SCENARIOS = sorted(path.stem for path in FOLDER.glob("serve_*.yaml"))
LATENCIES = ("time_to_first_token_s", "time_per_output_token_s")
STATISTICS = ("mean", "p99")

Figures = dict[str, float]


def figures(scenario: str) -> Figures:
    """Output tokens per second, and seconds to the first token and per token after it, of a shipped scenario."""
    result: dict[str, Any] = simulate_serving(load_scenario(FOLDER / f"{scenario}.yaml")).result
    latencies = {f"{name} {part}": float(result[name][part]) for name in LATENCIES for part in STATISTICS}
    return {"output_tokens_per_s": float(result["output_tokens_per_s"]), **latencies}


def moved(now: Figures, recorded: Figures, rel: float = 1e-6) -> list[str]:
    """Return in words which figures are not those recorded; machines may differ in the last digits."""
    return [
        f"{name}: {then:.6g} recorded, {now.get(name, float('nan')):.6g} now"
        for name, then in recorded.items()
        if not abs(now.get(name, float("inf")) - then) <= rel * abs(then)
    ]


def main() -> None:
    """Record all scenarios."""
    rows = [f"{json.dumps(name)}: {json.dumps(figures(name))}" for name in SCENARIOS]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{RECORDED}: {len(rows)} scenarios")


if __name__ == "__main__":
    main()
