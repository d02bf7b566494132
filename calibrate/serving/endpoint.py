"""Ask a running engine for tokens over HTTP, and note when each comes.

Engines that serve OpenAI's completions API (`/v1/completions`) with streaming are understood: vLLM, SGLang,
TensorRT-LLM's `trtllm-serve`. Prompts are lists of token ids, so that their lengths are exact. With `ignore_eos`, which
those engines added to the API, an answer has as many tokens as were asked for.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sim.core.errors import InputError

PATHS = ("/v1/completions", "/v1")  # what users may have written after the address
SILENT_S = 300.0  # without a byte from the server
MOST_SHOWN = 300  # characters of a server's message
FEWEST_PIECES = 32  # of an answer that tells whether its stream was held back: fewer may wait for a busy reader
ATTEMPTS = 3  # a reader that another process kept from running reads one answer at once, not three
LEAST_TOKEN_S = 1e-4  # an iteration's kernels alone take longer to start; pieces that wait in a socket are read faster
DATA, DONE = b"data:", b"[DONE]"


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """The fields that are read of a streamed event."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """When an answer's tokens came, in seconds of `time.perf_counter`.

    `tokens` tokens came in `pieces` chunks of the stream."""

    sent_s: float
    first_s: float
    last_s: float
    tokens: int
    pieces: int

    @property
    def buffered(self) -> bool:
        """Tell whether all pieces came faster than any engine computes them."""
        return self.pieces >= FEWEST_PIECES and self.last_s - self.first_s < (self.pieces - 1) * LEAST_TOKEN_S


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address (`http://host:port`), the name by which it knows its model, and the key that it asks for."""

    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)

    def named(self, model: str | None) -> Endpoint:
        """The endpoint with its model's name; None: the first that the server lists.

        Raises:
            InputError: if the server does not answer or lists none.
        """
        if model is not None:
            return replace(self, model=model)
        with_models = self._json("GET", "/v1/models")
        listed = with_models.get("data") if isinstance(with_models, dict) else None
        try:
            return replace(self, model=str(listed[0]["id"]))  # type: ignore[index]
        except (LookupError, TypeError):
            raise InputError(f"{self.url}/v1/models: lists no model; name it with --model") from None

    def check_stream(self, prompt: list[int], tokens: int) -> None:
        """Ask, and refuse a stream that somebody holds back, in which no token can be timed.

        Raises:
            InputError: as `ask`, and if each of `ATTEMPTS` answers came all at once.
        """
        for _ in range(ATTEMPTS):
            answer = self.ask(prompt, tokens)
            if not answer.buffered:
                return
        took = f"all {answer.pieces} pieces of an answer came at once, {answer.last_s - answer.sent_s:.3g} s after"
        why = "something on the way buffers the stream (of nginx: proxy_buffering off), so no token can be timed"
        raise InputError(f"{self._at}: {took} it was asked for; {why}")

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        """Send a prompt and read as many tokens.

        Raises:
            InputError: if the server does not answer, refuses, does not stream, or sends another number of tokens.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        sent = time.perf_counter()
        came, counted = [], None
        for event in self._events(body):
            if any(choice.text is not None for choice in event.choices or ()):
                came.append(time.perf_counter())
            if event.usage is not None and event.usage.completion_tokens is not None:
                counted = event.usage.completion_tokens
        found = len(came) if counted is None else counted
        if found != tokens:
            why = "it must honour ignore_eos, and prompt and answer must fit the model's length"
            raise InputError(f"{self._at}: sent {found} of {tokens} tokens; {why}")
        if len(came) < min(tokens, 2):
            raise InputError(f"{self._at}: sent {tokens} tokens in one piece; it must stream them as they are computed")
        return Answer(sent, came[0], came[-1], tokens, len(came))

    @property
    def _at(self) -> str:
        return f"{self.url}/v1/completions"

    def _events(self, body: dict[str, Any]) -> Iterator[_Event]:
        """The events of an answer as they come: lines `data: {…}`, the last of them `data: [DONE]`."""
        with self._answered("POST", "/v1/completions", body) as answer:
            kind = answer.getheader("Content-Type", "")
            if "text/event-stream" not in kind:
                found = f"answered with {kind.partition(';')[0] or 'no content type'}"
                raise InputError(f"{self._at}: {found}, not with a stream (text/event-stream)")
            for line in answer:
                if not line.startswith(DATA):
                    continue
                data = line.removeprefix(DATA).strip()
                if data == DONE:
                    return
                try:
                    event = msgspec.json.decode(data, type=_Event)
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise InputError(f"{self._at}: streamed {_told(data)}: {_shown(error)}") from None
                if event.error is not None:
                    raise InputError(f"{self._at}: {_shown(event.error)}")
                yield event

    def _json(self, method: str, path: str) -> Any:
        with self._answered(method, path) as answer:
            data = answer.read()
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise InputError(f"{self.url}{path}: answered with {_told(data)}, no JSON that can be read") from None

    def _answered(self, method: str, path: str, body: dict[str, Any] | None = None) -> _Reading:
        return _Reading(self, method, path, body)


class _Reading:
    """A request, and its answer while it is read; what fails on the way is an `InputError`."""

    def __init__(self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None) -> None:
        address = urlsplit(endpoint.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(address.netloc, timeout=SILENT_S)
        self.url, self.method, self.path = endpoint.url, method, address.path + path
        self.body = None if body is None else json.dumps(body).encode()
        self.headers = {} if body is None else {"Content-Type": "application/json"}
        if endpoint.api_key:
            self.headers["Authorization"] = f"Bearer {endpoint.api_key}"

    def __enter__(self) -> http.client.HTTPResponse:
        try:
            self.connection.request(self.method, self.path, self.body, self.headers)
            answer = self.connection.getresponse()
            if answer.status != http.client.OK:
                said = _shown(answer.read(4096).decode(errors="replace"))
                raise InputError(f"{self.url}{self.path}: HTTP {answer.status} {answer.reason}: {said}")
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: of a host's name
            self.connection.close()
            raise self._failed(error) from None
        except InputError:
            self.connection.close()
            raise
        return answer

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.connection.close()
        if isinstance(error, (OSError, http.client.HTTPException)):
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> InputError:
        why = _shown(error) or type(error).__name__
        return InputError(f"{self.url}: no answer ({why}); is the server running?")


def endpoint_at(url: str, api_key: str = "") -> Endpoint:
    """The endpoint of an address as users write it; with an `api_key` every request has it, as OpenAI's API asks.

    >>> endpoint_at("http://gpu7:8000/v1/").url, endpoint_at("gpu7:8000").url
    ('http://gpu7:8000', 'http://gpu7:8000')

    Raises:
        InputError: if it is no address, or the key cannot stand in a header. A key is never shown.
    """
    if not (api_key.isascii() and api_key.isprintable()):
        raise InputError("--api-key (or OPENAI_API_KEY): has characters that no HTTP header may have")
    text = (url if "://" in url else f"http://{url}").rstrip("/")
    for path in PATHS:
        text = text.removesuffix(path)
    try:
        address = urlsplit(text)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        usable &= text.isascii() and " " not in text and not any((address.username, address.query, address.fragment))
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"--url: found {url[:100]!r}; must be a server's address, such as http://localhost:8000")
    return Endpoint(text, api_key=api_key)


def _told(data: bytes) -> str:
    return _shown(data[: 4 * MOST_SHOWN].decode(errors="replace"))


def _shown(text: Any) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= MOST_SHOWN else words[:MOST_SHOWN] + "…"
