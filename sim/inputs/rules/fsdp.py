"""Rules of which of torch's FSDPs shards parameters, and of what the first one prefetches."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.models.frameworks.records import framework_of


def torch_fsdp(sections: Sections, t: Training) -> Problems:
    """Refuse another FSDP than the framework can have, and gathers without prefetch where it is not torch's first."""
    p, engine = sections.parallelism, framework_of(t).zero
    own, others = engine.fsdp_version, {2} if engine.or_torch else set[int]()
    if p.fsdp_version is not None and own != 2 and p.fsdp_version not in {own, *others}:
        another = (
            "a sharding of its own, not torch's FSDP" if not others else "its own and torch's FSDP2, not the first"
        )
        found = "torch's first FSDP alone" if own else another
        yield ("parallelism", "fsdp_version"), f"found {p.fsdp_version}; framework {t.framework} has {found}"
    if p.fsdp_double_buffer and (p.zero < 2 or p.fsdp_version is not None or not engine.ahead_elements):
        needed = "found true; needs zero 2 or 3 with a framework of Megatron-Core, and its own FSDP"
        yield ("parallelism", "fsdp_double_buffer"), needed
    if p.zero == 3 and not p.backward_prefetch and (p.fsdp_version or own) != 1:
        needed = "found false; needs torch's first FSDP: parallelism.fsdp_version 1, or framework composer"
        yield ("parallelism", "backward_prefetch"), needed
