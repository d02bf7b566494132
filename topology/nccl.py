"""Hold NCCL's releases: when each appeared, what it changed of what is priced here, and who brings which release.

torch's wheels for Linux ask for one release of NCCL (`Requires-Dist: nvidia-nccl-cu12` or `-cu13`, in the metadata on
PyPI). NVIDIA's containers have a newer one, which nothing on PyPI states: one of a month has at least the release of
the month before (24.05 has 2.21.5 of April 2024: NVIDIA, "Release 24.05" of its framework containers).
Dates are those of the wheels on PyPI, of NCCL's own (`nvidia-nccl-cu11`, `-cu12`) and of torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct


class Release(Struct, frozen=True):
    """Hold what a release does if nothing is set in the environment.

    `date`: of its wheel. `pat`: whether it considers PAT (`ncclPatEnable` in src/graph/tuning.cc) for all-gathers and
    reduce-scatters with one GPU of each node, over a network whose proxies run on the host.
    """

    version: str
    date: str
    pat: bool


# Not stated here are releases between these that change nothing priced. PAT came with 2.23; ncclPatEnable is alike in
# 2.24.3, 2.26.2 (which also asks for compute capability 6.0), 2.28.3 and 2.31.
RELEASES = (
    Release("2.14.3", "2022-08-31", pat=False),
    Release("2.18.1", "2023-05-04", pat=False),
    Release("2.19.3", "2023-10-24", pat=False),
    Release("2.20.5", "2024-03-06", pat=False),
    Release("2.21.5", "2024-04-03", pat=False),
    Release("2.22.3", "2024-06-19", pat=False),
    Release("2.23.4", "2024-09-11", pat=True),
    Release("2.24.3", "2025-01-07", pat=True),
    Release("2.25.1", "2025-01-24", pat=True),
    Release("2.26.2", "2025-03-13", pat=True),
    Release("2.27.3", "2025-06-03", pat=True),
    Release("2.27.5", "2025-06-26", pat=True),
    Release("2.28.9", "2025-11-18", pat=True),
    Release("2.29.7", "2026-03-03", pat=True),
    Release("2.30.7", "2026-06-09", pat=True),
)
"""The oldest first."""

NcclFrom = Literal["torch", "nvidia"]
"""Who brings NCCL: torch's wheels, or NVIDIA's containers."""

OF_TORCH: Mapping[str, tuple[str, str]] = {
    "2.0": ("2023-03-15", "2.14.3"),
    "2.1": ("2023-10-04", "2.18.1"),
    "2.2": ("2024-01-30", "2.19.3"),
    "2.3": ("2024-04-24", "2.20.5"),
    "2.4": ("2024-07-24", "2.20.5"),
    "2.5": ("2024-10-17", "2.21.5"),
    "2.6": ("2025-01-29", "2.21.5"),
    "2.7": ("2025-04-23", "2.26.2"),
    "2.8": ("2025-08-06", "2.27.3"),
    "2.9": ("2025-10-15", "2.27.5"),
    "2.10": ("2026-01-21", "2.27.5"),
    "2.11": ("2026-03-23", "2.28.9"),
    "2.12": ("2026-05-13", "2.29.7"),
    "2.14": ("2026-09-02", "2.30.7"),
}
"""By torch's release, the oldest first: the date of its wheel, and the NCCL that it asks for."""


def nccl_at(date: str | None, bringer: NcclFrom = "torch") -> Release:
    """Return the release that ran in a month or on a day ("2024-12", "2024-12-23"); None: the newest one known.

    Of torch's wheels the newest on that day, where a month means its first day; before the first one, that one's.
    Of NVIDIA's containers the newest release of the months before.

    >>> nccl_at("2025-03").version, nccl_at("2025-05").version, nccl_at("2025-01", "nvidia").version
    ('2.21.5', '2.26.2', '2.23.4')
    """
    if date is None:
        return RELEASES[-1]
    if bringer == "nvidia":
        of_months = [release for release in RELEASES if release.date[:7] < date[:7]]
        return (of_months or RELEASES[:1])[-1]
    versions = [version for day, version in OF_TORCH.values() if day <= date] or [RELEASES[0].version]
    return next(release for release in RELEASES if release.version == versions[-1])
