"""Simulate public recipes whose makers say on which GPUs they run, and write docs/recipes.md.

    python tools/recipes_that_run.py            # writes the page
    python tools/recipes_that_run.py glm qlora  # prints the lines whose recipes have one of these words

The recipes stand in docs/recipes.yaml as settings of their programs, which `stepsim convert` reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from sim import parse_scenario, simulate, simulate_serving  # noqa: E402
from sim.convert.readers import Asked, converted  # noqa: E402
from sim.convert.scripts.script import given_values  # noqa: E402
from sim.convert.settings import Machine  # noqa: E402
from sim.core.errors import InputError  # noqa: E402
from sim.inputs.input_source import Source  # noqa: E402
from sim.inputs.overrides import with_overrides  # noqa: E402

DATA, FAMILIES, PAGE = (ROOT / "docs" / name for name in ("recipes.yaml", "families.yaml", "recipes.md"))
FEW_REQUESTS = "inference.requests={count: 8, prompt_len: 512, output_len: 64}"
GIB = 2**30
CLOSE = 0.2  # a peak within this part of the makers'
INTRO = """# Recipes that are known to run

Makers of public recipes say on which GPUs these run, or how much memory they take. This page simulates such recipes:
`stepsim convert` reads the settings of `docs/recipes.yaml`, and the peak is compared with what the makers say. No
constant was set from these figures, and a recipe that disagrees stays in the table.
`python tools/recipes_that_run.py` writes this page.

{summary}

"Peak" is the simulated peak of the allocator (serving: of weights, cache and buffers), "said" the makers' figure in
GiB, which some logged as allocated and some as reserved; "too much": they say that it does not fit. Recipes that name
no GPU are simulated on an H100 or H200, where most fit by far: of these the peak says more than "fits". Every sequence
has its full length. Remark "unknown": why the peaks differ is not known. Remark "typed": the model is not shipped, its
config was typed by hand and not compared with the published one, so the model itself may be wrong.

| recipe | of | GPUs | said | peak | fits | remark |
|---|---|---|---|---|---|---|
"""


class Found(NamedTuple):
    """What is simulated of a recipe: the peak in bytes and whether it fits, or why it is not simulated."""

    peak: float = 0.0
    fits: bool | None = None
    refused: str = ""


def recipes() -> list[dict[str, Any]]:
    return list(yaml.safe_load(DATA.read_text()))


def simulated(recipe: dict[str, Any], folder: Path) -> Found:
    """The recipe's step, or some requests of its server; `folder`: for the files that `stepsim convert` reads."""
    serves = "command" in recipe
    file = folder / ("serve.sh" if serves else "recipe.yaml")
    file.write_text(recipe["command"] if serves else yaml.safe_dump(recipe["settings"], sort_keys=False))
    model = recipe.get("model")
    if title := recipe.get("family"):
        model = next(family["config"] for family in yaml.safe_load(FAMILIES.read_text()) if family["title"] == title)
    if isinstance(model, dict):
        described = folder / "config.json"
        described.write_text(json.dumps(model))
        model = str(described)
    machine = Machine(recipe["cluster"], recipe["gpus"], model)
    changed = (FEW_REQUESTS,) if serves else tuple(recipe.get("set", ()))
    try:
        found = converted(file, Asked(machine, recipe.get("seq_len"), None, given_values((), None)), None)
        scenario = parse_scenario(with_overrides(Source(str(file), found.scenario), changed).data, str(file))
        result = (simulate_serving if serves else simulate)(scenario).result
    except InputError as error:
        return Found(refused=str(error).partition(": ")[2])
    return Found(result["peak_memory_bytes"], result["fits_in_memory"])


def line(recipe: dict[str, Any], found: Found) -> str:
    """The recipe's line of the table."""
    said, why, cluster = recipe["says"], recipe.get("why", ""), recipe["cluster"]
    gpu = cluster if isinstance(cluster, str) else cluster["gpu"]
    wanted = f"{said['gib']:g}" if "gib" in said else "" if said["fits"] else "too much"
    peak = f"{found.peak / GIB:.1f}" if not found.refused else "refused"
    fits = {True: "yes", False: "no", None: ""}[found.fits]
    typed = "typed" if isinstance(recipe.get("model"), dict) else ""
    why = found.refused or "; ".join(filter(None, (why, typed)))
    return (
        f"| `{recipe['recipe']}` | {recipe['of']} | {recipe['gpus']} × {gpu} | {wanted} | {peak} | {fits} | {why} |\n"
    )


def summary(pairs: list[tuple[dict[str, Any], Found]]) -> str:
    """How many recipes fit as their makers say, and how near the peaks are."""
    read = [(r, f) for r, f in pairs if not f.refused]
    agree = sum(f.fits == r["says"]["fits"] for r, f in read)
    ratios = [f.peak / GIB / r["says"]["gib"] for r, f in read if "gib" in r["says"]]
    near = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    typed = sum(isinstance(r.get("model"), dict) for r, _ in read)
    return (
        f"**{agree} of {len(read)} fit, or do not, as their makers say**; {len(pairs) - len(read)} more are refused. "
        f"Makers name the peak of {len(ratios)} of these: {near} are within {CLOSE:.0%} of it, and the median of "
        f"simulated ÷ said is {statistics.median(ratios):.2f}. The models of {typed} were typed by hand."
    )


def written() -> str:
    """The text of the page."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(recipe, simulated(recipe, Path(folder))) for recipe in recipes()]
    return INTRO.format(summary=summary(pairs)) + "".join(line(*pair) for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="print recipes whose names have one of these words")
    words = parser.parse_args().words
    if not words:
        PAGE.write_text(written(), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes():
            if any(word in recipe["recipe"] for word in words):
                print(line(recipe, simulated(recipe, Path(folder))), end="")


if __name__ == "__main__":
    main()
