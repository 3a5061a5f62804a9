"""Models by hub id, from a cache laid out as huggingface_hub lays it out; no test goes online."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from anechain.bake.source import open_source
from anechain.errors import SourceError
from tests.tiny import shard, write_tiny

COMMIT, OTHER = "a" * 39 + "1", "b" * 39 + "2"
OFFLINE = "is not in the local cache, and the hub cannot be reached: go online once, or give a directory."


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    assert constants.HF_HUB_OFFLINE, "no test may go online"
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def lay_out(cache: Path, name: str, commit: str, refs: tuple[str, ...] = ("main",), **changes: Any) -> Path:
    """A snapshot of T-llama, its files as links to blobs, and the refs that name it."""
    repo = cache / f"models--{name.replace('/', '--')}"
    model = write_tiny(cache.parent / f"made-{commit[:3]}", "llama", **changes)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    for file in model.iterdir():
        blob = repo / "blobs" / f"{commit[:6]}-{file.name}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(blob)
    for ref in refs:
        (repo / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return snapshot


def refusal(ref: str) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(ref)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def test_a_cached_model_is_opened_offline(cache: Path, tmp_path: Path) -> None:
    lay_out(cache, "org/tiny.model-1", COMMIT)
    source = open_source("org/tiny.model-1")
    plain = open_source(str(write_tiny(tmp_path / "plain", "llama")))
    assert source.ref == f"org/tiny.model-1@{COMMIT}", "the commit is what a later run has to find again"
    assert source.spec == plain.spec and source.fingerprint == plain.fingerprint
    assert source.text_files == plain.text_files
    assert open_source(source.ref).ref == source.ref


def test_revisions(cache: Path) -> None:
    lay_out(cache, "org/tiny", COMMIT, ("main", "v1"))
    lay_out(cache, "org/tiny", OTHER, ("v2", "refs/pr/3"), rope_theta=5000.0)
    commits = {ref: open_source(f"org/tiny{ref}").ref.partition("@")[2] for ref in ("", "@main", "@v1", "@v2")}
    assert commits == {"": COMMIT, "@main": COMMIT, "@v1": COMMIT, "@v2": OTHER}
    assert open_source("org/tiny@refs/pr/3").ref.endswith(OTHER)
    assert open_source(f"org/tiny@{OTHER}").spec.attentions[0].rope.theta == 5000
    assert open_source(f"org/tiny@{COMMIT}").spec.attentions[0].rope.theta == 10000
    assert refusal("org/tiny@v3") == f"the model org/tiny@v3 of the Hugging Face hub {OFFLINE}"


def test_a_model_that_is_not_cached(cache: Path) -> None:
    lay_out(cache, "org/tiny", COMMIT)
    assert refusal("org/other") == f"the model org/other of the Hugging Face hub {OFFLINE}"
    assert refusal(f"org/tiny@{OTHER}") == f"the model org/tiny@{OTHER} of the Hugging Face hub {OFFLINE}"
    assert not (cache / "models--org--other" / "snapshots").exists()


def test_a_snapshot_that_lacks_files(cache: Path) -> None:
    snapshot = lay_out(cache, "org/tiny", COMMIT)
    (snapshot / "model.safetensors").unlink()
    for ref in ("org/tiny", f"org/tiny@{COMMIT}"):
        assert "has no model.safetensors" in refusal(ref)
    (snapshot / "config.json").unlink()
    assert refusal("org/tiny") == (
        "org/tiny has no config.json on the Hugging Face hub: use a model with safetensors weights, or fetch its .gguf "
        "file and give that."
    )


def test_a_directory_of_that_name_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(cache, "org/tiny", COMMIT)
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "org" / "tiny", "llama", rope_theta=77.0)
    assert open_source("org/tiny").spec.attentions[0].rope.theta == 77
    assert refusal("org/tiny2").startswith("there is no org/tiny2: give"), "a slip in a path is not looked up"


def test_what_is_fetched(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, index, config and tokenizer: no other formats, no folders, no second copy."""
    calls: list[dict[str, Any]] = []
    snapshot = shard(write_tiny(tmp_path / COMMIT, "llama"))

    def fetch(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_source("org/tiny@v1").ref == f"org/tiny@{COMMIT}"
    (call,) = calls
    assert (call["name"], call["revision"], call["local_files_only"]) == ("org/tiny", "v1", False)
    there = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "chat_template.jinja", "generation_config.json", "README.md", "pytorch_model.bin", "tokenizer.model",
        "consolidated.safetensors", "consolidated.safetensors.index.json", "original/model.safetensors",
        "adapter_model.safetensors", "onnx/config.json", "model.gguf",
    ]  # fmt: skip
    wanted = list(
        huggingface_hub.utils.filter_repo_objects(
            there, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
        )
    )
    assert wanted == there[:6]


def answer(kind: type[Exception], status: int) -> Exception:
    response = SimpleNamespace(headers={}, request=None, status_code=status)
    return kind("no\nsuch luck", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "error, words",
    [
        (answer(errors.GatedRepoError, 403), "needs its owner's permission: accept its licence there, then run"),
        (answer(errors.RepositoryNotFoundError, 404), "is not there or is private: check its name"),
        (answer(errors.RevisionNotFoundError, 404), "has no such revision: check it."),
        (answer(errors.HfHubHTTPError, 500), "could not be fetched (no such luck): try again"),
        (RuntimeError("the peer hung up"), "could not be fetched (the peer hung up): try again"),
        (OSError(28, "No space left on device"), "could not be fetched ([Errno 28] No space left on device): try"),
        (errors.HFValidationError("bad -- name"), "is no valid name (bad -- name): write org/name."),
        (errors.LocalEntryNotFoundError("gone"), OFFLINE),
    ],
)
def test_what_the_hub_refuses(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    message = refusal("org/tiny@v1")
    assert message.startswith("the model org/tiny@v1 of the Hugging Face hub ") and words in message


def test_a_pinned_commit_goes_online_only_when_the_cache_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, partial = write_tiny(tmp_path / "whole" / COMMIT, "llama"), tmp_path / "partial"
    shutil.copytree(whole, partial)
    (partial / "model.safetensors").unlink()
    asked: list[bool] = []

    def fetch(name: str, local_files_only: bool, **options: Any) -> str:
        asked.append(local_files_only)
        return str(partial if local_files_only and len(asked) == 1 else whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_source(f"org/tiny@{COMMIT}").ref == f"org/tiny@{COMMIT}" and asked == [True, False]
    assert open_source(f"org/tiny@{COMMIT}").ref == f"org/tiny@{COMMIT}" and asked == [True, False, True]


def test_the_index_is_read_through_links(cache: Path) -> None:
    snapshot = lay_out(cache, "org/tiny", COMMIT)
    shard(cache.parent / f"made-{COMMIT[:3]}")
    (snapshot / "model.safetensors").unlink()
    for file in (cache.parent / f"made-{COMMIT[:3]}").glob("*.safetensors*"):
        (snapshot / file.name).symlink_to(file)
    assert json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
    assert open_source("org/tiny").spec.n_layers == 2
