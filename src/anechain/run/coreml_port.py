"""What the Core ML engine asks of macOS, as a port of a dozen calls, and the port itself: all that knows PyObjC.

Whether it has run on a Mac stands in docs/status.md. What a machine without Core ML can check of it is checked:
tests/run/test_pyobjc.py holds every class, constant, function and selector against PyObjC's own metadata, with the
number of arguments and the errors that are passed back.
"""

import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import DTypeLike

from anechain.errors import EngineError

try:
    import CoreML
    import Foundation
    import IOSurface
    import objc
    from Quartz import CoreVideo
except ImportError:  # said when an engine is asked for
    objc = None

COMPUTE_UNITS = ("cpu-and-ne", "all", "cpu-and-gpu", "cpu")
PLAN_TIMEOUT_S = 600.0  # a plan of a package of 15 layers compiles it for every device first
MACOS_WITH_INT8 = 26  # the first system whose MLMultiArray knows int8


@dataclass(eq=False)
class Buffer:
    """Memory that host and Core ML share: `array` is the host's view of it, `handle` the port's own object.

    `address` is where it begins, 0 for memory that cannot be an output's backing.
    """

    array: np.ndarray
    handle: Any
    pixels: Any
    address: int


@dataclass(frozen=True)
class Placed:
    """Where Core ML means to run one op ("NE", "GPU", "CPU"), and its share of the function's cost if it says so."""

    device: str
    cost: float | None


class Returned(Protocol):
    """An output of a prediction: where it lies (0 where that cannot be told), and its values."""

    @property
    def address(self) -> int: ...
    def copy_to(self, array: np.ndarray) -> None: ...


class Port(Protocol):
    """Core ML, as the engine uses it. `model`, `state`, `request` are the port's own objects.

    Raises EngineError with what Core ML said. `lend` gives buffers to Core ML, `take_back` to the host: Core ML asks
    that a pixel buffer that backs an output is not locked during a prediction, and the host must lock what it reads or
    writes.
    """

    def system(self) -> str: ...
    def pool(self) -> AbstractContextManager[object]: ...
    def compile(self, package: Path) -> Path: ...
    def load(self, compiled: Path, function: str, units: str) -> Any: ...
    def plan(self, compiled: Path, function: str, units: str) -> Mapping[str, Placed]: ...
    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer: ...
    def lend(self, buffers: Sequence[Buffer]) -> None: ...
    def take_back(self, buffers: Sequence[Buffer]) -> None: ...
    def new_state(self, model: Any) -> Any: ...
    def visit_state(self, state: Any, name: str, visit: Callable[[np.ndarray], None]) -> None: ...
    def prepare(self, model: Any, inputs: Mapping[str, Buffer], backings: Mapping[str, Buffer]) -> Any: ...
    def predict(self, request: Any, state: Any) -> Mapping[str, Returned]: ...


@dataclass(frozen=True)
class _Request:
    """One prediction, ready to be made again and again: the ring comes back to the same buffers."""

    model: Any
    features: Any
    options: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Output:
    """An MLMultiArray that a prediction returned."""

    array: Any

    @property
    def address(self) -> int:
        """Read off the surface: to ask the array for its data would lock a buffer that is to be a backing again."""
        pixels = self.array.pixelBuffer()
        return 0 if pixels is None else _address(pixels)

    def copy_to(self, array: np.ndarray) -> None:
        np.copyto(array, _view(self.array), casting="no")


