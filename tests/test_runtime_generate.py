"""Generation: streams, batches, stops, turns. The expected continuation comes from the numpy reference."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_artefact as tiny

from plugins.errors import UserError
from runtime.artefact import write_config
from runtime.engine import Engine
from runtime.generate import Token
from runtime.sampling import SamplingParams
from runtime.session import ContextOverflow

LIMIT = 400


@pytest.fixture(scope="module", params=["dense", "coded"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    geometry = tiny.SMALL if request.param == "coded" else None
    with Engine.open(tiny.make(tmp_path_factory.mktemp("e"), geometry=geometry, max_length=LIMIT), threads=1) as opened:
        yield opened


def greedy(tokens: list[int], count: int) -> list[int]:
    """The reference's continuation."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(tiny.reference(tokens)[-1].argmax()))
    return tokens[-count:]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_a_stream_is_the_greedy_continuation_with_its_probabilities(engine: Engine) -> None:
    prompt = engine.text.encode("once upon a time")
    with engine.session() as session:
        got = list(session.generate("once upon a time", SamplingParams(max_tokens=40)))
    expected = greedy(prompt, 40)
    assert [token.id for token in got] == expected
    assert text_of(got) == engine.text.decode(expected)
    assert [token.finish_reason for token in got] == [None] * 39 + ["length"]
    logits = tiny.reference([*prompt, *expected])[len(prompt) - 1 : -1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits[range(40), expected] - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose([token.logprob for token in got], logprobs, atol=1e-5)


def test_a_batch_equals_its_prompts_one_by_one(engine: Engine) -> None:
    prompts = ["a", "two words", "a rather longer prompt that fills more than one block", [1, 2, 3]]
    params = [SamplingParams(max_tokens=count) for count in (30, 3, 12, 1)]
    together = engine.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, together, strict=True):
        tokens = engine.text.encode(prompt) if isinstance(prompt, str) else prompt
        assert result.tokens == greedy(tokens, one.max_tokens or 0)
        assert result.prompt_tokens == len(tokens) and result.finish_reason == "length"
        assert result.text == engine.text.decode(result.tokens)
        assert result.cache_bytes > 0
    assert engine.nbytes == 0


def test_sampling_with_a_seed_does_not_depend_on_the_neighbours(engine: Engine) -> None:
    params = SamplingParams(max_tokens=25, temperature=30.0, seed=3)
    first = engine.generate(["hello", "world"], params)
    second = engine.generate(["hello", "something else entirely", "third"], params)
    assert first[0].tokens == second[0].tokens
    with engine.session() as session:
        assert [token.id for token in session.generate("hello", params)] == first[0].tokens
    same = engine.generate(["hello", "hello"], params)
    assert same[0].tokens != same[1].tokens


def test_a_stop_string_across_tokens_ends_the_text_before_it(engine: Engine) -> None:
    with engine.session() as session:
        full = text_of(list(session.generate("start", SamplingParams(max_tokens=60))))
    stop = full[20:25]
    assert len(engine.text.encode(stop)) > 1
    with engine.session() as session:
        got = list(session.generate("start", SamplingParams(max_tokens=60, stop=(stop, "\x00"))))
    assert text_of(got) == full[: full.find(stop)]
    assert got[-1].finish_reason == "stop"
    assert all(token.finish_reason is None for token in got[:-1])
    assert engine.generate(["start"], SamplingParams(max_tokens=60, stop=stop))[0].text == full[: full.find(stop)]


def test_text_held_back_for_a_stop_string_comes_with_the_last_token(engine: Engine) -> None:
    with engine.session() as session:
        full = text_of(list(session.generate("start", SamplingParams(max_tokens=20))))
    with engine.session() as session:
        got = list(session.generate("start", SamplingParams(max_tokens=20, stop=full[-3:] + "!")))
    assert text_of(got) == full and got[-1].text == full[-3:]


