"""The model `kvpack` of lm-eval: any of its tasks on an engine.

    python -m export.lm_eval --model kvpack --model_args engine=engine/ --batch_size 8 --tasks hellaswag

runs lm-eval's own command line with this model known to it. Releases of lm-eval that read the entry points
`lm_eval.models` find it by themselves: `lm_eval --model kvpack ...`.

A prefill is exact and would prove nothing about a compressed cache. So a context is prefilled but for its last token,
and from there on everything goes through the compressed cache, one token at a time: that token, then the continuation.
See `Scorer` for the arguments read, tail and chunk. Generation is what the engine does in any other use: an exact
prefill, which yields the first token, then decoding.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from plugins.errors import UserError
from runtime import Engine

from .generation import sampling_params, texts
from .scoring import Scorer, windows

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger(__name__)
REPLY = "\x02kvpack reply\x03"  # stands for the assistant's text while it is looked up in a rendered conversation


@register_model("kvpack")
class KVPackLM(TemplateLM):
    """An engine as lm-eval sees it.

    engine: folder of the engine, with a tokenizer. provider, threads: as for `Engine.open`. batch_size: sequences per
    step. max_length: at most the engine's limit; longer contexts lose their first tokens. read, tail, chunk: see
    `Scorer`. max_gen_toks: for tasks that name no length. seed: for tasks that sample. device: not followed, since
    lm-eval says "cuda:0" even when nobody asked for it. Raises UserError.
    """

    def __init__(
        self,
        engine: str,
        provider: str | None = None,
        threads: int | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        read: str = "decode",
        tail: int = 1,
        chunk: int = 1,
        max_gen_toks: int = 256,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or max_batch_size is not None:
            raise UserError(f"batch_size is {batch_size!r}: give a number; kvpack does not search for one.")
        self.engine = Engine.open(str(engine), provider=provider, threads=threads)
        runs_on = self.engine.provider
        if device is not None and not device.startswith(runs_on):
            log.info("kvpack runs on the %s provider, not on %s: see --model_args provider=...", runs_on, device)
        self.text = self.engine.text
        self.scorer = Scorer(self.engine, int(batch_size), max_length, read, tail, chunk)
        self.max_gen_toks = max_gen_toks
        self.seed = seed

    @property
    def max_length(self) -> int:
        return self.scorer.limit

    @property
    def eot_token_id(self) -> int:
        return self._special("eos_token")

    @property
    def prefix_token_id(self) -> int:
        return self._special("bos_token" if "bos_token" in self.text.special else "eos_token")

    @property
    def tokenizer_name(self) -> str:
        """Keys lm-eval's cache of requests."""
        return f"kvpack-{self.engine.artefact.config['digest']}"

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records beside its results."""
        config, scorer = self.engine.artefact.config, self.scorer
        return {
            "model_name": config["model"]["name"],
            "model_sha": config["model"]["sha256"],
            "engine_digest": config["digest"],
            "cache_method": config["method"],
            "cache_dtype": config["kv_dtype"],
            "scoring": {"read": scorer.read, "tail": scorer.tail, "chunk": scorer.chunk, "max_length": scorer.limit},
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens; by default with what the tokenizer puts before a text, unless the text begins with BOS already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.text.special.get("bos_token") or "\0")
        return self.text.encode(string, start=add_special_tokens)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pairs, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            own = windows(tokens, self.prefix_token_id, self.max_length)
            pairs += own
            owners += [number] * len(own)
        totals, left = [0.0] * len(requests), Counter(owners)
        for score in self._shown(self.scorer.scores(pairs), len(pairs), "windows", disable_tqdm):
            owner = owners[score.index]
            totals[owner] += score.log_likelihood
            left[owner] -= 1
            if left[owner] == 0:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, totals[owner])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        params = [
            sampling_params(request.args[1], self.max_gen_toks, self.seed + number)
            for number, request in enumerate(requests)
        ]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        results = [""] * len(requests)
        done = texts(self.engine, prompts, params, self.scorer.batch, self.max_length)
        for number, text in self._shown(done, len(requests), "generations", disable_tqdm):
            results[number] = text
            self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return results

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What lm-eval records of the template: one message as it renders it. None when no template is used."""
        if isinstance(chat_template, str):
            raise UserError(f"an engine has one chat template, without a name, and not {chat_template!r}: name none.")
        if not chat_template:
            return None
        if not self.text.has_template:
            raise UserError("this engine has no chat template: leave --apply_chat_template out.")
        return self.apply_chat_template([{"role": "user", "content": "MESSAGE"}])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without a generation prompt it ends inside the last message, to be continued."""
        if add_generation_prompt:
            return self.text.render(chat_history)
        *before, last = chat_history
        rendered = self.text.render([*before, {**last, "content": REPLY}], add_generation_prompt=False)
        head, found, _ = rendered.partition(REPLY)
        if not found:
            raise UserError("this chat template does not print its last message: leave --apply_chat_template out.")
        return head + last["content"]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        results = [(0.0, True)] * len(requests)
        scores = self.scorer.scores([(context, continuation) for _, context, continuation in requests])
        for score in self._shown(scores, len(requests), "continuations", disable_tqdm):
            results[score.index] = (score.log_likelihood, score.greedy)
            key = requests[score.index][0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[score.index])
        return results

    def _special(self, name: str) -> int:
        token = self.text.special.get(name)
        found = None if token is None else self.text.tokenizer.token_to_id(token)
        if found is None:
            raise UserError(f"{self.engine.artefact.path} names no {name}, which a text without a context needs.")
        return found

    @staticmethod
    def _shown(results: Iterator[Any], total: int, unit: str, hidden: bool) -> Iterator[Any]:
        return iter(tqdm(results, total=total, unit=f" {unit}", disable=hidden))
