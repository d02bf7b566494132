"""Kernels that put a matmul's operands into its 8- or 4-bit format, as the recipe of a step runs them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from sim.core.program import Compute, Phase, Program
from sim.models.dims import Dims, ceil_div
from sim.models.operators import F, I, Operator, W, collective, memory_op
from sim.variants.recipes import NOTHING, TRANSPOSE, Pass, Recipe


def saved_element_bytes(d: Dims) -> float:
    """A linear layer keeps its input in the dtype its weight gradient reads (8 bits where the recipe keeps such)."""
    return min(d.act_bytes, d.linear_bytes) if d.recipe is not None and d.recipe.keeps_quantized else d.act_bytes


def gathered_element_bytes(d: Dims) -> float:
    """Return the bytes of an element that sequence parallelism gathers. Transformer Engine quantizes before it gathers,
    whatever the format (`gather_along_first_dim` with a quantizer, transformer_engine/pytorch/distributed.py)."""
    return min(d.act_bytes, d.linear_bytes) if gathers_quantized(d) else d.act_bytes


def gathers_quantized(d: Dims) -> bool:
    return d.recipe is not None and d.recipe.gathers_quantized


def casts(d: Dims, name: str, phase: Phase, elements: float) -> Program:
    """Quantizing a 16-bit tensor for the matmul that comes next."""
    return () if d.recipe is None else _kernels(d, f"{name}_cast", phase, elements, d.recipe.activations)


def input_casts(
    d: Dims,
    name: str,
    elements: float,
    normed: bool,
    original: bool = False,
    cut_rows: int = 0,
    step: Pass | None = None,
) -> Program:
    """`casts` of a matmul's input, by `step` where that is given; `normed`: a norm has made it. `original`: the forward
    needs one order alone, as the 16-bit input is kept and quantized again (`casts_again`). `cut_rows`: rows of which
    each rank of tp has a part."""
    if d.recipe is None:
        return ()
    step = step or _step(d.recipe, normed)
    step = step._replace(copies=1) if original else step
    return _agreeing(d, name, F, elements, step, _agreed_bytes(d.recipe, cut_rows))


def _agreed_bytes(recipe: Recipe, rows: int) -> float:
    """Bytes of the largest values that ranks agree on when each has a part of `rows` rows that a matmul reads along."""
    return float(rows * recipe.agreed_row_bytes or (recipe.agreed_bytes if rows and recipe.agrees_everywhere else 0))


def _agreeing(
    d: Dims, name: str, phase: Phase, elements: float, step: Pass, agreed_bytes: float, tensors: int = 1
) -> Program:
    """The kernels of a cast. `agreed_bytes`: between the pass that finds the largest value, unless a norm has found it,
    and the cast the ranks of tp agree on that value, or on those of rows, once for each of `tensors`. A kernel that
    finds the values of rows and casts these at once becomes two."""
    if d.recipe is None or d.tp == 1 or not agreed_bytes:
        return _kernels(d, f"{name}_cast", phase, elements, step)
    found: Program = ()
    if step.sixteen == 1 and d.recipe.agreed_row_bytes:
        found = _kernels(d, f"{name}_largest", phase, elements, Pass(1, 0, 1))
    elif step.sixteen > 1:
        found = _kernels(d, f"{name}_largest", phase, elements, Pass(1, 0, 1))
        step = step._replace(sixteen=step.sixteen - 1, kernels=step.kernels - 1)
    agreed = (collective(f"{name}_largest_all_reduce", "all_reduce", agreed_bytes, phase),) * tensors
    return (*found, *agreed, *_kernels(d, f"{name}_cast", phase, elements, step))


def _step(recipe: Recipe, normed: bool) -> Pass:
    return recipe.after_norm if normed and recipe.after_norm is not None else recipe.activations


def casts_again(d: Dims, name: str, elements: float, original: bool = False) -> Program:
    """Return what of a tensor is quantized only for the weight gradient, which frozen weights have not. `original`: the
    whole input once more, with one scale in both orders, else by columns alone (Transformer Engine 2.6,
    module/linear.py and grouped_linear.py: `save_original_input`)."""
    if d.recipe is None or d.lora is not None:
        return ()
    if original:
        step = d.recipe.activations
        step = step if d.recipe.one_scale else step._replace(copies=1)
        return _kernels(d, f"{name}_cast_again", I, elements, step)  # before a matmul that may be delayed
    made = _kernels(d, f"{name}_cast_again", W, elements, d.recipe.activations_again)
    return _of_other_order(d.recipe, made)


def gradient_casts(d: Dims, name: str, elements: float, cut: int = 0, cut_rows: int = 0) -> Program:
    """Quantizing the gradient of a matmul's output for both of its products. `cut`: of how many outputs each rank of tp
    has a part; `cut_rows`: rows of each."""
    if d.recipe is None:
        return ()
    agreed = _agreed_bytes(d.recipe, cut_rows if cut else 0)
    made = _agreeing(d, f"{name}_grad", I, elements, d.recipe.activations, agreed, cut)
    return made + casts_again(d, f"{name}_grad", elements)


def gather_casts(d: Dims, name: str, phase: Phase, elements: int, normed: bool = False) -> tuple[Program, Program]:
    """Return what quantizes `elements` before they are gathered, a rank's own, and after. `normed`: a norm has made
    them.

    With one scale a tensor is gathered in one order, and the other made of it by `transposes`.
    """
    if d.recipe is None or not d.recipe.gathers_quantized:
        return (), casts(d, name, phase, elements)
    step = _step(d.recipe, normed)
    if d.recipe.one_scale:
        step = step._replace(copies=1) if step.sixteen else NOTHING
    return _agreeing(d, name, phase, ceil_div(elements, d.tp), step, float(d.recipe.agreed_bytes)), ()


def transposes(d: Dims, name: str, elements: float) -> Program:
    """The other order of what was gathered in the format, for the weight gradient (Transformer Engine on Hopper:
    "the rowwise tensor is gathered first, then transposed", fp8_current_scaling.rst)."""
    needed = d.recipe is not None and d.recipe.gathers_quantized and d.recipe.one_scale and d.quantized_copies > 1
    return _kernels(d, f"{name}_transpose", W, elements, TRANSPOSE) if needed else ()


def weight_casts(d: Dims, name: str, size: float, cut: int = 0, cut_rows: int = 0) -> Program:
    """Quantizing weights in the forward. Where they are kept (Transformer Engine), once a step, in its first
    micro-batch: counted at 1/micro-batches in each; what ZeRO-3 gathers for each micro-batch in 16 bits is quantized
    as often, what it gathers in the format on each rank's own shard. Frozen weights are quantized as often, unless
    they are parameters in the format.

    8-bit parameters arrive by rows, and their other order is made of them once a step (Transformer Engine,
    tensor/utils.py: `post_all_gather_processing`); those in MXFP8 arrive in 16 bits and are cast (Megatron-Core,
    distributed/param_and_grad_buffer.py: `finish_param_sync` with `reuse_grad_buf_for_mxfp8_param_ag`).

    `cut`: of how many weights each rank of tp has a part, on whose scales the ranks agree if `agrees_everywhere`;
    `cut_rows`: rows of a weight, along which the forward reads it, of which each has a part. Left out: where FSDP
    gathers 8 bits, its ranks agree instead (torchao float8/fsdp_utils.py: `fsdp_pre_all_gather`), ahead of the gather.
    """
    if d.recipe is None:
        return ()
    if d.eight_bit_parameters and gathers_parameters(d.recipe):
        return _weights(d, f"{name}_weight_transpose", F, size, TRANSPOSE)
    agreed = _agreed_bytes(d.recipe, cut_rows if d.recipe.agreed_row_bytes else cut)
    if agreed and d.weight_shards == 1:
        return _agreeing(d, f"{name}_weight", F, size, d.recipe.weights, agreed, cut)
    return _weights(d, f"{name}_weight_cast", F, size, d.recipe.weights)


def gathers_parameters(recipe: Recipe) -> bool:
    """Tell whether 8-bit parameters are gathered in 8 bits. Those scaled by 32 numbers are not, as the shards of a flat
    buffer do not end where their columns' scales do."""
    return recipe.format == "fp8"


