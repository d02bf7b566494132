"""The server's process behind the engine: text of tokens, and pieces streamed one after another."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest

from sim.inputs.scenario import load_scenario, parse_scenario
from sim.serve.prices.front import MOST_BUSY, Front, front_of
from sim.serve.simulation import ServingSimulation, simulate_serving
from sim.variants.engines import ENGINES
from sim.variants.engines.host_times import HostTimes

VLLM, SGLANG = ENGINES["vllm-0.33"], ENGINES["sglang-0.5.23"]
FRONT = Front(outputs_s=2e-4, sequence_s=2e-5, piece_s=5e-5, together=128)
TWO = Front(3e-4, 1e-5, 6e-5, together=16, text_outputs_s=5e-4, text_sequence_s=1.2e-5)


MEASURED = {"vLLM": (0, 8), "SGLang": (0, 0), "TensorRT-LLM": (1, 0)}  # since these releases


def streamed(front: Front, sequences: int) -> list[float]:
    """When each piece of an iteration leaves, slice after slice, as vLLM's loop would, and SGLang's behind the process
    that makes text of all of an iteration's tokens."""
    now, out = front.text_outputs_s + sequences * front.text_sequence_s + front.outputs_s, []
    for begin in range(0, sequences, front.together):
        size = min(front.together, sequences - begin)
        now += size * front.sequence_s
        for _ in range(size):
            now += front.piece_s
            out.append(now)
    return out


@pytest.mark.parametrize("front", [FRONT, TWO])
@pytest.mark.parametrize("sequences", [1, 2, 127, 128, 129, 300, 512])
def test_pieces_of_a_slice_follow_its_text(sequences: int, front: Front) -> None:
    pieces = streamed(front, sequences)
    mean_s, last_s = front.after_s(sequences, 1.0)
    assert mean_s == pytest.approx(sum(pieces) / sequences)
    assert last_s == pytest.approx(pieces[-1]) == pytest.approx(front.text_s(sequences) + front.work_s(sequences))


def test_two_processes_keep_up_where_the_slower_one_does() -> None:
    """While the second sends an iteration's pieces the first makes the next one's text."""
    assert TWO.keeps_up(100, TWO.work_s(100))
    assert not TWO.keeps_up(100, TWO.work_s(100) * 0.99)
    slow_text = Front(0.0, 0.0, 1e-6, together=16, text_sequence_s=1e-3)
    assert slow_text.keeps_up(10, 0.01)
    assert not slow_text.keeps_up(11, 0.01)


def test_log_probabilities_make_pieces_longer() -> None:
    times = HostTimes(output_s=1e-5, piece_s=4e-5, logprobs_s=2e-5, logprob_s=3e-6, logprob_piece_s=4e-6)
    assert front_of(times, VLLM) == Front(0.0, 1e-5, 4e-5, 128)
    assert front_of(times, VLLM, logprobs=6) == Front(0.0, 1e-5 + 2e-5 + 6 * 3e-6, 4e-5 + 6 * 4e-6, 128)


def rounds(front: Front, sequences: int, iteration_s: float, iterations: int) -> float:
    """Mean seconds that tokens wait, once rounds are alike: each takes all iterations that have ended by its begin."""
    now, done, waits, late = 0.0, 0, 0.0, 0
    while done < iterations:
        now = max(now, (done + 1) * iteration_s)
        come = int(now / iteration_s * (1 + 1e-12))
        text_s = (come - done) * (front.outputs_s + sequences * front.sequence_s)
        for i in range(done, come):
            if i > iterations / 2:
                waits += now + text_s + (sequences + 1) / 2 * front.piece_s - (i + 1) * iteration_s
                late += 1
        now += text_s + sequences * front.piece_s
        done = come
    return waits / late


def test_an_interval_makes_fewer_pieces_and_on_sglang_less_text() -> None:
    """vLLM's server makes text of each token; SGLang's scheduler sends none on until a piece is due."""
    times = HostTimes(outputs_s=2e-4, output_s=2e-5, piece_s=5e-5, text_outputs_s=4e-4, text_output_s=1e-5)
    assert front_of(times, VLLM, interval=10) == Front(2e-4, 2e-5, 5e-6, 128, 4e-4, 1e-5)
    assert front_of(times, SGLANG, interval=10) == Front(2e-4, 2e-5 / 10, 5e-6, 16, 4e-4, 1e-5 / 10)
    assert front_of(times, VLLM, interval=1) == front_of(times, VLLM)


