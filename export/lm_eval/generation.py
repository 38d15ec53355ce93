"""Continuations by an engine, asked for with lm-eval's generation options. Needs no lm-eval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plugins.errors import UserError
from runtime import SamplingParams

if TYPE_CHECKING:
    from runtime import Engine

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the same, by precedence
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_p", "top_k", "num_beams"}


def sampling_params(options: Mapping[str, Any], max_tokens: int, seed: int) -> SamplingParams:
    """SamplingParams for a task's generation options. Raises UserError for one that an engine cannot follow.

    max_tokens: when the options name no length. Without do_sample a temperature above 0 means sampling; with
    do_sample and no temperature it is 1.
    """
    if unknown := set(options) - KNOWN:
        raise UserError(f"the generation option {min(unknown)!r} is unknown: use {', '.join(sorted(KNOWN))}.")
    if options.get("num_beams") not in (None, 1):
        raise UserError(f"num_beams is {options['num_beams']}: an engine decodes one sequence, without a beam.")
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    sample = options.get("do_sample")
    temperature = options.get("temperature")
    if temperature is None:
        temperature = 1.0 if sample else 0.0
    lengths = [options[name] for name in LENGTHS if options.get(name) is not None]
    return SamplingParams(
        max_tokens=int(lengths[0]) if lengths else max_tokens,
        temperature=0.0 if sample is False else float(temperature),
        top_p=float(options.get("top_p") or 1.0),
        top_k=int(options.get("top_k") or 0),
        seed=seed,
        stop=tuple(stop for stop in until if stop),
    )


def texts(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], batch: int, limit: int
) -> Iterator[tuple[int, str]]:
    """Continue each prompt (tokens); yields its number and the text, without the stop string, longest prompts first.

    limit: tokens in the cache at most; a prompt that leaves no room for its max_tokens loses its first tokens.
    Raises UserError before anything runs when max_tokens alone exceed the limit.
    """
    fitted = []
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        room = limit - (one.max_tokens or 1) + 1  # the last token needs no place
        if room < 1:
            raise UserError(
                f"{one.max_tokens} new tokens exceed the limit of {limit}: ask for fewer with "
                "--gen_kwargs max_gen_toks=N, or export with a larger --max-length."
            )
        if not len(prompt):
            raise UserError(f"prompt {number} is empty.")
        fitted.append(prompt[-room:])
    order = sorted(range(len(prompts)), key=lambda number: len(fitted[number]), reverse=True)
    for at in range(0, len(order), batch):
        group = order[at : at + batch]
        done = engine.generate([fitted[number] for number in group], [params[number] for number in group])
        yield from ((number, one.text) for number, one in zip(group, done, strict=True))
