"""Which package, and which of its layers, does Core ML not take? Halving, each trial in a process of its own."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anechain.bake import package
from anechain.bake.source import Source
from anechain.bundle.manifest import Bundle
from anechain.errors import BundleError

Probe = Callable[[Sequence[Path]], str | None]  # tries packages out together: what went wrong, None when nothing did
Say = Callable[[str], None]


@dataclass(frozen=True)
class Culprit:
    """The first package that fails, "" when none does; its first bad layer, None for the head or when none fails alone.

    `alone` is whether the package fails by itself, or only after those before it.
    """

    package: str
    reason: str
    alone: bool = True
    layer: int | None = None
    layer_reason: str = ""


def find_culprit(bundle: Bundle, source: Source, probe: Probe, say: Say) -> Culprit:
    """Halves the chain, then the layers of the first package that fails, which are baked again from `source`.

    Raises BundleError when `source` is not what the bundle was baked from.
    """
    if source.fingerprint != bundle.fingerprint:
        raise BundleError(
            f"{source.ref} is not what {bundle.path} was baked from (fingerprint {source.fingerprint[:12]} instead of "
            f"{bundle.fingerprint[:12]}): give the original checkpoint with --source."
        )
    paths = [*bundle.block_paths, bundle.head_path]

    def packages(count: int) -> str | None:
        say(f"the first {count} of {len(paths)} packages")
        return probe(paths[:count])

    number, reason = first_failure(len(paths), packages)
    if number is None:
        return Culprit("", "")
    culprit = paths[number]
    say(f"{culprit.name} alone")
    own = probe([culprit])
    if own is None:
        return Culprit(culprit.name, reason, alone=False)
    if culprit == bundle.head_path:
        return Culprit(culprit.name, own)
    block = bundle.blocks[number]
    with tempfile.TemporaryDirectory(prefix="anechain-bisect-") as folder:

        def layers(count: int) -> str | None:
            taken = range(block.start, block.start + count)
            say(f"{culprit.name}, layers {taken.start} to {taken.stop - 1}")
            path = Path(folder) / f"layers-{taken.start}-{taken.stop}.mlpackage"
            if not path.exists():
                form = bundle.form(number)
                form = replace(form, gives=form.gives if taken.stop == block.stop else None)
                package.make_block(
                    source, bundle.spec, bundle.recipe, taken, bundle.context, bundle.prefill, path, form
                )
            return probe([path])

        index, why = first_failure(len(block.layers), layers)
    return Culprit(culprit.name, own, True, None if index is None else block.start + index, why)


def first_failure(count: int, fails: Callable[[int], str | None]) -> tuple[int | None, str]:
    """The index of the first of `count` items with which a beginning of them fails, and why; None if all pass.

    `fails(n)` tries the first n; a longer beginning than one that fails is taken to fail, too.
    """
    reason = fails(count)
    if reason is None:
        return None, ""
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        why = fails(middle)
        good, bad, reason = (middle, bad, reason) if why is None else (good, middle, why)
    return bad - 1, reason
