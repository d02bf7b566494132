"""How tokens get to experts on other replicas and their results back: a record for each backend of the engines.

With N ranks, t tokens on each of them (t = tokens / tp) and k experts a token, a rank sends

    all_to_all               k t out, k t back
    deepep                   the same up to 256 tokens; above that each token once to every node, or rank of a single
                             node, that has any of its k experts, and back
    allgather_reducescatter  t to each of the N - 1 others (all-gather); (N - 1) t partial sums (reduce-scatter)
    naive                    t to each of the N - 1 others (broadcasts, priced as an all-gather); an all-reduce of N t
"""

from __future__ import annotations

from typing import NamedTuple


class All2All(NamedTuple):
    """`gathers`: every rank gets the tokens of all, whatever experts these chose; `sums`: results come back by an
    all-reduce, of which a rank uses its own part; `once`: many tokens go once to each node or rank; `narrow`: tokens go
    out in 8 bits beside fp8 weights; `beside`: its messages can travel while the GPU computes (two-batch overlap)."""

    name: str
    source: str
    gathers: bool = False
    sums: bool = False
    once: bool = False
    narrow: bool = False
    beside: bool = True


BACKENDS = {
    one.name: one
    for one in (
        All2All("all_to_all", "NCCL's all-to-all of the copies, in 16 bits: an assumption"),
        All2All("deepep", "deep_ep/buffer.py: dispatch, low_latency_dispatch", once=True, narrow=True),
        All2All(
            "allgather_reducescatter",
            "vLLM, distributed/device_communicators/all2all.py: AgRsAll2AllManager; SGLang's `none`,"
            " srt/layers/dp_attention.py: dp_gather_partial, dp_reduce_scatter_tensor; TensorRT-LLM,"
            " _torch/modules/fused_moe/communication/allgather_reducescatter.py",
            gathers=True,
            beside=False,
        ),
        All2All(
            "naive",
            "vLLM 0.9 to 0.16, distributed/device_communicators/all2all.py: NaiveAll2AllManager (naive_multicast;"
            " combine: dp_group.all_reduce)",
            gathers=True,
            sums=True,
            beside=False,
        ),
    )
}
