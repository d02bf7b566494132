"""Memory of a GPU that an engine's process takes beside PyTorch's tensors, and that the cache cannot have.

CUDA's context: vLLM 0.10.2 finds 78.66 of 79.19 GiB free on an H100 when it starts ("Free memory on device"), 43.93 of
44.42 on a GPU of 48 GB, 139.21 of 139.81 on an H200.

Communicators of a server of several GPUs (NCCL with its buffers for NVLink and the switch, the engine's own
all-reduces), as logs have them:

    vLLM before 0.11 ("GiB for non-torch memory")   H200, tp 2: 1.38; one H100: 0.07
        (pull request 10511, December 2024)         two H100: 1.79 more than one
        over PCIe                                   RTX 5090 (issue 14452): 0.33; RTX 4090 (issue 13061): 0.25;
                                                    48 GB: 0.21
    vLLM of August 2026, GPUs of 184 GiB, tp 4      181.84 of 184.31 free when it starts, then 0.95
    SGLang ("Init torch distributed ends")          8 H200 (pull request 11716): 2.01; 8 B200 (pull request 5390): 2.50
        over PCIe                                   4 GPUs of compute capability 12.0 (issue 40558): 0.39

The means of these are taken for any number of GPUs and any release (an assumption); a single GPU has none.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 2.0**30
CONTEXT_BYTES = 0.54 * GIB
PCIE_BYTES = 0.3 * GIB


class OutsideMemory(NamedTuple):
    """What an engine's process takes of a GPU beside tensors: CUDA's context and, as far as `linked_bytes` are known,
    communicators. `linked_bytes`: over NVLink; 0 of an engine of which nothing is known.

    What of it counts as part of vLLM's share: `counted` of the communicators; `context`: CUDA's context, too. `graphs`:
    the part of the whole memory that CUDA graphs are taken to need, which is part of the share; 0: they are in the
    rest."""

    linked_bytes: float = 0.0
    counted: float = 1.0
    context: bool = False
    graphs: float = 0.0

    def bytes(self, ranks: int, pcie: bool) -> float:
        """Bytes on each GPU of a server of `ranks`, which are connected by `pcie` or NVLink."""
        return self._communicators(ranks, pcie) + (CONTEXT_BYTES if self.linked_bytes else 0.0)

    def counted_bytes(self, ranks: int, pcie: bool) -> float:
        """What of `bytes` counts as part of the engine's share of the memory."""
        return self.counted * self._communicators(ranks, pcie) + self.context * CONTEXT_BYTES

    def _communicators(self, ranks: int, pcie: bool) -> float:
        return 0.0 if ranks == 1 else PCIE_BYTES if pcie and self.linked_bytes else self.linked_bytes


# worker/worker.py of 0.6.6, determine_num_available_blocks, and v1/worker/gpu_worker.py of 0.9 and 0.10,
# memory_profiling: what is not PyTorch's and was not there before the process had a context.
VLLM = OutsideMemory(1.58 * GIB)
# v1/worker/gpu_worker.py of 0.8.5, determine_available_memory: total_allocated_bytes - torch_allocated_bytes.
VLLM_08 = VLLM._replace(context=True)
# Since 0.11.0 communicators are there before it looks what is free (v1/worker/gpu_worker.py, init_device:
# init_worker_distributed_environment stands before MemorySnapshot): of 2.47 - 0.54 + 0.95 GiB only the last count.
VLLM_11 = OutsideMemory(2.88 * GIB, counted=0.33)
# Since 0.20 graphs are captured once before the cache is sized, and what they took is taken off the share
# (determine_available_memory: cudagraph_memory_estimate). Its default rose from 0.9 to 0.92 with that, "to preemptively
# address the impact" (pull request 38284): so much is taken. Logs say 0.7 % to 2 % of a GPU ("is equivalent to"), for
# some models much more (issue 45178).
VLLM_20 = VLLM_11._replace(graphs=0.02)
# srt/model_executor/model_runner.py of 0.5.3, profile_max_num_token: what is free beyond 1 - mem_fraction_static of
# what was free behind init_torch_distributed.
SGLANG = OutsideMemory(2.25 * GIB, context=True)
# _torch/pyexecutor/_util.py of 1.0: extra_cost, what mem_get_info shows in use beyond PyTorch's. No log was found:
# communicators are taken to be those of vLLM before 0.11.
TRTLLM = OutsideMemory(1.58 * GIB, context=True)
