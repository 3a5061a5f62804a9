"""OpenVINO GenAI on the graph that its own reader makes of the Q8_0 file, with the defaults of its CPU plugin.

Its figures are those of LLMPipeline; the logits, which that does not give, are those of the same graph, run directly.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from _protocol import main, not_there, pieces

sys.path.pop(0)  # this file has the name of the library
try:
    import openvino
    import openvino_genai
except ImportError:
    not_there("openvino-genai is not installed")


def convert(source: Path, out: Path) -> None:
    """The reader takes minutes for a large model, so what it makes is kept, as the library can do by itself."""
    out.mkdir(exist_ok=True)
    model = out / "model.gguf"
    subprocess.run([sys.executable, str(Path(__file__).with_name("_q8_gguf.py")), source, model], check=True)
    openvino_genai.LLMPipeline(str(model), "CPU", enable_save_ov_model=True)
    model.unlink()


class Engine:
    def __init__(self, model: Path) -> None:
        self._model, self._request = model, None
        self._pipe = openvino_genai.LLMPipeline(str(model), "CPU")
        precision = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        self.settings = (
            f"OpenVINO GenAI {openvino_genai.__version__}, Q8_0, {precision} arithmetic, 8-bit activations and cache"
        )

    def timed(self, ids: list[int], tokens: int) -> tuple[float, list[float]]:
        given = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(given), openvino.Tensor(np.ones_like(given)))
        config = openvino_genai.GenerationConfig(max_new_tokens=1 + tokens, ignore_eos=True, do_sample=False)
        raw = self._pipe.generate(inputs, config).perf_metrics.raw_metrics
        return raw.m_times_to_first_token[0] / 1e6, [us / 1e6 for us in raw.m_durations[1:]]

    def answers(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if self._request is None:
            compiled = openvino.Core().compile_model(str(self._model / "openvino_model.xml"), "CPU")
            self._request = compiled.create_infer_request()
        self._request.reset_state()
        made, done = [], 0
        for piece in pieces(ids, positions):
            places = np.arange(done, done + len(piece))[None]
            done += len(piece)
            inputs = {
                "input_ids": np.array([piece], np.int64), "attention_mask": np.ones((1, done), np.int64),
                "position_ids": places, "beam_idx": np.zeros(1, np.int32),
            }  # fmt: skip
            made.append(self._request.infer(inputs)["logits"][0, -1].copy())
        return np.array(made)


main("openvino", convert, Engine)
