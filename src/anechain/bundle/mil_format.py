"""The numbers of Core ML's file format that its reader and its writer share, and the protobuf class of a model."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from anechain.errors import EngineError

# MIL DataType (MIL.proto) -> our name, the numpy type that holds one element here, bits of one element in a file.
DTYPES: dict[int, tuple[str, Any, int]] = {
    1: ("bool", np.bool_, 8),
    2: ("string", np.str_, 0),
    10: ("fp16", np.float16, 16),
    11: ("fp32", np.float32, 32),
    12: ("fp64", np.float64, 64),
    13: ("bf16", None, 16),
    21: ("int8", np.int8, 8),
    22: ("int16", np.int16, 16),
    23: ("int32", np.int32, 32),
    24: ("int64", np.int64, 64),
    25: ("int4", np.int8, 4),
    31: ("uint8", np.uint8, 8),
    32: ("uint16", np.uint16, 16),
    33: ("uint32", np.uint32, 32),
    34: ("uint64", np.uint64, 64),
    35: ("uint4", np.uint8, 4),
    36: ("uint2", np.uint8, 2),
    37: ("uint1", np.uint8, 1),
    38: ("uint6", np.uint8, 6),
    39: ("uint3", np.uint8, 3),
    40: ("fp8e4m3", None, 8),
    41: ("fp8e5m2", None, 8),
}
# MIL blob storage, version 2: what the metadata record of a weight calls its dtype.
BLOB_DTYPES = {
    1: "fp16", 2: "fp32", 3: "uint8", 4: "int8", 6: "int16", 7: "uint16", 8: "int4", 9: "uint1", 10: "uint2",
    11: "uint4", 12: "uint3", 13: "uint6", 14: "int32", 15: "uint32",
}  # fmt: skip
BLOB_VERSION, BLOB_SENTINEL, BLOB_RECORD = 2, 0xDEADBEEF, 64
_PROTO = "_anechain_coreml_proto"


def model_class() -> Any:
    """The protobuf class of a Core ML model. The package's own `__init__` takes 2 s and 300 MB, so it never runs."""
    if _PROTO not in sys.modules:
        spec = importlib.util.find_spec("coremltools")
        if spec is None or not spec.submodule_search_locations:
            raise EngineError(
                "packages can be neither read nor written, because coremltools is not installed: "
                "pip install coremltools."
            )
        alias = ModuleType(_PROTO)
        alias.__path__ = [str(Path(place) / "proto") for place in spec.submodule_search_locations]
        sys.modules[_PROTO] = alias
    return importlib.import_module(f"{_PROTO}.Model_pb2").Model
