"""Tables on terminals of every width: a narrow one shows every word and number that a wide one shows."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from sim.commands.stepsim import main
from tests.processes import invoked

NARROW = 40
TAKEN = re.compile(r"simulated .* engine|; [\d.]+ s on|^.* in [\d.]+ s on ", re.DOTALL | re.MULTILINE)
COMMANDS = [
    "run 1f1b_pp8 --operators",
    "run serve_static_a100",
    "run dp8 --plan-batch --critical-batch 512",
    "sweep memory_zero_llama8b --vary parallelism.zero=0,3 --vary training.micro_batch_size=1,2",
    "diff tp8 tp8_sp",
    "search search_llama3_8b --only tp=8 --only schedule=1f1b",
    "map --models llama3.2-1b --gpus 8 --only tp=1 --only pp=1 --only cp=1 --only recompute=none --workers 1",
    "compare cpu/tp2 scenarios/measured/tp2.json",
    "replay scenarios/captured/trl_sft.rank0.json.gz --cluster dgx-a100",
    "validate scenarios/published/nccl_allreduce_a100.json",
    "quality",
    "regress",
    "courses 41",
    "clusters",
    "models qwen",
    "scenarios pp8",
]


def words(text: str) -> Counter[str]:
    """The words that a command prints, without rules, bars, and seconds of its own."""
    return Counter(word for word in re.split(r"[\s·]+", TAKEN.sub("", text)) if re.search(r"[^─█▓░]", word))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_narrow_terminal_shows_all_that_a_wide_one_shows(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for width in (NARROW, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        shown[width] = invoked(main, *command.split()).stdout
    said = words(shown[NARROW])
    missing = [word for word, often in words(shown[400]).items() if said[word] < often and len(word) < NARROW]
    assert not missing
    too_long = [line for line in shown[NARROW].splitlines() if len(line) > NARROW]
    assert [line for line in too_long if "stepsim" not in line] == []  # commands are whole, to be copied
