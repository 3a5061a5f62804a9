"""What a recipe makes of a model's bytes, counted from shapes alone."""

from dataclasses import dataclass

from anechain.bundle.recipe import Recipe
from anechain.bundle.spec import ModelSpec, matrices_of
from anechain.bundle.stored import storage_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes of all matrices under a recipe; a table that serves at both ends is counted once."""

    bytes: int
    fp16_bytes: int  # of the same matrices in fp16
    left: tuple[str, ...]  # what stays fp16
    left_bytes: int
    eight_bit_share: float  # of the weights of all blocks: those stored at 8 bits or less

    @property
    def share(self) -> float:
        """Of the fp16 bytes."""
        return self.bytes / self.fp16_bytes

    @property
    def note(self) -> str:
        """A sentence about what stays fp16."""
        if not self.left:
            return "no matrix stays fp16"
        if self.left_bytes == self.bytes:
            return "all matrices stay fp16"
        named = ", ".join(self.left[:4]) + (f" and {len(self.left) - 4} more" if len(self.left) > 4 else "")
        return f"{named} stay{'s' if len(self.left) == 1 else ''} fp16: {self.left_bytes / self.bytes:.1%} of the bytes"


def footprint(spec: ModelSpec, recipe: Recipe) -> Footprint:
    """Norms and biases are left out: they are fp16 in every recipe, and under a thousandth of the bytes."""
    total = plain = left_bytes = small = blocks = 0
    left = []
    matrices = matrices_of(spec)
    schemes = {name: recipe.scheme_for(name, o * i) for name, (o, i) in matrices.items()}
    for name, (outputs, inputs) in matrices.items():
        if name == "head" and spec.tied:
            if schemes["head"] == schemes["embed"]:
                continue
            plain -= 2 * outputs * inputs  # an fp16 model stores the table once
        count = outputs * inputs
        size = storage_bytes((outputs, inputs), schemes[name])
        total, plain = total + size, plain + 2 * count
        if schemes[name].bits == 16:
            left.append(name)
            left_bytes += size
        if name.startswith("layers."):
            blocks += count
            # A correction's fp16 weights count as blocks' weights that are not at 8 bits.
            blocks += schemes[name].rank * (outputs + inputs)
            small += count if schemes[name].bits < 16 else 0
    return Footprint(total, plain, tuple(left), left_bytes, small / blocks)


def matrix_bytes(name: str, shape: tuple[int, int], recipe: Recipe) -> int:
    """Bytes that a matrix takes under the recipe; a table on the host is never wider than fp16."""
    scheme = recipe.scheme_for(name, shape[0] * shape[1])
    wide = recipe.compute == "fp32" and name != "embed"
    return storage_bytes(shape, scheme) * (2 if wide and scheme.bits == 16 else 1)
