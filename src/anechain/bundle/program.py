"""The MIL program of a .mlpackage as plain ops and memory-mapped weights, read without importing coremltools."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from anechain.bundle.interface import Interface, interface_of
from anechain.bundle.mil_format import BLOB_DTYPES, BLOB_RECORD, BLOB_SENTINEL, BLOB_VERSION, DTYPES, model_class
from anechain.errors import BundleError


@dataclass(frozen=True)
class Value:
    """A tensor that flows: its name, shape and dtype ("fp16", "fp32", "int32", "int8", "bool", "string", "state")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Op:
    """One operation. `inputs` maps a parameter to the names of its values (several for a list such as concat's).

    Constants are not ops: a name in `inputs` is either an earlier op's output, a function input, or a key of
    `Function.consts`. `blocks` are the bodies of control flow (cond, while_loop), which only foreign programs have:
    what they read by name may also come from the function around them.
    """

    type: str
    name: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[Value, ...]
    blocks: tuple["Function", ...] = ()


@dataclass(frozen=True)
class Function:
    """One function of a program: typed inputs and states, constants by name, ops in order, names of its outputs."""

    name: str
    inputs: tuple[Value, ...]
    states: tuple[Value, ...]  # dtype is that of the tensor inside
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    consts: Mapping[str, np.ndarray]  # weights are read-only views of the mapped weight file
    packed: Mapping[str, str] = field(default_factory=dict)  # dtype in the file of constants of less than a byte each


@dataclass(frozen=True)
class Program:
    """All functions of one package. A package with a single function calls it "main" or by its own name."""

    path: Path
    spec_version: int
    functions: Mapping[str, Function]
    interfaces: Mapping[str, Interface] = field(default_factory=dict)  # what is promised to an app, by function
    metadata: Mapping[str, str] = field(default_factory=dict)  # the short description, and what its maker defined


class NotAProgramError(BundleError):
    """The package holds another kind of model; `kind` is the format's word for it ("neuralNetwork", "pipeline")."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_program(package: Path) -> Program:
    """Reads a .mlpackage directory; its weights stay in the memory-mapped file until they are touched.

    What a file writes as `write_state`, and the `read_state` of the same state that follows at once, is one
    `coreml_update_state` here, as it was in the program before it was saved; without such a `read_state` its output is
    named `<op>.state`. Immediate arguments and attributes of an op become constants named `<output>.<parameter>`.
    Packed elements of less than a byte are unpacked to int8 or uint8. A dimension that is not fixed is -1.

    Raises BundleError, naming the package and the reason, for one that is incomplete, damaged or no ML program;
    EngineError when coremltools, whose format definitions this reads with, is not installed.
    """
    reader = _Reader(package)
    try:
        return reader.program()
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        # A flipped byte can leave a protobuf that parses and means nothing; no list of checks covers every such one.
        raise reader.damaged(f"its program makes no sense ({type(error).__name__}: {error})") from error


def _value(name: str, kind: Any) -> Value:
    """A NamedValueType's type -> Value; lists, tuples and dictionaries have no shape and their own word as dtype."""
    which = kind.WhichOneof("type")
    if which == "stateType":
        return _value(name, kind.stateType.wrappedType)
    if which != "tensorType":
        return Value(name, (), str(which).removesuffix("Type"))
    dims = kind.tensorType.dimensions
    shape = tuple(int(d.constant.size) if d.WhichOneof("dimension") == "constant" else -1 for d in dims)
    number = kind.tensorType.dataType
    return Value(name, shape, DTYPES[number][0] if number in DTYPES else f"dtype {number}")


def _values(items: Iterable[Any]) -> tuple[Value, ...]:
    return tuple(_value(item.name, item.type) for item in items)


def _unpack(packed: np.ndarray, count: int, bits: int, signed: bool) -> np.ndarray:
    """`count` elements of `bits` bits, least significant bit first -> int8 or uint8 [count]."""
    flags = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    values = np.packbits(flags, axis=1, bitorder="little")[:, 0]  # [count] u8
    return (values << (8 - bits)).view(np.int8) >> (8 - bits) if signed else values


