"""The parts of a scenario that decide what a framework does."""

from __future__ import annotations

from typing import Protocol


class Named(Protocol):
    """The part of a scenario that names a framework: `training`."""

    @property
    def framework(self) -> str:
        """The record's name."""

    @property
    def software_date(self) -> str | None:
        """A month or a day; None: today."""


class Sharded(Protocol):
    """The part of a scenario that names torch's FSDP: `parallelism`."""

    @property
    def fsdp_version(self) -> int | None:
        """None: the framework's own."""

    @property
    def fsdp_double_buffer(self) -> bool:
        """Megatron's FSDP has buffers of two layers."""

    @property
    def zero(self) -> int:
        """The ZeRO stage."""


class Updated(Named, Protocol):
    """The part of a scenario that names an optimizer: `training`."""

    @property
    def optimizer(self) -> str:
        """The optimizer's name."""


class Trained(Named, Protocol):
    """The part of a scenario that says what becomes of gradients between steps: `training`."""

    @property
    def zero_grad(self) -> str | None:
        """keep, set_to_none, or None: as the framework does."""
