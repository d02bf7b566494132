"""Context parallelism: who computes what, and what goes round."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_programs import LLAMA, comm_bytes, comms, flops, make

from sim.core.program import Comm, Compute, Wait
from sim.inputs.scenario import parse_scenario
from sim.models.attention.context_parallel import gathered_blocks, ring_blocks
from sim.models.attention.core import Core
from sim.models.dims import Shard
from sim.models.layer import layer_block
from sim.ranks.plan import make_plan
from sim.simulation import simulate

CORES = ("attention_forward",)
KV = 2 * 2 * 256 * 2 * 4 * 64  # bytes: 16 bits, micro-batch 2, 512/2 tokens, k and v, 4 heads of 64


def core_flops(method, split, cp):
    blocks = [layer_block(make(LLAMA, cp=cp, cp_method=method, cp_split=split), 0, Shard(r)) for r in range(cp)]
    return [flops(b.forward, CORES) for b in blocks]


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_splits_share_the_causal_triangle(method, cp):
    """All ranks together do what one device does; zigzag shares it evenly, contiguous as 1 : 3 : 5 …"""
    whole = flops(layer_block(make(LLAMA), 0).forward, CORES)
    zigzag, contiguous = (core_flops(method, split, cp) for split in ("zigzag", "contiguous"))
    assert sum(zigzag) == pytest.approx(whole)
    assert zigzag == pytest.approx([whole / cp] * cp)
    assert sum(contiguous) == pytest.approx(whole)
    assert contiguous == pytest.approx([whole * (2 * r + 1) / cp**2 for r in range(cp)])
    assert core_flops(method, "striped", cp) == pytest.approx([whole / cp] * cp)


@pytest.mark.parametrize("window", [512, 2048, 6000])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("framework", ["eager", "megatron", "compiled"])
def test_simulated_ranks_share_what_a_window_shows(framework: str, split: str, window: int) -> None:
    """Zigzag too: the first rank's first queries see fewer keys than a window holds, and no other rank is taken for
    it."""
    keys = {"cp": 4, "cp_method": "all_gather", "cp_split": split}
    training = {"framework": framework, "seq_len": 8192}
    scenario = make({**LLAMA, "window": window}, training, **keys)
    plan = make_plan(scenario)
    blocks = {c.ranks: layer_block(scenario, 0, Shard(plan.work_of(c.rank)[0])) for c in plan.classes}
    seen = sum(len(ranks) * flops(block.forward, CORES) for ranks, block in blocks.items())
    whole = make({**LLAMA, "window": window}, training)
    assert seen == pytest.approx(flops(layer_block(whole, 0).forward, CORES), rel=1e-3)


@given(cp=st.integers(2, 16), rank=st.integers(0, 15), half=st.integers(1, 64))
def test_zigzag_steps_are_equal(cp, rank, half):
    own = Core(2 * half, 2 * half, 8, 8, 64, 64)
    steps = ring_blocks(own, cp, rank % cp, "zigzag")
    assert {b.visible for b in steps} == {2 * half * half}
    assert sum(b.visible for b in gathered_blocks(own, cp, rank % cp, "zigzag")) == 2 * half * half * cp


def test_a_mask_of_numbers_hides_no_pair_from_a_striped_kernel() -> None:
    """Half of the pairs are skipped where the kernel knows that attention is causal, none where it gets a tensor."""
    (skipping,), (masked,) = (
        gathered_blocks(Core(64, 64, 8, 8, 64, 64, causal=causal), 4, 1, "striped") for causal in (True, False)
    )
    assert (skipping.visible, masked.visible) == (64 * 256 / 2, 64 * 256)


def test_ring_messages():
    """Keys and values go cp − 1 hops in each direction of the pass, their gradients cp hops."""
    cp = 4
    block = layer_block(make(LLAMA, {"seq_len": 1024}, cp=cp), 0, Shard(1))
    assert comms(block.forward, "cp") == Counter(send_recv=cp - 1)
    assert comm_bytes(block.forward, "cp") == (cp - 1) * KV
    assert comms(block.backward, "cp") == Counter(send_recv=2 * cp - 1)
    assert comm_bytes(block.backward, "cp") == (2 * cp - 1) * KV


def test_ring_sends_beside_its_compute():
    items = layer_block(make(LLAMA, cp=4), 0, Shard(0)).forward
    for step in range(3):
        at = [i for i, item in enumerate(items) if isinstance(item, Comm) and item.handle == f"ring_kv{step}"]
        waits = [i for i, item in enumerate(items) if isinstance(item, Wait) and item.handle == f"ring_kv{step}"]
        between = items[at[0] : waits[0]]
        assert not items[at[0]].blocking
        assert any(isinstance(i, Compute) and i.kind == "attention_forward" for i in between)


def test_sums_of_ring_gradients_take_their_bytes():
    """3 times dK, dV at 0.85 of 3.35 TB/s: the host issues a sum before the attention that it waits for has ended."""
    training = {"seq_len": 65536, "global_batch_size": 1, "framework": "eager"}
    layout = {"tp": 8, "cp": 8, "sp": True}
    sim = simulate(
        parse_scenario({"model": "llama3-70b", "cluster": "dgx-h100", "training": training, "parallelism": layout}),
        expand=True,
    )
    sums = [s for s in sim.timeline.spans() if "attention_dkv_sum" in s.detail.name]
    assert len(sums) == 80 * 7
    want_s = 3 * (2 * 8192 * 128 * 2) / (0.85 * 3.35e12)
    assert all(want_s < s.end_s - s.start_s < want_s + 5e-6 for s in sums)  # and a launch


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("date", ["2024-12", "2026-06"])
def test_messages_are_those_of_torchs_context_parallel(cp: int, method: str, date: str) -> None:
    """torch's own ring attention, run with attention that computes nothing in a group that sends nothing."""
    training = {"seq_len": 1024, "framework": "compiled", "software_date": date}
    model = {**LLAMA, "kv_heads": 4}
    shard = Shard(cp - 1)
    scenario = make(model, training, cp=cp, cp_method=method)
    block = layer_block(scenario, 0, shard)
    heads = 4 if date == "2026-06" else model["heads"]
    want = torch_messages(cp, cp - 1, method, (2, heads, 1024 // cp, 64))
    for program, (gathered, sent, joined) in zip((block.forward, block.backward), want, strict=True):
        copies = [i.bytes / 2 for i in program if isinstance(i, Compute) and i.name.startswith(("kv_join", "kv_copy"))]
        # Of an all-gather a compiler leaves out what is not sent.
        assert copies == (joined if method == "ring" else joined[:1])
        assert comm_bytes(program, "cp", "all_gather") == gathered
        assert comm_bytes(program, "cp", "send_recv") == sent
        assert all(i.blocking for i in program if isinstance(i, Comm) and i.group == "cp")


def torch_messages(cp: int, rank: int, method: str, shape: tuple[int, ...]) -> list[tuple[int, int, list[int]]]:
    """Bytes of all-gathers (of all that arrives), permutations, and joined keys and values, forward and backward."""
    torch = pytest.importorskip("torch")
    from torch.distributed import destroy_process_group, group, init_process_group
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    class Messages(TorchDispatchMode):
        gathered = sent = 0

        def __init__(self):
            super().__init__()
            self.joined = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "all_gather" in func.__name__:
                self.gathered += out.nbytes
            elif "all_to_all" in func.__name__:
                self.sent += out.nbytes
            elif "cat" in func.__name__ and out.dim() == 1 and out.dtype is torch.bfloat16:
                self.joined.append(out.nbytes)
            return out

    def forward(q, k, v, **_):
        return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32)

    def backward(query, key, value, **_):
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    rotates = {"ring": ring._RotateMethod.ALL_TO_ALL, "all_gather": ring._RotateMethod.ALL_GATHER}
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
    former = ring._cp_options.rotate_method
    init_process_group("fake", store=FakeStore(), rank=rank, world_size=cp)
    try:
        ring._cp_options.rotate_method = rotates[method]
        with Messages() as there:
            out, lse = ring._templated_ring_attention(group.WORLD, 2, forward, q, k, v, is_causal=True)
        with Messages() as back:
            ring._templated_ring_attention_backward(
                group.WORLD, 2, backward, out, "grad_out", q, k, v, out, lse, is_causal=True
            )
    finally:
        ring._cp_options.rotate_method = former
        destroy_process_group()
    return [(part.gathered, part.sent, part.joined) for part in (there, back)]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("last", [False, True])
def test_transformer_engine_copies_around_its_ring(cp: int, last: bool, joins: bool) -> None:
    """Bytes by AttnFuncWithCPAndKVP2P, of q (queries) and kv (keys and values). The first rank has half of the queries
    in all blocks but its own, the last half of the keys. Half of the first rank's keys are seen by its own queries
    alone, so their gradients are copied at the end. Before Transformer Engine 2.8 dK and dV were joined first.
    """
    changes = {"seq_len": 1024, "framework": "megatron"} | ({"software_date": "2025-06"} if joins else {})
    block = layer_block(make(LLAMA, changes, cp=cp), 0, Shard(cp - 1 if last else 0))
    moved = {i.name: i.bytes for i in (*block.forward, *block.backward) if isinstance(i, Compute)}
    kernels = {i.name: i.kernels for i in (*block.forward, *block.backward) if isinstance(i, Compute)}
    own = {name: n for name, n in moved.items() if "merge" in name or "sum" in name or name in ("kv_join", "kv_copy")}
    q, kv = 2 * 2 * (1024 // cp) * 16 * 64, KV * 1024 // (512 // 2) // cp
    queries, keys = (1.0, 0.5) if last else (0.5, 1.0)
    rest = cp - 1
    assert own["kv_join"] == own["kv_copy"] == 2 * kv
    assert sum(n for name, n in own.items() if "merge" in name) == 2 * q + rest * 3 * queries * q
    assert sum(n for name, n in own.items() if "dq_sum" in name) == 2 * q + rest * 3 * queries * q
    added = keys * kv * (2 + 3 * (rest - 1)) + (3 if last else 2.5) * kv
    joined = 2 * kv + rest * 2 * keys * kv if joins else 0
    assert sum(n for name, n in own.items() if "dkv_sum" in name) == added + joined
    assert {n for name, n in kernels.items() if "merge" in name} == {2}


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_transformer_engine_s_gradients_are_home_before_the_last_block_ends(cp: int) -> None:
    """The backward has cp messages: keys and values, then cp - 2 times both they and the sum of dK and dV, then that
    sum alone. torch's and the first ring's gradients go cp times. No message is behind the last attention kernel."""
    whole = KV * 2 // cp

    def sent(framework: str) -> tuple[list[float], bool]:
        changes = {"framework": framework}
        items = layer_block(make(LLAMA, changes, cp=cp), 0).backward
        messages = [(i.bytes, n) for n, i in enumerate(items) if isinstance(i, Comm) and i.kind == "send_recv"]
        kernel = max(n for n, i in enumerate(items) if isinstance(i, Compute) and i.kind == "attention_backward")
        return [n for n, _ in messages], max(n for _, n in messages) < kernel

    assert sent("megatron") == ([whole, *[2 * whole] * (cp - 2), whole], True)
    sizes, hidden = sent("eager")
    assert sum(sizes) == (2 * cp - 1) * whole
    assert not hidden


def test_transformer_engine_s_block_order_ends_with_its_own_keys() -> None:
    """The forward begins with the causal block, the backward ends with it."""
    block = layer_block(make(LLAMA, {"framework": "megatron"}, cp=4), 0)
    causal = [
        [i.shape[-1] for i in side if isinstance(i, Compute) and i.kind.startswith("attention_")]
        for side in (block.forward, block.backward)
    ]
    assert causal == [[1, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("date", [None, "2025-06"])
def test_transformer_engine_copies_around_its_exchanges(date: str | None) -> None:
    """Twice each exchanged tensor, read and written; before Transformer Engine 2.8 the backward exchanged the output,
    too. Since then it is kept as it was before the exchange, beside what the projection keeps."""
    changes = {"seq_len": 1024, "framework": "megatron", "software_date": date}
    block = layer_block(make(LLAMA, changes, cp=4, cp_method="all_to_all"), 0)
    again = 0 if date is None else 1
    assert comms(block.forward, "cp") == Counter(all_to_all=4)
    assert comms(block.backward, "cp") == Counter(all_to_all=4 + again)
    query = 2 * 2 * 256 * 16 * 64
    copies = [sum(i.bytes for i in side if isinstance(i, Compute) and i.name.endswith(("_split", "_join")))
              for side in (block.forward, block.backward)]  # fmt: skip
    assert copies == [4 * (2 * query + KV), 4 * ((2 + again) * query + KV)]
    assert sum(s.bytes for s in block.saved if s.name == "output") == (0 if again else query)


def test_transformer_engine_copies_one_tensor_while_another_is_exchanged() -> None:
    """Each exchange starts behind its own copy alone, so that the next copies run beside it."""
    block = layer_block(make(LLAMA, {"seq_len": 1024, "framework": "megatron"}, cp=4, cp_method="all_to_all"), 0)
    named = [i.handle if isinstance(i, Wait) else i.name for i in block.forward]
    begin = named.index("query_split")
    exchanged = ["query_split", "ulysses_query", "key_split", "ulysses_key", "value_split", "ulysses_value"]
    joined = ["ulysses_query", "query_join", "ulysses_key", "key_join", "ulysses_value", "value_join"]
    assert named[begin : begin + 12] == exchanged + joined
    assert not any(i.blocking for i in block.forward if isinstance(i, Comm) and i.group == "cp")


def test_transformer_engine_copies_around_gathered_keys() -> None:
    """AttnFuncWithCPAndKVAllGather: each kernel's output and dQ are copied to their place, and the sums of dK and dV
    begin with zeros."""
    block = layer_block(make(LLAMA, {"seq_len": 1024, "framework": "megatron"}, cp=4, cp_method="all_gather"), 0)
    moved = {i.name: i.bytes for i in (*block.forward, *block.backward) if isinstance(i, Compute)}
    query = 2 * 2 * 256 * 16 * 64
    assert sum(n for name, n in moved.items() if "out_copy" in name) == 2 * query
    assert sum(n for name, n in moved.items() if "dq_copy" in name) == 2 * query
    assert moved["attention_dkv_zeros"] == 4 * KV


def test_contiguous_ranks_wait_for_keys_they_do_not_use():
    counts = [
        sum(
            isinstance(i, Compute) and i.kind == "attention_forward"
            for i in layer_block(make(LLAMA, cp=4, cp_split="contiguous"), 0, Shard(r)).forward
        )
        for r in range(4)
    ]
    assert counts == [1, 2, 3, 4]


def test_gathered_keys():
    """One blocking all-gather forward; backward gathers again and reduce-scatters the gradients."""
    block = layer_block(make(LLAMA, {"seq_len": 1024}, cp=4, cp_method="all_gather"), 0)
    assert comms(block.forward, "cp") == Counter(all_gather=1)
    assert comms(block.backward, "cp") == Counter(all_gather=1, reduce_scatter=1)
    assert comm_bytes(block.forward, "cp") == 4 * KV
    assert comm_bytes(block.backward, "cp") == 8 * KV


def test_gathered_keys_are_put_into_the_sequence_s_order():
    """Gathered keys and values lie by ranks: read and written once more, but for contiguous pieces, of which a rank has
    one. Of zigzag's two kernels each adds its dK, dV of the keys it saw: (1 + 8) / 8 of them all on rank 0 of 4.
    """

    def copies(split: str) -> dict[str, float]:
        block = layer_block(make(LLAMA, {"seq_len": 1024}, cp=4, cp_method="all_gather", cp_split=split), 0)
        items = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute)]
        return {i.name: i.bytes for i in items if "reorder" in i.name or "dkv_sum" in i.name}

    assert copies("contiguous") == {}
    assert copies("striped") == {"kv_reorder": 8 * KV, "dkv_reorder": 8 * KV}
    zigzag = copies("zigzag")
    assert zigzag.pop("kv_reorder") == zigzag.pop("dkv_reorder") == 8 * KV
    assert sum(zigzag.values()) == 3 * 4 * KV * 9 / 8


def test_heads_for_tokens():
    """Ulysses: q, k, v, o each way; key and value heads repeated where a rank would get none."""
    block = layer_block(make(LLAMA, {"seq_len": 1024}, cp=4, cp_method="all_to_all"), 0)
    assert comms(block.forward, "cp") == comms(block.backward, "cp") == Counter(all_to_all=4)
    query = 2 * 2 * 256 * 16 * 64
    assert comm_bytes(block.forward, "cp") == 2 * query + KV
    core = next(i for i in block.forward if isinstance(i, Compute) and i.kind == "attention_forward")
    assert core.shape == (2, 4, 1, 1024, 1024, 64, 64, 1)
    wide = layer_block(make(LLAMA, {"seq_len": 1024}, cp=8, cp_method="all_to_all"), 0)
    assert comm_bytes(wide.forward, "cp") == 2 * query / 2 + 2 * (KV / 2)


RINGS = {"cp_method": "all_to_all_ring", "hierarchical_context_parallel_sizes": [2, 4]}


@pytest.mark.parametrize("framework", ["eager", "megatron"])
def test_rings_of_ranks_that_exchange_heads(framework: str) -> None:
    """a2a+p2p on 2 x 4 ranks: four exchanges among two, of the bytes of all_to_all on eight ranks; three messages
    of the bytes of a ring's on eight, and four blocks of twice the queries and half the heads."""
    changes = {"seq_len": 1024, "framework": framework}
    block = layer_block(make(LLAMA, changes, cp=8, **RINGS), 0)
    assert comms(block.forward, "cp_exchanged") == Counter(all_to_all=4)
    assert comms(block.backward, "cp_exchanged") == Counter(all_to_all=4)
    query = 2 * 2 * 128 * 16 * 64  # bytes: 16 bits, micro-batch 2, 1024/8 tokens, 16 heads of 64
    assert comm_bytes(block.forward, "cp_exchanged") == 2 * query + KV / 2
    assert comms(block.forward, "cp_ring") == Counter(send_recv=3)
    assert comm_bytes(block.forward, "cp_ring") == 3 * KV / 2
    assert comm_bytes(block.backward, "cp_ring") == (7 if framework == "eager" else 6) * KV / 2
    assert not comms((*block.forward, *block.backward), "cp")
    shapes = [i.shape for i in block.forward if isinstance(i, Compute) and i.kind == "attention_forward"]
    assert shapes[0] == (2, 8, 2, 256, 256, 64, 64, 1)
    assert len(shapes) == 4
    ring = layer_block(make(LLAMA, changes, cp=8), 0)
    assert flops(block.forward, CORES) == flops(ring.forward, CORES)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_rings_over_groups_share_the_causal_triangle(split: str) -> None:
    layouts = [make(LLAMA, {"seq_len": 1024}, cp=8, cp_split=split, **RINGS)]
    layouts.append(make(LLAMA, {"seq_len": 1024}, cp=1))
    ranks = [flops(layer_block(layouts[0], 0, Shard(r)).forward, CORES) for r in range(8)]
    assert sum(ranks) == pytest.approx(flops(layer_block(layouts[1], 0).forward, CORES))
    assert ranks[0::2] == ranks[1::2]  # both of each exchange do the same


@pytest.mark.parametrize("framework", ["eager", "megatron"])
def test_a_group_of_one_exchanges_nothing_and_a_ring_of_one_sends_nothing(framework: str) -> None:
    """Transformer Engine exchanges `if cp_size_a2a > 1`; without it the ring is that of all ranks."""
    changes = {"seq_len": 1024, "framework": framework}
    ring = layer_block(make(LLAMA, changes, cp=8), 0)
    alone = layer_block(make(LLAMA, changes, cp=8, **{**RINGS, "hierarchical_context_parallel_sizes": [1, 8]}), 0)
    assert (alone.forward, alone.backward) == (ring.forward, ring.backward)
    whole = layer_block(make(LLAMA, changes, cp=8, **{**RINGS, "hierarchical_context_parallel_sizes": [8, 1]}), 0)
    heads = layer_block(make(LLAMA, changes, cp=8, cp_method="all_to_all"), 0)
    assert not comms((*whole.forward, *whole.backward), "cp_ring")
    assert comm_bytes(whole.forward, "cp_exchanged") == comm_bytes(heads.forward, "cp")
    assert flops(whole.backward, CORES) == flops(heads.backward, CORES)


def test_groups_of_rings_are_consecutive_ranks_and_every_so_many() -> None:
    """`create_hierarchical_groups` of megatron/core/parallel_state.py: the first size varies fastest."""
    plan = make_plan(make(LLAMA, {"seq_len": 1024, "global_batch_size": 4}, cp=8, tp=2, dp=2, **RINGS))
    assert plan.group("cp_exchanged", 4) == [4, 6]
    assert plan.group("cp_ring", 4) == [0, 4, 8, 12]
    assert plan.group("cp_ring", 19) == [19, 23, 27, 31]


def test_layers_with_ways_of_their_own() -> None:
    """Each layer's program is that of a model with this way everywhere."""
    ways = ["ring", "all_to_all", "all_gather", "all_to_all_ring"]
    sizes = {"cp": 8, "hierarchical_context_parallel_sizes": [4, 2]}
    changes = {"seq_len": 1024, "framework": "megatron"}
    mixed = make(LLAMA, changes, cp_method_by_layer=ways, **sizes)
    for layer, way in enumerate(ways):
        alone = layer_block(make(LLAMA, changes, cp_method=way, **sizes), layer)
        assert layer_block(mixed, layer).forward == alone.forward
        assert layer_block(mixed, layer).key == alone.key
    parts = [simulate(make(LLAMA, changes, cp_method=way, **sizes)).step_time_s for way in ways]
    assert min(parts) < simulate(mixed).step_time_s < max(parts)


def test_everything_else_splits_by_tokens():
    whole, split = (layer_block(make(LLAMA, cp=cp), 0) for cp in (1, 4))
    assert flops(split.forward) == flops(whole.forward) / 4
    assert split.params == whole.params
