"""Packages that coremltools writes, for the tests of this room: `from tests.bundle.packages import save`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def save(program: Any, path: Path, target: Any = ct.target.iOS18, **options: Any) -> Path:
    """Converts without the passes that fold constants away, so that every const of the builder reaches the file."""
    options.setdefault("pass_pipeline", ct.PassPipeline.EMPTY)
    model = ct.convert(program, minimum_deployment_target=target, skip_model_load=True, **options)
    model.save(str(path))
    return path


def stateful(queries: int) -> Any:
    """Reads a state once and updates it twice: the second update has no reader."""
    specs = [
        mb.TensorSpec((1, 4, 1, queries), types.fp16),
        mb.TensorSpec((4,), types.int32),
        mb.StateTensorSpec((2, 4, 8, 4), types.fp16),
    ]
    rng = np.random.default_rng(3)  # the same weights in every function, so that a merge can share them
    data = rng.integers(-127, 128, (64, 4, 1, 1)).astype(np.int8)
    scale = rng.uniform(0.01, 0.02, (64, 1, 1, 1)).astype(np.float16)
    table = rng.standard_normal((2, 4, 8, 4)).astype(np.float16)

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Any, begin: Any, kv: Any) -> Any:
        past = mb.read_state(input=kv, name="past")
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="weight")
        y = mb.conv(x=x, weight=weight, pad_type="valid", name="projected")
        both = mb.concat(values=[y, mb.mul(x=y, y=np.float16(0.5)), y], axis=1, interleave=False, name="both")
        first = mb.coreml_update_state(state=kv, value=mb.add(x=past, y=table), name="first")
        box = mb.slice_by_size(x=first, begin=begin, size=[1, 4, 2, 4], name="box")
        update = mb.slice_update(x=first, update=box, begin=begin, end=[1, 4, 2, 4], name="new")
        mb.coreml_update_state(state=kv, value=update, name="second")
        return both

    return program


def copy(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package, tmp_path / "copy.mlpackage"))


def edited(package: Path, tmp_path: Path, edit: Callable[[Any], Any]) -> Path:
    """A copy of the package whose model was changed through the protobuf."""
    target = copy(package, tmp_path)
    model = ct.models.utils.load_spec(str(package))
    edit(model)
    (target / MODEL).write_bytes(model.SerializeToString())
    return target


def body(model: Any) -> Any:
    return next(iter(model.mlProgram.functions["main"].block_specializations.values()))
