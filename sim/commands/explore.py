"""`python -m sim.explore SCENARIO.yaml`: change the layout in a browser and see the step redrawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from sim.commands.command import Command
from sim.commands.options import overrides_option, scenario_argument

ADDRESS = "127.0.0.1"


@click.command("explore", cls=Command)
@scenario_argument
@click.option("--port", type=click.IntRange(0, 65535), default=5006, help="port on this machine; 0: any free port")
@overrides_option
def main(scenario: Path, port: int, overrides: tuple[str, ...]) -> None:
    """Show a page, for this machine only, on which you can change SCENARIO's layout. Ctrl-C ends it."""
    server = make_server(scenario, overrides, port)
    print(f"explore {scenario} at http://{ADDRESS}:{server.port}/ (Ctrl-C ends)", flush=True)
    server.run_until_shutdown()


def make_server(scenario: Path, overrides: tuple[str, ...] = (), port: int = 0) -> Any:
    """A Bokeh server bound to the loopback address; other hosts' requests and other origins' web sockets are refused.

    Raises:
        InputError: if the scenario cannot be simulated, or the port is taken.
    """
    from bokeh.application import Application
    from bokeh.application.handlers.function import FunctionHandler
    from bokeh.server.server import Server
    from bokeh.server.util import bind_sockets

    from sim.core.errors import InputError
    from sim.inputs.scenario import load_scenario
    from sim.serve.simulation import simulate_serving
    from sim.simulation import simulate
    from sim.views.explore_app import open_explorer
    from sim.views.explore_state import too_large

    loaded = load_scenario(scenario, overrides)
    if loaded.rl is not None:
        raise InputError(f"{scenario}: explore: is not for an rl step")
    if too_large(loaded) is None:  # what cannot be simulated as it stands is told here, once
        simulate(loaded) if loaded.inference is None else simulate_serving(loaded)
    try:
        sockets, bound = bind_sockets(ADDRESS, port)
        for socket in sockets:
            socket.close()
        application = Application(FunctionHandler(lambda document: open_explorer(document, scenario, overrides)))
        origins = [f"{ADDRESS}:{bound}", f"localhost:{bound}"]
        server = Server({"/": application}, address=ADDRESS, port=bound, allow_websocket_origin=origins)
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}; choose another, or 0 for any that is free") from None
    _answer_only(server, (ADDRESS, "localhost"))
    return server


def _answer_only(server: Any, hosts: Sequence[str]) -> None:
    """Answer requests for these hosts alone: a page of another name that leads here (DNS rebinding) reads nothing."""
    from tornado.routing import HostMatches

    anything, *_ = server._tornado.default_router.rules  # Tornado's own rule, behind which all of Bokeh's stand
    anything.matcher = HostMatches(f"(?:{'|'.join(map(re.escape, hosts))})")
