"""Seconds that the host of each serving engine takes, by GPU architecture.

Seconds called "fitted" are printed by `python tools/fit_engines.py`: least squares on every second row of one table in
`scenarios/published`; docs/accuracy_causes.md has the errors on the other rows, and those of the table left out.
"""

from __future__ import annotations

from sim.variants.engines.host_times import HostTimes

# Fitted, each number once: other records take theirs from these.
VLLM_02 = {
    "ampere": HostTimes(
        iteration_s=0.206e-3,
        rank_s=0.628e-3,
        sequence_s=0.345e-3,
        prompt_s=14.1e-3,
        oversize_s=16.6e-6,
        launch_s=44.4e-6,
        uncertainty=0.072,
    ),
    "hopper": HostTimes(
        iteration_s=6.42e-3,
        rank_s=0.983e-3,
        sequence_s=0.226e-3,
        prompt_s=10.1e-3,
        oversize_s=6.38e-6,
        launch_s=17.4e-6,
        uncertainty=0.063,
    ),
}
TRTLLM_06 = HostTimes(launch_s=19.5e-6, uncertainty=0.056)
TRTLLM = {
    "ampere": HostTimes(collective_s=68.3e-6, uncertainty=0.05),
    "hopper": HostTimes(sequence_s=2.33e-6, collective_s=19.1e-6, launch_s=TRTLLM_06.launch_s, uncertainty=0.059),
}
TRITON = HostTimes(
    iteration_s=0.359e-3,
    sequence_s=16.3e-6,
    prompt_s=5.82e-3,
    collective_s=TRTLLM["hopper"].collective_s,
    request_s=1.11e-3,
    uncertainty=0.16,
)
FP8_EXPERTS = 0.759  # fitted with `TRTLLM`
# Hosts of A100 are older. Only vLLM of 2023 was measured beside both GPUs.
A100_BY_H100 = VLLM_02["ampere"].sequence_s / VLLM_02["hopper"].sequence_s

# Host seconds that no table here judges, from what authors wrote; the spread of what they wrote is the uncertainty.
_LAUNCH_S, _HTTP_S = VLLM_02["hopper"].launch_s, TRITON.request_s
V5 = HostTimes(5e-3, sequence_s=31e-6, launch_s=_LAUNCH_S, request_s=_HTTP_S, uncertainty=0.4)
V6 = HostTimes(2.5e-3, sequence_s=15.6e-6, launch_s=_LAUNCH_S, request_s=_HTTP_S, uncertainty=0.4)
# A sequence of V1 is measured on a CPU without a GPU (tools/time_vllm_host.py): vLLM 0.10.2, 0.24 and 0.32.
V1 = HostTimes(1.5e-3, sequence_s=9.4e-6, launch_s=_LAUNCH_S, request_s=_HTTP_S, uncertainty=0.4)
# vLLM's API server, a process of its own since 0.7, was measured likewise (tools/time_vllm_server.py): that of 0.32,
# taken for all releases of V1. A prompt's token takes its event loop 0.8 us and its tokenizer's thread 1.5.
VLLM_V1 = V1._replace(request_s=1.08e-3, prompt_token_s=2.3e-6, outputs_s=0.197e-3, output_s=18.8e-6, piece_s=44.7e-6)
# Of a grammar: tools/time_grammar.py, vLLM 0.32 with xgrammar 0.2.9, the mean of two JSON schemas at 128 sequences, of
# which the longer one takes 1.3 times as long; in proportion to the vocabulary, from 32,000 and 128,000 tokens.
_GRAMMAR = {"mask_s": 0.63e-9, "accept_s": 4.9e-6}
# Drafts from the text: tools/time_ngram.py with 0.32, means of two runs; 14 to 29 us of an iteration are left out.
VLLM_V1 = VLLM_V1._replace(search_s=2.0e-6, search_token_s=3.1e-9)
# The server with `--logprobs 0` and `--logprobs 5`: a token's text takes 57.5 and 110.4 us, a piece 61.1 and 120.1.
_SERVED = VLLM_V1
VLLM_V1 = VLLM_V1._replace(logprobs_s=28.1e-6, logprob_s=10.6e-6, logprob_piece_s=12.6e-6, **_GRAMMAR)
# trtllm-serve was not timed. Its process does what vLLM's does, with the same parts (uvicorn, FastAPI and pydantic in
# one event loop; executor/result.py, _handle_response: text; serve/postprocess_handlers.py: pieces;
# num_postprocess_workers is 0, llmapi/llm_args.py of 1.0 and of 2026, commit 0004396), so it is given vLLM's seconds.
TRTLLM_1 = _SERVED
# SGLang's two processes (tools/time_sglang_server.py): those of 0.5.23, taken for all releases. A sequence of 0.5.3 is
# measured in its scheduler (tools/time_sglang_host.py), taken until 0.5.10. Of 0.5.23 the output alone takes 9.6 us.
SGLANG = V1._replace(
    sequence_s=4.6e-6,
    request_s=1.11e-3,
    prompt_token_s=2.4e-6,
    outputs_s=0.656e-3,
    piece_s=57.1e-6,
    text_outputs_s=0.427e-3,
    text_output_s=12.9e-6,
    # Assumption, not timed: as vLLM's without the text's tokens, for speculative/ngram_worker.py matches the last
    # max_trie_depth ones (18) with a trie.
    search_s=VLLM_V1.search_s,
    logprob_piece_s=20.9e-6,  # with `--logprobs 5` a piece takes 182.3 us; others in proportion
    **_GRAMMAR,
)
# With several GPUs V1's engine core sends each iteration to its workers' processes, and one sends tokens back
# (v1/executor/multiproc_executor.py). tools/time_vllm_messages.py with 0.10.2 and 0.33.0: medians of five runs of each,
# in turn, while other programs had both cores. Runs had 0.08 to 0.12 ms and 0.8 to 1.4 us a sequence with 0.10.2, 0.18
# to 0.24 ms and 1.2 to 1.7 us with 0.33.0; on a busier machine the latter took up to 0.52 ms and 2.4 us.
VLLM_V1 = VLLM_V1._replace(message_s=0.1e-3, message_sequence_s=0.83e-6)
SGLANG_10 = SGLANG._replace(sequence_s=V1.sequence_s)
VLLM_V1_24 = VLLM_V1._replace(sequence_s=13.5e-6)
VLLM_V1_32 = VLLM_V1._replace(sequence_s=17.9e-6, message_s=0.22e-3, message_sequence_s=1.33e-6)


def hosts(hopper: HostTimes) -> dict[str, HostTimes]:
    """Return host seconds by GPU architecture, from those measured beside an H100.

    Hosts of A100s are older and slower (`A100_BY_H100`); their launches were measured.
    """
    older = hopper.slower(A100_BY_H100)
    return {"ampere": older._replace(launch_s=VLLM_02["ampere"].launch_s), "hopper": hopper}
