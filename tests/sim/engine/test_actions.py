"""The action text form, the grid, and what the validator refuses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.core.actions import Action, Entry, Kind, Overlap, Schedule, grid, parse_entry, validate
from tests.sim.schedule_facts import in_flight


def schedule(*ranks: str, stages: tuple[int, ...] | None = None, m: int = 2) -> Schedule:
    """Ranks as text, one chain, stage s on rank s unless told."""
    where = stages or tuple(range(len(ranks)))
    lists: tuple[tuple[Entry, ...], ...] = tuple(tuple(parse_entry(x) for x in r.split()) for r in ranks)
    numbers = tuple(range(len(where)))
    return Schedule("test", m, where, numbers, (numbers,), lists)


GOOD = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1")


@pytest.mark.parametrize("text", ["2F0", "17B255", "0I3", "1W1", "(0F4;7B1)OVERLAP_F_B", "(0F4;7I1)OVERLAP_F_B"])
def test_text_form_round_trips(text: str) -> None:
    assert str(parse_entry(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 1", "(0B4;7F1)OVERLAP_F_B", "(0F4)OVERLAP_F_B"])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|overlap"):
        parse_entry(text)


def test_grid_aligns_and_marks() -> None:
    rows = [[Action(0, Kind.F, 0), None], [None, Overlap(Action(1, Kind.F, 1), Action(1, Kind.B, 0))]]
    assert grid(rows, mark=(1, 1), first_slot=9) == ("       9   10\nrank 0 0F0\nrank 1     1F1+1B0 <-- here")


@pytest.mark.parametrize("p2p_overlap", [True, False])
def test_good_lists_pass(p2p_overlap: bool) -> None:
    validate(GOOD, p2p_overlap=p2p_overlap)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1B1 1F1", r"rank 1, entry 2 \(1B1\): backward needs one forward"),
        ("0F0 0F0 0B0 0B1 / 1F0 1B0 1F1 1B1", r"rank 0, entry 1 \(0F0\): forward runs twice"),
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1W1 1I1", r"rank 1, entry 3 \(1W1\): weight gradient needs"),
        ("0F0 0F1 0B0 0I0 0W0 / 1F0 1B0 1F1 1B1", r"rank 0, entry 3 \(0I0\): input gradient needs"),
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1I1", "rank 1 has no weight gradient of stage 1, micro-batch 1"),
        ("0F0 0F1 0B0 / 1F0 1B0 1F1 1B1", "rank 0 has no backward of stage 0, micro-batch 1"),
        ("0F0 0B0 / 1F0 1B0 1F1 1B1", "rank 0 has no forward of stage 0, micro-batch 1"),
        ("0F0 0B0 / 1F0 1B0", "micro-batch 1 is never run"),
        ("0F0 1F1 / 1F0", r"rank 0, entry 1 \(1F1\): stage 1 is not one of this rank's"),
        ("0F2 / 1F0", r"rank 0, entry 0 \(0F2\): micro-batch 2 is not in 0..1"),
        ("(0F0;0B0)OVERLAP_F_B 0F1 0B1", "two halves need two micro-batches"),
    ],
)
def test_what_is_refused(bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(schedule(*bad.split(" / ")))


def test_error_shows_the_grid() -> None:
    with pytest.raises(ValueError, match="rank 1 1F0 1B0 1B1 <-- here 1F1"):
        validate(schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"))


def test_crossed_orders_deadlock() -> None:
    """Each list alone is in order; together rank 0 waits for 1B1, and rank 1 for 0F2, forever."""
    crossed = schedule("0F0 0F1 0B1 0F2 0B0 0B2", "1F0 1B0 1F2 1F1 1B1 1B2", m=3)
    with pytest.raises(ValueError, match=r"rank (0|1), entry 2 .*deadlock: waits forever") as error:
        validate(crossed)
    assert "<-- here" in str(error.value)


def test_a_message_out_of_order_blocks_only_blocking_ranks() -> None:
    """Rank 1 takes micro-batch 1 before 0: posted ahead, its messages come; in batches neither gives way."""
    swapped = schedule("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")
    validate(swapped, p2p_overlap=True)
    with pytest.raises(ValueError, match="blocking messages after it never pass"):
        validate(swapped, p2p_overlap=False)


def test_a_v_hands_to_itself_in_order() -> None:
    """Stages 1 and 2 of a V share rank 1: 2F0 before 1F0 can never run."""
    good = schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", stages=(0, 1, 1, 0), m=1)
    bad = schedule("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0", stages=(0, 1, 1, 0), m=1)
    for p2p_overlap in (True, False):
        validate(good, p2p_overlap=p2p_overlap)
        with pytest.raises(ValueError, match="waits forever for the forward of stage 1, micro-batch 0"):
            validate(bad, p2p_overlap=p2p_overlap)


def test_chains_own_their_micro_batches() -> None:
    two = replace(
        schedule("0F0 0B0 3F1 3B1", "1F0 1B0 2F1 2B1", stages=(0, 1, 1, 0)),
        part_of_stage=(0, 1, 0, 1),
        chains=((0, 1), (2, 3)),
    )
    validate(two)
    both = (two.ranks[0], (*two.ranks[1], parse_entry("2F0"), parse_entry("2B0")))
    with pytest.raises(ValueError, match="micro-batch 0 runs on two chains"):
        validate(replace(two, ranks=both))
    with pytest.raises(ValueError, match="chains must hold each"):
        validate(replace(two, chains=((0, 1), (2, 2))))


def test_in_flight() -> None:
    assert in_flight(GOOD) == (2, 1)
    split = schedule("0F0 0I0 0F1 0I1 0W0 0W1")
    assert in_flight(split) == (1,)
    assert in_flight(split, until=Kind.W) == (2,)
    assert in_flight(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == (2,)
    with pytest.raises(ValueError, match="expected I or W"):
        in_flight(split, until=Kind.F)
