"""A built program -> the two files of a package: the protobuf of the model and the file of its weights.

The layout of the weight file (MIL blob storage, version 2, little endian): 64 bytes that begin with the number of
weights and the version; for each weight a record of 64 bytes (sentinel, dtype, bytes, offset of the data, unused bits
of its last byte) and its data, both at multiples of 64.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from anechain.bake.mil import Function, Op, Program, Var
from anechain.bundle.interface import ARRAY_DTYPES
from anechain.bundle.mil_format import BLOB_DTYPES, BLOB_RECORD, BLOB_SENTINEL, BLOB_VERSION, DTYPES, model_class

WEIGHTS = "weights/weight.bin"
_OPSETS = {9: "CoreML8", 10: "CoreML9"}  # of a version of the format
_NUMBERS = {name: number for number, (name, _, _) in DTYPES.items()}
_BITS = {name: bits for name, _, bits in DTYPES.values()}
_BLOB_NUMBERS = {name: number for number, name in BLOB_DTYPES.items()}
_ARRAY_NUMBERS = {name: number for number, name in ARRAY_DTYPES.items()}
_IN_FILE = 10  # elements from which on a constant lies in the weight file
_FIELDS = {"bool": "bools", "int32": "ints", "fp32": "floats", "string": "strings"}  # others are bytes


def write_model(program: Program, folder: Path, description: Mapping[str, str], spec_version: int) -> None:
    """Writes `model.mlmodel` and `weights/weight.bin` into `folder`; `description` becomes the model's metadata.

    Raises OSError when the disk does not take it.
    """
    (folder / WEIGHTS).parent.mkdir(parents=True)
    model = model_class()(specificationVersion=spec_version)
    model.mlProgram.version = 1
    with (folder / WEIGHTS).open("wb") as file:
        weights = _Weights(file)
        for number, (name, function) in enumerate(program.functions.items()):
            _function(model.mlProgram.functions[name], function, _OPSETS[spec_version], weights)
            _describe(model.description.functions.add(name=name), function)
            if not number:
                model.description.defaultFunctionName = name
        weights.finish()
    model.description.metadata.userDefined.update(description)
    (folder / "model.mlmodel").write_bytes(model.SerializeToString(deterministic=True))


class _Weights:
    """The weight file, written from front to back; a weight that is named again is not written again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._count, self._end = file, 0, BLOB_RECORD
        self._offsets: dict[str | Op, int] = {}
        file.write(bytes(BLOB_RECORD))

    def offset(self, op: Op) -> int:
        """Where the record of a constant is."""
        key = op.weight_id or op
        if key not in self._offsets:
            self._offsets[key] = self._write(op)
        return self._offsets[key]

    def _write(self, op: Op) -> int:
        assert isinstance(op.value, np.ndarray)
        dtype = op.outputs[0].dtype
        bits = _BITS[dtype]
        data = np.ascontiguousarray(op.value if bits >= 8 else packed(op.value, bits))
        start = self._end
        at = start + BLOB_RECORD
        unused = -op.value.size * bits % 8
        self._file.seek(start)
        record = struct.pack("<IIQQQ", BLOB_SENTINEL, _BLOB_NUMBERS[dtype], data.nbytes, at, unused)
        self._file.write(record.ljust(BLOB_RECORD, b"\0"))
        self._file.write(data.data.cast("B"))
        # The next record is at a multiple of 64; behind the last one the file ends with its data.
        self._end, self._count = at + data.nbytes + -data.nbytes % BLOB_RECORD, self._count + 1
        return start

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(struct.pack("<II", self._count, BLOB_VERSION))


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Elements of less than a byte -> bytes u8, least significant bit first, without gaps."""
    flags = np.unpackbits(values.view(np.uint8).reshape(-1, 1), axis=1, count=bits, bitorder="little")  # [n, bits]
    return np.packbits(flags.reshape(-1), bitorder="little")


def _function(target: Any, function: Function, opset: str, weights: _Weights) -> None:
    target.opset = opset
    for var in function.inputs.values():
        _named(target.inputs.add(), var)
    block = target.block_specializations[opset]
    block.outputs.extend(var.name for var in function.outputs)
    readers = _readers(function)
    inlined = {op for op, kinds in readers.items() if op.kind == "const" and all(map(_spells_out, kinds))}
    results = {var.op for var in function.outputs}
    for op in function.ops:
        if op.kind == "coreml_update_state":
            _update(block, op, is_read=op in readers or op in results)
        elif op not in inlined:
            _operation(block.operations.add(), op, weights)


def _readers(function: Function) -> dict[Op, set[str]]:
    """The kinds of ops that read each op's results."""
    readers: dict[Op, set[str]] = {}
    for op in function.ops:
        for argument in op.inputs.values():
            for var in argument if isinstance(argument, list) else [argument]:
                if var.op is not None:
                    readers.setdefault(var.op, set()).add(op.kind)
    return readers


