"""CUDA's automatic mixed precision for tensors on the CPU.

`torch.autocast("cpu")` casts other operators than CUDA's autocast. So this module applies CUDA's lists (torch's
aten/src/ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_PROMOTE). Attention and dropout use the GPU's kernels, which the CPU's dispatch would not choose.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from calibrate.capture.gpu.attention import HALF, attention
from calibrate.capture.gpu.recurrent import CELLS, RECURRENT, recurrent
from calibrate.capture.gpu.rms_norm import rms_norm


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _names(
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
    "prelu addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv linalg_vecdot linear addbmm "
    "baddbmm bmm chain_matmul linalg_multi_dot scaled_dot_product_attention multi_dot "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
).union(RECURRENT)
FP32 = _names(
    "__pow__ __rpow__ __rdiv__ __rtruediv__ acos asin cosh erfinv exp expm1 log log10 log2 log1p "
    "reciprocal rsqrt sinh tan pow softplus layer_norm native_layer_norm group_norm frobenius_norm "
    "nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp rms_norm "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
)
OPTIONAL_FP32 = _names("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm norm sum")
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot cat stack")
LISTED = LOWER | FP32 | OPTIONAL_FP32 | WIDEST
GROUPED = ("grouped_mm", "_grouped_mm")
OF_DATA = ("tensor", "as_tensor")
ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}  # aten/src/ATen/autocast_mode.cpp: autocast_dtype


class CudaOperators(TorchFunctionMode):
    """Applies CUDA's autocast, with its cache of cast weights, and operators that exist only on a GPU.

    `dtype` None: autocast is off. `on_gpu` False: operators are those of the CPU.
    """

    def __init__(self, dtype: torch.dtype | None, on_gpu: bool = True) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.states: list[torch.dtype | None] = [dtype]
        self.active = False
        self.compiled = False  # softmax is divided and fused by the compiler
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to which autocast casts; None if it is off. The code's own is on in a backward, too: recomputed."""
        return self.states[-1] if self.active or len(self.states) > 1 else None

    def forget(self) -> None:
        """Free the cast weights, as leaving the outermost autocast does."""
        self.cache.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in OF_DATA:
            args = (_read_one_by_one(args[0]), *args[1:]) if args else args
        if name in GROUPED:  # which autocast leaves alone
            return grouped(func, *args, **kwargs)
        if not self.on_gpu:
            return func(*args, **kwargs)
        if self.dtype is not None:
            func, args, kwargs = self._cast(name, func, args, kwargs)
        if name == "cross_entropy" and self.dtype is not None:
            return self._cross_entropy(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return attention(*args, **kwargs)
        if name == "dropout" and func in (F.dropout, torch.dropout):
            return dropout(*args, **kwargs)
        if name == "one_hot":
            return one_hot(func, *args, **kwargs)
        if name in RECURRENT:
            return recurrent(args)
        if name in CELLS:
            return CELLS[name](*args)
        if name == "rms_norm" and not self.compiled:
            return rms_norm(func, *args, **kwargs)
        if name in ("softmax", "log_softmax"):
            return func(*args, **kwargs) if self.compiled else softmax(name, func, args, kwargs)
        if isinstance(func, FunctionType) and func.__module__ == F.__name__ and name not in LISTED:
            return self._inside(func, args, kwargs)
        return func(*args, **kwargs)

    def _cross_entropy(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a cross-entropy, which autocast does not know, as the operators that it calls.

        It asks `log_softmax` for its input's dtype, so autocast leaves that alone; `nll_loss` is cast to fp32
        (aten/src/ATen/native/LossNLL.cpp: cross_entropy_loss).
        """
        found = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
        found.apply_defaults()
        own = found.arguments
        x, target, weight = own["input"], own["target"], own["weight"]
        if target.is_floating_point() or own["label_smoothing"] or own["size_average"] is not None or own["reduce"]:
            return func(*args, **kwargs)
        logarithms = F.log_softmax(x, int(x.dim() > 1), dtype=x.dtype)
        wide = self._to(logarithms, torch.float32)
        weight = None if weight is None else self._to(weight, torch.float32)
        return F.nll_loss(wide, target, weight, ignore_index=own["ignore_index"], reduction=own["reduction"])

    def _inside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of `torch.nn.functional` so that this mode sees what it calls (attention of several heads).

        Such a function begins with the question whether a mode wants it, which is answered with no once.
        """
        asked = {name: getattr(F, name) for name in ASKS}

        def no(*_: object) -> bool:
            vars(F).update(asked)
            return False

        vars(F).update(dict.fromkeys(ASKS, no))
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            vars(F).update(asked)

    def _cast(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        if name in LOWER:
            wanted = self.dtype
        elif name in FP32:
            wanted = torch.float32
        elif name in OPTIONAL_FP32:
            first = args[0] if args else None
            if kwargs.get("dtype") is None and isinstance(first, torch.Tensor) and first.dtype in HALF:
                kwargs = {**kwargs, "dtype": torch.float32}
            return func, args, kwargs
        elif name in WIDEST:
            dtypes = _float_dtypes((args, kwargs))
            wanted = torch.float32 if torch.float32 in dtypes and len(dtypes) > 1 else None
        else:
            wanted = None
        if wanted is None:
            return func, args, kwargs

        def one(x: torch.Tensor) -> torch.Tensor:
            return self._to(x, wanted)

        args, kwargs = tree_map_only(torch.Tensor, one, (args, kwargs))
        return func, args, kwargs

    def _to(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype == dtype or x.dtype not in (torch.float32, *HALF):
            return x
        if dtype not in HALF or x.dtype != torch.float32 or not x.is_leaf or not x.requires_grad or x._is_view():
            return x.to(dtype)
        kept = self.cache.get(id(x))
        if kept is None:
            kept = self.cache[id(x)] = (x, x.to(dtype))
        return kept[1]


def _read_one_by_one(data: Any) -> Any:
    """Return lists of numbers for lists of tensors of one element, each of which torch copies to the host."""
    if isinstance(data, list | tuple):
        return [_read_one_by_one(x.item() if isinstance(x, FakeTensor) and x.dim() == 0 else x) for x in data]
    return data


def _float_dtypes(tree: Any) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    tree_map_only(torch.Tensor, lambda x: found.add(x.dtype) if x.is_floating_point() else None, tree)
    return found


@torch.library.custom_op("calibrate::grouped_mm", mutates_args=())
def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Stand in for torch's matmul of each group of rows, which tells its result's shape in bf16 only."""
    raise NotImplementedError("captured, never run")


@_grouped_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if a.dim() == b.dim() == 2:  # both have groups of rows: weight gradients, one matrix for each group
        return a.new_empty(ends.size(0), a.size(0), b.size(1))
    if b.dim() == 2:  # groups of columns
        return a.new_empty(a.size(1), b.size(1))
    return a.new_empty(a.size(0), b.size(-1))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    """Return gradients in the layout of what they belong to (FunctionsManual.cpp, `_grouped_mm_mat2_backward`)."""
    a, b, ends = ctx.saved_tensors
    wants_a, wants_b, _ = ctx.needs_input_grad
    of_a = of_b = None
    if wants_a:
        of_a = _grouped_mm(b, grad.mT, ends).mT if _by_columns(a) else _grouped_mm(grad, b.mT, ends)
    if wants_b:
        of_b = _grouped_mm(grad.mT, a, ends).mT if _by_columns(b) else _grouped_mm(a.mT, grad, ends)
    return of_a, of_b, None


def _by_columns(x: torch.Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) == x.size(-2)


_grouped_mm.register_autograd(_gradients, setup_context=_keep)


def grouped(
    func: Callable[..., Any],
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Any:
    """Run a grouped matmul; in fp32 and fp16 torch runs it group by group, which some fake kernels refuse.

    Without groups of its own it is a batched matmul (ATen/native/GroupedMMUtils.h, `_grouped_mm_fallback`).
    """
    if a.dtype == torch.bfloat16:
        return func(a, b, offs, *rest, **more) if func is torch._grouped_mm else func(a, b, offs=offs, **more)
    return torch.bmm(a, b) if offs is None else _grouped_mm(a, b, offs)


def one_hot(func: Callable[..., Any], tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Write ones into zeros; fake tensors would be compared with all classes (ATen/native/Onehot.cpp)."""
    if num_classes < 1 or tensor.dtype != torch.int64:
        return cast(torch.Tensor, func(tensor, num_classes))
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Run dropout in one kernel with a one-byte mask, which only CUDA has.

    In place it draws, divides and multiplies (ATen/native/Dropout.cpp: `dropout_`), and at 1 it multiplies by zeros.
    """
    if not training or p == 0.0:
        return input
    if inplace or p == 1.0:
        return torch.dropout_(input, p, True) if inplace else torch.dropout(input, p, True)
    return torch.native_dropout(input, p, True)[0]


def softmax(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a softmax that reads fp16 and writes fp32 in one kernel, which only CUDA has (SoftMax.cpp: softmax)."""
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if kwargs.get("dtype") is torch.float32 and x.dtype == torch.float16 and isinstance(dim, int):
        fused = torch._softmax if name == "softmax" else torch._log_softmax
        return fused(x, dim, True)
    return func(*args, **kwargs)


def _wanted(device_type: str, dtype: torch.dtype | None, enabled: bool) -> torch.dtype | None:
    """Return the dtype that an autocast casts to, by default the one of its device; None if it is off."""
    return (dtype or DEFAULT_DTYPES.get(device_type, torch.bfloat16)) if enabled else None


@contextmanager
def autocast_noted() -> Iterator[None]:
    """Let an autocast that is made before the step is captured, such as a decorator, keep what it asks for.

    torch switches one for a GPU off where there is no GPU (torch/amp/autocast_mode.py).
    """
    kind = torch.amp.autocast_mode.autocast
    make = kind.__init__

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        with catch_warnings():
            filterwarnings("ignore", "CUDA is not available")
            make(self, device_type, dtype, enabled, cache_enabled)
        self.wanted = _wanted(device_type, dtype, enabled)

    with patch.object(kind, "__init__", begin):
        yield


@contextmanager
def user_autocast(mode: CudaOperators) -> Iterator[None]:
    """Let the captured code's own `torch.autocast` switch `mode` on and off and ask whether it is on."""

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        self.wanted = _wanted(device_type, dtype, enabled)

    def enter(self: Any) -> Any:
        if not hasattr(self, "wanted"):  # one that nobody noted has what torch made of it
            self.wanted = self.fast_dtype if self._enabled else None
        mode.states.append(self.wanted)
        return self

    def leave(self: Any, *_: object) -> None:
        mode.states.pop()
        if len(mode.states) == 1 and mode.dtype is None:  # that was the outermost autocast
            mode.forget()

    def enabled(*_: object) -> bool:
        return mode.dtype is not None

    def dtype(device_type: str = "cuda") -> torch.dtype:
        return mode.dtype or DEFAULT_DTYPES.get(device_type, torch.bfloat16)

    of_any_device = torch._C._is_any_autocast_enabled

    with (
        patch.multiple(torch.amp.autocast_mode.autocast, __init__=begin, __enter__=enter, __exit__=leave),
        patch.object(torch, "is_autocast_enabled", enabled),
        patch.object(torch._C, "_is_any_autocast_enabled", lambda: enabled() or of_any_device()),
        patch.object(torch, "get_autocast_dtype", dtype),
    ):
        yield
