"""What the description of a Core ML model says of its edges: features, the dtype of their elements, allowed shapes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNBOUNDED = -1  # as the upper end of a range

# ArrayFeatureType.ArrayDataType (FeatureTypes.proto) -> our name
ARRAY_DTYPES = {65552: "fp16", 65568: "fp32", 65600: "fp64", 131080: "int8", 131104: "int32"}


@dataclass(frozen=True)
class Feature:
    """One input, output or state as an app sees it.

    `kind` is the format's word ("multiArray", "image", "state", ...), `dtype` that of its elements where they have one.
    `shape` is the fixed or the default shape; an image's is its height and width. `enumerated` are the shapes it may
    have instead, `ranges` the (lowest, highest) size of each dimension, UNBOUNDED for no highest.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    enumerated: tuple[tuple[int, ...], ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def ranged(self) -> bool:
        return any(low != high for low, high in self.ranges)

    @property
    def flexible(self) -> bool:
        return self.ranged or len(set(self.enumerated)) > 1


@dataclass(frozen=True)
class Interface:
    """The features of one function."""

    inputs: tuple[Feature, ...] = ()
    outputs: tuple[Feature, ...] = ()
    states: tuple[Feature, ...] = ()


def interface_of(description: Any) -> Interface:
    """A parsed ModelDescription or FunctionDescription (Model.proto) -> Interface."""
    return Interface(_features(description.input), _features(description.output), _features(description.state))


def _features(items: Iterable[Any]) -> tuple[Feature, ...]:
    return tuple(_feature(item.name, item.type) for item in items)


def _feature(name: str, kind: Any) -> Feature:
    word = str(kind.WhichOneof("Type")).removesuffix("Type")
    if word == "image":
        image = kind.imageType
        sizes = tuple((int(s.height), int(s.width)) for s in image.enumeratedSizes.sizes)
        sides = (_range(image.imageSizeRange.heightRange), _range(image.imageSizeRange.widthRange))
        ranges = sides if image.WhichOneof("SizeFlexibility") == "imageSizeRange" else ()
        return Feature(name, word, "", (int(image.height), int(image.width)), sizes, ranges)
    array = kind.stateType.arrayType if word == "state" else kind.multiArrayType
    if word not in ("state", "multiArray"):
        return Feature(name, word, "", ())
    dtype = ARRAY_DTYPES.get(array.dataType, f"dtype {array.dataType}")
    shape = tuple(int(size) for size in array.shape)
    options = tuple(tuple(int(size) for size in s.shape) for s in array.enumeratedShapes.shapes)
    return Feature(name, word, dtype, shape, options, tuple(_range(r) for r in array.shapeRange.sizeRanges))


def _range(sizes: Any) -> tuple[int, int]:
    return int(sizes.lowerBound), int(sizes.upperBound) if sizes.upperBound >= 0 else UNBOUNDED
