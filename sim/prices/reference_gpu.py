"""The GPU on which a profile's efficiencies were measured, and how far they hold for another GPU."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.prices.profile import Profile
from sim.prices.roofline import Device
from topology.spec import GpuSpec

# Of efficiencies measured on another GPU: 1.48 times the median error of a kernel where its own are left out (`python
# tools/borrowed_kernels.py`), by a GPU of the same multiprocessors or by another chip.
SAME_MULTIPROCESSORS_UNCERTAINTY = 0.08
OTHER_CHIP_UNCERTAINTY = 0.22


def reference_gpu(profile: Profile, gpu: GpuSpec) -> GpuSpec:
    """Return the GPU that a profile names as its `reference`; `gpu` itself if it names none.

    Raises:
        InputError: if there is no such GPU.
    """
    if not profile.reference:
        return gpu
    from topology.presets import GPUS

    if profile.reference not in GPUS:
        found, names = profile.reference, ", ".join(sorted(GPUS))
        raise InputError(f"profile {profile.name!r}: reference: found {found!r}; allowed: {names}")
    return GPUS[profile.reference]


def measured_device(profile: Profile, gpu: GpuSpec) -> Device:
    """Return the data sheet of `gpu` with the bandwidth and the peaks that the profile measured on it."""
    c = profile.coefficients
    bandwidth = c.memory_bandwidth_bytes_per_s or gpu.memory_bandwidth_bytes_per_s
    return Device(gpu.name, {**gpu.peak_flops_per_s, **c.peak_flops_per_s}, bandwidth)


def borrowed_uncertainty(gpu: GpuSpec, reference: GpuSpec) -> float:
    """Return the uncertainty of the reference's efficiencies for kernels of `gpu`; 0 if their figures are equal."""
    own, other = Device.of(gpu), Device.of(reference)
    if replace(own, name=other.name) == other:
        return 0.0
    return SAME_MULTIPROCESSORS_UNCERTAINTY if gpu.same_multiprocessors(reference) else OTHER_CHIP_UNCERTAINTY
