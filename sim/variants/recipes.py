"""Recipes of 8- and 4-bit training: what has a scale of its own, which kernels quantize, what is kept and gathered.

`training.fp8_recipe` names one; which kernels a recipe is made of depends on who quantizes (`Framework.quantizer`):
`te`, Transformer Engine, or `torchao` under torch.compile. Embedding, output layer, norms, attention and routers stay
in 16 bits in all of them (the output layer unless `training.fp8_output_proj`, attention unless
`training.fp8_dot_product_attention`), and so does a matmul's result.

A matmul of 8-bit numbers reads both operands along the dimension that it sums over. The forward `X W'` wants rows of X
and W; the gradients `dY W` and `dY' X` want columns of W, dY and X. So a tensor is quantized in two orders: where one
scale serves all of it they are one set of numbers and its transpose, else they differ. `Pass` counts what each kernel
moves. Sources: Transformer Engine's documentation of low-precision training (docs/features/low_precision_training) and
common/recipe; torchao's own count of its kernels' traffic (torchao/testing/training/roofline_utils.py:
`get_tensor_memory_traffic_ovhd_s`), whose bytes an element are met exactly (`tests/sim/models/test_recipes.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.keys import Named
from sim.variants.frameworks.records import framework_of

RecipeName = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
Operand = Literal["activations", "weights"]  # of a matmul; gradients of its output are activations


class Pass(NamedTuple):
    """Kernels that quantize a tensor. Accesses an element: `sixteen` reads or writes of 16 bits, `copies` written in
    the matmuls' format, `read_copies` read in it."""

    sixteen: int
    copies: int
    kernels: int
    read_copies: int = 0


NOTHING = Pass(0, 0, 0)
TRANSPOSE = Pass(0, 1, 1, 1)


class FormerRecipe(Struct, frozen=True, forbid_unknown_fields=True):
    """What releases before the month `until` did in another way (None: the same), and who says so."""

    until: str
    source: str
    activations: Pass | None = None
    after_norm: Pass | None = None
    quantizes_groups: bool | None = None
    grouped_activations: Pass | None = None
    swizzled_apart: tuple[Operand, ...] | None = None
    swizzled_together: int | None = None
    fuses_experts: bool | None = None


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """One recipe as one library runs it.

    `scaled`: what has a scale of its own, for people. `one_scale`: a whole tensor has, so that its other order is its
    transpose, which a GPU that reads both orders does without. `from_history`: the scale is of the largest values of
    steps before, so that it is known before the tensor is. `scale_bytes`: of an element's share in a scale, of
    activations and of weights, beside those of the format itself. `activations`: a matmul's input in the forward and,
    with `activations_again`, the output's gradient in the backward; `activations_again`: what of the input is left to
    the backward; `after_norm`: of an input that a norm makes, whose kernel does part of it (TE
    csrc/extensions/normalization.cpp: FULLY_FUSED, FUSED_NORM_AMAX_FP8). `weights`, `weights_again` likewise.
    `keeps_quantized`: the input is kept for its weight gradient in the format, else in 16 bits. `caches_weights`: they
    are quantized once a step and kept. `gathers_quantized`: sequence parallelism gathers what is quantized.
    `shards_quantized`: FSDP gathers layers' matrices in the format. `kernel`: the matmul where it is not the usual one,
    whose gradients' sums leave Hopper's tensor cores to be added in fp32. `again`: the kernel of the other order, where
    it has a speed of its own. `quantizes_groups`: one kernel quantizes the operands of all groups of a grouped matmul
    (TE `nvte_multi_cast_transpose`, `nvte_group_hadamard_transform_amax` and its like), else each has its own.
    `grouped_activations`: of a grouped matmul, where they are others than `activations`.
    `launches_for_scale`: in a grouped matmul, kernels on one number that each operand's scale takes besides.
    `agreed_bytes`: of a tensor's largest values, on which tensor-parallel ranks that have its parts agree by an
    all-reduce before they cast it: of what sequence parallelism gathers (TE module/linear.py:
    `with_amax_reduction`) and, with `agrees_everywhere`, of every input, weight and output's gradient that is cut,
    because a DTensor's largest value is one of all its shards (torchao float8_tensor_parallel.py, float8_linear.py;
    `tests/real/test_largest_values.py`). `agreed_row_bytes`: of the largest value of each row, as a matmul reads it, on
    which they agree likewise where each has a part of the row.
    `numbers_of_swizzled_scale`: of one scale, where matmuls read scales in an order of their own; 0: they do not.
    `swizzled_apart`: operands whose scales a kernel before each matmul brings into that order; others' casts write them
    so (`sim.models.precision.swizzles`). `swizzled_together`: groups of a grouped matmul that share such a kernel.
    `fuses_experts`: kernels of fused experts multiply in it and, where `after_activation` is nothing, quantize what
    they make; else they write 16 bits: that pass quantizes the activation's result, `activations` both halves'
    gradients, and the matmuls' inputs are kept in both orders (TE ops/fused/grouped_mlp.py: "NVFP4 generic GEMM
    fallbacks need the full grouped tensor state").
    `in_prediction`: it holds in modules that predict further tokens, too; else these stay in 16 bits.
    `has_attention`: it quantizes for attention in 8 bits, too; with others that takes current scaling.
    """

    name: RecipeName
    quantizer: str
    format: str
    scaled: str
    activations: Pass
    weights: Pass
    since: str
    source: str
    after_norm: Pass | None = None
    activations_again: Pass = NOTHING
    weights_again: Pass = NOTHING
    one_scale: bool = False
    from_history: bool = False
    scale_bytes: float = 0.0
    weight_scale_bytes: float = 0.0
    keeps_quantized: bool = True
    caches_weights: bool = True
    gathers_quantized: bool = True
    shards_quantized: bool = False
    kernel: str = ""
    again: str = ""
    quantizes_groups: bool = False
    grouped_activations: Pass | None = None
    launches_for_scale: int = 0
    agreed_bytes: int = 0
    agrees_everywhere: bool = False
    in_prediction: bool = True
    agreed_row_bytes: int = 0
    has_attention: bool = False
    numbers_of_swizzled_scale: int = 0
    swizzled_apart: tuple[Operand, ...] = ()
    swizzled_together: int = 64
    fuses_experts: bool = False
    after_activation: Pass = NOTHING
    former: tuple[FormerRecipe, ...] = ()  # newest first

    @property
    def of_groups(self) -> Recipe:
        """The recipe as a grouped matmul runs it."""
        return self if self.grouped_activations is None else replace(self, activations=self.grouped_activations)

    def at(self, date: str | None) -> Recipe:
        """The recipe as it was in a month or on a day; None: as it is."""
        own = self
        for former in self.former:
            if date is not None and date < former.until:
                facts = {k: v for k in _CHANGED if (v := getattr(former, k)) is not None}
                own = replace(own, **facts)
        return own


