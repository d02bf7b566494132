"""CUDA graphs of a draft's passes: a fact of each engine.

A draft computes in an iteration the prompts, once all tokens that the model checked, and then one token after another
(`sim.serve.scheduling.speculation.drafting`). What no graph has, the host launches kernel by kernel.

vLLM. 0.8.5, v1/spec_decode/eagle.py, `propose`: the model is called without graphs (`set_forward_context` without a
mode, no padding); a later pass follows eleven operators of torch that move positions, lengths and slots by one. 0.9.2:
`use_cuda_graph` at compilation level PIECEWISE, and a cast and three copies into the graph's buffers besides; 0.12 and
0.14.1 give cudagraph_runtime_mode PIECEWISE (pull request 25109). Not modelled: 0.11.0 gives none, and
compilation/cuda_graph.py, `CUDAGraphWrapper`, replays nothing then. Of the operators 0.20 (0.17 not) has one kernel
(`eagle_step_update_slot_mapping_and_metadata`), a cast and two copies. Since 0.28 the second model runner drafts with
layers that read hidden states: v1/worker/gpu/spec_decode/autoregressive/speculator.py, later
target_dependent_ar/speculator.py: the first pass is in the model's own mode, later ones are whole graphs, before each
of which slots are computed and the step's number is written; with FlashAttention, the default before Blackwell, one
graph has all of them and these kernels (`use_fused_multi_step_decode`; FlashInfer's since 0.33 is not modelled). A
model of its own drafts in the first model runner (config/vllm.py, `_get_v2_model_runner_unsupported_features`:
"speculative method") until it got a speculator, which 0.31 has (draft_model/speculator.py, in 0.33 standalone_ar: "CUDA
graph not yet supported").

SGLang. speculative/eagle_draft_cuda_graph_runner.py: all later passes are one graph. The pass over what was checked has
one since 0.4.7 (0.4.6, speculative/eagle_worker.py: `draft_extend_attn_backend` is None). Workers that overlap, since
0.5.11, have it with some attention backends alone (speculative/eagle_worker_v2.py, `supports_cuda_draft_extend_graph`):
0.5.11 with Triton's and TensorRT-LLM's latent one, 0.5.14 not with FlashAttention 3, which 0.5.23 adds. Until 0.5.13 a
worker that does not overlap has it with all (eagle_worker.py, `init_cuda_graphs`). Trees run without FlashAttention 3,
but for latents (srt/server_args.py, `_get_default_attn_backend`: `is_no_spec_infer_or_topk_one`). Prompts: since 0.5.15
as the model's (`init_prefill_cuda_graph(force_for_draft_worker=True)`).

TensorRT-LLM. _torch/speculative/mtp.py, eagle3.py: the model's own graph has them all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Graphs = Literal["none", "pieces", "whole"]


class TextDrafts(NamedTuple):
    """How an engine drafts tokens that followed the same ones earlier in a sequence's text (prompt lookup, n-grams).

    `overlaps`: where its host works beside the GPU, it does so with these drafts, too; but the search needs the tokens
    of the iteration before, and the next one needs the drafts, so that the GPU waits for it. `always`: as many tokens
    are checked of a sequence for which nothing is found as of others.
    """

    overlaps: bool = True
    always: bool = False


# vLLM. v1/spec_decode/ngram_proposer.py; v1/worker/gpu_model_runner.py, propose_draft_token_ids: on the host, once
# tokens are sampled. config/vllm.py: async scheduling "is only supported with EAGLE/MTP/Draft Model/NGram GPU". Not
# modelled: ngram_gpu (pull request 29184). SGLang. speculative/ngram_worker.py: `_prepare_draft_tokens` asserts
# draft_token_num tokens of each sequence, and waits for those just accepted (`.cpu()`); 0.5.3, srt/server_args.py:
# disable_overlap_schedule is set; 0.5.14, arg_groups/speculative_hook.py, `_handle_ngram`: not any more.
VLLM_TEXT = TextDrafts(overlaps=False)
SGLANG_TEXT_03 = TextDrafts(overlaps=False, always=True)
SGLANG_TEXT_14 = TextDrafts(always=True)


class DraftGraphs(NamedTuple):
    """Which of a draft's kernels CUDA graphs hold: none, pieces (all but attention), or the whole pass.

    `checked`: in the pass over the tokens that the model has just checked. `later`: in each pass after it, which
    computes one token of each sequence. `prompts`: in a pass over prompts. `steps`: the kernels before each later pass
    that no graph holds. `eager`, `eager_latent`: GPU architectures on which no graph holds the pass over checked
    tokens, without and with latent attention; with `eager_beside` only where the host works ahead of the GPU. `fused`:
    architectures on which, without latent attention, one graph holds all later passes and the kernels before them.
    """

    checked: Graphs = "whole"
    later: Graphs = "whole"
    prompts: Graphs = "none"
    steps: int = 0
    eager: tuple[str, ...] = ()
    eager_latent: tuple[str, ...] = ()
    eager_beside: bool = False
    fused: tuple[str, ...] = ()

    def of_checked(self, architecture: str, latent: bool, trees: bool, overlaps: bool) -> Graphs:
        """Graphs of the pass over checked tokens on such GPUs; `overlaps`: the host works beside the GPU.

        >>> own = SGLANG_DRAFTS["0.5.14"][0]
        >>> [own.of_checked("hopper", False, trees, True) for trees in (False, True)]
        ['none', 'whole']
        """
        if self.eager_beside and not overlaps:
            return self.checked
        eager = self.eager_latent if latent else () if trees else self.eager
        return "none" if architecture in eager else self.checked


VLLM_DRAFTS_08 = DraftGraphs("none", "none", "none", steps=11)
VLLM_DRAFTS_09 = DraftGraphs("pieces", "pieces", "pieces", steps=15)
VLLM_DRAFTS_20 = VLLM_DRAFTS_09._replace(steps=4)
VLLM_DRAFTS_28 = DraftGraphs("whole", "whole", "pieces", steps=2, fused=("ampere", "ada", "hopper"))
VLLM_DRAFTS_31_MODEL = DraftGraphs("none", "none", "none", steps=8)
_SGLANG_047 = DraftGraphs("whole", "whole", "none")
_SGLANG_11 = _SGLANG_047._replace(
    eager=("ampere", "ada", "hopper", "blackwell", "other"),
    eager_latent=("hopper",),
    eager_beside=True,
)
_SGLANG_14 = _SGLANG_047._replace(eager=("hopper",), eager_latent=("hopper",))
SGLANG_DRAFTS = {  # by release, of the model's own layer and of a model of their own
    "0.4": (DraftGraphs("none", "whole", "none"),) * 2,
    "0.4.7": (_SGLANG_047,) * 2,
    "0.5.11": (_SGLANG_11,) * 2,
    "0.5.14": (_SGLANG_14,) * 2,
    "0.5.15": (_SGLANG_14._replace(prompts="pieces"),) * 2,
    "0.5.23": (_SGLANG_047._replace(prompts="pieces"),) * 2,
}
