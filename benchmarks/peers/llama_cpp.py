"""llama.cpp through llama-cpp-python: Q8_0 weights, 8-bit activations in groups of 32, f16 keys and values."""

import os
import subprocess
import sys
import time
from pathlib import Path

from _protocol import arguments, converted, not_there, report

sys.path.pop(0)  # this file has the name of the library
try:
    import llama_cpp
except ImportError:
    not_there("llama-cpp-python is not installed")


def main() -> None:
    given = arguments()
    model = converted(given.source, ".q8_0.gguf")
    subprocess.run([sys.executable, str(Path(__file__).with_name("_q8_gguf.py")), given.source, model], check=True)
    begin = time.perf_counter()
    threads = len(os.sched_getaffinity(0))
    engine = llama_cpp.Llama(
        str(model), n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    load_s = time.perf_counter() - begin
    ids = [1 + 7 * i % 5000 for i in range(given.prompt)]
    engine.eval(ids)  # once, so that pages and buffers are there
    spent = []
    for _ in range(3):
        engine.reset()
        begin = time.perf_counter()
        engine.eval(ids)
        spent.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(given.tokens):
        engine.eval([engine.sample(temp=0.0)])
    decode_s = time.perf_counter() - begin
    settings = f"llama.cpp {llama_cpp.__version__}, Q8_0, 8-bit activations in groups of 32, f16 cache"
    report(settings, load_s, sorted(spent)[1], decode_s, given.prompt, given.tokens)


main()
