"""Number formats: the usual spellings, bytes per element, and the rate at which a device multiplies each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

SPELLINGS: dict[str, str] = {
    **dict.fromkeys(("fp32", "float32", "float", "f32", "single"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("fp8", "float8", "fp8_e4m3", "float8_e4m3fn", "e4m3", "fp8_e5m2", "float8_e5m2", "e5m2"), "fp8"),
    "mxfp8": "mxfp8",
    **dict.fromkeys(("nvfp4", "fp4"), "nvfp4"),
}

_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,  # one 8-bit scale for 32 elements (OCP Microscaling Formats v1.0)
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,  # one fp8 scale for 16 elements (NVIDIA Blackwell)
    "int8": 1.0,
    "int4": 0.5,
}
DTYPES = tuple(_BYTES)
FP32_BYTES = 4.0
INT64_BYTES = 8.0  # a token's number, as torch indexes


def normalise_dtype(value: Any) -> Any:
    """The short name of a dtype in any usual spelling; anything else comes back as it is.

    >>> normalise_dtype("torch.bfloat16"), normalise_dtype("Half"), normalise_dtype("fp12")
    ('bf16', 'fp16', 'fp12')
    """
    if not isinstance(value, str):
        return value
    return SPELLINGS.get(value.lower().removeprefix("torch."), value)


def dtype_bytes(dtype: str) -> float:
    """Bytes per element, block scales included.

    >>> dtype_bytes("bf16"), dtype_bytes("nvfp4")
    (2.0, 0.5625)
    """
    if dtype not in _BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; allowed: {', '.join(_BYTES)}")
    return _BYTES[dtype]


MUON_DTYPE = "bf16"  # of the products that make a momentum orthogonal (`sim.models.optimizers.muon`)


# Products in bf16 that replace one in fp32: each factor is a sum of three bf16 numbers, and the three smallest of nine
# products are left out (Henry, Tang and Heinecke 2019, arXiv:1904.06376; `bf16_6x` in StableHLO's specification).
FP32_PRODUCTS = 6


def peak_flops_per_s(peaks: Mapping[str, float], dtype: str) -> float | None:
    """Return the dense rate in FLOP/s at which a device of these peaks by dtype multiplies in `dtype`; None: it cannot.

    nvfp4 and mxfp4 have the peak of fp4 where they have none of their own. mxfp8 never has that of fp8: only some of
    the chips that multiply in fp8 apply a scale for every 32 elements as they multiply. fp32 never has the peak of
    tf32; a device without fp32 units (TPU, Gaudi) takes `FP32_PRODUCTS` products in bf16.

    >>> peak_flops_per_s({"bf16": 6e14, "fp8": 12e14}, "fp32"), peak_flops_per_s({"fp8": 12e14}, "mxfp8")
    (100000000000000.0, None)
    """
    for name in (dtype, "fp4") if dtype in ("nvfp4", "mxfp4") else (dtype,):
        if name in peaks:
            return peaks[name]
    return peaks["bf16"] / FP32_PRODUCTS if dtype == "fp32" and "bf16" in peaks else None


def sixteen_bit(precision: str) -> str:
    """Return what a precision keeps outside linear layers: bf16 where it is 8 bits or less, else itself."""
    return "bf16" if precision in ("fp8", "mxfp8", "nvfp4") else precision


class _Spellings:
    """An annotation of a dtype: any usual spelling is read as the short name, and the JSON Schema lists them all."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(normalise_dtype, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = handler(schema)["enum"]
        return {"type": "string", "enum": [s for s, name in SPELLINGS.items() if name in names]}


Precision = Annotated[Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"], _Spellings()]
StorageDtype = Annotated[Literal["fp32", "bf16", "fp16"], _Spellings()]
TransportDtype = Annotated[Literal["fp32", "bf16", "fp16", "fp8"], _Spellings()]
MomentDtype = Annotated[Literal["fp32", "bf16", "int8"], _Spellings()]
GatherDtype = Annotated[Literal["fp32", "bf16", "fp8", "int8"], _Spellings()]
