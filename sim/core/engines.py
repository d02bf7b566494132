"""The engines that a user may choose."""

from __future__ import annotations

from typing import Literal

Engine = Literal["auto", "simpy", "static"]
