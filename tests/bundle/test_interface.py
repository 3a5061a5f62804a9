"""The edges of a package as its description promises them, on descriptions that coremltools wrote."""

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.proto import FeatureTypes_pb2

from anechain.bundle.interface import UNBOUNDED, Feature, Interface
from anechain.bundle.program import NotAProgramError, read_program
from tests.bundle.packages import edited, save, stateful


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stateful(1), tmp_path_factory.mktemp("interface") / "stateful.mlpackage")


def test_inputs_outputs_and_states(package: Path) -> None:
    assert read_program(package).interfaces == {
        "main": Interface(
            inputs=(Feature("x", "multiArray", "fp16", (1, 4, 1, 1)), Feature("begin", "multiArray", "int32", (4,))),
            outputs=(Feature("both", "multiArray", "fp16", (1, 192, 1, 1)),),
            states=(Feature("kv", "state", "fp16", (2, 4, 8, 4)),),
        )
    }


def test_each_function_has_its_own(tmp_path: Path) -> None:
    merge = ct.utils.MultiFunctionDescriptor()
    for size in (1, 5):
        merge.add_function(str(save(stateful(size), tmp_path / f"{size}.mlpackage")), "main", f"of_{size}")
    merge.default_function_name = "of_1"
    ct.utils.save_multifunction(merge, str(tmp_path / "both.mlpackage"))
    interfaces = read_program(tmp_path / "both.mlpackage").interfaces
    assert {name: i.inputs[0].shape for name, i in interfaces.items()} == {"of_1": (1, 4, 1, 1), "of_5": (1, 4, 1, 5)}


def test_shapes_that_may_change(package: Path, tmp_path: Path) -> None:
    def loosen(model: Any) -> None:
        x, begin = (i.type.multiArrayType for i in model.description.input)
        for low, high in ((1, 1), (4, 4), (1, -1), (1, 8)):
            x.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
        for shape in ((4,), (8,)):
            begin.enumeratedShapes.shapes.add(shape=shape)

    x, begin = read_program(edited(package, tmp_path, loosen)).interfaces["main"].inputs
    assert x.ranges == ((1, 1), (4, 4), (1, UNBOUNDED), (1, 8)) and x.ranged and x.flexible and not x.enumerated
    assert begin.enumerated == ((4,), (8,)) and begin.flexible and not begin.ranged


def test_ranges_and_lists_of_one_shape_are_fixed() -> None:
    assert not Feature("x", "multiArray", "fp16", (1, 4), ranges=((1, 1), (4, 4))).flexible
    assert not Feature("x", "multiArray", "fp16", (1, 4), enumerated=((1, 4), (1, 4))).flexible


def test_images_and_other_kinds(package: Path, tmp_path: Path) -> None:
    def change(model: Any) -> None:
        x, begin = model.description.input
        image = x.type.imageType
        image.width, image.height = 20, 10
        image.imageSizeRange.widthRange.lowerBound, image.imageSizeRange.widthRange.upperBound = 20, 40
        image.imageSizeRange.heightRange.lowerBound, image.imageSizeRange.heightRange.upperBound = 10, -1
        begin.type.dictionaryType.stringKeyType.SetInParent()
        out = model.description.output[0].type.imageType
        out.width, out.height = 3, 2
        out.enumeratedSizes.sizes.add(width=6, height=4)

    interface = read_program(edited(package, tmp_path, change)).interfaces["main"]
    assert interface.inputs[0] == Feature("x", "image", "", (10, 20), (), ((10, UNBOUNDED), (20, 40)))
    assert interface.inputs[1] == Feature("begin", "dictionary", "", ())
    assert interface.outputs[0] == Feature("both", "image", "", (2, 3), ((4, 6),), ())


def test_dtypes_of_arrays(package: Path, tmp_path: Path) -> None:
    """Every dtype that the format knows has a name; one that it does not know yet keeps its number."""
    kinds = FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.items()
    names = {"FLOAT16": "fp16", "FLOAT32": "fp32", "DOUBLE": "fp64", "INT32": "int32", "INT8": "int8"}
    compared = 0
    for number, (kind, value) in enumerate([(k, v) for k, v in kinds if v]):
        folder = tmp_path / str(number)
        folder.mkdir()

        def change(model: Any, value: int = value) -> None:
            model.description.input[0].type.multiArrayType.dataType = value

        found = read_program(edited(package, folder, change)).interfaces["main"].inputs[0].dtype
        assert found == names.get(kind, f"dtype {value}"), kind
        compared += kind in names
    assert compared >= 4


def test_metadata(package: Path, tmp_path: Path) -> None:
    assert read_program(package).metadata["com.github.apple.coremltools.version"] == ct.__version__

    def describe(model: Any) -> None:
        model.description.metadata.shortDescription = "what it is"
        model.description.metadata.userDefined["key"] = "value"

    metadata = read_program(edited(package, tmp_path, describe)).metadata
    assert metadata["shortDescription"] == "what it is" and metadata["key"] == "value"


def test_constants_of_less_than_a_byte_keep_their_dtype(tmp_path: Path) -> None:
    kinds = ("int4", "uint4", "uint3")
    specs = [mb.TensorSpec((1, 64), types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        outs = []
        for kind in (*kinds[:2], "int8"):
            data = np.ones((32, 64), types.nptype_from_builtin(types.string_to_builtin(kind)))
            weight = mb.constexpr_blockwise_shift_scale(data=data, scale=np.full((32, 1), 0.1, np.float16), name=kind)
            outs.append(mb.linear(x=x, weight=weight))
        indices = np.zeros((32, 64), types.nptype_from_builtin(types.string_to_builtin("uint3")))
        weight = mb.constexpr_lut_to_dense(indices=indices, lut=np.ones((1, 1, 8, 1), np.float16), name="uint3")
        return (*outs, mb.linear(x=x, weight=weight))

    main = read_program(save(program, tmp_path / "packed.mlpackage")).functions["main"]
    assert main.packed == {"int4.data": "int4", "uint4.data": "uint4", "uint3.indices": "uint3"}


def test_another_kind_of_model_says_which(package: Path, tmp_path: Path) -> None:
    with pytest.raises(NotAProgramError, match="it holds a pipeline, not an ML program") as error:
        read_program(edited(package, tmp_path, lambda model: model.pipeline.SetInParent()))
    assert error.value.kind == "pipeline"