def _spells_out(kind: str) -> bool:
    """Whether ops of this kind make a weight; constants that only they read are written inside of them."""
    return kind.startswith("constexpr_")


def _operation(target: Any, op: Op, weights: _Weights) -> None:
    target.type = op.kind
    _immediate(target.attributes["name"], op.name, "string")
    for var in op.outputs:
        _named(target.outputs.add(), var)
    if op.kind == "const":
        _value(target.attributes["val"], op, weights)
    for parameter, argument in op.inputs.items():
        for var in argument if isinstance(argument, list) else [argument]:
            binding = target.inputs[parameter].arguments.add()
            if _spells_out(op.kind) and var.op is not None:
                _value(binding.value, var.op, weights)
            else:
                binding.name = var.name


def _update(block: Any, op: Op, is_read: bool) -> None:
    """In a file, `coreml_update_state` is a `write_state`, and a `read_state` where its result is used."""
    target = block.operations.add(type="write_state")
    _immediate(target.attributes["name"], f"{op.name}_write_state", "string")
    for parameter, argument in (("input", op.inputs["state"]), ("data", op.inputs["value"])):
        assert isinstance(argument, Var)
        target.inputs[parameter].arguments.add(name=argument.name)
    if is_read:
        state = op.inputs["state"]
        assert isinstance(state, Var)
        target = block.operations.add(type="read_state")
        _immediate(target.attributes["name"], op.name, "string")
        target.inputs["input"].arguments.add(name=state.name)
        _named(target.outputs.add(), op.outputs[0])


def _value(target: Any, op: Op, weights: _Weights) -> None:
    """What a constant is: a place in the weight file, or the number itself where there are few."""
    var, value = op.outputs[0], op.value
    assert value is not None
    if isinstance(value, str) or value.size < _IN_FILE or var.dtype not in _BLOB_NUMBERS:
        _immediate(target, value, var.dtype)
        return
    _tensor(target.type.tensorType, var.shape, var.dtype)
    target.blobFileValue.fileName = f"@model_path/{WEIGHTS}"
    target.blobFileValue.offset = weights.offset(op)


def _immediate(target: Any, value: np.ndarray | str, dtype: str) -> None:
    _tensor(target.type.tensorType, () if isinstance(value, str) else value.shape, dtype)
    tensor = target.immediateValue.tensor
    if isinstance(value, str):
        tensor.strings.values.append(value.encode())
    elif dtype in _FIELDS:
        getattr(tensor, _FIELDS[dtype]).values.extend(value.reshape(-1).tolist())
    else:
        assert _BITS[dtype] >= 8, "a constant of few elements that take less than a byte each"
        tensor.bytes.values = value.tobytes()


def _named(target: Any, var: Var) -> None:
    target.name = var.name
    kind = target.type.stateType.wrappedType if var.is_state else target.type
    _tensor(kind.tensorType, var.shape, var.dtype)


def _tensor(target: Any, shape: tuple[int, ...], dtype: str) -> None:
    target.dataType = _NUMBERS[dtype]
    target.rank = len(shape)
    for size in shape:
        target.dimensions.add().constant.size = size


def _describe(target: Any, function: Function) -> None:
    """What an app is promised: the inputs, outputs and states of a function."""
    for var in function.inputs.values():
        feature = (target.state if var.is_state else target.input).add(name=var.name)
        _array(feature.type.stateType.arrayType if var.is_state else feature.type.multiArrayType, var)
    for var in function.outputs:
        _array(target.output.add(name=var.name).type.multiArrayType, var)


def _array(target: Any, var: Var) -> None:
    target.shape.extend(var.shape)
    target.dataType = _ARRAY_NUMBERS[var.dtype]
