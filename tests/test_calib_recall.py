import re

import pytest
import torch
from families import VOCAB, tiny, tiny_tokenizer
from test_calib_quality import deltakv_codec

from calib.recall import ASIDE, DEPTHS, KINDS, Sample, samples, score, training_window
from calib.texts import default_text
from plugins.errors import UserError

HAYSTACK = default_text().content[:40_000]
TOKENIZER = tiny_tokenizer()


def parts(sample: Sample) -> tuple[str, str, str]:
    """Context, question and answer as text."""
    ids, decoded, answer = sample.ids, sample.decoded, sample.answer
    return tuple(TOKENIZER.decode(part) for part in (ids[:-decoded], ids[-decoded:-answer], ids[-answer:]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [1200, 3001])
def test_samples_have_the_length_asked_for_and_state_what_they_ask(kind, context):
    made = samples(kind, TOKENIZER, HAYSTACK, context, 10, 5)
    assert [len(sample.ids) for sample in made] == [context] * 10
    for sample in made:
        text, question, answer = parts(sample)
        if kind == "uuid":
            key = re.search(r'The value of "([0-9a-f-]{36})" in', question)[1]
            stated = re.findall(rf'"{key}": "([0-9a-f-]{{36}})"', text)
        else:
            place = re.search(r"What is the secret number of (\w+)\?", question)[1]
            stated = re.findall(rf"The secret number of {place} is( \d{{6}})\.", text)
            assert question.endswith(f"The secret number of {place} is")
            assert len(re.findall(r"secret number", text)) == {"needle": 1, "pairs": 10}[kind]
        assert stated == [answer]
        where = text.index(stated[0])
        assert len(TOKENIZER(text[where:]).input_ids) > ASIDE  # it is out of the window when it is asked for


def test_needles_stand_at_the_depths_in_turn_at_the_beginnings_of_sentences():
    made = samples("needle", TOKENIZER, HAYSTACK, 4000, 10, 0)
    for sample, depth in zip(made, 2 * DEPTHS, strict=True):
        text = parts(sample)[0]
        needle = text.index("\n\nThe secret number")
        ahead = len(TOKENIZER(text[:needle]).input_ids)
        assert sample.depth == pytest.approx(ahead / 4000, abs=2 / 4000)
        assert sample.depth == pytest.approx(depth, abs=0.05)
        assert text[:needle].rstrip(" ").endswith((".", "\n"))


def test_samples_follow_from_their_seed():
    one, same, other = (samples("pairs", TOKENIZER, HAYSTACK, 1500, 4, seed) for seed in (1, 1, 2))
    assert one == same and all(a.ids != b.ids for a, b in zip(one, other, strict=True))
    assert len({tuple(sample.ids) for sample in one}) == 4


def test_what_is_too_short_is_refused():
    with pytest.raises(UserError, match="recall kind 'haiku' is unknown"):
        samples("haiku", TOKENIZER, HAYSTACK, 1000, 1, 0)
    with pytest.raises(UserError, match="the haystack has .* fewer than the context of 90000"):
        samples("needle", TOKENIZER, HAYSTACK, 90_000, 1, 0)
    for kind in KINDS:
        with pytest.raises(UserError, match="a context of 200 tokens is too short"):
            samples(kind, TOKENIZER, HAYSTACK, 200, 1, 0)


def test_training_text_looks_up_what_it_stated_before_and_asks_in_other_words():
    texts = [TOKENIZER.decode(training_window(TOKENIZER, 2500, 0, index)) for index in range(20)]
    found = {"number": 0, "string": 0, "uuid": 0}
    for text in texts:
        for name, value in re.findall(r"Look up (\S+)\. It is (\d+)\.", text):
            assert text.index(f"{name}: {value}") < text.index(f"Look up {name}. It is {value}")
            found["number"] += 1
        for name, value in re.findall(r'>>> settings\["([^"]+)"\]\n"([0-9a-f]+)"', text):
            assert f'"{name}": "{value}"' in text[: text.index(f'settings["{name}"]')]
            found["string"] += 1
        for key, value in re.findall(r"ticket ([0-9a-f-]{36}) belongs to order ([0-9a-f-]{36})", text):
            assert f"| {key} | {value} |" in text[: text.index(f"ticket {key}")]
            found["uuid"] += 1
        assert "secret number" not in text and "JSON object" not in text
    assert min(found.values()) > 10


def test_training_windows_are_all_different_and_follow_from_seed_and_number():
    made = [training_window(TOKENIZER, 300, seed, index) for seed in range(2) for index in range(5)]
    assert all(len(ids) == 300 for ids in made) and len({tuple(ids) for ids in made}) == 10
    assert made[7] == training_window(TOKENIZER, 300, 1, 2)


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_are_of_the_answers_as_the_model_reads_them(batch):
    model = tiny("llama")
    ids = torch.randint(0, VOCAB, (5, 70), generator=torch.Generator().manual_seed(0))
    asked = [Sample(row.tolist(), 3, 6 + row_number, 0.1 * row_number) for row_number, row in enumerate(ids)]
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=ids).logits, -1)[:, -4:-1]
    asked[2] = Sample(asked[2].ids[:-3] + greedy(model, asked[2].ids[:-3], 3), 3, 8, 0.2)
    found = score(model, None, asked, batch)
    assert found["samples"] == 5 and found["recall"] == pytest.approx(0.2)
    assert found["by_depth"] == {"0.0": 0, "0.1": 0, "0.2": 1, "0.3": 0, "0.4": 0}
    others = [row for row in range(5) if row != 2]
    truth = rows.gather(2, ids[:, -3:, None])[others].mean((1, 2)).sum()
    with torch.no_grad():
        again = torch.tensor([asked[2].ids])
        truth += torch.log_softmax(model(input_ids=again).logits, -1)[0, -4:-1].gather(1, again[0, -3:, None]).mean()
    assert found["log_likelihood"] == pytest.approx(float(truth / 5), rel=1e-4)


def greedy(model, ids: list[int], count: int) -> list[int]:
    made = list(ids)
    with torch.no_grad():
        for _ in range(count):
            made.append(int(model(input_ids=torch.tensor([made])).logits[0, -1].argmax()))
    return made[-count:]


def test_with_a_codec_both_caches_are_scored():
    model, codec = tiny("llama"), deltakv_codec((1, 2, 3), full_layers=(0,))
    ids = torch.randint(0, VOCAB, (4, 70), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [Sample(row, 3, 9, 0.5) for row in ids]
    exact, both = score(model, None, asked, 2), score(model, codec, asked, 4)
    assert both["exact_recall"] == exact["recall"]
    assert both["exact_log_likelihood"] == pytest.approx(exact["log_likelihood"], rel=1e-4)
    assert abs(both["log_likelihood"] - exact["log_likelihood"]) > 1e-3
    assert score(model, deltakv_codec(()), asked)["log_likelihood"] == pytest.approx(exact["log_likelihood"], rel=1e-3)
