"""The bundled engine behind HTTP: the same tokens, and an engine's file from its token times."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from calibrate.serving.engine import Prompt, Settings, serve  # noqa: E402
from calibrate.serving.forward import make_model  # noqa: E402
from calibrate.serving.front import parts_profile, serve_http  # noqa: E402
from calibrate.serving.running import main  # noqa: E402
from sim.inputs.scenario import load_scenario  # noqa: E402
from tests.processes import invoked  # noqa: E402

FILE = Path(__file__).parents[2] / "scenarios" / "serve_cpu.yaml"
SMALL = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128"]
LONGEST = 200


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    torch.set_num_threads(1)
    server = serve_http(load_scenario(FILE, SMALL), LONGEST, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def asked(port: int, body: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_answers_at_once_are_the_engines_own(port: int) -> None:
    prompts = [tuple(range(first, first + 7 + 3 * first)) for first in range(1, 6)]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        _, text = asked(port, {"prompt": prompts[i], "max_tokens": 9, "stream": True})
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
        found[i] = [int(event["choices"][0]["text"]) for event in events if event["choices"]]
        assert events[-1]["usage"] == {"prompt_tokens": len(prompts[i]), "completion_tokens": 9}

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = make_model(load_scenario(FILE, SMALL).model, LONGEST)
    own = serve(model, [Prompt(p, 9) for p in prompts], Settings(blocks=100))
    assert [found[i] for i in range(len(prompts))] == own.outputs


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "text", "max_tokens": 4, "stream": True}, "needs prompt (a list of token ids)"),
        ({"prompt": [1, 2], "max_tokens": 4}, "stream true"),
        ({"prompt": [1, 99999], "max_tokens": 4, "stream": True}, "tokens must be from 0 to 1023"),
        ({"prompt": [1] * 5000, "max_tokens": 4, "stream": True}, "the cache holds"),
    ],
)
def test_wrong_requests_are_refused(port: int, body: dict[str, Any], said: str) -> None:
    status, text = asked(port, body)
    assert status == 400
    assert said in json.loads(text)["error"]["message"]


def test_a_running_engine_is_measured_and_its_file_simulated(port: int, tmp_path: Path) -> None:
    parts, out = tmp_path / "parts.json", tmp_path / "engine.json"
    parts.write_text(json.dumps(parts_profile(load_scenario(FILE, SMALL)).to_json()))
    options = [x for setting in (*SMALL, f"calibration={parts}") for x in ("--set", setting)]
    options += ["--url", f"127.0.0.1:{port}/v1", "--prompt-len", "16,100", "--output-len", "8", "--rounds", "1"]
    done = invoked(main, str(FILE), *options, "--concurrency", "1,4", "--out", str(out))
    written = json.loads(out.read_text())
    assert written["engine"] == "bundled"
    assert [row["count"] for row in written["measured"]] == [1, 4, 4, 1, 12, 16, 16, 12]
    assert all(row["time_to_first_token_s"] < row["request_latency_s"] for row in written["measured"])
    judged = [*options, "--concurrency", "2", "--judge", "--set", f"inference.engine={out}"]
    done = invoked(main, str(FILE), *judged)
    assert "errors: mean " in done.output
