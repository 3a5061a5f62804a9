"""OpenVINO GenAI on the Q8_0 file: its CPU defaults (bf16 arithmetic, 8-bit activations in groups, 8-bit cache)."""

import subprocess
import sys
import time
from pathlib import Path

from _protocol import arguments, converted, not_there, report

sys.path.pop(0)  # this file has the name of the library
try:
    import openvino_genai
except ImportError:
    not_there("openvino-genai is not installed")


def main() -> None:
    given = arguments()
    model = converted(given.source, ".q8_0.gguf")
    subprocess.run([sys.executable, str(Path(__file__).with_name("_q8_gguf.py")), given.source, model], check=True)
    begin = time.perf_counter()
    pipe = openvino_genai.LLMPipeline(str(model), "CPU")
    load_s = time.perf_counter() - begin
    import numpy as np
    import openvino

    ids = np.array([[1 + 7 * i % 5000 for i in range(given.prompt)]], np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))

    def generated(tokens: int) -> tuple[float, float]:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        metrics = pipe.generate(inputs, config).perf_metrics
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3

    generated(4)
    first_s = sorted(generated(2)[0] for _ in range(3))[1]
    token_s = generated(given.tokens)[1]
    settings = f"OpenVINO GenAI {openvino_genai.__version__}, Q8_0, bf16 arithmetic, 8-bit activations and cache"
    report(settings, load_s, first_s, token_s * given.tokens, given.prompt, given.tokens)


main()
