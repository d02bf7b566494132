"""Which scenarios can be run for real here; all others are refused with what stands in the way."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sim.errors import InputError
from sim.scenario import Scenario

RANKS_PER_CORE = 4
ONE_WAY = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_search")  # head on the last rank


def check_runnable(scenario: Scenario, where: str) -> None:
    """Checks that `calibrate.measure` has an implementation of everything the scenario asks for.

    Raises:
        InputError: naming the file, the key, what was found and what can be run.
    """
    if scenario.training is None:
        raise InputError(f"{where}: inference: only training steps can be run for real")
    for key, found, allowed in (*_model(scenario), *_training(scenario), *_layout(scenario)):
        raise InputError(f"{where}: {key}: found {found}; calibrate.measure can run: {allowed}")


Problem = tuple[str, object, str]


def _model(s: Scenario) -> Iterator[Problem]:
    m = s.model
    if m.moe is not None:
        yield "model.moe", "experts", "dense models"
    if m.mla is not None:
        yield "model.mla", "latent attention", "multi-head and grouped-query attention"
    if m.mtp_layers:
        yield "model.mtp_layers", m.mtp_layers, "0"
    p = s.parallelism
    if m.tied_embeddings and p.pp > 1 and (p.schedule not in ONE_WAY or p.zero):
        found = f"true with schedule {p.schedule}, zero {p.zero}"
        yield "model.tied_embeddings", found, f"at pp > 1: {', '.join(ONE_WAY)}; zero 0"
    if s.distillation is not None:
        yield "distillation", "a teacher", "plain training"
    if s.faults is not None:
        yield "faults", "faults", "healthy runs"


def _training(s: Scenario) -> Iterator[Problem]:
    t = s.training
    assert t is not None
    for name in ("precision", "param_dtype", "grad_dtype", "grad_reduce_dtype"):
        dtype = getattr(t, name)
        if dtype != "fp32":
            yield f"training.{name}", dtype, "fp32"
    if t.recompute.mode == "selective_op":
        yield "training.recompute", t.recompute.mode, "none, selective, full"
    if t.activation_offload:
        yield "training.activation_offload", "true", "false"
    if t.attention == "fused" and s.model.dropout > 0:
        yield "training.attention", f"fused, dropout {s.model.dropout:g}", "fused without dropout, or unfused"
    if t.elementwise != "eager":
        yield "training.elementwise", t.elementwise, "eager"
    if t.cross_entropy != "unfused":
        yield "training.cross_entropy", t.cross_entropy, "unfused"


def _layout(s: Scenario) -> Iterator[Problem]:
    p = s.parallelism
    for name, found in (("tp", p.tp), ("cp", p.cp), ("ep", p.ep), ("expert_tp", p.expert_tp)):
        if found != 1:
            yield f"parallelism.{name}", found, "1"
    if p.zero == 3 and s.model.tied_embeddings:
        yield "parallelism.zero", "3 with tied embeddings", "0 to 2 with tied embeddings"
    if 0 in p.layers_per_stage[1:-1]:
        found = list(p.layers_per_stage)
        yield "parallelism.layers_per_stage", found, "at least one layer on stages in the middle"
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    if s.cluster.gpu.name == "cpu" and p.ranks > most:
        yield "parallelism", f"{p.ranks} ranks", f"at most {most} on this machine ({RANKS_PER_CORE} a core)"
    if s.cluster.gpu.name != "cpu":
        from torch import cuda

        if not cuda.is_available() or cuda.device_count() < p.ranks:
            yield "cluster", f"{p.ranks} GPUs", f"cpu-host, or {cuda.device_count()} CUDA devices"
