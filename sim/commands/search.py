"""`python -m sim.search SCENARIO.yaml`: the best layouts of its GPUs that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct, field
from msgspec.structs import replace

from sim.commands.command import Command
from sim.commands.files_named import OutputSeries
from sim.commands.layout_options import Prices, limit_bytes, parse_clusters, parse_gpus, parse_only, with_trainer
from sim.commands.options import (
    STUDY_OPTIONS,
    TOKENS,
    Narrowing,
    Study,
    each_narrowing_option,
    gathered,
    joined,
    scenario_argument,
)
from sim.core.errors import InputError
from sim.core.units import plain

if TYPE_CHECKING:
    from sim.core.executors import Workers
    from sim.inputs.input_source import Source
    from sim.search.best_first import BestFirst
    from sim.search.found import BestLayout, ClustersResult, SearchResult
    from sim.search.space import Space

OBJECTIVES = ("step_time", "tokens_per_s_per_gpu")
SAVED = OutputSeries(r"/\d+\.(yaml|flags)")
_OF_SERVING = {  # what a search of serving has in place of an option of training
    "--save": "for serving, the table names the degrees, which `stepsim run … --set parallelism.tp=N` takes",
    "--only": "for serving, --set and --vary choose what is searched",
    "--cluster A,B": "for serving, search each cluster by itself and compare the costs (--price)",
    "--gpus N,N": "for serving, give one number; the result names the fewest GPUs for the scenario's rate",
}
POOL_FROM_MESHES = 24  # fewer are done before other processes have started


class SearchOptions(Study, frozen=True, kw_only=True, dict=True):
    """Hold the options that were given; each field is the option of its name, `trainer` is --for."""

    gpus: str | None = None
    objective: str | None = None
    top: int = 10
    only: tuple[str, ...] = ()
    memory_limit: str | None = None
    trainer: str | None = None
    cluster: str | None = None
    whole_front: bool = False
    slo: str | None = None
    vary: tuple[str, ...] = ()
    price: str | None = None
    tokens: float | None = None
    save: Path | None = None


search_options = gathered(
    SearchOptions,
    "options",
    click.option(
        "--gpus",
        metavar="N,…",
        help="number of GPUs; several are compared; by default the scenario's ranks or, without tp, cp, pp and dp, its "
        "cluster's GPUs",
    ),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        help=f"what is best, by default {OBJECTIVES[0]}; both give the same order for one number of GPUs",
    ),
    click.option("--top", type=click.IntRange(1, 10_000), default=10, help="number of layouts to list"),
    *each_narrowing_option(),
    click.option(
        "--for",
        "--emit",
        "trainer",
        metavar="TRAINER",
        help="only layouts that torchtitan, torchtitan-python or megatron can run; prints flags for the best; with "
        "--slo: vllm, sglang, trtllm or dynamo, whose command line for the best layout is printed",
    ),
    click.option(
        "--cluster",
        metavar="NAME,…",
        help="search these clusters (names, or {gpu: l40s, gpus_per_node: 8}) in place of the scenario's, and compare "
        "them",
    ),
    click.option(
        "--whole-front",
        is_flag=True,
        help="simulate all layouts that may lie on the Pareto front of time and memory, not only its fast end",
    ),
    click.option(
        "--slo",
        multiple=True,
        callback=joined,
        metavar="NAME=SECONDS,…",
        help="serving: find the highest rate of requests within these latencies, such as "
        "ttft_p99=0.25,tpot_p99=0.035 (ttft, tpot, itl, latency; p50, p90, p95, p99, mean)",
    ),
    click.option(
        "--vary",
        multiple=True,
        metavar="KEY=VALUE,…",
        help="with --slo: search these values of an engine's option beside the layout, repeatable, such as "
        "inference.max_batch_tokens=512,2048",
    ),
    click.option(
        "--price",
        metavar="PER_GPU_HOUR",
        help="adds the cost of a trillion tokens (with --slo: a million output tokens); several clusters: NAME=PRICE,…",
    ),
    click.option(
        "--tokens",
        type=TOKENS,
        metavar="N",
        help="tokens of the whole training, such as 15T; adds days and, with --price, its cost",
    ),
    click.option(
        "--save", type=SAVED, metavar="FOLDER", help="write each listed layout there as a scenario: 1.yaml, 2.yaml, …"
    ),
    *STUDY_OPTIONS,
)


@click.command("search", cls=Command)
@scenario_argument
@search_options
def main(scenario: Path, options: SearchOptions) -> int:
    """Search all layouts of SCENARIO's GPUs over tp, sp, cp, pp, dp, ep, zero, schedule, virtual stages,
    micro-batch size and recomputation; with --slo, of a serving SCENARIO over replicas or pools, and with --vary
    over options of its engine."""
    names, prices = parse_clusters(options.cluster) if options.cluster else [], Prices(options.price)
    for option, given in (("--for", options.trainer), ("--cluster", options.cluster)):
        if given == "":
            raise InputError(f"{option}: found ''; name one, or leave the option out")
    gpus = () if options.gpus is None else parse_gpus(options.gpus)
    if len(names) == 1:
        options = replace(options, overrides=(*options.overrides, f"cluster={names[0]}"))
    if options.slo is not None:
        _refuse_of_training(options, names, gpus)
        return _serving(scenario, options, options.slo, prices, gpus[0] if gpus else None)
    if options.vary:
        raise InputError(
            "--vary: is for searches of serving (--slo); of a training step `stepsim sweep` varies any key"
        )
    if options.tokens is not None:
        options = replace(options, overrides=(*options.overrides, f"training.tokens={plain(options.tokens)}"))
    asked = Asked(
        gpus[0] if len(gpus) == 1 else None,
        Narrowing(options.only, options.memory_limit),
        options.top,
        options.whole_front,
        options.objective or OBJECTIVES[0],
        options.trainer or "",
        prices,
    )
    if len(names) > 1 or len(gpus) > 1:
        if options.save is not None:
            raise InputError("--save: can be given for one cluster and one number of GPUs only")
        return _several(scenario, options, asked, names[1:] and names, gpus)
    return _training(scenario, options, asked, options.save)


def _refuse_of_training(options: SearchOptions, clusters: Sequence[str], gpus: Sequence[int]) -> None:
    """Raise for the first option that a search of serving does not have."""
    for option, value in (
        ("--save", options.save),
        ("--cluster A,B", clusters[1:]),
        ("--gpus N,N", gpus[1:]),
        ("--tokens", options.tokens),
        ("--whole-front", options.whole_front),
        ("--only", options.only),
        ("--memory-limit", options.memory_limit),
        ("--objective", options.objective),
    ):
        if value:
            instead = _OF_SERVING.get(option, "a search of serving (--slo) does not have it")
            raise InputError(f"{option}: is for searches of training steps; {instead}")


def _several(path: Path, study: Study, asked: Asked, clusters: Sequence[str], gpus: Sequence[int]) -> int:
    """Layouts of a training step on several clusters or numbers of GPUs; exit code 1 where none fits.

    Raises:
        KeyboardInterrupt: at Ctrl-C, after what was found by then is shown.
    """
    from sim.commands.search_tables import print_clusters
    from sim.views.clusters_page import clusters_page

    several = search_clusters(path, study, clusters, asked, gpus)
    study.show(several, clusters_page, print_clusters)
    if several.interrupted:
        raise KeyboardInterrupt
    return 0 if any(one.search.best for one in several.clusters) else 1


def _training(path: Path, study: Study, asked: Asked, save: Path | None) -> int:
    """Layouts of a training step; exit code 1 where none fits.

    Raises:
        KeyboardInterrupt: at Ctrl-C, after what was found by then is shown.
    """
    from sim.commands.saved_layouts import save_layouts
    from sim.commands.search_tables import print_result
    from sim.views.search_page import search_page

    result = search_one(path, study, asked)
    if save is not None:
        save_layouts(save, result)
    study.show(result, search_page, partial(print_result, saved=save))
    if result.unexamined is not None:
        raise KeyboardInterrupt
    return 0 if result.best else 1


class Asked(Struct, frozen=True, dict=True):
    """Hold the options of a search of training layouts. `trainer`: one that must be able to run them, or nothing."""

    gpus: int | None = None
    narrowing: Narrowing = field(default_factory=Narrowing)
    top: int = 10
    whole_front: bool = False
    objective: str = OBJECTIVES[0]
    trainer: str = ""
    prices: Prices = field(default_factory=lambda: Prices(None))


def _serving(path: Path, options: SearchOptions, slo: str, prices: Prices, gpus: int | None) -> int:
    """Rates of a serving workload's layouts; exit code 1 where none keeps the latencies `slo`.

    Raises:
        KeyboardInterrupt: at Ctrl-C, after what was found by then is shown.
    """
    from sim.commands.serving_search import print_serving_search, sets_of_serving
    from sim.commands.sweep import parse_vary
    from sim.emit import SERVERS, emit
    from sim.inputs.scenario import load_scenario, name_of, read_source
    from sim.search.engine_options import choices_of
    from sim.search.runnable import run_words
    from sim.search.serving import ServingSearch, search_serving
    from sim.studies.promised_latencies import parse_slo
    from sim.views.serving_search_page import serving_search_page

    source = read_source(path, options.overrides)
    choices = choices_of(parse_vary(options.vary)) if options.vary else ({},)
    asked = ServingSearch(source, name_of(path), parse_slo(slo), gpus, prices.of(_cluster_name(source)), choices)
    if options.trainer is not None and options.trainer not in SERVERS:
        raise InputError(f"--emit: found '{options.trainer[:40]}'; for serving must be one of {', '.join(SERVERS)}")
    result = search_serving(asked, options.pool)
    command = run_words(path, options.overrides)
    options.show(result, serving_search_page, lambda found: print_serving_search(found, options.top, command))
    if options.trainer is not None and options.json != "-" and result.best and result.best[0].rate_per_s:
        best = load_scenario(path, [*options.overrides, *sets_of_serving(result.best[0])])
        print(f"\n{emit(best, options.trainer, path)}")
    if result.unsearched is not None:
        raise KeyboardInterrupt
    return 0 if any(row.rate_per_s for row in result.best) else 1


def _cluster_name(source: Source) -> str:
    """The shipped cluster that a scenario names, if it does."""
    cluster = source.data.get("cluster")
    return str(cluster.get("preset", "")) if isinstance(cluster, dict) else str(cluster)


def search_one(path: Path, study: Study, asked: Asked) -> SearchResult:
    """Search, with the best layouts as commands and files. Ctrl-C ends the search with what it found.

    Raises:
        KeyboardInterrupt: at Ctrl-C before anything was found, or again.
        InputError: for a scenario or an option that is wrong, or a Dask cluster that does not answer.
    """
    from sim.commands.search_tables import progress
    from sim.search.found import make_result
    from sim.search.runnable import runnable
    from sim.search.space import mesh_is_legal, meshes_of
    from sim.search.whole_training import with_costs

    unsaid = _unsaid(path, study.overrides, asked.trainer)
    overrides = (*study.overrides, *unsaid)
    space, limit, source = space_of(path, overrides, asked.gpus, asked.narrowing, asked.trainer)
    price = asked.prices.of(_cluster_name(source))
    meshes = sum(mesh_is_legal(space, mesh) for mesh in meshes_of(space))
    with study.pool(meshes >= POOL_FROM_MESHES) as pool, progress() as report:
        found, best = search_space(space, limit, asked, pool, report, or_so_far=True)

    def with_run(row: BestLayout) -> BestLayout:
        run = runnable(space, row.layout, source, path, study.overrides, unsaid)
        return with_costs(replace(row, runnable=run), price)

    return make_result(found, asked.objective, [with_run(row) for row in best], price)


def search_clusters(
    path: Path, study: Study, names: Sequence[str], asked: Asked, gpus: Sequence[int] = ()
) -> ClustersResult:
    """Search each number of `gpus`, by default the scenario's, of several clusters, by default the scenario's own.

    Raises:
        InputError: as `search_one`.
    """
    from sim.search.found import ClusterSearch, several_searches

    gpus = gpus or (asked.gpus or space_of(path, study.overrides, None, asked.narrowing)[0].gpus,)
    searches = []
    for name in names or ("",):
        overrides = (*study.overrides, f"cluster={name}") if name else study.overrides
        searches += [(name, replace(study, overrides=overrides), replace(asked, gpus=n)) for n in gpus]
    for _, on_it, one in searches:  # what is wrong is said before the first search
        one.prices.of(_cluster_name(space_of(path, on_it.overrides, one.gpus, one.narrowing)[2]))
    found: list[ClusterSearch] = []
    for name, on_it, one in searches:
        try:
            found.append(ClusterSearch(name, search_one(path, on_it, one)))
        except KeyboardInterrupt:
            if not found:
                raise
            break
        if found[-1].search.unexamined is not None:
            break
    return several_searches(gpus, found, len(searches) - len(found) or None)


def _unsaid(path: Path, overrides: Sequence[str], trainer: str) -> list[str]:
    """Return what the trainer does where the scenario says nothing, as KEY=VALUE.

    Raises:
        InputError: for an unknown trainer.
    """
    from sim.emit import TRAINERS
    from sim.inputs.scenario import read_source

    if not trainer:
        return []
    if trainer not in TRAINERS:
        raise InputError(f"--for: found '{trainer[:40]}'; must be one of {', '.join(TRAINERS)}")
    data = read_source(path, overrides).data

    def said(key: str) -> bool:
        section, _, name = key.partition(".")
        inside = data.get(section)
        return isinstance(inside, dict) and inside.get(name) is not None

    return [f"{key}={value}" for key, value in TRAINERS[trainer].unsaid.items() if not said(key)]


def space_of(
    path: Path, overrides: Sequence[str], gpus: int | None, narrowing: Narrowing, trainer: str = ""
) -> tuple[Space, float | None, Source]:
    """Where a search looks, the bytes of a GPU that --memory-limit allows, and the scenario as it is written.

    Raises:
        InputError: for a scenario or an option that is wrong.
    """
    from sim.emit import TRAINERS, check_every_layout
    from sim.inputs.scenario import name_of, read_source
    from sim.search.space_of_scenario import make_space

    source = read_source(path, overrides)
    only, linked = parse_only(narrowing.only)
    if trainer:
        only = with_trainer(only, trainer, TRAINERS[trainer])
    space = make_space(source, gpus, name_of(path), only, linked, trainer)
    if trainer:
        check_every_layout(space.base, trainer, path)
    return space, limit_bytes(narrowing.memory_limit), source


def search_space(
    space: Space,
    limit: float | None,
    asked: Asked,
    pool: Workers,
    report: Callable[[BestFirst], None] = lambda _: None,
    or_so_far: bool = False,
) -> tuple[BestFirst, list[BestLayout]]:
    """Search with these workers, and return the finished search and its best layouts. `limit` as in
    `sim.search.evaluation`. `or_so_far`: at Ctrl-C return what was found, if anything was."""
    from sim.core.executors import results
    from sim.search.best_first import BestFirst
    from sim.search.evaluation import means_of, pack
    from sim.search.found import best_layout

    found = BestFirst(space, limit, asked.top, asked.whole_front, pool, report)
    try:
        found.run()
    except KeyboardInterrupt:
        if not (or_so_far and found.best):
            raise
    packed = pack(space)
    means = results(pool, means_of, ((packed, o.layout) for o in found.best))
    return found, [best_layout(found, o, m) for o, m in zip(found.best, means, strict=True)]
