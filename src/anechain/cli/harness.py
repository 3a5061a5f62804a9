"""The model `anechain` of EleutherAI's evaluation harness: `anechain-lm-eval --model anechain --model_args bundle=DIR`.

The harness (lm-eval 0.4) has no way to find models that live in other packages, so `main` is its own command line with
one more model registered. In Python `import anechain.cli.harness` does the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.cli.console import open_engine
from anechain.errors import EngineError, RequestError
from anechain.run.chain import Chain
from anechain.run.chat import ChatTemplate
from anechain.run.generate import generate
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer

NAME = "anechain"
MAX_GEN_TOKS = 256  # what the harness's own models generate where a task does not say
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = {*LIMITS, "until", "do_sample", "temperature", "top_k", "top_p"}


class AnechainLM(LM):  # type: ignore[misc]  # the harness has no type information
    """A bundle as the harness sees a model. One request after another; nothing is cut to fit the context."""

    def __init__(
        self,
        bundle: str,
        engine: str = "cpu",
        fast: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """`batch_size`, `max_batch_size` and `device` are what the harness always hands over: not used."""
        super().__init__()
        opened = open_bundle(Path(bundle), verify_hashes=True)
        self._chain = Chain(opened, open_engine(engine, fast=fast))
        self._tokenizer = Tokenizer.load(opened.path / TOKENIZER)
        self._name = f"{opened.path.name} {opened.key}"

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the log probability in nats, and whether greedy decoding would say it."""
        results = []
        for request in requests:
            context, continuation = request.args
            results.append(self._score(*self._pair(context, continuation)))
            self.cache_hook.add_partial("loglikelihood", request.args, results[-1])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """For each text its log probability in nats, in windows of the context where it is longer."""
        results = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self._tokenizer.encode(text, add_special=False), prefix_token=self._first_id(),
                max_seq_len=self._chain.bundle.context, context_len=1,
            )  # fmt: skip
            results.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """For each (context, options): what follows, up to the first of the stop texts, which is not part of it."""
        results = []
        for request in requests:
            context, options = request.args
            results.append(self._continue(context, options))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return ChatTemplate(self._tokenizer).render(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        return self._name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_templates.get(chat_template if isinstance(chat_template, str) else "default")

    def _encode(self, text: str) -> list[int]:
        """The ids of a context. One that a chat template has begun with the first token does not get another."""
        first = self._tokenizer.special_tokens.get("bos_token")
        return self._tokenizer.encode(text, add_special=not (first and text.startswith(first)))

    def _first_id(self) -> int:
        """What stands before a text without a context: the tokenizer's first token, or one that ends a text."""
        bos, ends = self._tokenizer.bos_id, sorted(self._tokenizer.eos_ids)
        if bos is None and not ends:
            raise RequestError("this model's tokenizer has no token that a text could begin after: give a context.")
        return ends[0] if bos is None else bos

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both, cut as the harness's own models cut them: white space at the end of the context belongs to
        the continuation, and both are encoded as one text."""
        if not context:
            return [self._first_id()], self._tokenizer.encode(continuation, add_special=False)
        if spaces := len(context) - len(context.rstrip()):
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self._encode(context)
        return before, self._encode(context + continuation)[len(before) :]

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        if not continuation:
            raise RequestError("a continuation has no tokens: there is nothing to score.")
        session, fed = self._chain.start(), list(context)
        total, greedy = 0.0, True
        for token in continuation:
            logits = self._chain.feed(session, fed).astype(np.float64)  # [V]
            if not np.isfinite(logits).all():
                raise EngineError("the engine gave logits that are NaN or infinite: run `anechain gate --by-package`.")
            top = logits.max()
            total += float(logits[token] - top - np.log(np.exp(logits - top).sum()))
            greedy = greedy and int(logits.argmax()) == token
            fed = [token]
        return total, greedy

    def _continue(self, context: str, options: Mapping[str, Any]) -> str:
        if strange := sorted(set(options) - KNOWN):
            raise RequestError(f"the task's generation options {', '.join(strange)} are not known: leave them out.")
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        limit = next((int(options[key]) for key in LIMITS if options.get(key) is not None), MAX_GEN_TOKS)
        sampling = Sampling(
            _temperature(options), int(options.get("top_k") or 0), float(options.get("top_p") or 1.0), seed=0
        )
        text = ""
        tokens = generate(self._chain, self._chain.start(), self._tokenizer, self._encode(context), sampling, limit)
        for token in tokens:
            text += token.text
            if found := [at for at in map(text.find, filter(None, stops)) if at >= 0]:
                return text[: min(found)]
        return text


def _temperature(options: Mapping[str, Any]) -> float:
    """As the harness means it: without `do_sample` greedy whatever the temperature, with it 1 where none is given."""
    given = options.get("temperature")
    if options.get("do_sample") is None:
        return float(given or 0.0)
    if not options["do_sample"]:
        return 0.0
    return 1.0 if given is None else float(given)


if NAME not in model_registry:
    model_registry.register(NAME, target=AnechainLM)


def main() -> None:
    """The harness's own command line."""
    cli_evaluate()
