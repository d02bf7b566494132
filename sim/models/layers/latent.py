"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values from latents.

Serving keeps the latent and the shared rope key of a token (section 2.1.2): prefill expands them to keys and values of
every head, decode absorbs the up-projections into query and output, so that all heads read one latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.operator_kinds import ATTENTION_DECODE
from sim.core.program import Compute, ModelPart, Program
from sim.models.activation_memory.recompute_modules import inside, runs_again
from sim.models.attention.context_parallel import attention_core
from sim.models.attention.core import Core, attention_flops
from sim.models.attention.head_copies import output_copied
from sim.models.attention.latent_kernels import put_into_keys, rope_of_latents
from sim.models.attention.query_factor import query_factor
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.elementwise import copied
from sim.models.layers.head_gate import element_gate, head_gate, served_element_gate, served_head_gate
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.norm import norm
from sim.models.operators import F, I, Linear, Operator, collective, gemm, keeping, memory_op
from sim.models.precision.casts import casts_apart
from sim.models.serving.latents import (
    LatentHeads,
    absorbed_core,
    context_gathered,
    context_merged,
    keys_joined,
    latents_joined,
    queries_joined,
    served_latent_norm,
)
from sim.models.serving.operators import (
    ServingDims,
    norm_quantizes,
    prefill_attention,
    rope_cache,
    served_linear,
    unfused_attention,
)

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

LATENT_HEADS = 16  # assumption: however many heads read one latent, their kernel is as efficient as with so many


