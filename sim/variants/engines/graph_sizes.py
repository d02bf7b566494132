"""The batch sizes for which a serving engine captures CUDA graphs, one function for each rule.

A function is called after the first release with its rule. `to`: the largest size that the engine would capture
(`Defaults.graphs_to`). `running`: `inference.max_running_requests`. A batch is padded to the next captured size. With
speculative decoding, `_drafting_sizes` count sequences, and `_drafting_tokens` the tokens of whole sequences.
`AskedGraphs`: the sizes that somebody asks for in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

SMALL = (1, 2, 4)


def of_sequences(sizes: Callable[[int, int], tuple[int, ...]]) -> Callable[[int, int, int], tuple[int, ...]]:
    """Return the rule for tokens of graphs from a rule for sequences, each of which has all of its tokens in a graph.

    >>> of_sequences(vllm_08_sizes)(8, 12, 3)
    (3, 6, 12, 24)
    """
    return partial(_of_sequences, sizes)


def _of_sequences(sizes: Callable[[int, int], tuple[int, ...]], to: int, running: int, each: int) -> tuple[int, ...]:
    return tuple([n * each for n in sizes(to, running)])


def vllm_05_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and multiples of 8, up to the first that holds `running` (vLLM 0.5, worker/model_runner.py,
    _get_graph_batch_size).

    >>> vllm_05_sizes(256, 12), vllm_05_sizes(8, 12)
    ((1, 2, 4, 8, 16), (1, 2, 4, 8))
    """
    most = min(to, next((n for n in SMALL if n >= running), -(-running // 8) * 8))
    return tuple([n for n in (*SMALL, *range(8, most + 1, 8)) if n <= most])


def vllm_08_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and multiples of 8 up to `to`, whatever `running` is (vLLM 0.8, config.py, _set_cudagraph_sizes).

    >>> vllm_08_sizes(24, 12)
    (1, 2, 4, 8, 16, 24)
    """
    return vllm_05_sizes(to, to)


def vllm_014_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return multiples of 8, from 256 on of 16, to twice `running` (vLLM 0.14, config/vllm.py, _set_cudagraph_sizes).

    >>> vllm_014_sizes(512, 5), vllm_014_sizes(512, 256)[-3:]
    ((1, 2, 4, 8), (480, 496, 512))
    """
    most = min(to, 2 * running)
    return tuple([n for n in (*SMALL, *range(8, 256, 8), *range(256, most + 1, 16)) if n <= most])


def vllm_031_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return those of vLLM 0.14, and `running` (vLLM 0.31, config/vllm.py, _set_cudagraph_sizes).

    >>> vllm_031_sizes(512, 20), vllm_031_sizes(512, 1024)[-1]
    ((1, 2, 4, 8, 16, 20, 24, 32, 40), 512)
    """
    own = {running} if running <= to else set()
    return tuple(sorted(own.union(vllm_014_sizes(to, running))))


def vllm_014_drafting_tokens(to: int, running: int, each: int) -> tuple[int, ...]:
    """Return tokens of batches with a graph where `each` sequence has so many to check: steps to twice the tokens of
    `running` sequences, rounded up to whole sequences (vLLM 0.14, config/vllm.py, _set_cudagraph_sizes;
    config/compilation.py, adjust_cudagraph_sizes_for_spec_decode).

    >>> vllm_014_drafting_tokens(512, 4, 4), vllm_014_drafting_tokens(512, 256, 5)[-2:]
    ((4, 8, 16, 24, 32), (480, 500))
    """
    return in_whole_sequences(vllm_014_sizes(to, running * each), each)


def in_whole_sequences(sizes: tuple[int, ...], each: int) -> tuple[int, ...]:
    """Return sizes in tokens, rounded up to whole sequences of `each`, up to the largest (vLLM 0.14,
    config/compilation.py, adjust_cudagraph_sizes_for_spec_decode).

    >>> in_whole_sequences((1, 2, 4, 8), 3)
    (3, 6)
    """
    return tuple(sorted({whole for n in sizes if (whole := -(-n // each) * each) <= sizes[-1]}))


def vllm_029_drafting_tokens(to: int, running: int, each: int) -> tuple[int, ...]:
    """Return those of vLLM 0.14, and those of 1, 2, 4, 8, 16, … and `running` sequences (vLLM 0.29, config/vllm.py,
    _set_cudagraph_sizes, request_counts).

    >>> vllm_029_drafting_tokens(512, 4, 5)
    (5, 10, 20, 25, 35, 40)
    """
    most = min(to, running)
    counts = {n for n in (*SMALL, *range(8, 256, 8), *range(256, most + 1, 16), most) if n <= most}
    own = {n * each for n in counts if n * each <= min(to, 2 * running * each)}
    return tuple(sorted(own.union(vllm_014_drafting_tokens(to, running, each))))


def sglang_04_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return multiples of 8, from 256 on of 16, and `running` (SGLang 0.4 to 0.5.2,
    model_executor/cuda_graph_runner.py, get_batch_sizes_to_capture).

    >>> sglang_04_sizes(160, 20), sglang_04_sizes(512, 4096)[-3:]
    ((1, 2, 4, 8, 16, 20), (480, 496, 512))
    """
    return _with_most((*SMALL, *range(8, 257, 8), *range(272, to + 1, 16)), to, running)


def sglang_05_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return multiples of 8, from 256 on of 16, from 512 on of 32, and `running` (SGLang 0.5.3, server_args.py,
    _generate_cuda_graph_batch_sizes).

    >>> sglang_05_sizes(24, 4096), sglang_05_sizes(576, 4096)[-4:]
    ((1, 2, 4, 8, 12, 16, 24), (496, 512, 544, 576))
    """
    return _with_most((*SMALL, 8, 12, *range(16, 256, 8), *range(256, 512, 16), *range(512, to + 1, 32)), to, running)


def sglang_04_drafting_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return sizes with drafted tokens (SGLang 0.4, model_executor/cuda_graph_runner.py, get_batch_sizes_to_capture).

    >>> sglang_04_drafting_sizes(160, 48)[-4:], sglang_04_drafting_sizes(160, 200)[-4:]
    ((27, 29, 31, 48), (64, 96, 128, 160))
    """
    return _with_most((*range(1, 9), *range(9, 33, 2), 64, 96, 128, 160), to, running)


def sglang_046_drafting_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return sizes with drafted tokens (SGLang 0.4.6, cuda_graph_runner.py, get_batch_sizes_to_capture).

    >>> sglang_046_drafting_sizes(160, 48)[-5:]
    (28, 30, 32, 40, 48)
    """
    return _with_most((*range(1, 9), *range(10, 33, 2), *range(40, 161, 16), *range(160, to + 1, 8)), to, running)


def sglang_047_drafting_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return sizes with drafted tokens (SGLang 0.4.7 to 0.5.2, cuda_graph_runner.py, get_batch_sizes_to_capture).

    >>> sglang_047_drafting_sizes(256, 48)[-5:]
    (28, 30, 32, 40, 48)
    """
    steps = (*range(1, 9), *range(10, 33, 2), 40, 48, 56, *range(80, 161, 16), *range(168, 257, 8))
    return _with_most((*steps, *range(272, to + 1, 16)), to, running)


def sglang_05_drafting_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return sizes with drafted tokens: all up to 8, then steps of 2 to 32, of 4 to 64, of 8 to 256, then of 16, and
    `running` (SGLang 0.5.3, server_args.py, _generate_cuda_graph_batch_sizes).

    >>> sglang_05_drafting_sizes(256, 48)[-8:]
    (24, 26, 28, 30, 32, 40, 44, 48)
    """
    steps = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, to + 1, 16))
    return _with_most(steps, to, running)


def sglang_0510_prompt_sizes(chunk: int, latent: bool) -> tuple[int, ...]:
    """Return the numbers of tokens for which an iteration of prompts has graphs: up to the `chunk` that an iteration
    computes at most, with latent attention up to 2,048 (SGLang 0.5.10, server_args.py,
    _generate_piecewise_cuda_graph_tokens and the lines that set piecewise_cuda_graph_max_tokens).

    >>> len(sglang_0510_prompt_sizes(8192, False)), sglang_0510_prompt_sizes(600, False)[-2:]
    (58, (512, 576))
    >>> sglang_0510_prompt_sizes(8192, True)[-1]
    2048
    """
    return _prompt_sizes(2048 if latent else chunk)


def sglang_0523_prompt_sizes(chunk: int, latent: bool) -> tuple[int, ...]:
    """Return those of SGLang 0.5.10, with latent attention up to 8,192 (SGLang 0.5.23, arg_groups/memory_hook.py).

    >>> [sglang_0523_prompt_sizes(chunk, True)[-1] for chunk in (4096, 16384)]
    [4096, 8192]
    """
    return _prompt_sizes(min(8192, chunk) if latent else chunk)


def _prompt_sizes(most: int) -> tuple[int, ...]:
    fine = *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)
    return tuple([n for n in (*fine, *range(1280, 4097, 256), *range(4608, most + 1, 512)) if n <= most])


def trtllm_10_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return multiples of 8 up to 128, then powers of two, and `running` (TensorRT-LLM 1.0, llmapi/llm_args.py,
    _generate_cuda_graph_batch_sizes with enable_padding).

    >>> trtllm_10_sizes(2048, 400)[-4:]
    (120, 128, 256, 400)
    """
    return _with_most((*SMALL, *range(8, 129, 8), *[2**n for n in range(8, to.bit_length())]), to, running)


def trtllm_13_sizes(to: int, running: int) -> tuple[int, ...]:
    """Return multiples of 8 up to 128, then of 64, and `running` (TensorRT-LLM 1.3, llmapi/llm_args.py,
    _generate_cuda_graph_batch_sizes with enable_padding).

    >>> trtllm_13_sizes(2048, 400)[-5:]
    (192, 256, 320, 384, 400)
    """
    return _with_most((*SMALL, *range(8, 129, 8), *range(192, to + 1, 64)), to, running)


def _with_most(sizes: tuple[int, ...], to: int, running: int) -> tuple[int, ...]:
    """Return the sizes up to `running`, and `running` itself if larger ones would be captured."""
    kept = {n for n in sizes if n <= min(to, running)} | ({running} if running < to else set())
    return tuple(sorted(kept))


class AskedGraphs(NamedTuple):
    """What an engine makes of CUDA graphs that somebody asks for: up to a stated largest size, or of stated sizes.

    `sizes`, `drafting`: as `Engine.graph_sizes`, also with drafted tokens (None: as without). `sequences`: the numbers
    count sequences, each with all of its tokens, up to `running`; else tokens. `whole`: with drafts these are
    rounded up to whole sequences. `extends`: more may be asked for than the engine has by itself. `keeps_largest`: the
    stated largest size is one of those that are captured, also between two steps.

    vLLM: config/vllm.py, _set_cudagraph_sizes (max_cudagraph_capture_size, cudagraph_capture_sizes; what is asked for
    does not depend on max_num_seqs). SGLang: server_args.py, later arg_groups/cuda_graph_hook.py (cuda_graph_max_bs,
    cuda_graph_bs; the largest is kept since 0.5.20), cuda_graph_runner.py, get_batch_sizes_to_capture (0.4.6: filters
    the usual ones alone). TensorRT-LLM: llmapi/llm_args.py, CudaGraphConfig; _torch/pyexecutor/model_engine.py,
    _filter_cuda_graph_batch_sizes.
    """

    sizes: Callable[[int, int], tuple[int, ...]]
    drafting: Callable[[int, int], tuple[int, ...]] | None = None
    sequences: bool = False
    whole: bool = False
    extends: bool = True
    keeps_largest: bool = False

    def up_to(self, largest: int, running: int, each: int) -> tuple[int, ...]:
        """Return tokens of batches with a graph up to `largest`, where each sequence has `each` to compute.

        >>> AskedGraphs(vllm_014_sizes, whole=True).up_to(16, 4, 3)
        (3, 6, 9)
        >>> AskedGraphs(sglang_05_sizes, sequences=True, keeps_largest=True).up_to(20, 4096, 1)
        (1, 2, 4, 8, 12, 16, 20)
        """
        rule = self.drafting if each > 1 and self.drafting is not None else self.sizes
        sizes = {*rule(largest, running if self.sequences else largest)}
        if self.keeps_largest and largest <= running:
            sizes.add(largest)
        return self._tokens(tuple(sorted(sizes)), each)

    def of(self, asked: Sequence[int], running: int, each: int) -> tuple[int, ...]:
        """Return tokens of batches with a graph where these sizes are `asked` for.

        >>> AskedGraphs(sglang_05_sizes, sequences=True).of([8, 64, 2], 48, 2)
        (4, 16, 96)
        """
        sizes = tuple(sorted({*asked}))
        if self.sequences and sizes[-1] > running:
            sizes = (*[n for n in sizes if n < running], running)
        return self._tokens(sizes, each)

    def _tokens(self, sizes: tuple[int, ...], each: int) -> tuple[int, ...]:
        if self.sequences:
            return tuple([n * each for n in sizes])
        return in_whole_sequences(sizes, each) if self.whole and each > 1 else sizes