def test_stop_tokens_end_the_stream_without_text_and_stay_out_of_the_cache(engine: Engine) -> None:
    prompt = engine.text.encode("start")
    expected = greedy(prompt, 30)
    ending = expected[12]
    upto = expected[: expected.index(ending) + 1]
    with engine.session() as session:
        got = list(session.generate(prompt, SamplingParams(max_tokens=30, stop_tokens=(ending,))))
        assert [token.id for token in got] == upto
        assert got[-1].text == "" and got[-1].finish_reason == "stop"
        again = list(session.generate([5], SamplingParams(max_tokens=4)))
        assert session.lengths[0] == len(prompt) + len(upto) - 1 + 1 + 3
    assert [token.id for token in again] == greedy([*prompt, *upto[:-1], 5], 4)


def test_end_of_sequence_comes_from_the_configuration_and_can_be_ignored(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e")
    prompt = tiny.tokenizer().encode("start").ids
    expected = greedy(prompt, 20)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": expected[5]}))
    write_config(folder, json.loads((folder / "config.json").read_text()))
    with Engine.open(folder, threads=1) as engine:
        stopped = engine.generate([prompt], SamplingParams(max_tokens=20))[0]
        assert stopped.tokens == expected[: expected.index(expected[5]) + 1] and stopped.finish_reason == "stop"
        assert engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))[0].tokens == expected


def test_generating_again_continues_after_everything_shown(engine: Engine) -> None:
    prompt = engine.text.encode("once")
    with engine.session() as session:
        first = [token.id for token in session.generate("once", SamplingParams(max_tokens=9))]
        second = [token.id for token in session.generate(" more", SamplingParams(max_tokens=9))]
    assert second == greedy([*prompt, *first, *engine.text.encode(" more")], 9)


def test_encode_tells_what_generate_would_store(engine: Engine) -> None:
    turns = ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Why?"}])
    for prompts in (("once", " more"), turns):
        with engine.session() as session:
            for prompt in prompts:
                before, tokens = int(session.lengths[0]), session.encode(prompt)
                assert session.lengths[0] == before  # it stores nothing
                list(session.generate(prompt, SamplingParams(max_tokens=3)))
                assert session.lengths[0] == before + len(tokens) + 3 - 1
            assert session.encode(prompts[-1])[: len(session.pending)] == session.pending != []


def test_turns_of_a_chat_equal_one_rendering_of_the_whole_conversation(engine: Engine) -> None:
    params = SamplingParams(max_tokens=7)
    messages = [{"role": "user", "content": "Hi"}]
    with engine.session() as session:
        for question in ("And then?", "Why?"):
            new = messages if len(messages) == 1 else messages[-1:]
            reply = text_of(list(session.generate(new, params)))
            assert session.chat == [*messages, {"role": "assistant", "content": reply}]
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
        last = [token.id for token in session.generate(messages[-1:], params)]
        expected = greedy(engine.text.encode(engine.text.render(messages), start=False), 7)
        assert last == expected
        assert [token.id for token in session.fork().generate("x", params)]
    with engine.session() as session:
        list(session.generate("plain", params))
        with pytest.raises(UserError, match="was not started with messages"):
            session.generate(messages, params)


def test_closing_the_stream_or_setting_cancel_leaves_a_usable_session(engine: Engine) -> None:
    prompt = engine.text.encode("once")
    with engine.session() as session:
        stream = session.generate("once", SamplingParams())
        first = [next(stream).id for _ in range(5)]
        stream.close()
        cancel = threading.Event()
        second = []
        for token in session.generate([3], SamplingParams(), cancel):
            second.append(token)
            if len(second) == 4:
                cancel.set()
        assert [token.finish_reason for token in second] == [None] * 4 + ["cancelled"]
        third = [token.id for token in session.generate([4], SamplingParams(max_tokens=3))]
    expected = [*prompt, *first, 3, *(token.id for token in second), 4]
    assert third == greedy(expected, 3)
    assert [one.finish_reason for one in engine.generate(["a", "b"], SamplingParams(), cancel)] == ["cancelled"] * 2