def weight_casts_again(d: Dims, name: str, size: float, cut: int = 0, cut_rows: int = 0) -> Program:
    """The other order of weights, where it is made in the backward; of frozen ones in each
    (`Dims.transposes_frozen`). `cut`: of how many weights each rank of tp has a part of the rows that the backward
    reads, `cut_rows` of each, on whose scales the ranks agree."""
    if d.recipe is None:
        return ()
    if d.transposes_frozen:
        moved = 2 * d.quantized_weight_element_bytes * size
        return (memory_op(f"{name}_weight_transpose", I, "cast", size, moved, d.act, 1, d.recipe.kernel),)
    made = _of_other_order(d.recipe, _weights(d, f"{name}_weight_cast_again", I, size, d.recipe.weights_again))
    if not (made and cut and d.tp > 1 and d.recipe.agreed_row_bytes):
        return made
    found = _kernels(d, f"{name}_weight_largest", I, size, Pass(1, 0, 1))  # its rows' kernel becomes two
    agreed = float(cut_rows * d.recipe.agreed_row_bytes)
    return (*found, *(collective(f"{name}_weight_largest_all_reduce", "all_reduce", agreed, I),) * cut, *made)


def _of_other_order(recipe: Recipe, made: Program) -> Program:
    """The kernels of a tensor's other order, by the name that a profile knows them by."""
    return tuple(replace(x, kernel=recipe.again) for x in made if isinstance(x, Compute)) if recipe.again else made


