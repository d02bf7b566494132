"""Records what a rank puts on its device's streams besides operators: collectives, and waits of streams and the host.

`torch.cuda.Stream` needs a GPU, and `torch.cpu.Stream` does nothing. Here both record, so that a script on fake CPU
tensors shows what overlaps with what (FSDP2 gathers and reduces on streams of its own).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sim.inputs.script_program import Collective, Entry, What


class Queue:
    """Entries in the order in which the host issued them, and the stream on which it issues now."""

    def __init__(self) -> None:
        self.recording = False
        self.rows = 0  # operators recorded so far
        self.entries: list[Entry] = []
        self.collectives: list[Collective] = []
        self.streams = 1
        self.current = 0
        self.events = 0
        self.kinds: dict[str, int] = {}  # of Python besides operators: their numbers

    def add(self, what: What, value: int, stream: int | None = None) -> None:
        """Issue an entry on a stream, or on the current one."""
        if self.recording:
            self.entries.append(Entry(self.rows, what, self.current if stream is None else stream, value))

    def start(self, collective: Collective) -> int:
        """Issue a collective on the current stream and return its number; -1 if nothing is recorded."""
        if not self.recording:
            return -1
        self.collectives.append(collective)
        self.add(What.START, len(self.collectives) - 1)
        return len(self.collectives) - 1

    def wait(self, number: int) -> None:
        """Let the current stream wait for a collective."""
        if number >= 0:
            self.add(What.WAIT, number)

    def new_event(self, stream: int) -> int:
        """Record an event on a stream and return its number; -1 if nothing is recorded."""
        if not self.recording:
            return -1
        self.events += 1
        self.add(What.RECORD, self.events - 1, stream)
        return self.events - 1

    def wait_event(self, event: int, stream: int) -> None:
        """Let a stream wait for an event."""
        if event >= 0:
            self.add(What.WAIT_EVENT, event, stream)

    def host_wait(self, stream: int | None = None) -> None:
        """Let the host wait for everything issued on a stream."""
        if self.recording:
            on = self.current if stream is None else stream
            self.add(What.HOST_WAIT, self.new_event(on), on)

    def host_waits_for_all(self) -> None:
        """Let the host wait for all streams, as `torch.cuda.synchronize` does."""
        for stream in range(self.streams):
            self.host_wait(stream)

    def host_work(self, kind: str) -> None:
        """Note one call of a kind of `sim.core.host_work`."""
        if self.recording:
            self.add(What.HOST_WORK, self.kinds.setdefault(kind, len(self.kinds)))

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Issue on this stream within the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def _event_class(queue: Queue) -> type[Any]:
    """Make a class that replaces `torch.cuda.Event` and records on `queue`."""

    class Event:
        """A point on a stream."""

        def __init__(self, *_: object, **__: object) -> None:
            self.number, self.on = -1, 0

        def record(self, stream: Any = None) -> Any:
            """Record the event after everything issued on the stream."""
            self.on = queue.current if stream is None else stream.number
            self.number = queue.new_event(self.on)
            return self

        def wait(self, stream: Any = None) -> None:
            """Let a stream wait for the event."""
            queue.wait_event(self.number, queue.current if stream is None else stream.number)

        def synchronize(self) -> None:
            """Let the host wait for the event."""
            if self.number >= 0:
                queue.add(What.HOST_WAIT, self.number, self.on)

        def query(self) -> bool:
            """Return true, as a capture has no times; a caller that polls then continues."""
            return True

        def elapsed_time(self, other: Any) -> float:
            """Return a placeholder for milliseconds, as a capture has no times."""
            return 1.0

    return Event


def _stream_class(queue: Queue, event_class: type[Any]) -> type[Any]:
    """Make a class that replaces `torch.cuda.Stream` and records on `queue`."""

    class Stream:
        """A stream by its number; 0 is the default one."""

        def __init__(self, *_: object, number: int | None = None, **__: object) -> None:
            self.number = queue.streams if number is None else number
            queue.streams = max(queue.streams, self.number + 1)

        def wait_stream(self, stream: Any) -> None:
            """Wait for everything issued on the other stream so far."""
            queue.wait_event(queue.new_event(stream.number), self.number)

        def record_event(self, event: Any = None) -> Any:
            """Record an event on this stream."""
            return (event_class() if event is None else event).record(self)

        def wait_event(self, event: Any) -> None:
            """Wait for an event."""
            event.wait(self)

        def synchronize(self) -> None:
            """Let the host wait for this stream."""
            queue.host_wait(self.number)

        def is_capturing(self) -> bool:
            """Return false: kernels of a CUDA graph are recorded like all others."""
            return False

        def query(self) -> bool:
            """Return true, as a capture has no times; a caller that polls then continues."""
            return True

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return hash(self.number)

    return Stream


class StreamModule:
    """`Stream`, `Event` and related functions of `torch.cuda` and `torch.cpu`, which record on a queue."""

    def __init__(self, queue: Queue) -> None:
        event_class = _event_class(queue)
        stream_class = _stream_class(queue, event_class)

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            with queue.on(queue.current if chosen is None else chosen.number):
                yield

        def set_stream(chosen: Any) -> None:
            queue.current = chosen.number

        self.attributes: dict[str, Any] = {
            "Stream": stream_class,
            "Event": event_class,
            "stream": stream,
            "set_stream": set_stream,
            "StreamContext": stream,
            "current_stream": lambda *_: stream_class(number=queue.current),
            "default_stream": lambda *_: stream_class(number=0),
            "synchronize": lambda *_: queue.host_waits_for_all(),
        }
