"""The `faults` section of a scenario: slow ranks, slow links and NICs, jitter, failures."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from sim.core.json_values import is_integer
from sim.inputs.input_source import UserInput, as_tuple
from sim.inputs.parallelism import MAX_RANKS


def numbered(name: str) -> int:
    """The 7 of `node7`; ValueError for any other text."""
    match = re.fullmatch(r"node([0-9]{1,9})", name)
    if match is None:
        raise ValueError(f"{name!r} is no node's name, such as node7")
    return int(match[1])


def _no_number(value: Any) -> Any:
    if is_integer(value):
        raise ValueError(f"must be a node's name: node{value}")
    return value


NodeName = Annotated[str, Field(min_length=1, max_length=100), BeforeValidator(_no_number)]


class Straggler(UserInput):
    """One rank, or all ranks of a node, whose computations take `compute_scale` times as long, which is never less than
    their GPU's record says: that record's peak is what utilization is a share of. A quicker GPU is one of
    `cluster.others`."""

    rank: int | None = Field(default=None, ge=0, le=MAX_RANKS)
    node: NodeName | None = None
    compute_scale: float = Field(default=1.3, ge=1, le=1e6)

    @model_validator(mode="after")
    def _at_one_place(self) -> Self:
        if (self.rank is None) == (self.node is None):
            raise ValueError("must have either a rank or a node, such as rank: 3 or node: node0")
        return self

    @property
    def node_number(self) -> int | None:
        """The number of the node that is slow as a whole; `rules.faults` has refused other names."""
        return None if self.node is None else numbered(self.node)


class LinkFault(UserInput):
    """The links between `node0` and `node1`, or (one name twice) within a node, slowed down; 0: cut."""

    between: Annotated[
        tuple[
            Annotated[str, Field(min_length=1, max_length=100)],
            Annotated[str, Field(min_length=1, max_length=100)],
        ],
        BeforeValidator(as_tuple),
    ]
    bandwidth_scale: float = Field(default=0.5, ge=0, le=1e6)

    @property
    def nodes(self) -> tuple[int, int]:
        """The numbers of the two nodes, the lower one first; `rules.faults` has refused other names."""
        a, b = sorted(map(numbered, self.between))
        return a, b


class NicFault(UserInput):
    """A node's NICs, or the one with this number alone, slowed down towards every other node."""

    node: NodeName
    nic: int | None = Field(default=None, ge=0, le=10_000)
    bandwidth_scale: float = Field(default=0.5, gt=0, le=1)

    @field_validator("bandwidth_scale", mode="before")
    @classmethod
    def _up(cls, value: Any) -> Any:
        if value == 0 and value is not False:
            raise ValueError("must be above 0; a NIC that is down is left out of a network file (`stepsim topology`)")
        return value

    @property
    def node_number(self) -> int:
        """The node's number; `rules.faults` has refused other names."""
        return numbered(self.node)


class JitterFault(UserInput):
    """Computations vary at random: factors drawn from a log-normal distribution of mean 1, for each rank and action, or
    from `factors`, which come from a measured run where that is named."""

    sigma: float = Field(default=0.05, ge=0, le=2)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    measured: str | None = Field(default=None, min_length=1, max_length=4096)
    factors: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1e3)], ...], BeforeValidator(as_tuple), Field(max_length=100_000)
    ] = ()


class NetworkJitter(UserInput):
    """Other jobs on a shared network leave each node a part of its NICs' bandwidth: exp(σz), z of a standard normal
    distribution, drawn once for each node; at most all of it."""

    sigma: float = Field(default=0.3, ge=0, le=3)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


class FailureKind(UserInput):
    """Failures of one kind, at a rate of their own. `restart_s` null: as all; `takes_node`: a spare takes its place."""

    name: str = Field(min_length=1, max_length=100)
    mtbf_s_per_gpu: float = Field(gt=0, le=1e15)
    restart_s: float | None = Field(default=None, ge=0, le=1e9)
    takes_node: bool = True


class Published(UserInput):
    """Published figures of a job, shown beside the simulated ones."""

    effective_training_time: float | None = Field(default=None, gt=0, le=1)
    failures: float | None = Field(default=None, ge=0, le=1e9)


class Failures(UserInput):
    """Random failures and checkpoints, in seconds. With `kinds` these have their own rates, and `mtbf_s_per_gpu` is not
    used; `spare_nodes` null: there is always one."""

    mtbf_s_per_gpu: float = Field(default=1.8e8, gt=0, le=1e15)
    checkpoint_interval_s: float = Field(default=1800.0, gt=0, le=1e9)
    checkpoint_s: float = Field(default=60.0, ge=0, le=1e9)
    restart_s: float = Field(default=600.0, ge=0, le=1e9)
    kinds: Annotated[tuple[FailureKind, ...], BeforeValidator(as_tuple), Field(max_length=1000)] = ()
    spare_nodes: int | None = Field(default=None, ge=0, le=10_000_000)
    repair_s: float = Field(default=86400.0, ge=0, le=1e9)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    published: Published | None = None


class Faults(UserInput):
    """Faults during the workload: slow ranks and links, jitter, failures."""

    stragglers: Annotated[tuple[Straggler, ...], BeforeValidator(as_tuple), Field(max_length=100_000)] = ()
    links: Annotated[tuple[LinkFault, ...], BeforeValidator(as_tuple), Field(max_length=100_000)] = ()
    nics: Annotated[tuple[NicFault, ...], BeforeValidator(as_tuple), Field(max_length=100_000)] = ()
    jitter: JitterFault | None = None
    network_jitter: NetworkJitter | None = None
    failures: Failures | None = None