def _weights(d: Dims, name: str, phase: Phase, size: float, step: Pass) -> Program:
    if d.recipe is None or (d.lora is not None and d.eight_bit_parameters):
        return ()
    times, bytes_ = 1.0 / d.quantized_for if d.recipe.caches_weights else 1.0, d.quantized_weight_element_bytes
    if d.weight_shards > 1 and phase is I:  # the other order is made of the gathered copy
        step, times = TRANSPOSE, 1.0
    elif d.weight_shards > 1:
        size, times = size / d.weight_shards, 1.0
    return _kernels(d, name, phase, size, step, times, bytes_, d.weight_copies)


def _kernels(
    d: Dims,
    name: str,
    phase: Phase,
    elements: float,
    step: Pass,
    times: float = 1.0,
    copy_bytes: float | None = None,
    orders: int | None = None,
) -> Program:
    """`times` a micro-batch. `copy_bytes`: an element in the format. `orders`: how many are read, an activation's if
    None; a second one is not written where nobody reads it."""
    orders = d.quantized_copies if orders is None else orders
    if d.recipe is None or step == NOTHING or not elements:
        return ()
    if step == TRANSPOSE and orders == 1:
        return ()
    copies = min(step.copies, orders) + step.read_copies
    in_format = copies * (d.linear_bytes if copy_bytes is None else copy_bytes)
    moved = elements * (step.sixteen * d.act_bytes + in_format) * times
    cast = memory_op(name, phase, "cast", elements, moved, d.act, step.kernels, d.recipe.kernel)
    return (replace(cast, flops=cast.flops * times, share=times),)


def quantized_weight_bytes(d: Dims, parts: Iterable[Operator]) -> float:
    """Weights in the matmuls' 8- or 4-bit format, kept beside the 16-bit ones: by rows for the forward and by columns
    for the backward.

    Transformer Engine quantizes a weight in a step's first micro-batch and keeps both (`get_weight_workspace` in its
    module/base.py, tensor/float8_blockwise_tensor.py). Parameters that are in the format themselves take the same.
    """
    return cached_weight_bytes(d) * sum(_matrices(parts))


def cached_weight_bytes(d: Dims) -> float:
    """Return the bytes of an element of these weights, in all orders that are kept."""
    if d.recipe is None or not d.recipe.caches_weights:
        return 0.0
    return d.weight_copies * d.quantized_weight_element_bytes


def passing_weight_bytes(d: Dims, parts: Iterable[Operator]) -> float:
    """Return what torchao holds of them: a copy of the matrix that a matmul is about to read."""
    if d.recipe is None or d.recipe.caches_weights:
        return 0.0
    return d.quantized_weight_element_bytes * max(_matrices(parts), default=0)


def _matrices(parts: Iterable[Operator]) -> list[int]:
    return [p.matrix_elements for p in parts]
