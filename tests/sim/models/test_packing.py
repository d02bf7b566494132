"""Packed documents: closed forms, packing by hand, cuts over cp against a count one by one, replicas that wait."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from sim.core.errors import InputError
from sim.core.operator_kinds import shape_flops
from sim.core.program import Compute
from sim.emit import emit
from sim.inputs.packed_documents import best_fit, expected_tokens, pack, pairs_between, wrapped
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.training_config import Packing
from sim.models.dims import Shard, packed_batch
from sim.models.layer import layer_block
from sim.models.source import source_of
from sim.simulation import simulate

MODEL = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 2, "vocab": 1000}


def training(packing: Any = None, parallelism: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    keys = {"seq_len": 4096, "global_batch_size": 8, "packing": packing} | keys
    model = keys.pop("model", MODEL)
    return parse_scenario({"model": model, "training": keys, "parallelism": parallelism or {}, "cluster": "dgx-h100"})


def cores(s: Scenario, rank: int = 0) -> list[Compute]:
    """The attention kernels of one layer, forward and backward."""
    block = layer_block(s, 0, Shard(cp_rank=rank))
    items = (*block.forward, *block.backward)
    return [i for i in items if isinstance(i, Compute) and i.kind in ("attention_forward", "attention_backward")]


def test_one_document_is_no_packing_to_the_last_digit() -> None:
    plain, one = simulate(training()), simulate(training({"lengths": [4096]}))
    assert one.step_time_s == plain.step_time_s
    assert one.result["mfu"] == plain.result["mfu"]
    assert cores(training({"lengths": [4096]})) == cores(training())


@pytest.mark.parametrize("n", [2, 4, 16])
def test_equal_documents_take_an_nth_of_attentions_flops(n: int) -> None:
    packed, plain = training({"lengths": [4096 // n] * n}), training()
    for few, many in zip(cores(packed), cores(plain), strict=True):
        assert few.flops == many.flops / n
        assert few.bytes == many.bytes
        assert shape_flops(few.kind, few.shape) == pytest.approx(few.flops, rel=0.02)
    layer = 4096 * 12 * 8 * 64 / 2
    found = [source_of(s).flops_per_token(causal_half=True) for s in (plain, packed)]
    assert found[0] - found[1] == pytest.approx(2 * layer * (1 - 1 / n))
    short = training(seq_len=4096 // n)
    assert found[1] == pytest.approx(source_of(short).flops_per_token(causal_half=True))


def test_uneven_documents_take_the_sum_of_squares() -> None:
    lengths = [2048, 1024, 512, 100]
    packed = training({"lengths": lengths})
    for few, many in zip(cores(packed), cores(training()), strict=True):
        assert few.flops == pytest.approx(many.flops * sum(n**2 for n in lengths) / 4096**2)
    assert any("4.0 documents on average, which fill 89.9% of it" in w for w in packed.warnings)
    assert simulate(packed).step_time_s < simulate(training()).step_time_s


def kernel(s: Scenario, rank: int = 0) -> tuple[int, ...]:
    """Blocks, queries, keys of the forward kernel."""
    blocks, _, _, queries, keys, *_ = cores(s, rank)[0].shape
    return blocks, queries, keys


@pytest.mark.parametrize("cp", [{}, {"cp": 4, "cp_method": "all_gather", "cp_split": "contiguous"}])
@pytest.mark.parametrize("length", [1000, 300, 100, 10])
def test_padding_makes_no_blocks(length: int, cp: dict[str, Any]) -> None:
    """A padded document's kernel is that of the document alone, however long the sequence is."""
    assert kernel(training({"lengths": [length]}, cp)) == (1, length, length)
    assert kernel(training({"lengths": [length] * 3})) == (3, length, length)


def test_a_cut_document_is_one_block_of_each_rank() -> None:
    ring = {"cp": 4, "cp_split": "contiguous", "cp_method": "ring"}
    s = training({"lengths": [1500, 100]}, ring)
    assert [c.shape[0] for c in cores(s, 1)[:2]] == [1, 1]
    assert [c.shape[3:5] for c in cores(s, 1)[1:2]] == [(476, 1024)]  # queries 1024 to 1500, all earlier keys
    assert cores(s, 2) == []


def test_blocks_of_a_window_have_its_queries() -> None:
    """Of 512 tokens each sees 112.1 in the mean, as a block of 128 queries against 176 keys does."""
    narrow = {**MODEL, "window": 128}
    assert kernel(training({"lengths": [512] * 8}, model=narrow)) == (32, 128, 176)
    assert kernel(training({"lengths": [512] * 4}, model=narrow)) == (16, 128, 176)


