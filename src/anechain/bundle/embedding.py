"""The embedding table, looked up on the host: a file of its own, or the rows of the head's weights (a tied table)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anechain.bundle.manifest import HEAD, Bundle
from anechain.bundle.palette import Palettized
from anechain.bundle.program import read_program
from anechain.bundle.quant import Quantized, dequantize
from anechain.bundle.spec import DECODE, head_pieces
from anechain.bundle.stored import Stored
from anechain.errors import BundleError

TABLE, SCALE, PALETTE = "embedding.npy", "embedding-scale.npy", "embedding-palette.npy"


@dataclass(frozen=True)
class Embedding:
    """Equal pieces of a memory-mapped table [V, H]: floats, steps with a scale per row or per block of a row, or places
    in the values of a palette for the piece or for groups of its rows.
    """

    data: tuple[np.ndarray, ...]  # each [rows, H]
    scale: tuple[np.ndarray, ...]  # each [rows, blocks]; empty for other tables
    multiplier: float  # embedding_scale times stream_scale
    palette: tuple[np.ndarray, ...] = ()  # each [groups, entries]; empty for other tables

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Token ids [n] -> [n, H] f16: the start of the residual stream, rounded once."""
        size = len(self.data[0])
        out = np.empty((len(ids), self.data[0].shape[1]), np.float32)
        for at, token in enumerate(ids.tolist()):
            piece, row = divmod(token, size)
            out[at] = self._dense(piece, row)
        with np.errstate(over="ignore"):  # an overflow becomes inf, which the gate names
            return (out * np.float32(self.multiplier)).astype(np.float16)

    def _dense(self, piece: int, row: int) -> np.ndarray:
        dense = self.data[piece][row]  # [H]
        if self.scale:
            dense = dequantize(Quantized(dense[None], np.asarray(self.scale[piece][row])[None]))[0]
        if self.palette:
            palette = self.palette[piece]
            dense = palette[row * len(palette) // len(self.data[piece])][dense]
        return np.asarray(dense, np.float32)


def write_embedding(directory: Path, table: Stored) -> None:
    """Writes an untied (or differently stored) table [V, H] as `embedding.npy`, a byte or two for each value, with
    `embedding-scale.npy` for int8 and `embedding-palette.npy` for palettes.
    """
    if isinstance(table, Quantized):
        np.save(directory / TABLE, table.data)
        np.save(directory / SCALE, table.scale)
    elif isinstance(table, Palettized):
        np.save(directory / TABLE, table.indices)
        np.save(directory / PALETTE, table.table)
    else:
        assert isinstance(table, np.ndarray)  # a correction is refused by the recipe
        np.save(directory / TABLE, table.astype(np.float16))


def open_embedding(bundle: Bundle) -> Embedding:
    """The bundle's table, memory-mapped. Raises BundleError when its shape is not the model's."""
    spec = bundle.spec
    if bundle.embedding == HEAD:
        data, scale, palette = _from_head(bundle)
    else:
        data = (_mapped(bundle.path / bundle.embedding),)
        scale = (_mapped(bundle.path / SCALE),) if data[0].dtype == np.int8 else ()
        palette = (_mapped(bundle.path / PALETTE),) if data[0].dtype == np.uint8 else ()
    if sum(len(piece) for piece in data) < spec.vocab_size or data[0].shape[1] != spec.hidden_size:
        shape = (sum(len(piece) for piece in data), data[0].shape[1])
        wanted = (spec.vocab_size, spec.hidden_size)
        raise BundleError(f"the embedding of {bundle.path} has shape {shape} instead of {wanted}: bake it again.")
    return Embedding(data, scale, spec.embedding_scale * spec.stream_scale, palette)


def _mapped(file: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise BundleError(f"{file} cannot be read ({error}): bake it again.") from None
    if array.ndim != 2 or array.dtype not in (np.int8, np.uint8, np.float16):
        raise BundleError(f"{file} holds {array.dtype} {list(array.shape)}, which is no table: bake it again.")
    return array


def _from_head(bundle: Bundle) -> tuple[tuple[np.ndarray, ...], ...]:
    """The weights behind the convolutions that give `logits_0`, `logits_1`, ... as [rows, H], scales, palettes."""
    function = read_program(bundle.head_path).functions[DECODE]
    makers = {op.outputs[0].name: op for op in function.ops}
    data, scale, palette = [], [], []
    for op in (op for op in function.ops if op.type == "conv"):  # in vocabulary order
        weight = op.inputs["weight"][0]
        if weight in makers:
            spelled = makers[weight].inputs
            weight = spelled["data" if "data" in spelled else "indices"][0]
            if "scale" in spelled:
                scale.append(function.consts[spelled["scale"][0]][:, :, 0, 0])
            else:
                palette.append(function.consts[spelled["lut"][0]][:, 0, 0, 0, :, 0])
        data.append(function.consts[weight][:, :, 0, 0])
    if len(data) != head_pieces(bundle.spec)[0] or len(scale) + len(palette) not in (0, len(data)):
        raise BundleError(f"{bundle.head_path} does not hold the head that its manifest describes: bake it again.")
    return tuple(data), tuple(scale), tuple(palette)
