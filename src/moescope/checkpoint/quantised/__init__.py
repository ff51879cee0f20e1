"""Quantised checkpoints: stored tensors to logical ones, from headers. One file per scheme; SCHEMES."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.quantised.fp8 import fp8
from moescope.checkpoint.quantised.int_packed import int_packed
from moescope.checkpoint.quantised.mxfp4 import mxfp4
from moescope.checkpoint.quantised.packed import (
    USE_INSTEAD,
    Claim,
    Packed,
    Quantisation,
    Scheme,
    Stored,
    find_quantisation,
    incomplete,
    present,
    rejected,
)
from moescope.errors import BadInput

if TYPE_CHECKING:
    from moescope.checkpoint.files import TensorInfo

# --- schemes that are recognised but not supported: rejected by name instead of as missing tensors

# modelopt: its FP8, not its NVFP4
SUPPORTED_METHODS = (None, "fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt")
NAMES = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "gguf": "GGUF"}
BITSANDBYTES = (".absmax", ".nested_absmax", ".quant_map", ".SCB")


def reject_unsupported(stored: Stored, quantisation: Quantisation) -> None:
    """Raise for schemes whose tensors have neither the names nor the shapes of the model's tensors."""
    for name, info in stored.items():
        bitsandbytes = name.endswith(BITSANDBYTES) or ".quant_state." in name
        if bitsandbytes or name.endswith(".qweight"):
            scheme = "bitsandbytes" if bitsandbytes else gptq_or_awq(stored, name, quantisation)
            raise BadInput(
                f"{info.file}: tensor {name} is quantised by {scheme}, which is not supported; {USE_INSTEAD}"
            )
    method = quantisation.get("quant_method")
    if stored and method not in SUPPORTED_METHODS:
        first, label = next(iter(stored.values())), NAMES.get(str(method), "unknown")
        raise BadInput(
            f"{first.file}: config.json says quant_method {str(method)[:60]!r} ({label}), which is not "
            f"supported; {USE_INSTEAD}, or, if its weights are not quantised, remove quantization_config "
            "from config.json"
        )


def gptq_or_awq(stored: Stored, name: str, quantisation: Quantisation) -> str:
    """Decide by the config, else by the packed axis: GPTQ's qweight has as many columns as its scales."""
    if (method := quantisation.get("quant_method")) in ("gptq", "awq"):
        return NAMES[method]
    stem = name.removesuffix("qweight")
    if f"{stem}g_idx" in stored:
        return "GPTQ"
    scales = stored.get(f"{stem}scales")
    if scales is None or not scales.shape:
        return "GPTQ or AWQ"
    return "GPTQ" if stored[name].shape[-1:] == scales.shape[-1:] else "AWQ"


def nvfp4(stored: Stored, quantisation: Quantisation) -> Iterator[Claim]:
    """Recognise and reject NVFP4: e2m1 values, an e4m3 scale per 16, one float32 scale for all."""
    for name, info in stored.items():
        if info.dtype != "U8" or len(info.shape) < 2 or not name.endswith((".weight_packed", ".weight")):
            continue
        logical_name = name.removesuffix("_packed")
        scale = stored.get(f"{logical_name}_scale")
        overall = f"{logical_name}_global_scale" if name.endswith("_packed") else f"{logical_name}_scale_2"
        if scale is None or scale.dtype != "F8_E4M3":
            continue
        module = logical_name.removesuffix("weight")
        inputs = (f"{module}input_scale", f"{module}input_global_scale")
        parts = present(stored, name, scale.name, overall, *inputs)
        shape = (*info.shape[:-1], 2 * info.shape[-1])
        logical = replace(info, name=logical_name, shape=shape, dtype="NVFP4")
        missing = incomplete("NVFP4", logical, parts, f"its global scale {overall}")
        unsupported = rejected("NVFP4", logical, parts, "is quantised as NVFP4, which is not supported")
        yield logical, unsupported if overall in stored else missing


# No two schemes claim the same tensor, so their order does not matter.
SCHEMES: list[Scheme] = [nvfp4, mxfp4, int_packed, fp8]

__all__ = ["SCHEMES", "Packed", "logical_tensors"]


def logical_tensors(
    stored: Mapping[str, TensorInfo], config: Mapping[str, Any] | None
) -> tuple[dict[str, TensorInfo], dict[str, Packed]]:
    """Return the tensors as the model has them, and how to read those that are quantised.

    A logical tensor has the model's name and shape, and the scheme as dtype; scales are not listed. A tensor
    with missing or wrongly shaped parts is listed and raises when it is read; a scheme whose tensors have no
    known logical form raises here.
    """
    quantisation = find_quantisation(config)
    reject_unsupported(stored, quantisation)
    left = dict(stored)
    packed: dict[str, Packed] = {}
    logical: dict[str, TensorInfo] = {}
    for scheme in SCHEMES:
        for info, how in list(scheme(left, quantisation)):
            for part in how.parts:
                left.pop(part, None)
            if left.pop(info.name, None) or info.name in logical:
                why = "is stored twice, in two formats"
                how = rejected(how.scheme, info, how.parts, why, "keep one of the two")
            logical[info.name], packed[info.name] = info, how
    return {**left, **logical}, packed
