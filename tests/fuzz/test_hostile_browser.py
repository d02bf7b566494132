"""What a hostile page, or anybody on this machine, can send to the explorer: nothing of it is run, read or believed."""

from __future__ import annotations

import asyncio
import http.client
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SCENARIO = "scenarios/1f1b_pp8.yaml"
SMALLER = ("parallelism.pp=2", "training.global_batch_size=4", "model.layers=4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an explorer, which must live through all of this and end on Ctrl-C."""
    command = [sys.executable, "-m", "sim.explore", SCENARIO, "--port", "0"]
    command += [word for option in SMALLER for word in ("--set", option)]
    log = tmp_path_factory.mktemp("explorer") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        try:
            assert running.stdout is not None
            yield running.stdout.readline().split(" at ")[1].split(" ")[0]
            assert running.poll() is None, "it ended by itself"
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(60)
            finally:
                running.kill()
    assert running.returncode == 0


def get(server: str, path: str, **headers: str) -> tuple[int, bytes]:
    address = urlsplit(server)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_it_listens_on_the_loopback_address_alone(server: str) -> None:
    port = urlsplit(server).port
    assert get(server, "/")[0] == 200
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as s:
            s.settimeout(2)
            assert s.connect_ex((address, port)) != 0


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/static/../../../../../../etc/passwd",
        "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/static/js/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/scenarios/1f1b_pp8.yaml",
        "/sim/explore.py",
        "/static/",
        "/%00",
        "/metadata/../../etc/passwd",
        "/static/extensions/../../../../etc/passwd",
    ],
)
def test_paths_lead_nowhere(server: str, path: str) -> None:
    status, body = get(server, path)
    assert status in (400, 403, 404)
    assert b"root:" not in body
    assert b"global_batch_size" not in body


@pytest.mark.parametrize(
    "value",
    [
        "../../etc/passwd",
        "{model: /etc/passwd}",
        "!!python/object/apply:os.system ['id']",
        "*a",
        "&a [*a]",
        "\0",
        "64\n",
        "[" * 1000,
        "9" * 5000,
        "%ff%fe",
        "<script>alert(1)</script>",
        "__import__('os')",
        "null",
        "4; rm -rf ~",
    ],
)
def test_links_choose_among_options_only(server: str, value: str) -> None:
    keys = ("a.parallelism.pp", "b.cluster", "a.model", "a.calibration", "a", "", "b.parallelism.pp.0")
    query = "&".join(f"{k}={value if value.startswith('%') else quote(value)}" for k in keys)
    status, body = get(server, f"/?{query}")
    assert status == 200
    assert b"alert(1)" not in body
    assert b"root:" not in body


def test_requests_that_are_too_large_or_none_are_refused(server: str) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, "/?a=" + "x" * 100_000)
    dice, address = random.Random(5), urlsplit(server)
    for _ in range(60):
        with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as s:
            start = dice.choice([b"", b"GET / HTTP/1.1\r\n", b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\n", b"POST / "])
            s.sendall(start + dice.randbytes(dice.choice([1, 40, 2000])) + b"\r\n\r\n")
    assert get(server, "/")[0] == 200


HANDSHAKE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "x3JJHMbDL1EzLkh9GBhXDw==",
}


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1.evil.example:{port}",
        "http://127.0.0.1:1",
        "https://localhost",
        "null",
        "file://",
        "http://[::1]:{port}",
    ],
)
def test_web_sockets_of_other_origins_are_refused(server: str, origin: str) -> None:
    origin = origin.format(port=urlsplit(server).port)
    assert get(server, "/ws", Origin=origin, **HANDSHAKE)[0] == 403


def test_messages_that_are_none_end_their_connection_alone(server: str) -> None:
    from bokeh.util.token import generate_jwt_token, generate_session_id
    from tornado.websocket import websocket_connect

    dice = random.Random(7)
    forged = '{"msgid":"1","msgtype":"PATCH-DOC"}'
    messages: list[Any] = [
        "",
        "x",
        "{",
        "[]" * 1000,
        "\0",
        forged,
        '{"msgid":1}',
        b"\xff" * 10,
        "[" * 100_000,
        "x" * 30_000_000,
        *(dice.randbytes(200) for _ in range(20)),
    ]

    async def send(message: Any, token: str) -> None:
        from tornado.httpclient import HTTPRequest

        request = HTTPRequest(server.replace("http", "ws") + "ws", request_timeout=20)
        connection = await websocket_connect(request, subprotocols=["bokeh", token])
        try:
            for part in (message, "{}", "{}"):  # a header, its metadata, its content
                await connection.write_message(part, binary=isinstance(part, bytes))
            while await asyncio.wait_for(connection.read_message(), 0.1) is not None:
                pass
        except Exception:  # closed, or still open and silent
            pass
        finally:
            connection.close()

    token = generate_jwt_token(generate_session_id())
    for message in messages:
        asyncio.run(send(message, token))
    asyncio.run(send("x", "no.token"))
    assert get(server, "/")[0] == 200


def test_a_client_that_sets_what_no_option_says_changes_nothing(server: str) -> None:
    from bokeh.client import pull_session
    from bokeh.document.events import MessageSentEvent
    from bokeh.events import DocumentReady

    session = pull_session(url=server)
    # What a browser says once it has drawn the page; only then is the explorer there.
    session.document.callbacks.trigger_on_change(MessageSentEvent(session.document, "bokeh_event", DocumentReady()))
    session.force_roundtrip()
    session.pull()

    def set_and_look(values: dict[str, str]) -> tuple[str, str]:
        """Facts and link that the server has after these were set."""
        for key, value in values.items():
            session.document.get_model_by_name(key).value = value
        session.force_roundtrip()
        again = pull_session(session_id=session.id, url=server)
        try:
            find = again.document.get_model_by_name
            return find("facts-a").text, find("link").value
        finally:
            again.close()

    try:
        before = set_and_look({})
        for value in ("/etc/passwd", "__import__('os').system('id')", "{preset: x}"):
            assert set_and_look({"a.parallelism.schedule": value, "b.cluster": value}) == before
        facts, link = set_and_look({"a.parallelism.schedule": "gpipe"})
        assert link == "a.parallelism.schedule=gpipe"
        assert facts != before[0]
    finally:
        session.close()
