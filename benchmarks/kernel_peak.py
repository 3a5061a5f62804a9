"""Multiply-adds a cycle of the int8 kernel on one thread: `python benchmarks/kernel_peak.py [GHZ]`.

The best of some runs of a few hundred microseconds, which a busy machine leaves alone; 64 a cycle are what a Zen 4 core
can do, 128 an Emerald Rapids core. GHZ is the clock, 3.7 unless it is given.
"""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from anechain.run.native import library
from anechain.run.tape_plan import Code, Instruction, Ref, tape_of
from anechain.run.tape_weights import fixed

RUNS = 30


def aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    room = np.ones(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
    begin = -room.__array_interface__["data"][0] % 64
    return room[begin : begin + room.size - 64].view(dtype).reshape(shape)


def best_us(tokens: int, rows: int, depth: int, group: int, bits: int) -> float:
    at_once = 1 if tokens == 1 else {8: 6, 15: 3}[bits]
    padded = -(-tokens // at_once) * at_once * depth
    inputs = (aligned((padded,), np.int8), aligned((padded,), np.int8))
    scales = (np.ones((tokens, depth // group), np.float32), np.ones((tokens, depth // group), np.int32))
    matrix, row_scales = aligned((rows * depth,), np.uint8), np.ones(rows, np.float32)
    arrays = [matrix, *inputs, *scales, row_scales, None, None, np.zeros((tokens, rows), np.float32)]
    operands = [Ref(None) if a is None else Ref(fixed(a)) for a in arrays]
    made = Instruction(Code.LINEAR8, (bits > 8, tokens, rows, depth, group, *operands, rows), (), (), True)
    tape, slots, best = tape_of([made])[0], np.zeros(3, np.uint64), float("inf")
    for _ in range(RUNS):
        times = np.zeros(1, np.int64)
        library().run(tape, slots, times)
        best = min(best, times[0] / 1e3)
    return best


def main() -> None:
    ghz = float(sys.argv[1]) if sys.argv[1:] else 3.7
    library().prepare(1 << 20)
    for bits, groups in ((8, (32, 64, 128, 256, 512, 1024)), (15, (32, 64, 128))):
        for group in groups:
            us = best_us(64, 3072, 1024, group, bits)
            print(f"64 tokens, 3072 x 1024, {bits} bits, groups of {group}: {us:.0f} us, "
                  f"{64 * 3072 * 1024 / us / ghz / 1e3:.1f} multiply-adds a cycle")  # fmt: skip
    for bits in (8, 15):
        us = best_us(1, 256, 1024, 32, bits)
        print(f"1 token, 256 x 1024 in the second cache, {bits} bits: {256 * 1024 / us / 1e3:.0f} GB/s")


main()