def test_clients_get_their_last_token_sooner_with_an_interval() -> None:
    """200 pieces of an iteration take longer than the iteration; ten do not, and the server keeps up."""
    requests = {"prompt_len": 64, "output_len": 64, "count": 200}
    found = {}
    for interval in (1, 20):
        section = {"engine": "vllm-0.33", "requests": requests, "stream_interval": interval}
        data = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": section}
        found[interval] = simulate_serving(parse_scenario(data)).result
    assert found[20]["request_latency_s"]["mean"] < found[1]["request_latency_s"]["mean"]
    late = [any("cannot stream" in w for w in one["warnings"]) for one in found.values()]
    assert late == [True, False]
    noted = parse_scenario(
        {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"stream_interval": 2, "requests": requests}}
    ).warnings
    assert any("inference.stream_interval: of no effect with engine bundled" in w for w in noted)


@pytest.mark.parametrize("times", [3, 5, 9])
def test_a_process_that_is_behind_sends_tokens_of_several_iterations_in_one_piece(times: int) -> None:
    """Text of 128 outputs takes 2.76 ms, their pieces 6.4: with iterations of a `times`-th of both rounds follow."""
    front = Front(outputs_s=2e-5, sequence_s=1e-6, piece_s=1e-4, together=128)
    iteration_s = front.work_s(128) / times
    assert not front.keeps_up(128, iteration_s)
    mean_s, last_s = front.after_s(128, iteration_s)
    assert mean_s == last_s
    assert mean_s == pytest.approx(rounds(front, 128, iteration_s, 4000), rel=0.15)


def test_more_text_than_time_is_no_endless_wait() -> None:
    assert FRONT.after_s(128, 1e-4)[0] == pytest.approx(128 * FRONT.piece_s / (1 - MOST_BUSY))


def test_engines_whose_server_is_not_known_have_no_such_process() -> None:
    assert front_of(HostTimes(request_s=1.0), VLLM) is None
    fronts = {name for name, e in ENGINES.items() if front_of(e.host_on("hopper"), e) is not None}
    assert fronts == {n for n, e in ENGINES.items() if MEASURED.get(e.product, (9,)) <= e.since}


def served(*changes: str, engine: Literal["auto", "simpy", "static"] = "auto") -> ServingSimulation:
    small = ("inference.requests.count=64", "inference.requests.rate_per_s=null", "inference.engine=vllm-0.33")
    return simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", [*small, *changes]), engine=engine)


def test_first_tokens_leave_last_and_others_in_the_middle() -> None:
    """All at once: the requests of the first iteration have their first tokens when all of its pieces are sent."""
    sim = served("inference.requests.prompt_len=16", "inference.requests.output_len=3")
    host = sim.costs.host.times
    front = sim.costs.host.front
    assert front is not None
    first, *_ = sorted(sim.sequences, key=lambda s: s.first_token_s)
    load = sim.replicas[0].iterations[0].load
    assert first.first_after_s == pytest.approx(front.work_s(load.sequences))
    own = sim.times.first_token_s[sim.sequences.index(first)]
    assert own == pytest.approx(host.request_s + 16 * host.prompt_token_s + first.first_token_s + first.first_after_s)
    assert first.last_after_s == pytest.approx(front.after_s(64, 1.0)[0])
    ends = [s.sent_s - s.finish_s for s in sim.sequences]
    assert ends == pytest.approx([s.last_after_s for s in sim.sequences])


@pytest.mark.parametrize("engine", ["static", "simpy"])
def test_a_client_s_next_request_waits_for_its_last_piece(engine: Literal["static", "simpy"]) -> None:
    sim = served("inference.requests.max_concurrency=1", "inference.requests.output_len=4", engine=engine)
    host = sim.costs.host.times
    gaps = [b.arrival_s - a.finish_s for a, b in itertools.pairwise(sim.sequences)]
    assert gaps == pytest.approx([a.last_after_s + host.before_s(1000) for a in sim.sequences[:-1]])
    assert min(a.last_after_s for a in sim.sequences) > 0


def test_both_engines_give_the_same_times_with_it() -> None:
    changes = ("inference.requests.max_concurrency=7", "inference.requests.range_ratio=0.9")
    pair: list[Any] = [served(*changes, engine=engine) for engine in ("static", "simpy")]
    for key in ("latency_s", "first_token_s"):
        ours, theirs = (sorted(getattr(sim.times, key)) for sim in pair)
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_server_that_is_behind_is_told() -> None:
    sim = served("model.layers=2", "inference.requests.prompt_len=16", "inference.requests.count=600")
    assert any("cannot stream" in w for w in sim.outcome.warnings)
    assert not any("cannot stream" in w for w in served().outcome.warnings)
