"""What a request needs, and takes, when an engine lets it in."""

from __future__ import annotations

from typing import Literal, NamedTuple

CapacityPolicy = Literal["guaranteed_no_evict", "max_utilization"]
RouterName = Literal["round_robin", "least_loaded", "prefix_aware", "one_queue"]  # of sim.serve.replicas.router.ROUTERS


class Admission(NamedTuple):
    """Rules of TensorRT-LLM; all false, those of the others.

    `policies`: it has both of `CapacityPolicy`; with max_utilization a request enters once there is room for its
    prompt, and the youngest is put out where blocks run out. `whole_blocks`: a request takes the blocks of its whole
    prompt when the first chunk is computed, and enters once there is room for them. `counts_found`: what it finds
    computed of its prompt counts as tokens of the iteration and as blocks to find all the same. `block_chunks`: a chunk
    that is not a prompt's last has whole blocks of tokens. `keeps_ended`: with prefixes in the GPU's cache, blocks of a
    request that has ended, or was put out, stay until room is needed. `waits`: told to, prompts wait for others
    (`sim.serve.scheduling.prompt_waits`)."""

    policies: bool = False
    whole_blocks: bool = False
    counts_found: bool = False
    block_chunks: bool = False
    keeps_ended: bool = False
    waits: bool = False


class LoadScore(NamedTuple):
    """How loaded a replica is for `least_loaded`. A waiting request counts `waiting` times a running one, more where
    over half of the cache is taken: `pressed` times what is beyond, a part of 1. `rotates`: of equally loaded ones not
    the first gets a request, but the first from a place on that moves on with each."""

    waiting: float = 1.0
    pressed: float = 0.0
    rotates: bool = False


class Routers(NamedTuple):
    """Which of an engine's replicas a request goes to where nobody says: of replicas `apart`, and of those that share
    experts (`sharing`); and their `score`."""

    apart: RouterName = "round_robin"
    sharing: RouterName = "round_robin"
    score: LoadScore = LoadScore()
