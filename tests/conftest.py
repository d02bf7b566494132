"""What every test relies on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start also where this run itself is in the background, for which shells ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
