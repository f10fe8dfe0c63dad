"""The types of torch by their names, as they are in files, and what safetensors calls them. Needs no torch."""

from __future__ import annotations

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8,
    "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex128": 16, "complex64": 8, "complex32": 4, "bcomplex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "quint8": 1, "qint8": 1, "qint32": 4,
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}  # fmt: skip
"""Names that the pickles of ``torch.save`` give to the memory of tensors of a type."""
DTYPES = {
    "C64": "complex64", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Names that safetensors gives to the types of torch."""
ALIASES_KEY = "safe_ckpt.aliases"
STRIDES_KEY = "safe_ckpt.strides"  # of the tensor in memory: in the file its elements lie in the order of its shape
VERSIONS_KEY = "safe_ckpt.versions"  # of an OrderedDict
ORDER_KEY = "safe_ckpt.order"  # the place in the mapping of each name in the file's order, behind which are the aliases
GRADIENTS_KEY = "safe_ckpt.gradients"  # of tensors that are no plain ones: [is a Parameter, requires a gradient]
KEYS = (ALIASES_KEY, STRIDES_KEY, VERSIONS_KEY, ORDER_KEY, GRADIENTS_KEY)
"""Keys that we add to the metadata of a safetensors file."""
