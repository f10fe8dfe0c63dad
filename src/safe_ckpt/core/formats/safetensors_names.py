"""What safetensors calls the types of torch, and the entries that this package adds to a file's metadata. Needs no torch."""

from __future__ import annotations

DTYPES = {
    "C64": "complex64", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
ALIASES_KEY = "safe_ckpt.aliases"
STRIDES_KEY = "safe_ckpt.strides"  # of the tensor in memory: in the file its elements lie in the order of its shape
VERSIONS_KEY = "safe_ckpt.versions"