class AppleCoreML:
    """The port on a Mac. Raises EngineError anywhere else, and where PyObjC is not installed.

    PyObjC lets go of the interpreter's lock during every message to an object, so also while Core ML predicts.
    """

    def __init__(self) -> None:
        if platform.system() != "Darwin":
            raise EngineError(
                f"the coreml engine needs a Mac with Apple silicon, and this is {platform.system()} on "
                f"{platform.machine()}: use --engine cpu."
            )
        if platform.machine() != "arm64":
            raise EngineError(
                "the coreml engine needs Apple silicon, and this Python runs as x86-64 (Rosetta or an Intel Mac): "
                "install an arm64 Python."
            )
        if objc is None:
            raise EngineError('the coreml engine needs PyObjC, which is not installed: pip install "anechain[macos]".')
        self._types: dict[Any, tuple[int, int]] = {
            np.dtype(np.float16): (CoreVideo.kCVPixelFormatType_OneComponent16Half, CoreML.MLMultiArrayDataTypeFloat16)
        }
        if int(platform.mac_ver()[0].partition(".")[0]) >= MACOS_WITH_INT8:
            pixel, array = CoreVideo.kCVPixelFormatType_OneComponent8, CoreML.MLMultiArrayDataTypeInt8
            self._types[np.dtype(np.int8)] = (pixel, array)

    def system(self) -> str:
        """The system's version and build, on which a compiled model and all that is known of it depend."""
        return f"macOS {Foundation.NSProcessInfo.processInfo().operatingSystemVersionString()}"

    def pool(self) -> AbstractContextManager[object]:
        pool: AbstractContextManager[object] = objc.autorelease_pool()
        return pool

    def compile(self, package: Path) -> Path:
        """The compiled model, in a temporary folder that is the caller's."""
        url, error = CoreML.MLModel.compileModelAtURL_error_(_url(package), None)
        if url is None:
            _refuse(f"compile {package.name}", error)
        return Path(str(url.path()))

    def load(self, compiled: Path, function: str, units: str) -> Any:
        model, error = CoreML.MLModel.modelWithContentsOfURL_configuration_error_(
            _url(compiled), _configuration(function, units), None
        )
        if model is None:
            _refuse(f"load {function!r} of {compiled.name}", error)
        return model

    def plan(self, compiled: Path, function: str, units: str) -> dict[str, Placed]:
        """The name of an op's first result -> where it goes, without ops that have no device, such as constants."""
        answers: list[tuple[Any, Any]] = []
        done = threading.Event()

        def completed(plan: Any, error: Any) -> None:
            answers.append((plan, error))
            done.set()

        CoreML.MLComputePlan.loadContentsOfURL_configuration_completionHandler_(
            _url(compiled), _configuration(function, units), completed
        )
        what = f"plan {function!r} of {compiled.name}"
        if not done.wait(PLAN_TIMEOUT_S):
            raise EngineError(f"Core ML did not {what} within {PLAN_TIMEOUT_S:.0f} s: try `--bisect`.")
        plan, error = answers[0]
        if plan is None:
            _refuse(what, error)
        program = plan.modelStructure().program()
        if program is None or program.functions().get(function) is None:
            raise EngineError(f"Core ML does not show the program in which to {what}: bake the package again.")
        placed: dict[str, Placed] = {}
        for operation in program.functions()[function].block().operations():
            usage = plan.computeDeviceUsageForMLProgramOperation_(operation)
            if usage is not None and len(operation.outputs()):
                cost = plan.estimatedCostOfMLProgramOperation_(operation)
                device = _device(usage.preferredComputeDevice())
                placed[str(operation.outputs()[0].name())] = Placed(device, None if cost is None else cost.weight())
        return placed

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """All zeros, and the host's. fp16 (and int8 where the system has it) is a pixel buffer on an IOSurface."""
        kind = np.dtype(dtype)
        if kind == np.int32:
            return self._plain(shape)
        if kind not in self._types:
            raise EngineError(f"Core ML on {self.system()} takes no {kind} arrays: bake with fp16 ports.")
        height, width = int(np.prod(shape[:-1])), int(shape[-1])
        attributes: dict[Any, Any] = {CoreVideo.kCVPixelBufferIOSurfacePropertiesKey: {}}
        status, pixels = CoreVideo.CVPixelBufferCreate(None, width, height, self._types[kind][0], attributes, None)
        if status != CoreVideo.kCVReturnSuccess:
            raise EngineError(f"Core Video cannot make a pixel buffer of {height} x {width} (status {status}).")
        handle = CoreML.MLMultiArray.alloc().initWithPixelBuffer_shape_(pixels, _numbers(shape))
        if handle is None:
            _refuse(f"make an array of {list(shape)} on a pixel buffer", None)
        _lock(pixels)
        row = CoreVideo.CVPixelBufferGetBytesPerRow(pixels)
        memory = CoreVideo.CVPixelBufferGetBaseAddress(pixels).as_buffer(row * height)
        array: np.ndarray = np.ndarray(shape, kind, memory, 0, row_strides(shape, kind, row))
        array[...] = 0
        return Buffer(array, handle, pixels, _address(pixels))

    def _plain(self, shape: Sequence[int]) -> Buffer:
        handle, error = CoreML.MLMultiArray.alloc().initWithShape_dataType_error_(
            _numbers(shape), CoreML.MLMultiArrayDataTypeInt32, None
        )
        if handle is None:
            _refuse(f"make an array of {list(shape)}", error)
        memory = handle.dataPointer().as_buffer(int(np.prod(shape)) * 4)
        array: np.ndarray = np.frombuffer(memory, np.int32).reshape(shape)
        array[...] = 0
        return Buffer(array, handle, None, 0)

    def lend(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.pixels is not None:
                status = CoreVideo.CVPixelBufferUnlockBaseAddress(buffer.pixels, 0)
                _check("unlocked", status)

    def take_back(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.pixels is not None:
                _lock(buffer.pixels)

    def new_state(self, model: Any) -> Any:
        return model.newState()

    def visit_state(self, state: Any, name: str, visit: Callable[[np.ndarray], None]) -> None:
        """`visit` sees the state's memory, which it may change, and which is another after it returned."""
        state.getMultiArrayForStateNamed_handler_(name, lambda array: visit(_view(array)))

    def prepare(self, model: Any, inputs: Mapping[str, Buffer], backings: Mapping[str, Buffer]) -> _Request:
        values = {n: CoreML.MLFeatureValue.featureValueWithMultiArray_(b.handle) for n, b in inputs.items()}
        features, error = CoreML.MLDictionaryFeatureProvider.alloc().initWithDictionary_error_(_mapping(values), None)
        if features is None:
            _refuse("take the inputs", error)
        options = CoreML.MLPredictionOptions.alloc().init()
        options.setOutputBackings_(_mapping({name: buffer.handle for name, buffer in backings.items()}))
        return _Request(model, features, options, tuple(backings))

    def predict(self, request: _Request, state: Any) -> dict[str, _Output]:
        model = request.model
        if state is None:
            result, error = model.predictionFromFeatures_options_error_(request.features, request.options, None)
        else:
            result, error = model.predictionFromFeatures_usingState_options_error_(
                request.features, state, request.options, None
            )
        if result is None:
            _refuse("predict", error)
        return {name: _Output(result.featureValueForName_(name).multiArrayValue()) for name in request.names}


def row_strides(shape: Sequence[int], dtype: np.dtype, row_bytes: int) -> tuple[int, ...]:
    """The strides of an array whose last axis is a row of a pixel buffer: rows may be longer than what lies in them."""
    if shape[-1] * dtype.itemsize > row_bytes:
        raise EngineError(f"rows of {row_bytes} bytes do not hold {shape[-1]} values of {dtype}.")
    strides = [dtype.itemsize]
    for length in (1, *reversed(shape[1:-1])):
        strides.append(row_bytes if len(strides) == 1 else strides[-1] * length)
    return tuple(reversed(strides[: len(shape)]))


# What Core ML reads during a prediction is Foundation's own: a list or a dict of Python would be handed over as a proxy
# that calls back into Python, and waits for the interpreter's lock.


def _numbers(values: Sequence[int]) -> Any:
    return Foundation.NSArray.arrayWithArray_([Foundation.NSNumber.numberWithLongLong_(int(n)) for n in values])


def _mapping(items: Mapping[str, Any]) -> Any:
    keys = [Foundation.NSString.stringWithString_(name) for name in items]
    return Foundation.NSDictionary.dictionaryWithObjects_forKeys_(list(items.values()), keys)


def _url(path: Path) -> Any:
    return Foundation.NSURL.fileURLWithPath_(str(path))


def _configuration(function: str, units: str) -> Any:
    known = {
        "cpu-and-ne": CoreML.MLComputeUnitsCPUAndNeuralEngine,
        "all": CoreML.MLComputeUnitsAll,
        "cpu-and-gpu": CoreML.MLComputeUnitsCPUAndGPU,
        "cpu": CoreML.MLComputeUnitsCPUOnly,
    }
    configuration = CoreML.MLModelConfiguration.alloc().init()
    configuration.setComputeUnits_(known[units])
    configuration.setFunctionName_(function)
    return configuration


def _device(device: Any) -> str:
    """Raises EngineError for a kind of device that came after this was written."""
    kinds = {
        "NE": CoreML.MLNeuralEngineComputeDevice,
        "GPU": CoreML.MLGPUComputeDevice,
        "CPU": CoreML.MLCPUComputeDevice,
    }
    for name, kind in kinds.items():
        if device.isKindOfClass_(kind):
            return name
    raise EngineError(f"Core ML plans to use {device}, which is none of {', '.join(kinds)}: report it.")


def _lock(pixels: Any) -> None:
    _check("locked", CoreVideo.CVPixelBufferLockBaseAddress(pixels, 0))


def _check(what: str, status: int) -> None:
    if status != CoreVideo.kCVReturnSuccess:
        raise EngineError(f"a pixel buffer cannot be {what} (Core Video's status {status}): start again.")


def _address(pixels: Any) -> int:
    surface = CoreVideo.CVPixelBufferGetIOSurface(pixels)
    if surface is None:
        return 0
    memory = IOSurface.IOSurfaceGetBaseAddress(surface).as_buffer(1)
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _view(array: Any) -> np.ndarray:
    """The values of an MLMultiArray, where they lie, by its own strides."""
    kinds = {
        CoreML.MLMultiArrayDataTypeFloat16: np.float16,
        CoreML.MLMultiArrayDataTypeFloat32: np.float32,
        CoreML.MLMultiArrayDataTypeInt32: np.int32,
        CoreML.MLMultiArrayDataTypeInt8: np.int8,
    }
    dtype = np.dtype(kinds[array.dataType()])
    shape = [int(n) for n in array.shape()]
    strides = [int(n) * dtype.itemsize for n in array.strides()]
    if any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True)):
        raise EngineError(f"Core ML returned an array of {shape} with strides of 0: it cannot be read.")
    end = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    view: np.ndarray = np.ndarray(shape, dtype, array.dataPointer().as_buffer(end), 0, strides)
    return view


def _refuse(what: str, error: Any) -> NoReturn:
    said = "nothing" if error is None else f"{error.localizedDescription()} ({error.domain()} {error.code()})"
    raise EngineError(f"Core ML cannot {what}: it said {said}.")