class _Reader:
    """One package: its parsed model and the weight files that are mapped so far."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.files: dict[str, np.ndarray] = {}
        self.packed: dict[str, str] = {}  # of the function that is being read
        self.model_file = self._model_file()

    def damaged(self, reason: str) -> BundleError:
        return BundleError(f"package {self.package} cannot be read, because {reason}: copy or bake it again.")

    def _model_file(self) -> Path:
        manifest = self.package / "Manifest.json"
        try:
            entries = json.loads(manifest.read_bytes())
            item = entries["itemInfoEntries"][entries["rootModelIdentifier"]]["path"]
            return self.package / "Data" / str(item)
        except OSError as error:
            raise self.damaged(f"Manifest.json is missing or unreadable ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise self.damaged("Manifest.json names no root model") from None

    def program(self) -> Program:
        model = model_class()()
        try:
            model.ParseFromString(self.model_file.read_bytes())
        except OSError as error:
            raise self.damaged(f"{self.model_file.name} is missing or unreadable ({error.strerror})") from None
        except DecodeError:
            raise self.damaged(f"{self.model_file.name} is not a Core ML model, or is cut off") from None
        kind = model.WhichOneof("Type")
        if kind is None:
            raise self.damaged("it holds no model, not an ML program")
        if kind != "mlProgram":
            raise NotAProgramError(str(self.damaged(f"it holds a {kind}, not an ML program")), kind)
        functions = {name: self._function(name, f) for name, f in sorted(model.mlProgram.functions.items())}
        if not functions:
            raise self.damaged("its ML program has no function")
        described = {f.name: interface_of(f) for f in model.description.functions}
        whole = interface_of(model.description)  # what describes the only function of the older form
        interfaces = {name: described.get(name, whole) for name in functions}
        words = model.description.metadata
        metadata = {"shortDescription": words.shortDescription} if words.shortDescription else {}
        metadata |= dict(words.userDefined)
        return Program(self.package, model.specificationVersion, functions, interfaces, metadata)

    def _function(self, name: str, function: Any) -> Function:
        block = function.block_specializations.get(function.opset)
        if block is None:
            raise self.damaged(f"function {name!r} has no body for its opset {function.opset!r}")
        self.packed = {}
        states = [i for i in function.inputs if i.type.WhichOneof("type") == "stateType"]
        inputs = [i for i in function.inputs if i.type.WhichOneof("type") != "stateType"]
        return self._block(name, block, _values(inputs), _values(states), {})

    def _block(
        self, name: str, block: Any, inputs: tuple[Value, ...], states: tuple[Value, ...], outer: Mapping[str, Value]
    ) -> Function:
        known = {**outer, **{v.name: v for v in (*inputs, *states)}}  # everything that a name may mean so far
        consts: dict[str, np.ndarray] = {}
        ops: list[Op] = []
        written = ""  # the state that the operation just before this one has written
        for number, item in enumerate(block.operations):
            outputs = _values(item.outputs)
            if item.type == "const":
                consts[outputs[0].name] = self._constant(outputs[0].name, item.attributes["val"])
            else:
                stem = outputs[0].name if outputs else f"{item.type}_{number}"
                op = self._operation(item, stem, outputs, consts, known)
                if op.type == "read_state" and op.inputs["input"] == (written,):
                    op = Op("coreml_update_state", op.name, ops.pop().inputs, outputs)
                ops.append(op)
                outputs = op.outputs
            written = ops[-1].inputs["state"][0] if item.type == "write_state" else ""
            known |= {v.name: v for v in outputs}
        missing = [n for n in block.outputs if n not in known]
        if missing:
            raise self.damaged(f"outputs of {name!r} are not computed: {', '.join(missing)}")
        return Function(name, inputs, states, tuple(ops), tuple(known[n] for n in block.outputs), consts, self.packed)

    def _operation(
        self,
        item: Any,
        stem: str,
        outputs: tuple[Value, ...],
        consts: dict[str, np.ndarray],
        known: Mapping[str, Value],
    ) -> Op:
        name = stem
        inputs: dict[str, tuple[str, ...]] = {}
        for parameter, attribute in sorted(item.attributes.items()):
            if parameter == "name":
                name = str(self._constant("name", attribute))
            else:
                consts[f"{stem}.{parameter}"] = self._constant(f"{stem}.{parameter}", attribute)
                inputs[parameter] = (f"{stem}.{parameter}",)
        for parameter, argument in sorted(item.inputs.items()):
            names = []
            for place, binding in enumerate(argument.arguments):
                if binding.WhichOneof("binding") == "name":
                    names.append(binding.name)
                else:
                    key = f"{stem}.{parameter}" + (f".{place}" if len(argument.arguments) > 1 else "")
                    consts[key] = self._constant(key, binding.value)
                    names.append(key)
            inputs[parameter] = tuple(names)
        unknown = sorted({n for names in inputs.values() for n in names if n not in known and n not in consts})
        if unknown:
            raise self.damaged(f"op {name!r} ({item.type}) reads what nothing before it makes: {', '.join(unknown)}")
        if item.type == "write_state":
            state = known[inputs["input"][0]]
            update = {"state": inputs["input"], "value": inputs["data"]}
            return Op("coreml_update_state", name, update, (Value(f"{name}.state", state.shape, state.dtype),))
        blocks = tuple(self._block(f"{name}.{i}", b, _values(b.inputs), (), known) for i, b in enumerate(item.blocks))
        return Op(item.type, name, inputs, outputs, blocks)

    def _constant(self, name: str, value: Any) -> np.ndarray:
        if value.type.WhichOneof("type") == "listType":
            array = np.array([self._constant(name, v) for v in value.immediateValue.list.values])
        elif value.type.WhichOneof("type") != "tensorType":
            raise self.damaged(f"constant {name!r} is neither a tensor nor a list")
        else:
            kind = _value(name, value.type)
            _, numpy_type, bits = DTYPES.get(value.type.tensorType.dataType, ("", None, 0))
            if numpy_type is None:
                raise self.damaged(f"constant {name!r} has the dtype {kind.dtype}, which numpy cannot hold")
            if value.WhichOneof("value") == "blobFileValue":
                raw = self._blob(kind, bits, value.blobFileValue)
                array = self._typed(kind, raw, numpy_type, bits)
            else:
                tensor = value.immediateValue.tensor
                field = tensor.WhichOneof("value")
                if field == "bytes":
                    array = self._typed(kind, np.frombuffer(tensor.bytes.values, np.uint8), numpy_type, bits)
                elif field is None:
                    array = np.empty(0, numpy_type)
                else:
                    array = np.array(getattr(tensor, field).values, numpy_type)
            if array.size != math.prod(kind.shape):
                raise self.damaged(f"constant {name!r} has {array.size} elements, which do not fill {list(kind.shape)}")
            array = array.reshape(kind.shape)
        array.flags.writeable = False
        return array

    def _typed(self, kind: Value, raw: np.ndarray, numpy_type: Any, bits: int) -> np.ndarray:
        """Bytes as they are stored -> the elements, [count]; raises BundleError when there are too few or too many."""
        count = math.prod(kind.shape)
        if raw.size != -(-count * bits // 8):
            what = f"{kind.dtype} {list(kind.shape)}"
            raise self.damaged(f"constant {kind.name!r} has {raw.size} bytes, which are not those of {what}")
        if bits < 8:
            self.packed[kind.name] = kind.dtype
        return raw.view(numpy_type) if bits >= 8 else _unpack(raw, count, bits, kind.dtype.startswith("int"))

    def _blob(self, kind: Value, bits: int, place: Any) -> np.ndarray:
        """The bytes of one weight, a view of the mapped file. Layout: MIL blob storage v2, little endian."""
        data = self._weight_file(place.fileName)
        start = int(place.offset)
        short = f"{place.fileName} is cut off or another model's: the weight {kind.name!r} is not in it"
        if start + BLOB_RECORD > data.size:
            raise self.damaged(short)
        sentinel, dtype, size, offset = struct.unpack("<IIQQ", data[start : start + 24].tobytes())
        if sentinel != BLOB_SENTINEL or BLOB_DTYPES.get(dtype) != kind.dtype or offset + size > data.size:
            raise self.damaged(short)
        return data[offset : offset + size]

    def _weight_file(self, name: str) -> np.ndarray:
        if name not in self.files:
            folder = self.model_file.parent
            path = (folder / name.removeprefix("@model_path/")).resolve()
            if not path.is_relative_to(folder.resolve()):
                raise self.damaged(f"the weight file {name} lies outside of it")
            try:
                data = np.asarray(np.memmap(path, np.uint8, "r"))
            except (OSError, ValueError) as error:
                raise self.damaged(f"the weight file {name} is missing, empty or unreadable ({error})") from None
            if data.size < BLOB_RECORD or struct.unpack("<I", data[4:8].tobytes())[0] != BLOB_VERSION:
                raise self.damaged(f"{name} is not a weight file of version {BLOB_VERSION}")
            self.files[name] = data
        return self.files[name]
