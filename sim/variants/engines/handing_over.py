"""How a replica that computes prompts hands them over to one that adds tokens (`inference.disaggregated`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

FirstToken = Literal["computed", "copied", "sampled"]
Asks = Literal["at_once", "with_tokens", "with_text"]


class HandingOver(NamedTuple):
    """Rules of an engine with two pools; those of the bundled one are DistServe's.

    `first_token`: when a request's first token leaves for its client. computed: the prefill replica sends it once the
    prompt is computed. copied: it goes along with the cache, and the decode replica sends it when it next puts an
    iteration together. sampled: it is dropped; the decode replica computes the prompt's last token again, without
    drafted ones, and samples the first token itself. `asks`: how a computed prompt's request comes to the decode
    replica. at_once: as the prompt is computed. with_tokens, with_text: a proxy waits for the prefill server's answer
    and sends the request to the decode server then, whose HTTP takes its time, and with text its tokenizer.
    `room_first`: the decode replica sets room aside before the prompt enters the prefill replica, so that each chunk is
    sent once it is computed. `swaps`: a decode replica copies what it preempts to host memory and back by itself, and
    lets it go on before others enter.
    """

    first_token: FirstToken = "computed"
    asks: Asks = "at_once"
    room_first: bool = False
    swaps: bool = False


# tests/v1/kv_connector/nixl_integration/toy_proxy_server.py: max_tokens 1 for the prefill server, whose answer it waits
# for; the client's tokens are the decode server's. v1/core/sched/scheduler.py, _update_waiting_for_remote_kv (0.20,
# 0.33): the last token of what came is computed again. Taken for all releases.
VLLM = HandingOver("sampled", "with_text")
# srt/disaggregation: decode.py, DecodePreallocQueue.pop_preallocated (disaggregation_decode_allocation_policy: early),
# and process_batch_result_prebuilt; prefill.py, PrefillBootstrapQueue.pop_bootstrapped and send_kv_chunk (0.5.23).
SGLANG = HandingOver("copied", room_first=True)
# serve/openai_disagg_server.py, merge_streaming_responses, later openai_disagg_service.py: the prefill server's answer
# is waited for, has the prompt's tokens, and is not passed on. _torch/pyexecutor/py_executor.py:
# _prepare_disagg_gen_transmission_complete, then _handle_first_token_response. Earlier proxies passed it on.
TRTLLM = HandingOver("copied", "with_tokens")
