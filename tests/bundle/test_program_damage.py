"""What read_program refuses, and in which words."""

import json
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest

from anechain.bundle.program import read_program
from anechain.errors import BundleError
from tests.bundle.packages import MODEL, WEIGHTS, body, copy, edited, save, stateful


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stateful(1), tmp_path_factory.mktemp("decode") / "decode.mlpackage")


def refusal(package: Path) -> str:
    with pytest.raises(BundleError) as caught:
        read_program(package)
    text = str(caught.value)
    start, end = f"package {package} cannot be read, because ", ": copy or bake it again."
    assert text.startswith(start) and text.endswith(end)
    return text.removeprefix(start).removesuffix(end)


def test_no_package(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.mlpackage") == "Manifest.json is missing or unreadable (No such file or directory)"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"itemInfoEntries": {}, "rootModelIdentifier": "a"}', "\xff"])
def test_manifest_that_names_no_model(text: str, decode: Path, tmp_path: Path) -> None:
    package = copy(decode, tmp_path)
    (package / "Manifest.json").write_bytes(text.encode("latin-1"))
    assert refusal(package) == "Manifest.json names no root model"


def test_the_manifest_names_the_model_file(decode: Path, tmp_path: Path) -> None:
    package = copy(decode, tmp_path)
    (package / MODEL).rename((package / MODEL).with_name("other.mlmodel"))
    assert refusal(package) == "model.mlmodel is missing or unreadable (No such file or directory)"
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = "com.apple.CoreML/other.mlmodel"
    (package / "Manifest.json").write_text(json.dumps(manifest))
    assert read_program(package).functions["main"].ops


def test_model_file_that_is_cut_off_or_foreign(decode: Path, tmp_path: Path) -> None:
    package = copy(decode, tmp_path)
    whole = (package / MODEL).read_bytes()
    (package / MODEL).write_bytes(whole[:-7])
    assert refusal(package) == "model.mlmodel is not a Core ML model, or is cut off"
    (package / MODEL).write_bytes(b"")
    assert refusal(package) == "it holds no model, not an ML program"


def test_neural_network(decode: Path, tmp_path: Path) -> None:
    package = edited(decode, tmp_path, lambda model: model.neuralNetwork.SetInParent())
    assert refusal(package) == "it holds a neuralNetwork, not an ML program"


def test_program_without_functions_or_without_a_body(decode: Path, tmp_path: Path) -> None:
    package = edited(decode, tmp_path, lambda model: model.mlProgram.functions.clear())
    assert refusal(package) == "its ML program has no function"
    model = ct.models.utils.load_spec(str(decode))
    model.mlProgram.functions["main"].opset = "CoreML99"
    (package / MODEL).write_bytes(model.SerializeToString())
    assert refusal(package) == "function 'main' has no body for its opset 'CoreML99'"


def test_op_that_reads_what_is_not_there(decode: Path, tmp_path: Path) -> None:
    def rename(model: Any) -> None:
        conv = next(op for op in body(model).operations if op.type == "conv")
        conv.inputs["x"].arguments[0].name = "gone"
        conv.inputs["weight"].arguments[0].name = "away"

    package = edited(decode, tmp_path, rename)
    assert refusal(package) == "op 'projected' (conv) reads what nothing before it makes: away, gone"


def test_output_that_is_not_computed(decode: Path, tmp_path: Path) -> None:
    package = edited(decode, tmp_path, lambda model: body(model).outputs.append("nothing"))
    assert refusal(package) == "outputs of 'main' are not computed: nothing"


def test_weight_file_that_is_missing_empty_cut_off_or_of_another_kind(decode: Path, tmp_path: Path) -> None:
    package = copy(decode, tmp_path)
    weights = package / WEIGHTS
    whole = weights.read_bytes()
    name = "@model_path/weights/weight.bin"
    cuts = 0
    for size in [*range(64, len(whole), 61), len(whole) - 64]:
        weights.write_bytes(whole[:size])
        assert refusal(package).startswith(f"{name} is cut off or another model's: the weight '")
        cuts += 1
    assert cuts > 5
    weights.write_bytes(whole[:40])
    assert refusal(package) == f"{name} is not a weight file of version 2"
    weights.write_bytes(whole[:4] + b"\x01" + whole[5:])
    assert refusal(package) == f"{name} is not a weight file of version 2"
    weights.write_bytes(b"")
    assert refusal(package).startswith(f"the weight file {name} is missing, empty or unreadable (")
    weights.unlink()
    assert refusal(package).startswith(f"the weight file {name} is missing, empty or unreadable (")


def weight_value(model: Any) -> Any:
    return next(op for op in body(model).operations if op.outputs[0].name == "weight").inputs["data"].arguments[0].value


def test_weight_of_another_shape_or_dtype_than_declared(decode: Path, tmp_path: Path) -> None:
    def longer(model: Any) -> None:
        weight_value(model).type.tensorType.dimensions[0].constant.size = 65

    package = edited(decode, tmp_path, longer)
    assert refusal(package) == "constant 'weight.data' has 256 bytes, which are not those of int8 [65, 4, 1, 1]"
    for number, reason in [(31, "is cut off or another"), (13, "has the dtype bf16"), (99, "has the dtype dtype 99")]:
        model = ct.models.utils.load_spec(str(decode))
        weight_value(model).type.tensorType.dataType = number
        (package / MODEL).write_bytes(model.SerializeToString())
        assert reason in refusal(package)


def test_weight_record_without_its_mark(decode: Path, tmp_path: Path) -> None:
    package = copy(decode, tmp_path)
    whole = (package / WEIGHTS).read_bytes()
    mark = (0xDEADBEEF).to_bytes(4, "little")
    assert mark in whole
    (package / WEIGHTS).write_bytes(whole.replace(mark, bytes(4)))
    assert " is cut off or another model's: the weight '" in refusal(package)


@pytest.mark.parametrize("found", [0, 5])
def test_inline_constant_with_too_few_or_too_many_elements(found: int, decode: Path, tmp_path: Path) -> None:
    def recount(model: Any) -> None:
        size = next(op for op in body(model).operations if op.type == "const" and "box_size" in op.outputs[0].name)
        tensor = size.attributes["val"].immediateValue.tensor
        if found:
            tensor.ints.values.append(1)
        else:
            tensor.ClearField("ints")

    package = edited(decode, tmp_path, recount)
    assert refusal(package) == f"constant 'box_size_0' has {found} elements, which do not fill [4]"


def test_weight_file_outside_of_the_package(decode: Path, tmp_path: Path) -> None:
    def elsewhere(model: Any) -> None:
        weight_value(model).blobFileValue.fileName = "@model_path/../../../secret.bin"

    package = edited(decode, tmp_path, elsewhere)
    assert refusal(package) == "the weight file @model_path/../../../secret.bin lies outside of it"


def test_program_that_parses_and_makes_no_sense(decode: Path, tmp_path: Path) -> None:
    def strip(model: Any) -> None:
        read = next(op for op in body(model).operations if op.type == "read_state")
        del read.inputs["input"]

    package = edited(decode, tmp_path, strip)
    assert refusal(package) == "its program makes no sense (KeyError: 'input')"


def test_damage_anywhere_is_a_refusal_and_never_another_error(decode: Path, tmp_path: Path) -> None:
    package = copy(decode, tmp_path)
    rng = np.random.default_rng(11)
    whole = np.fromfile(package / MODEL, np.uint8)
    refused = 0
    for _ in range(400):
        broken = whole.copy()
        broken[rng.integers(0, broken.size, 3)] = rng.integers(0, 256, 3)
        broken.tofile(package / MODEL)
        try:
            read_program(package)
        except BundleError:
            refused += 1
    assert refused > 100
