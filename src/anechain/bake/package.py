"""A MIL program -> one .mlpackage on disk, and the checks that what was written is what was meant.

The passes of coremltools are not run: every op is where `graph.py` put it. Its exporter writes the protobuf and the
weight file; the folder around them (a JSON manifest and two files) is written here, without the random identifiers that
would make two bakes of the same model differ.
"""

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from coremltools.converters.mil.backend.mil.load import load as export
from coremltools.converters.mil.mil import Program

from anechain.bake.check import check_block, check_head
from anechain.bake.graph import block_program, head_program
from anechain.bake.source import Source
from anechain.bundle.embedding import write_embedding
from anechain.bundle.form import Form
from anechain.bundle.recipe import FP16, Recipe, Scheme
from anechain.bundle.rounded import Rounded
from anechain.bundle.spec import FORM, LAYER_MATRICES, ModelSpec, head_pieces, layer_tensors, stream_writers
from anechain.bundle.stored import Stored, compress, scheme_of
from anechain.errors import RecipeError

FP16_MAX = 65504.0

Weights = dict[str, Stored]


def make_block(
    source: Source,
    spec: ModelSpec,
    recipe: Recipe,
    layers: range,
    context: int,
    prefill: int,
    path: Path,
    form: Form = FORM,
    rounded: Rounded | None = None,
) -> None:
    """Writes the package of `layers` as `path` and asserts, from the files, that it is what the recipe says.

    Tensors that are in `rounded` are taken from there as they are.
    """
    weights = block_weights(source, recipe, spec, layers, rounded)
    program = block_program(spec, recipe, layers, context, prefill, weights, form)
    described = {"layers": f"{layers.start}-{layers.stop - 1}", "recipe": recipe.name}
    save_package(program, path, described, form.spec_version)
    check_block(path, spec, recipe, layers, context, prefill, weights, form)


def make_head(
    source: Source, spec: ModelSpec, recipe: Recipe, path: Path, form: Form = FORM, rounded: Rounded | None = None
) -> None:
    """The same for the final norm and the head."""
    weights = head_weights(source, recipe, spec, rounded)
    save_package(head_program(spec, recipe, weights, form), path, {"recipe": recipe.name}, form.spec_version)
    check_head(path, spec, recipe, weights, form)


def make_embedding(source: Source, recipe: Recipe, directory: Path) -> None:
    """The table as files of its own, for models whose head does not hold it in the same form.

    It is looked up on the host as fp16, whatever the program computes in. Raises RecipeError when fp16 cannot hold it.
    """
    weights = _Stored(recipe, "fp16")
    table = source.tensor("embed")
    weights.add("embed", table, recipe.scheme_for("embed", table.size))
    write_embedding(directory, weights.checked()["embed"])


def block_weights(
    source: Source, recipe: Recipe, spec: ModelSpec, layers: range, rounded: Rounded | None = None
) -> Weights:
    """The tensors of `layers` in the form that the recipe says; what writes to the residual stream carries its scale.

    Raises RecipeError, naming all offenders, for weights that are not finite or that fp16 cannot hold.
    """
    weights = _Stored(recipe, recipe.compute)
    writers = stream_writers(spec)
    for i in layers:
        for part, shape in layer_tensors(spec).items():
            name = f"layers.{i}.{part}"
            if rounded is not None and name in rounded:
                scheme = recipe.scheme_for(name, math.prod(shape)) if part in LAYER_MATRICES else FP16
                weights.take(name, rounded.tensor(name), shape, scheme)
                continue
            tensor = source.tensor(name)
            if part in writers and spec.stream_scale != 1.0:
                tensor = tensor * np.float32(spec.stream_scale)
            weights.add(name, tensor, recipe.scheme_for(name, tensor.size) if part in LAYER_MATRICES else FP16)
    return weights.checked()


