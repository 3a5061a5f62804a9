"""`anechain merge`: a LoRA adapter becomes part of a Hugging Face checkpoint."""

from pathlib import Path
from typing import Annotated, Any

import typer

from anechain.bake.adapter import Adapter
from anechain.bake.lora import Merged
from anechain.bake.source import open_source
from anechain.bake.survival import warning
from anechain.bake.write_hf import write_hf
from anechain.cli.console import err, megabytes, print_json, progress


def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a Hugging Face directory")],
    lora: Annotated[str, typer.Option(metavar="DIR", help="a PEFT LoRA adapter")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the new checkpoint's folder")],
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16; left out, that of each tensor stays")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Fold the adapter DIR into MODEL and write the result as a plain Hugging Face directory."""
    source = Merged(open_source(model), Adapter(Path(lora)))
    for note in source.notes:
        err.print(f"note: {note}")
    for text in source.warnings:
        err.print(f"warning: {text}")
    with progress("merge") as report:
        written = write_hf(source, output, dtype or None, report)
    if lost := warning(written.survival):
        err.print(f"warning: {lost}")
    if as_json:
        record: dict[str, Any] = {
            "directory": str(output),
            "tensors": written.tensors,
            "changed": written.changed,
            "bytes": written.bytes,
            "adapter": source.provenance | {"survival": written.survival},
        }
        print_json(record)
        return
    err.print(f"{output}: {written.changed} of {written.tensors} tensors changed, {megabytes(written.bytes)}")