class LatentAttention(Struct, frozen=True):
    """Sizes of the whole model. `query_rank` None: queries are not compressed. A query or key head has a part without
    rope and a part with it; the keys' part with rope is shared by all heads. `gate`: a sigmoid of every number
    multiplies the result (Hunyuan 4), one of each head and token (`per_head`: Ling 3), or one that is projected with
    the query from its latent, normed and not, joined (`latent`: A.X K2). `sinks`: a learned score of each head. `rope`
    false: no rope on the second part (Kimi Linear)."""

    part: ClassVar = ModelPart.ATTENTION

    hidden: int
    heads: int
    query_rank: int | None
    latent_rank: int
    plain_width: int
    rope_width: int
    value_width: int
    gate: Literal[False, True, "per_head", "latent"] = False
    sinks: bool = False
    rope: bool = True

    @property
    def widths(self) -> tuple[int, int]:
        """Width of a query or key head, and of a value head."""
        return self.plain_width + self.rope_width, self.value_width

    @property
    def shared_width(self) -> int:
        """Numbers of a token that all heads read in multi-query mode: its latent and its rope key."""
        return self.latent_rank + self.rope_width

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """All matrices on one of `tp` ranks."""
        return (*self._gate(tp), *self.projections(tp))

    def _gate(self, tp: int) -> tuple[Matrix, ...]:
        if self.gate in (False, "latent"):
            return ()
        return (Matrix("head_gate", self.hidden, (self._gates(ceil_div(self.heads, tp)),), "column"),)

    def _gates(self, heads: int) -> int:
        return heads if self.gate == "per_head" else heads * self.value_width

    def projections(self, tp: int) -> tuple[Matrix, ...]:
        """Queries', keys' and values', and the output's; those to the latents are whole on every rank."""
        heads, (query_width, _) = ceil_div(self.heads, tp), self.widths
        return (
            *self._query(heads * query_width, heads * self.value_width),
            Matrix("kv_down", self.hidden, (self.latent_rank + self.rope_width,), "plain", module="qkv_linear"),
            Matrix("kv_up", self.latent_rank, (heads * (self.plain_width + self.value_width),), "column"),
            Matrix(
                "attention_out",
                heads * self.value_width,
                (self.hidden,),
                "row",
                target="attention_out",
                module="attn_proj",
            ),
        )

    def _query(self, width: int, gates: int) -> tuple[Matrix, ...]:
        if self.query_rank is None:
            return (Matrix("query", self.hidden, (width,), "column", module="qkv_linear"),)
        down = Matrix("query_down", self.hidden, (self.query_rank,), "plain", module="qkv_linear")
        joined = self.gate == "latent"
        inputs, outputs = (2 * self.query_rank, width + gates) if joined else (self.query_rank, width)
        return down, Matrix("query_up", inputs, (outputs,), "column")

    def core(self, d: Dims) -> Core:
        """Shapes of the attention on one rank's tokens: in training every head has keys and values of its own."""
        heads = ceil_div(self.heads, d.tp)
        return Core(d.seq, d.seq, heads, heads, *self.widths, sinks=self.sinks)

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Down-projections (whole on every rank), latent norms, up-projections (split by heads), rope, core, output.

        With sequence parallelism the latents are gathered instead of the hidden state: fewer bytes.
        """
        return self.expanded(scenario, d, shard, self.core(d))

    def expanded(self, scenario: Scenario, d: Dims, shard: Shard, own: Core) -> tuple[Operator, ...]:
        """`train` with a core of the shapes `own`: keys and values of every head."""
        *query, kv_down, kv_up, out = self.projections(d.tp)
        heads = ceil_div(self.heads, d.tp)
        norms_again = d.saves_originals and runs_again(scenario, "layernorm")

        def layer(matrix: Matrix, save_input: bool = True) -> Linear:
            plain = matrix.split == "plain"  # of what the layer's norm gives
            found = matrix.linear(d.rows if plain else d.tokens, save_input)
            return replace(found, wide=True, original=norms_again) if plain else found

        queries = [linear(d, layer(matrix)) for matrix in query]
        if self.query_rank is not None:
            queries[1:1] = self._normed(d, self.query_rank)
        # What reads the first query matrix's input, which that one keeps, or under autocast a copy of its own.
        apart = casts_apart(d)
        gates = [linear(d, layer(matrix, apart)) for matrix in self._gate(d.tp)]
        core = self._with_sinks(d, attention_core(scenario, d, shard, own), own)
        # a value is cut from what also makes its key, which is assembled anew
        if d.framework.keeps_merged_outputs and d.fused_attention:
            core = keeping(core, "keys without rope", d.tokens * heads * self.plain_width * d.act_bytes)
        core = output_copied(d, core, d.tokens * out.inputs)
        raised = (
            linear(d, layer(kv_up)),
            *self.rotary(d, heads),
            self._assembled(d, heads),
            *query_factor(d, d.tokens * heads * self.widths[0]),
        )
        return (
            *queries[:-1],
            *(inside("mla_up_proj", queries[-1:]) if self.query_rank is not None else queries[-1:]),
            linear(d, layer(kv_down, apart)),
            latent_norm(d, "kv", self.latent_rank),
            *inside("mla_up_proj", raised),
            *gates,
            core,
            *self.gating(d),
            linear(d, replace(out.linear(d.tokens), original=d.saves_originals)),
        )

    def rotary(self, d: Dims, heads: int) -> tuple[Operator, ...]:
        """The rope of every head's query and of the shared key; nothing without positions."""
        return (rope_of_latents(d, d.tokens * (heads + 1) * self.rope_width),) if self.rope else ()

    def _normed(self, d: Dims, rank: int) -> tuple[Operator, ...]:
        """The norm of the query's latent, and both joined where gates come from them."""
        normed = latent_norm(d, "query", rank)
        return (normed, copied("query_join", d, 2 * d.rows * rank)) if self.gate == "latent" else (normed,)

    def _with_sinks(self, d: Dims, core: Operator, own: Core) -> Operator:
        """Sinks are fp32, so that separate operators make the softmax in fp32, too, and keep it and its cast."""
        if not self.sinks:
            return core
        core = replace(core, params=own.heads)
        if d.fused_attention or not d.framework.softmax_in_fp32 or d.act_bytes == FP32_BYTES:
            return core
        return keeping(core, "softmax output in fp32", d.tokens * own.heads * (own.kv_len + 1) * FP32_BYTES)

    def gating(self, d: Dims) -> tuple[Operator, ...]:
        """The gate on the result; nothing without one."""
        heads = ceil_div(self.heads, d.tp)
        elements = d.tokens * heads * self.value_width
        if self.gate == "per_head":
            return (head_gate(d, elements, d.tokens * heads),)
        return (element_gate(d, elements, self.gate == "latent"),) if self.gate else ()

    def _assembled(self, d: Dims, heads: int) -> Operator:
        """Queries and keys from their two parts, the shared rope key (gathered first) copied to every head; values,
        which lie among keys, copied out of them where a framework does not keep both. Backward: the gradients of both
        projections' outputs from those of their parts, and that of the rope key summed over heads.

        Every rank has its heads' gradients of that key, which are summed: by the reduce-scatter that answers the
        gather, or without sequence parallelism, where nothing is gathered, by an all-reduce.
        """
        (query, _), n, e = self.widths, d.tokens * heads, d.act_bytes
        by_rope = d.framework.assembles_in_latent_rope and self.rope
        ahead, back = self._written_by_rope(d, n) if by_rope else self._joined(d, n)
        forward: Program = (ahead,)
        backward: Program = (back,)
        if d.tp > 1:
            size, summed = d.tokens * self.rope_width * e, "reduce_scatter" if d.sp else "all_reduce"
            forward = (*((collective("rope_key_gather", "all_gather", size, F),) if d.sp else ()), *forward)
            backward = (*backward, collective(f"rope_key_grad_{summed}", summed, size, I))
        return Operator("assemble_qk", forward, backward, backward_bytes=4 * n * query * e)

    def _joined(self, d: Dims, n: float) -> tuple[Compute, Compute]:
        """Copies of `n` heads' queries, keys and, if need be, values, each by its own kernel, and their gradients."""
        (query, value), e = self.widths, d.act_bytes
        if d.framework.runs_model_code and d.framework.puts_into_latent_keys:
            return put_into_keys(d, n, self.plain_width, self.rope_width, value, d.tokens * self.shared_width)
        copied = 0 if d.framework.keeps_merged_outputs else n * value
        elements, joined = 2 * n * query + copied, n * (query + self.plain_width + value)
        back = (2 * joined + n * self.rope_width) * e
        # torch.cat of parts that lie apart in their heads; what a compiler generates in its place streams.
        kernel, single = ("", 0.0) if d.framework.fuses_chains else ("cat", 1.0)
        ahead = memory_op("assemble_qk", F, "copy", elements, 2 * elements * e, d.act, 3 if copied else 2, kernel)
        behind = memory_op("assemble_qk_backward", I, "copy", joined, back, d.act, 3, kernel)
        return replace(ahead, single_elements=single * elements), replace(behind, single_elements=single * joined)

    def _written_by_rope(self, d: Dims, n: float) -> tuple[Compute, Compute]:
        """The kernel of rope for the shared key, as far as it moves more than that key: for `n` heads it reads keys
        without rope and values, and writes whole keys and values; backward the other way round
        (`assembles_in_latent_rope`, Megatron-Core's rotary_fwd_kv_kernel and rotary_bwd_kv_kernel). Queries are
        rotated in place."""
        query, value = self.widths
        moved = n * (self.plain_width + value + query + value) * d.act_bytes
        names = (("assemble_qk", F), ("assemble_qk_backward", I))
        ahead, back = (memory_op(name, phase, "copy", n * (query + value), moved, d.act) for name, phase in names)
        return ahead, back

    def other_parameters(self) -> int:
        """Weights of the norms of both latents, and sinks."""
        return (self.query_rank or 0) + self.latent_rank + (self.heads if self.sinks else 0)

    def seen_keys(self, length: int) -> float | None:
        """None: a query sees all keys before it."""
        return None

    def key(self, seq_len: int) -> str:
        """Nothing: all its sizes are the model's."""
        return ""

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices, forward and backward: see `attention_flops`."""
        return attention_flops(self.heads, self.widths, self.seen_keys(seq_len), seq_len, causal_half)

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Cache of a sequence of `length` tokens on every rank: whole latents and shared rope keys."""
        return self.entry_bytes(d) * length

    def entry_bytes(self, d: ServingDims) -> float:
        """Bytes of a token in the cache."""
        return self.shared_width * d.kv_bytes

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Return what depends on an iteration's number of tokens alone, up to the sum over tp; the latent is expanded
        in the attention."""
        *projected, _, out = self.served_matrices(d)
        if d.latents.merged_down:
            projected = self._with_one_down(projected, d.tp)
        normed = norm_quantizes(d, tokens)  # what the norm before attention writes, not the latents' own norms
        items = [i for m in projected for i in served_linear(d, m, tokens, normed and m.inputs == self.hidden)]
        ranks = (("query_norm", self.query_rank), ("kv_norm", self.latent_rank))
        norms = [served_latent_norm(d, name, tokens, rank) for name, rank in ranks if rank is not None]
        heads = tokens * ceil_div(self.heads, d.tp)
        gate: Program = (served_element_gate(d, heads * self.value_width),) if self.gate else ()
        if self.gate == "per_head":
            gate = (served_head_gate(d, heads * self.value_width, heads),)
        own, cached = self.rotated_width(d.tp), self.latent_rank + self.rope_width
        widths = (own - self.latent_rank, cached) if d.latents.cache_apart else (own,)
        rope = [rope_cache(d, tokens, width) for width in widths]
        joined = latents_joined(d, tokens, self._heads(d.tp))
        return (*items, *norms, *joined, *rope, *gate, *served_linear(d, out, tokens))

    def served_matrices(self, d: ServingDims) -> tuple[Matrix, ...]:
        """The matrices, as many of them merged as an engine merges beside those to the latents."""
        return self.matrices(d.tp)

    def _with_one_down(self, projected: list[Matrix], tp: int) -> list[Matrix]:
        """The matrices with those to both latents as one, where queries have a latent, too."""
        if self.query_rank is None:
            return projected
        query_down, _, kv_down, *_ = self.projections(tp)
        down = (query_down, kv_down)
        widths = tuple([m.width for m in down])
        return [Matrix("latents_down", self.hidden, widths, "plain"), *[m for m in projected if m not in down]]

    def rotated_width(self, tp: int) -> int:
        """Numbers of a token that the rope-and-cache kernel of serving engines reads and writes: rope's parts of the
        queries, in their place, and what is cached."""
        rotated = ceil_div(self.heads, tp) * self.rope_width if self.rope else 0
        return rotated + self.latent_rank + self.rope_width

    def _heads(self, tp: int) -> LatentHeads:
        widths = (self.plain_width, self.rope_width, self.value_width, self.latent_rank)
        return LatentHeads(ceil_div(self.heads, tp), *widths)

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token's queries, keys and values in prefill, on one rank."""
        return 3 * ceil_div(self.heads, tp) * self.widths[0]

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, each the last of the `kv_len` that they see: over keys and values of
        every head, or as decode where the engine attends so (`ServedLatents.absorbs`)."""
        h, up, tokens, cached = self._heads(d.tp), self.matrices(d.tp)[-2], batch * q_len, batch * (kv_len - q_len)
        if d.fused_attention and d.latents.absorbs(tokens, cached):
            absorb, expand = self._absorbing(d, tokens)
            core = absorbed_core(d, batch, q_len, kv_len, h, self.entry_bytes(d))
            return (*absorb, *queries_joined(d, tokens, h), core, *expand)
        return (
            *context_gathered(d, cached, h, self.entry_bytes(d)),
            *served_linear(d, up, batch * kv_len),
            keys_joined(d, batch * kv_len, h),
            *prefill_attention(d, batch, Core(q_len, kv_len, h.number, h.number, *self.widths), "latent"),
            *(context_merged(d, tokens, h) if cached else ()),
        )

    def _absorbing(self, d: ServingDims, tokens: int) -> tuple[Program, Program]:
        """The up-projection of keys taken to the queries, and that of values to the result: batched over heads, in fp8
        behind a kernel that quantizes where the engine does so, or with weights that two kernels convert."""
        heads, rank = ceil_div(self.heads, d.tp), self.latent_rank

        def product(name: str, n: int, k: int) -> Program:
            if d.latents.absorbed == "narrow":
                return self._narrow(d, name, tokens, n, k, heads)
            own = gemm(name, F, tokens, n, k, d.act, heads, kernel="absorbed")
            if d.latents.absorbed == "wide":
                return (own,)
            weights = heads * n * k
            widened = memory_op(f"{name}_widen", F, "cast", weights, weights * (1.0 + d.act_bytes), d.act)
            return widened, memory_op(f"{name}_scale", F, "elementwise", weights, 2 * weights * d.act_bytes, d.act), own

        return product("query_absorb", rank, self.plain_width), product("value_expand", self.value_width, rank)

    @staticmethod
    def _narrow(d: ServingDims, name: str, tokens: int, n: int, k: int, heads: int) -> Program:
        """A product `[tokens, k] x [k, n]` of each of `heads` in fp8, whose input is quantized first."""
        rows = tokens * heads
        moved = rows * k * (d.act_bytes + 1.0)
        cast = memory_op(f"{name}_quantize", F, "cast", rows * k, moved, d.act, kernel="quantize")
        return cast, gemm(name, F, tokens, n, k, "fp8", heads, rows * n * d.act_bytes, kernel="absorbed")

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` new tokens of each of `batch` sequences against a cache of `kv_len`: bound by reading it once."""
        heads, rank, tokens = ceil_div(self.heads, d.tp), self.latent_rank, batch * queries
        absorb, expand = self._absorbing(d, tokens)
        if not d.fused_attention:
            shared = Core(queries, kv_len, heads, 1, self.shared_width, rank)
            return (*absorb, *unfused_attention(d, batch, shared), *expand)
        latent = batch * kv_len * self.entry_bytes(d)  # values are part of what was read as keys
        widths = float(tokens * heads * (self.shared_width + rank))
        shape = (batch, heads, 1, kv_len, self.shared_width)
        moved = latent + widths * d.act_bytes
        cache = "latent" if self.entry_bytes(d) >= 2.0 * self.shared_width else "latent_fp8"
        core = Compute("attention", ATTENTION_DECODE, shape, d.act, 2.0 * widths * kv_len, moved, F, kernel=cache)
        return (*absorb, *queries_joined(d, tokens, self._heads(d.tp)), core, *expand)


def latent_norm(d: Dims, name: str, rank: int) -> Operator:
    """The RMS norm of a latent of `rank` numbers, on the rank's own rows."""
    return norm(d, f"{name}_latent_norm", "rmsnorm", d.rows, rank)