def head_weights(source: Source, recipe: Recipe, spec: ModelSpec, rounded: Rounded | None = None) -> Weights:
    """`final_norm` and the pieces `head.0` ... of the vocabulary; the last piece is filled up with rows of zeros."""
    pieces, rows = head_pieces(spec)
    weights = _Stored(recipe, recipe.compute)
    if rounded is not None and "final_norm" in rounded:
        weights.take("final_norm", rounded.tensor("final_norm"), (spec.hidden_size,), FP16)
    else:
        weights.add("final_norm", source.tensor("final_norm"), FP16)
    head = source.tensor("embed" if spec.tied else "head")  # [V, H]
    scheme = recipe.scheme_for("head", head.size)
    for i in range(pieces):
        if rounded is not None and f"head.{i}" in rounded:
            weights.take(f"head.{i}", rounded.tensor(f"head.{i}"), (rows, spec.hidden_size), scheme)
            continue
        piece = head[i * rows : (i + 1) * rows]
        weights.add(f"head.{i}", np.pad(piece, ((0, rows - len(piece)), (0, 0))), scheme)
    return weights.checked()


class _Stored:
    """Tensors on their way into the form that a recipe says, and what is wrong with them."""

    def __init__(self, recipe: Recipe, compute: str) -> None:
        self._name, self._compute = recipe.name, compute
        self._weights: Weights = {}
        self._faults: list[str] = []

    def add(self, name: str, tensor: np.ndarray, scheme: Scheme) -> None:
        if not np.isfinite(tensor).all():
            self._faults.append(f"{name} holds values that are not finite (the checkpoint is damaged)")
        elif (self._compute == "fp16" or scheme.bits != 16) and (largest := np.abs(tensor).max()) > FP16_MAX:
            self._faults.append(f"{name} reaches {largest:.0f}, above the 65504 that fp16 holds")
        elif scheme.bits == 16:
            self._weights[name] = tensor.astype(np.float16 if self._compute == "fp16" else np.float32)
        else:
            self._weights[name] = compress(tensor, scheme, name)

    def take(self, name: str, stored: Stored, shape: tuple[int, ...], scheme: Scheme) -> None:
        """A tensor that was rounded beforehand; it must be what the recipe would have made of the matrix' shape."""
        if stored.shape != shape or scheme_of(stored) != replace(scheme, granularity="channel", block=0):
            self._faults.append(f"{name} was rounded beforehand as {scheme_of(stored)} {list(stored.shape)}")
        elif isinstance(stored, np.ndarray) and not np.isfinite(stored).all():
            self._faults.append(f"{name} was rounded beforehand to values that are not finite")
        else:
            self._weights[name] = stored

    def checked(self) -> Weights:
        if self._faults:
            raise RecipeError(
                f"recipe {self._name!r} cannot be applied to this model: {'; '.join(self._faults)}: use another "
                'checkpoint or, where fp16 is too small, a recipe with compute = "fp32" that leaves these weights fp16.'
            )
        return self._weights


def save_package(
    program: Program, path: Path, description: Mapping[str, str], spec_version: int = FORM.spec_version
) -> None:
    """Writes `program` as the folder `path` (which must not exist); `description` becomes its metadata.

    Raises OSError when the disk does not take it.
    """
    data = path / "Data" / "com.apple.CoreML"
    (data / "weights").mkdir(parents=True)
    try:
        model = export(program, weights_dir=str(data / "weights"), specification_version=spec_version)
    except RuntimeError as error:  # the native weight writer reports a failed write this way
        raise OSError(f"the weights of {path.name} could not be written ({error})") from error
    model.description.metadata.userDefined.update(description)
    (data / "model.mlmodel").write_bytes(model.SerializeToString(deterministic=True))
    (path / "Manifest.json").write_text(
        json.dumps(_package_manifest(path.name), indent=4, sort_keys=True), encoding="utf-8"
    )


def _package_manifest(name: str) -> dict[str, object]:
    """What Core ML looks up the two parts of a package in; the identifiers are made from the name, so they repeat."""
    entries = {}
    for part, text in (("model.mlmodel", "CoreML Model Specification"), ("weights", "CoreML Model Weights")):
        entries[str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{part}")).upper()] = {
            "author": "com.apple.CoreML",
            "description": text,
            "name": part,
            "path": f"com.apple.CoreML/{part}",
        }
    return {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": next(iter(entries))}
