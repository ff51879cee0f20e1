"""Schemes that are recognised but not supported: rejected by name instead of as missing tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moescope.checkpoint.quantised.packed import (
    USE_INSTEAD,
    Claim,
    Quantisation,
    Stored,
    incomplete,
    present,
    rejected,
)
from moescope.errors import BadInput

# modelopt: its FP8, not its NVFP4
SUPPORTED_METHODS = (None, "fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt")
NAMES = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "gguf": "GGUF"}
BITSANDBYTES = (".absmax", ".nested_absmax", ".quant_map", ".SCB")


def reject_unsupported(stored: Stored, quantisation: Quantisation) -> None:
    """Raise for schemes whose tensors have neither the names nor the shapes of the model's tensors."""
    first = next(iter(stored.values()), None)
    if first is None:
        return
    for name, info in stored.items():
        if name.endswith(BITSANDBYTES) or ".quant_state." in name:
            raise BadInput(
                f"{info.file}: tensor {name} is of bitsandbytes, which is not supported; {USE_INSTEAD}"
            )
        if name.endswith(".qweight"):
            raise BadInput(
                f"{info.file}: tensor {name} is quantised by {gptq_or_awq(stored, name, quantisation)}, "
                f"which is not supported; {USE_INSTEAD}"
            )
    method = quantisation.method
    if method not in SUPPORTED_METHODS:
        label = NAMES.get(method, "unknown") if isinstance(method, str) else "unknown"
        raise BadInput(
            f"{first.file}: config.json says quant_method {str(method)[:60]!r} ({label}), which is not "
            f"supported; {USE_INSTEAD}, or, if its weights are not quantised, remove quantization_config "
            "from config.json"
        )


def gptq_or_awq(stored: Stored, name: str, quantisation: Quantisation) -> str:
    """Decide by the config, else by the packed axis: GPTQ's qweight has as many columns as its scales."""
    if quantisation.method in ("gptq", "awq"):
        return NAMES[quantisation.method]
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
        others = present(stored, overall, f"{module}input_scale", f"{module}input_global_scale")
        parts = (name, scale.name, *others)
        logical = replace(
            info, name=logical_name, shape=(*info.shape[:-1], 2 * info.shape[-1]), dtype="NVFP4"
        )
        if overall in stored:
            why = "is quantised as NVFP4, which is not supported"
            yield logical, rejected("NVFP4", logical, parts, why)
        else:
            yield logical, incomplete("NVFP4", logical, parts, f"its global scale {overall}")