_CHANGED = tuple(k for k in FormerRecipe.__struct_fields__ if k not in ("until", "source"))
_FILE = Path(__file__).parents[1] / "presets" / "recipes.yaml"
_RECORDS = msgspec.yaml.decode(_FILE.read_bytes(), type=list[Recipe])
RECIPES: dict[tuple[str, str], Recipe] = {(r.quantizer, r.name): r for r in _RECORDS}
SHARED = ("nvfp4",)  # formats that torchao has no recipe of its own for: Transformer Engine's stands


class Quantized(Named, Protocol):
    """The part of a scenario that names a recipe: `training`."""

    @property
    def precision(self) -> str: ...
    @property
    def fp8_recipe(self) -> str | None: ...


def known_recipes(framework: Framework, precision: str) -> list[Recipe]:
    """Return what a framework has for matmuls in `precision`, its default first; none for 16 bits and more."""
    own = [r for r in _RECORDS if r.format == precision and r.quantizer == framework.quantizer]
    found = own or [r for r in _RECORDS if r.format == precision and precision in SHARED]
    return sorted(found, key=lambda r: r.name != framework.fp8_recipe)


def recipe_of(training: Quantized) -> Recipe | None:
    """The record that `training` means, as it was on `training.software_date`: the one it names, else its framework's
    default; None without 8-bit matmuls.

    Raises:
        InputError: if the framework has no such recipe for the precision.
    """
    found = known_recipes(framework_of(training), training.precision)
    if training.fp8_recipe is None:
        return found[0].at(training.software_date) if found else None
    for recipe in found:
        if recipe.name == training.fp8_recipe:
            return recipe.at(training.software_date)
    where = f"framework {training.framework} and precision {training.precision}"
    low = list(dict.fromkeys(r.format for r in _RECORDS if known_recipes(framework_of(training), r.format)))
    if found:
        meant = f"; it goes with training.precision {training.fp8_recipe}" if training.fp8_recipe in low else ""
        allowed = ", ".join(r.name for r in found)
        raise InputError(f"found '{training.fp8_recipe}'; allowed with {where}: {allowed}{meant}")
    raise InputError(
        f"found '{training.fp8_recipe}'; with {where} nothing is scaled: leave the key out (null), "
        f"or set training.precision to {' or '.join(low)}"
    )
