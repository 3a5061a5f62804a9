"""A MIL program -> one .mlpackage on disk, and the checks that what was written is what was meant.

Every op is where `graph.py` put it, and no part of coremltools is run. Identifiers in the folder's manifest, which its
packager draws at random, follow from the name: two bakes of the same model give the same bytes.
"""

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from anechain.bake.check import check_block, check_head
from anechain.bake.graph import block_program, head_program
from anechain.bake.mil import Program
from anechain.bake.mil_file import write_model
from anechain.bake.source import Source, rows_of
from anechain.bundle.embedding import write_embedding
from anechain.bundle.form import Form
from anechain.bundle.recipe import FP16, Recipe, Scheme
from anechain.bundle.rounded import Rounded
from anechain.bundle.spec import (
    FORM,
    LAYER_MATRICES,
    MAX_PIECE,
    ModelSpec,
    head_pieces,
    layer_tensors,
    matrices_of,
    stream_writers,
)
from anechain.bundle.stored import Stored, compress, joined_rows, scheme_of
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
    save_package(head_program(spec, recipe, weights), path, {"recipe": recipe.name}, form.spec_version)
    check_head(path, spec, recipe, weights, form)


def make_embedding(source: Source, recipe: Recipe, directory: Path) -> None:
    """The table as files of its own, for models whose head does not hold it in the same form.

    It is looked up on the host as fp16, whatever the program computes in. Raises RecipeError when fp16 cannot hold it.
    """
    vocab, hidden = matrices_of(source.spec)["embed"]
    scheme = recipe.scheme_for("embed", vocab * hidden)
    rows = rows_of(source, "embed")
    step = MAX_PIECE if scheme.kind == "linear" and not scheme.rank else vocab  # a row's form depends on no other
    pieces = []
    for start in range(0, vocab, step):
        weights = _Stored(recipe, "fp16")
        weights.add("embed", rows(start, min(start + step, vocab)), scheme)
        pieces.append(weights.checked()["embed"])
    write_embedding(directory, joined_rows(pieces))


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
    read = rows_of(source, "embed" if spec.tied else "head")
    scheme = recipe.scheme_for("head", spec.vocab_size * spec.hidden_size)
    for i in range(pieces):
        if rounded is not None and f"head.{i}" in rounded:
            weights.take(f"head.{i}", rounded.tensor(f"head.{i}"), (rows, spec.hidden_size), scheme)
            continue
        piece = read(i * rows, min((i + 1) * rows, spec.vocab_size))
        if len(piece) < rows:
            piece = np.pad(piece, ((0, rows - len(piece)), (0, 0)))
        weights.add(f"head.{i}", piece, scheme)
    return weights.checked()


class _Stored:
    """Tensors on their way into the form that a recipe says, and what is wrong with them."""

    def __init__(self, recipe: Recipe, compute: str) -> None:
        self._name, self._compute = recipe.name, compute
        self._weights: Weights = {}
        self._faults: list[str] = []

    def add(self, name: str, tensor: np.ndarray, scheme: Scheme) -> None:
        largest = max(tensor.max(), -tensor.min())  # not a number where any is none
        if not np.isfinite(largest):
            self._faults.append(f"{name} holds values that are not finite (the checkpoint is damaged)")
        elif (self._compute == "fp16" or scheme.bits != 16) and largest > FP16_MAX:
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
    write_model(program, path / "Data" / "com.apple.CoreML", description, spec_version)
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