def test_windows_hide_within_documents() -> None:
    """Of 8 documents of 512 a window of 512 hides nothing; one of 128 hides the same in each."""
    model = {**MODEL, "window": 512}
    short = {"lengths": [512] * 8}
    assert [c.flops for c in cores(training(short, model=model))] == pytest.approx(
        [c.flops for c in cores(training(short))], rel=0.002
    )
    narrow = {**MODEL, "window": 128}
    ones = cores(training(model=narrow, seq_len=512))
    assert [c.flops for c in cores(training(short, model=narrow))] == pytest.approx([8 * c.flops for c in ones])


@pytest.mark.parametrize("split", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_ranks_of_cp_have_all_pairs_together(method: str, split: str) -> None:
    lengths = [1500, 1000, 900, 600]
    layout = {"cp": 4, "cp_method": method, "cp_split": split}
    s = training({"lengths": lengths}, layout)
    ranks = [sum(c.flops for c in cores(s, rank) if c.kind == "attention_forward") for rank in range(4)]
    assert sum(ranks) == pytest.approx(4 * 8 * 64 * sum(n**2 for n in lengths) / 2, rel=1e-3)
    assert (max(ranks) / min(ranks) > 1.2) == (split == "contiguous")


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("sizes", [[1, 4], [2, 2], [4, 1]])
def test_groups_of_cp_have_all_pairs_together(sizes: list[int], split: str) -> None:
    """Ranks of a group share its heads alike; a contiguous piece is a group's."""
    lengths = [1500, 1000, 900, 600]
    layout = {"cp": 4, "cp_method": "all_to_all_ring", "cp_split": split, "hierarchical_context_parallel_sizes": sizes}
    s = training({"lengths": lengths}, layout)
    ranks = [sum(c.flops for c in cores(s, rank) if c.kind == "attention_forward") for rank in range(4)]
    assert sum(ranks) == pytest.approx(4 * 8 * 64 * sum(n**2 for n in lengths) / 2, rel=1e-3)
    groups = [ranks[i : i + sizes[0]] for i in range(0, 4, sizes[0])]
    assert all(len(set(group)) == 1 for group in groups)
    groups_of = {row["group"] for row in simulate(s).result["communication"]}
    assert ("cp_exchanged" in groups_of) == (sizes[0] > 1)
    assert ("cp_ring" in groups_of) == (1 < sizes[0] < 4)


def test_pairs_of_pieces_are_those_counted_one_by_one() -> None:
    """Whole numbers here; half of a square stands for a triangle, which has half a row more."""
    lengths = [5, 1, 7, 3]
    ends = list(accumulate(lengths))
    document = [next(i for i, end in enumerate(ends) if place < end) for place in range(16)]
    for q in range(4):
        for k in range(4):
            places = (4 * q, 4 * q + 4), (4 * k, 4 * k + 4)
            seen = [(i, j) for i in range(*places[0]) for j in range(*places[1]) if j <= i]
            counted = sum(document[i] == document[j] for i, j in seen)
            diagonal = 2.0 if q == k else 0.0
            assert pairs_between(lengths, *places) == counted - diagonal


def test_packing_by_hand() -> None:
    assert best_fit([3, 9, 4, 6, 5, 1], 10) == [(9, 1), (6, 4), (5, 3)]
    assert best_fit([10, 10], 10) == [(10,), (10,)]
    assert wrapped([3, 9, 4, 6], 10) == [(3, 7), (2, 4, 4), (2,)]
    assert wrapped([30], 10) == [(10,), (10,), (10,)]


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_drawn_documents_fill_the_batch(strategy: str) -> None:
    packing = Packing(mean_seq_len=700, strategy=strategy, min_seq_len=16)
    batch = pack(packing, 4096, 256, 4)
    assert len(batch.sequences) == 64
    assert all(sum(lengths) <= 4096 for lengths in batch.sequences)
    assert 0.95 < batch.filled <= 1.0
    assert pack(packing, 4096, 256, 4) == batch
    assert pack(packing.model_copy(update={"seed": 1}), 4096, 256, 4) != batch
    mean = sum(n * length for length, n in batch.all_documents) / sum(n for _, n in batch.all_documents)
    assert 500 < mean < 800  # the longest are cut off


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.1, 3.0])
def test_drawn_documents_have_the_expected_mean(sigma: float) -> None:
    """The mean of a million lengths; rounding them moves it by less than what is allowed here."""
    packing = Packing(mean_seq_len=700, lognormal_sigma=sigma, min_seq_len=16, max_seq_len=3000)
    drawn = np.random.default_rng(1).lognormal(math.log(700) - sigma**2 / 2, sigma, 1_000_000)
    assert expected_tokens(packing, 4096) == pytest.approx(np.rint(drawn).clip(16, 3000).mean(), rel=0.01)


