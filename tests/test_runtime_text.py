"""Text in and out: templates as transformers renders them, streams that never show half a character."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tiny_artefact as tiny
from tokenizers import Tokenizer, decoders, models

from plugins.errors import UserError
from runtime.artefact import Artefact, write_config
from runtime.text import Detokenizer, StopStrings, Text

TEXTS = [
    "plain",
    "naïve café",
    "👩‍👩‍👧‍👦 family",
    "日本語のテキスト",
    "a😀b🚀c",
    "mixed é😀漢 the end",
    "\ufffd is a character too",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text.open(Artefact.open(folder))


def sentencepiece_like() -> Text:
    """Byte fallback and a stripped leading space, as in Llama 2 and Mistral."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "é"]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return Text(tokenizer, None, {}, frozenset())


def pieces(text: Text, tokens: list[int], context: list[int] | None = None) -> list[str]:
    stream = Detokenizer(text, context or [])
    return [*(stream.add(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("original", TEXTS)
def test_streamed_pieces_are_whole_characters_and_add_up(text: Text, original: str) -> None:
    got = pieces(text, text.encode(original))
    assert "".join(got) == original
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in original
    shown = ""
    for piece in got:
        shown += piece
        assert original.startswith(shown)


def test_an_emoji_of_four_tokens_comes_out_with_its_last(text: Text) -> None:
    tokens = text.encode("😀")
    assert len(tokens) == 4
    assert pieces(text, tokens) == ["", "", "", "😀", ""]


def test_an_unfinished_character_at_the_end_is_not_shown(text: Text) -> None:
    for cut in (1, 2, 3):
        assert "".join(pieces(text, text.encode("ok 😀")[: 3 + cut])) == "ok "


def test_random_text_survives_streaming_after_any_context(text: Text) -> None:
    rng = random.Random(0)
    alphabet = "ab é😀漢\n👍🏽ß"
    for _ in range(200):
        original = "".join(rng.choice(alphabet) for _ in range(rng.randrange(30)))
        context = text.encode("".join(rng.choice(alphabet) for _ in range(rng.randrange(5))))
        assert "".join(pieces(text, text.encode(original), context)) == original


def test_invalid_bytes_do_not_hold_the_stream_for_ever(text: Text) -> None:
    lone = text.encode("é")[1]  # a continuation byte without its lead
    stream = Detokenizer(text)
    assert any(stream.add(lone) for _ in range(40))
    assert "".join(stream.add(token) for token in text.encode("abc")).endswith("abc")


def test_byte_fallback_and_leading_spaces_survive() -> None:
    text = sentencepiece_like()
    token = text.tokenizer.token_to_id
    smile = [token(f"<0x{byte:02X}>") for byte in "😀".encode()]
    the, cat = token("▁the"), token("▁cat")
    assert pieces(text, [cat, token("s"), *smile, cat], context=[the]) == [" cat", "s", "", "", "", "😀", " cat", ""]
    assert pieces(text, [the, cat]) == ["the", " cat", ""]


def test_special_tokens_leave_no_text(text: Text) -> None:
    assert "".join(pieces(text, [tiny.START, *text.encode("hi"), tiny.END])) == "hi"


@pytest.mark.parametrize("stop", [("END",), ("stop here", "END"), ("aab",), ("\n\n",), ("x" * 9, "b")])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_stop_string_is_found_across_pieces_and_never_shown(stop: tuple[str, ...], size: int) -> None:
    rng = random.Random(size)
    for _ in range(100):
        full = "".join(rng.choice(["a", "aa", "b", "E", "EN", "END", "\n", "stop ", "here", "x"]) for _ in range(12))
        stream, shown = StopStrings(stop), ""
        for at in range(0, len(full), size):
            shown += stream.add(full[at : at + size])
            if stream.found:
                break
        shown += stream.finish()
        # The first hit as the stream unfolds: the shortest prefix (in pieces) that contains a stop string, cut at it.
        steps = [full[: at + size] for at in range(0, len(full), size)]
        first = next((part for part in steps if any(one in part for one in stop)), None)
        expected = full if first is None else first[: min(first.find(one) for one in stop if one in first)]
        assert shown == expected
        assert stream.found == (first is not None)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = StopStrings(("END",))
    assert [stream.add(piece) for piece in ["hello", " E", "N", "O", "EN"]] == ["hello", " ", "", "ENO", ""]
    assert stream.finish() == "EN"


def test_the_template_renders_the_conversation(text: Text) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = "<start>system\nBe brief.<end>\n<start>user\nHi<end>\n"
    assert text.render(messages, add_generation_prompt=False) == rendered
    assert text.render(messages) == rendered + "<start>assistant\n"
    assert text.encode(text.render(messages), start=False)[0] == tiny.START


def test_a_continuation_is_the_rest_of_the_longer_rendering(text: Text) -> None:
    past = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello END "}]
    new = [{"role": "user", "content": "More"}]
    assert text.continuation(past, new) == "<end>\n<start>user\nMore<end>\n<start>assistant\n"
    assert text.render([*past, *new]) == text.render(past[:1]) + " Hello END " + text.continuation(past, new)


def template(source: str, **special: str) -> Text:
    return Text(tiny.tokenizer(), source, special, frozenset())


def test_template_helpers_work_and_blocks_are_trimmed() -> None:
    source = (
        "{% for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}\n"
    )
    messages = [{"role": "user", "content": "é<b>"}, {"role": "user", "content": "x"}]
    assert template(source).render(messages) == '{"role": "user", "content": "é<b>"}\n'
    assert template("{{ strftime_now('%Y') }}").render([]).isdigit()


def test_a_template_can_refuse_and_cannot_reach_out() -> None:
    with pytest.raises(UserError, match=r"refuses these messages \(only users\)"):
        template("{{ raise_exception('only users') }}").render([])
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include '/etc/passwd' %}"):
        with pytest.raises(UserError, match="chat template refuses"):
            template(attack).render([])
    with pytest.raises(UserError, match="not valid Jinja"):
        template("{% for %}")


def test_messages_and_templates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        Text(tiny.tokenizer(), None, {}, frozenset()).render([])
    with pytest.raises(UserError, match="must be a dict with a role"):
        template("x").render(["hello"])
    with pytest.raises(UserError, match="cannot be continued turn by turn"):
        template("fixed").continuation([{"role": "assistant", "content": "a"}], [])


def test_settings_come_from_the_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    assert Text.open(Artefact.open(folder)).eos == {tiny.END}
    other = tiny.make(tmp_path / "e")
    (other / "chat_template.jinja").unlink()
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}]
    settings = {"eos_token": "<end>", "chat_template": named}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    write_config(other, json.loads((other / "config.json").read_text()))
    text = Text.open(Artefact.open(other))
    assert text.eos == {3, 4, tiny.END}
    assert text.render([]) == "d<end>"
