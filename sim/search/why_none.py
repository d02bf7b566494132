"""Say why no layout is legal: name the rule that the values of `--only` break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sim.inputs.rules.layout import LAYOUT_RULES, first_problem
from sim.inputs.rules.sizes import Problem
from sim.inputs.yaml_input import dotted
from sim.search.space import SIZES, MeshSizes, Space, layouts_of, mesh_problem, meshes_of, partial_layouts_of, sizes_of

NEEDS = {
    "sp": " (true needs tp above 1)",
    "zero": " (above 0 needs dp·cp above 1)",
    "micro_batch_size": " (must divide global_batch_size / dp)",
    "schedule": " (needs pp above 1)",
    "virtual_stages": " (above 1 needs pp above 1 and a schedule with as many)",
}


def why_none_legal(space: Space) -> str:
    """Return the rule that most layouts break, in words. `space` has no legal layout."""
    # Values that no mesh has leave no layout, so the rules about layouts would never be checked.
    if problem := _in_no_mesh(space):
        return problem
    meshes = list(meshes_of(space))
    if not meshes:
        words = " with ".join(f"{key} {_listed(space.only[key])}" for key in SIZES if key in space.only)
        return f"{words}: tp·cp·pp·dp must be the GPUs ({space.gpus:,})"
    broken = Counter(f"{dotted(path)}: {why}" for mesh in meshes for path, why in _problems(space, mesh))
    if broken:
        # The rule that most layouts break is the most likely mistake.
        return broken.most_common(1)[0][0]
    # No layout was enumerated, so a restriction of the other keys excludes all their values.
    left = [f"{key} {_listed(v)}{NEEDS.get(key, '')}" for key, v in space.only.items() if key not in (*SIZES, "ep")]
    return f"no mesh of these GPUs goes with {' and '.join(left)}" if left else "the rules leave none"


def _in_no_mesh(space: Space) -> str:
    """Return which values of a key no mesh of these GPUs and experts has; nothing if there is no such key."""
    for key in SIZES:
        if key in space.only and not any(isinstance(v, int) and v > 0 and space.gpus % v == 0 for v in space.only[key]):
            return f"{key} {_listed(space.only[key])}: must divide the GPUs ({space.gpus:,})"
    given, moe = space.only.get("ep"), space.base.model.moe
    if given is None:
        return ""
    if moe is None:
        return "" if 1 in given else f"ep {_listed(given)}: the model has no experts (model.moe)"
    fits = any(v > 0 and moe.experts % v == 0 for v in given)
    return "" if fits else f"ep {_listed(given)}: must divide model.moe.experts ({moe.experts})"


def _problems(space: Space, mesh: MeshSizes) -> Iterator[Problem]:
    """Yield the rule that a mesh breaks or, if it breaks none, those that each of its layouts breaks."""
    problem = mesh_problem(space, mesh)
    if problem is not None:
        yield problem
        return
    for partial in partial_layouts_of(space, mesh):
        for layout, _ in layouts_of(space, partial):
            if (found := first_problem(LAYOUT_RULES, sizes_of(space, layout))) is not None:
                yield found


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(str(v).lower() for v in values)