def test_a_warning_says_how_long_drawn_documents_are() -> None:
    s = training({"mean_seq_len": 2000, "lognormal_sigma": 3.0}, global_batch_size=64)
    batch = packed_batch(s)
    assert batch is not None
    mean = sum(n * length for length, n in batch.all_documents) / sum(n for _, n in batch.all_documents)
    assert mean < 1000
    assert any(f"a document has {mean:.0f} tokens on average, against 2000 before" in w for w in s.warnings)


@pytest.mark.parametrize("pattern", [["sliding"], ["chunked"], ["sliding", "full"]])
def test_the_slowest_replica_has_most_pairs_within_windows(pattern: list[str]) -> None:
    """With one replica the kernels have the mean of all sequences, with more that of the replica that all wait for."""
    model = MODEL | {"window": 256, "attention_pattern": pattern}
    keys: dict[str, Any] = {"global_batch_size": 32, "model": model}

    def core_flops(dp: int) -> float:
        s = training({"mean_seq_len": 700}, {"dp": dp}, **keys)
        blocks = [layer_block(s, n, Shard()) for n in range(2)]
        return sum(i.flops for b in blocks for i in b.forward if isinstance(i, Compute) and "attention_f" in i.kind)

    batch = packed_batch(training({"mean_seq_len": 700}, {"dp": 8}, **keys))
    assert batch is not None
    assert batch.imbalance > 1.0
    assert core_flops(8) / core_flops(1) == pytest.approx(batch.imbalance, rel=1e-3)


def test_the_step_waits_for_the_slowest_replica() -> None:
    drawn = {"mean_seq_len": 700}
    s = training(drawn, {"dp": 8}, global_batch_size=16)
    batch = packed_batch(s)
    assert batch is not None
    assert batch.imbalance > 1.05
    squares = sum(n * length**2 for length, n in batch.documents)
    mean = sum(n * length**2 for length, n in batch.all_documents)
    assert squares / mean == pytest.approx(batch.imbalance)
    whole = training()
    assert cores(s)[0].flops == pytest.approx(cores(whole)[0].flops * squares / 4096**2)
    # utilization counts what all replicas compute, not eight times the slowest
    matmuls = source_of(training({"lengths": [1]})).flops_per_token(True)
    attention = source_of(s).flops_per_token(True) - matmuls
    assert attention == pytest.approx(2 * 12 * 8 * 64 / 2 * mean / 4096, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"packing": {}}, "packing: needs either lengths, or mean_seq_len"),
        ({"packing": {"lengths": [8], "mean_seq_len": 9}}, "packing: needs either lengths, or mean_seq_len"),
        ({"packing": {"lengths": [4000, 97]}}, r"lengths: found 4097 tokens in all; a sequence has 4096"),
        ({"packing": {"mean_seq_len": 5000}}, r"mean_seq_len: found 5000; must lie between"),
        (
            {"packing": {"mean_seq_len": 1500, "lognormal_sigma": 10}, "seq_len": 1 << 14, "global_batch_size": 256},
            r"mean_seq_len: found 1500 with lognormal_sigma 10; clipped to the allowed lengths, .*; at most 1,000,000",
        ),
        ({"packing": {"lengths": [9]}, "attention": "unfused"}, "not simulated with unfused attention"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        training(**keys)


def test_flags_are_not_written() -> None:
    with pytest.raises(InputError, match=r"Megatron-LM takes documents from its data"):
        emit(training({"lengths": [9]}), "megatron")


def test_torchs_attention_gets_documents_as_a_mask_in_transformers() -> None:
    """transformers/masking_utils.py, `find_packed_sequence_indices`: positions that begin again make a mask, with which
    torch's attention computes all pairs; a named kernel computes those within documents, and one document has none."""
    several, one = {"lengths": [1024] * 4}, {"lengths": [4096]}
    masked, whole = (training(x, framework="transformers") for x in (several, one))
    flash = training(several, framework="transformers", attention_kernel="flash2")
    assert cores(masked)[0].flops == 2 * cores(whole)[0].flops == 8 * cores(flash)[0].flops
    assert all(i.masked for i in cores(masked))
    kept = {s.name: s.bytes for s in layer_block(masked, 0).saved}
    assert kept["attention mask"] == 2 * 4096**2
    assert any("attention_kernel" in w and "all pairs" in w for w in masked.warnings)
    assert cores(whole) == cores(training(framework="transformers"))
