"""Say why no layout is legal: name the rule that the values of `--only` break."""

from __future__ import annotations

from collections import Counter

from sim.inputs.layout_rules import LAYOUT_RULES, Problem, first_problem
from sim.inputs.yaml_input import dotted
from sim.search.space import Space, grid_problem, grids, layouts_of, partial_layouts_of, sizes_of

MESH = ("tp", "cp", "pp", "dp")
NEEDS = {
    "sp": " (true needs tp above 1)",
    "zero": " (above 0 needs dp·cp above 1)",
    "micro_batch_size": " (must divide global_batch_size / dp)",
    "schedule": " (needs pp above 1)",
    "virtual_stages": " (above 1 needs pp above 1 and a schedule with as many)",
}


def why_none_legal(space: Space) -> str:
    """Return the rule that most layouts break, in words. `space` has no legal layout."""
    values = [(key, space.only[key]) for key in MESH if key in space.only]
    # These mistakes leave no mesh at all, so the rules about layouts below would never be checked.
    for key, given in values:
        if not any(isinstance(v, int) and v > 0 and space.gpus % v == 0 for v in given):
            return f"{key} {_listed(given)}: must divide the GPUs ({space.gpus:,})"
    moe = space.base.model.moe
    if "ep" in space.only and moe is None and 1 not in space.only["ep"]:
        return f"ep {_listed(space.only['ep'])}: the model has no experts (model.moe)"
    if moe is not None and "ep" in space.only and not any(v > 0 and moe.experts % v == 0 for v in space.only["ep"]):
        return f"ep {_listed(space.only['ep'])}: must divide model.moe.experts ({moe.experts})"
    meshes = list(grids(space))
    if not meshes:
        words = " with ".join(f"{key} {_listed(v)}" for key, v in values)
        return f"{words}: tp·cp·pp·dp must be the GPUs ({space.gpus:,})"
    broken: Counter[str] = Counter()
    for grid in meshes:
        problem = grid_problem(space, grid)
        _count(broken, problem)
        if problem is None:
            for layout, _ in (
                found for partial in partial_layouts_of(space, grid) for found in layouts_of(space, partial)
            ):
                _count(broken, first_problem(LAYOUT_RULES, sizes_of(space, layout)))
    if broken:
        # The rule that most layouts break is the most likely mistake.
        return broken.most_common(1)[0][0]
    # No layout was enumerated, so a restriction of the other keys excludes all their values.
    left = [f"{key} {_listed(v)}{NEEDS.get(key, '')}" for key, v in space.only.items() if key not in (*MESH, "ep")]
    return f"no mesh of these GPUs goes with {' and '.join(left)}" if left else "the rules leave none"


def _count(broken: Counter[str], problem: Problem | None) -> None:
    if problem is not None:
        broken[f"{dotted(problem[0])}: {problem[1]}"] += 1


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(str(v).lower() for v in values)
