"""`org/name` or `org/name@revision`: a model on the Hugging Face hub, through that library's own cache."""

import re
from contextlib import suppress
from pathlib import Path

from anechain.bake.hf import TEXT_FILES, HfSource
from anechain.errors import SourceError

ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
_WANTED = ["config.json", "*.safetensors", "*.safetensors.index.json", *TEXT_FILES]
# Other formats of the same weights, which lie in folders or have names of their own.
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]


def open_hub(ref: str) -> HfSource:
    """Opens the model, fetching what the cache lacks; its `ref` names the commit, so that it stays the same model.

    Without a network, or with HF_HUB_OFFLINE set, what is in the cache is used. Raises SourceError.
    """
    found = ID.fullmatch(ref)
    assert found is not None, ref
    name, revision = found["name"], found["revision"]
    if revision and _COMMIT.fullmatch(revision):  # nothing can have changed: a whole copy needs no network
        with suppress(SourceError):
            return HfSource(_snapshot(name, revision, cached=True), ref)
    folder = _snapshot(name, revision, cached=False)
    if not (folder / "config.json").exists():
        raise SourceError(
            f"{ref} has no config.json on the Hugging Face hub: use a model with safetensors weights, or fetch its "
            ".gguf file and give that."
        )
    return HfSource(folder, f"{name}@{folder.name}")


def _snapshot(name: str, revision: str | None, cached: bool) -> Path:
    from huggingface_hub import errors, snapshot_download  # takes half a second, which no other source needs

    where = f"{name}{f'@{revision}' if revision else ''}"
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=cached,
            )
        )
    except errors.GatedRepoError:
        reason = "needs its owner's permission: accept its licence there, then run `hf auth login`"
    except errors.RevisionNotFoundError:
        reason = "has no such revision: check it"
    except errors.RepositoryNotFoundError:
        reason = "is not there or is private: check its name, or run `hf auth login`"
    except errors.LocalEntryNotFoundError:
        reason = "is not in the local cache, and the hub cannot be reached: go online once, or give a directory"
    except errors.HFValidationError as error:
        reason = f"is no valid name ({' '.join(str(error).split())}): write org/name"
    except Exception as error:  # a broken connection is an error of whatever HTTP library the hub's uses
        reason = f"could not be fetched ({' '.join(str(error).split())[:200]}): try again, or give a directory"
    raise SourceError(f"the model {where} of the Hugging Face hub {reason}.")