def test_an_overtaken_stream_cannot_touch_the_later_turn(engine: Engine) -> None:
    with engine.session() as session:
        old = session.generate("once", SamplingParams(max_tokens=9))
        shown = next(old).id
        new = session.generate([7], SamplingParams(max_tokens=5))
        first = next(new).id
        with pytest.raises(UserError, match="overtaken"):
            next(old)
        got = [first, *(token.id for token in new)]
        snapshot = session.snapshot()
        for forget in (session.reset, lambda: session.restore(snapshot)):
            stream = session.generate([1], SamplingParams(max_tokens=9))
            next(stream)
            forget()
            with pytest.raises(UserError, match="overtaken"):
                next(stream)
    assert got == greedy([*engine.text.encode("once"), shown, 7], 5)


def test_generation_runs_to_the_limit_and_stops_there(engine: Engine) -> None:
    prompt = list(range(100))
    with engine.session() as session:
        got = list(session.generate(prompt, SamplingParams(max_tokens=2 * LIMIT)))
        assert len(got) == LIMIT - 100 + 1 and got[-1].finish_reason == "length"
        assert session.lengths.tolist() == [LIMIT]
        with pytest.raises(ContextOverflow):
            session.generate([1])
    results = engine.generate([prompt, prompt[:300:3]], SamplingParams())
    assert [len(one.tokens) for one in results] == [LIMIT - 100 + 1, LIMIT - 34 + 1]


def test_bad_prompts_are_refused_at_the_call_and_not_at_the_first_token(engine: Engine) -> None:
    with engine.session() as session:
        for prompt, complaint in (("", "empty"), ([tiny.VOCAB], "outside the vocabulary"), ([{"role": 1}], "message")):
            with pytest.raises(UserError, match=complaint):
                session.generate(prompt)
    with engine.session(batch=2) as session, pytest.raises(UserError, match="streams one sequence"):
        session.generate("x")
    for prompts, complaint in (([], "at least one prompt"), (["a", ""], "prompt 1 is empty")):
        with pytest.raises(UserError, match=complaint):
            engine.generate(prompts)
    with pytest.raises(UserError, match="2 SamplingParams were given for 1 prompts"):
        engine.generate(["a"], [SamplingParams(), SamplingParams()])


def test_an_engine_without_a_tokenizer_still_takes_tokens(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    write_config(folder, json.loads((folder / "config.json").read_text()))
    with Engine.open(folder, threads=1) as engine:
        result = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5))[0]
        assert result.tokens == greedy([1, 2, 3], 5) and result.text == ""
        with pytest.raises(UserError, match=r"no tokenizer\.json"):
            engine.generate(["text"])
        with pytest.raises(UserError, match="use stop_tokens"):
            engine.generate([[1]], SamplingParams(stop="x"))


def test_the_example_service_streams_each_conversation_from_its_own_cache(engine: Engine) -> None:
    import runpy
    from urllib.request import Request, urlopen

    make_server = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "stream_service.py"))["make_server"]
    with make_server(engine, port=0, max_tokens=6) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/chat/"

        def ask(name: str, question: str) -> str:
            with urlopen(Request(address + name, question.encode(), method="POST")) as answer:
                return answer.read().decode()

        try:
            first, other = ask("alice", "Hi"), ask("bob", "Hello")
            second = ask("alice", "Why?")
            with urlopen(Request(address + "alice", method="DELETE")) as answer:
                assert answer.status == 204
            again = ask("alice", "Hi")
        finally:
            server.shutdown()
            thread.join()
    messages = [{"role": "user", "content": "Hi"}]
    expected = greedy(engine.text.encode(engine.text.render(messages)), 6)
    assert first == again == engine.text.decode(expected)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Why?"}]
    assert second == engine.text.decode(greedy(engine.text.encode(engine.text.render(messages)), 6))
    assert other != first
