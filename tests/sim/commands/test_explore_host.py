"""The explorer answers requests for its own host alone: a page of another name that leads here reads nothing."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path

import pytest

from sim.commands.explore import make_server

pytestmark = pytest.mark.slow
HOSTS = {"127.0.0.1": 200, "localhost": 200, "evil.example": 404, "127.0.0.1.evil.example": 404}


def test_other_hosts_get_no_page() -> None:
    server, found = make_server(Path("scenarios/dp8.yaml")), dict[str, int]()

    def ask() -> None:
        for host in HOSTS:
            there = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            there.request("GET", "/", headers={"Host": f"{host}:{server.port}"})
            found[host] = there.getresponse().status
            there.close()
        server.io_loop.add_callback(server.io_loop.stop)

    server.start()
    asking = threading.Thread(target=ask)
    asking.start()
    server.io_loop.start()
    asking.join()
    server.stop()
    assert found == HOSTS
