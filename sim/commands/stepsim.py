"""`stepsim`: every command of the program under one name. Only the modules of the command that runs are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem, get_completion_class

from sim.commands.command import Command
from sim.core.errors import InputError
from sim.core.version import version_words


class Lazy(NamedTuple):
    """Where a command is: the module whose `main` it is, and its line in the list of commands."""

    module: str
    about: str


OTHERWISE = {  # what a user may look for under a name that is no command
    "explain": "`stepsim run --explain KEY` explains a key of a scenario",
    "emit": "`stepsim run SCENARIO --emit TRAINER` prints a trainer's flags",
    "what-if": "`stepsim run SCENARIO --advise` and `stepsim sweep SCENARIO --vary KEY=A,B` simulate changes",
    "serve": "`stepsim run` simulates serving, if the scenario has `inference`; `stepsim search --slo` sizes a service",
    "fit": "it is `stepsim calibrate fit`",
    "capture": "it is `stepsim calibrate capture`",
    "simulate": "it is `stepsim run`",
    "train": "`stepsim run` simulates a training step, if the scenario has `training`",
    "gpus": "`stepsim clusters` lists GPUs, too",
}


class LazyGroup(click.Group):
    """A group that loads a command when it runs. `lazy` says where each is, in the order of the help."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"max_content_width": 120})
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return [*self.lazy, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, loaded."""
        place = self.lazy.get(cmd_name)
        return super().get_command(ctx, cmd_name) if place is None else import_module(place.module).main

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, but name the nearest one if there is no such command."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            from sim.inputs.input_source import nearest

            hint = f"; {OTHERWISE[args[0]]}" if args[0] in OTHERWISE else nearest(args[0], names)
            raise InputError(f"found {args[0]!r}; no such command{hint} (there are: {', '.join(names)})")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl(self._lines())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands, without loading any."""
        own = [CompletionItem(name, help=about) for name, about in self._lines() if name.startswith(incomplete)]
        return [*own, *click.Command.shell_complete(self, ctx, incomplete)]

    def _lines(self) -> list[tuple[str, str]]:
        here = [(name, command.get_short_help_str(100)) for name, command in self.commands.items()]
        return [*((name, place.about) for name, place in self.lazy.items()), *here]


CALIBRATE = {
    "run": Lazy("calibrate.run", "Measure this machine and write a calibration profile"),
    "measure": Lazy("calibrate.measure", "Run a scenario for real on local ranks"),
    "serving": Lazy("calibrate.serving.side_by_side", "Serve a scenario's requests for real"),
    "engine": Lazy("calibrate.serving.running", "Measure a serving engine that runs, over HTTP"),
    "capture": Lazy("calibrate.capture.command", "Record the operators of any model's training step, without a GPU"),
    "topology": Lazy("calibrate.topology", "Write the graph of this node: GPUs, PCIe, NVLink, NICs"),
    "fit": Lazy("calibrate.fit", "Fit a profile's coefficients to your own step times"),
    "import": Lazy("calibrate.imports.__main__", "Make a profile of kernels that others measured"),
}
COMMANDS = {
    "run": Lazy("sim.commands.run", "Simulate a training step, serving, or a step of reinforcement learning"),
    "search": Lazy("sim.commands.search", "Find the fastest layouts that fit in memory"),
    "map": Lazy("sim.commands.map", "Find the best layout for each model size and number of GPUs"),
    "quality": Lazy("sim.commands.quality", "Join a table of models' scores with simulated throughput and memory"),
    "sweep": Lazy("sim.commands.sweep", "Simulate every combination of values of some keys"),
    "compare": Lazy("sim.commands.compare", "Compare a simulation with a measured run"),
    "diff": Lazy("sim.commands.diff", "Show what differs between two scenarios or results"),
    "replay": Lazy("sim.commands.replay", "Replay recorded traces with another GPU, network or straggler"),
    "diagnose": Lazy("sim.commands.diagnose", "Find the slow rank in recorded traces, and what its repair would gain"),
    "convert": Lazy("sim.commands.convert", "Turn another trainer's configuration into a scenario"),
    "explore": Lazy("sim.commands.explore", "Change a layout in a browser and see the step redrawn"),
    "topology": Lazy("sim.commands.topology", "Write a cluster's network as a graph, to change and read back"),
    "validate": Lazy("sim.commands.validate", "Predict published measurements row by row"),
    "courses": Lazy("sim.commands.courses", "Show what the lecture decks say, row by row, with its figures"),
    "regress": Lazy("sim.commands.regress", "Check stored real runs against their simulation"),
}


@click.group("stepsim", cls=LazyGroup, lazy=COMMANDS)
@click.version_option(version_words(), prog_name="stepsim", message="%(prog)s %(version)s")
def main() -> None:
    """Simulate LLM training and serving on GPU clusters. SCENARIO is a YAML file or the name of a shipped scenario."""


@main.group("calibrate", cls=LazyGroup, lazy=CALIBRATE)
def calibrate() -> None:
    """Measure this machine, or run scenarios on it (all commands but engine, fit and import need torch)"""


@main.command("scenarios", cls=Command)
@click.argument("name", required=False)
def scenarios(name: str | None) -> None:
    """List the shipped scenarios, or those that say NAME"""
    from sim.inputs.shipped import first_comment, shipped_scenarios

    pairs = [(one, first_comment(path)) for one, path in shipped_scenarios().items()]
    _print_pairs(pairs if name is None else _that_say(name, pairs, "scenarios"))


@main.command("models", cls=Command)
@click.argument("name", required=False)
def models(name: str | None) -> None:
    """List the shipped models, or those that say NAME; a model's whole name shows it in full"""
    from sim.inputs.model_input import load_model, model_presets
    from sim.views.scenario_words import size_words

    if name in model_presets():
        from sim.views.shipped_records import model_record

        return click.echo(model_record(name))
    pairs = [(one, size_words(load_model(one))) for one in model_presets()]
    _print_pairs(pairs if name is None else _that_say(name, pairs, "models"))


@main.command("clusters", cls=Command)
@click.argument("name", required=False)
def clusters(name: str | None) -> None:
    """List the shipped clusters, and the GPUs of which a cluster may be made, or those that say NAME; a whole name
    shows one in full"""
    from sim.views.scenario_words import cluster_words
    from sim.views.terminal import standard_output
    from topology.presets import CLUSTERS, GPUS

    if name is not None and (name in CLUSTERS or name in GPUS):
        from sim.views.shipped_records import cluster_record, gpu_record

        return click.echo((gpu_record if name in GPUS else cluster_record)(name))
    pairs = [(one, cluster_words(cluster)) for one, cluster in CLUSTERS.items()]
    if name is not None:
        gpus = [(one, f"a GPU, for cluster: {{gpu: {one}}}") for one in GPUS]
        return _print_pairs(_that_say(name, [*pairs, *gpus], "clusters"))
    _print_pairs(pairs)
    standard_output().print(f"\nGPUs, for cluster: {{gpu: NAME}}:\n{', '.join(GPUS)}")


@main.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a shell's completion script: eval "$(stepsim completion bash)" in ~/.bashrc"""
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "stepsim", "_STEPSIM_COMPLETE").source())


def _that_say(word: str, pairs: Iterable[tuple[str, str]], command: str) -> list[tuple[str, str]]:
    """The names and descriptions of a list, of those in which a word stands, in any case and punctuation.

    Raises:
        InputError: where it stands in none.
    """
    from sim.inputs.input_source import nearest, show

    def plain(text: str) -> str:
        return "".join(filter(str.isalnum, text.casefold()))

    known = list(pairs)
    found = [pair for pair in known if plain(word) in plain(pair[0]) or plain(word) in plain(pair[1])]
    if not found or not plain(word):
        hint = nearest(word, [name for name, _ in known])
        raise InputError(f"found {show(word)}; nothing shipped says this{hint} (`stepsim {command}` lists the names)")
    return found


def _print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    from sim.views.terminal import PIPED_WIDTH, standard_output, words_table

    standard_output(PIPED_WIDTH).print_table(words_table(pairs))
