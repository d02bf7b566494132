"""What every test relies on."""

from __future__ import annotations

import signal

from hypothesis import settings

# The same examples each time, so that a change fails by its own fault; `--hypothesis-profile=default` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start also where this run itself is in the background, for which shells ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
