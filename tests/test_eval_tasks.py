import random
import re
from collections import Counter

import pytest
from families import tiny_tokenizer

from calib.recall import ASIDE, DEPTHS, Haystack
from calib.texts import Text, default_text
from export.eval import ruler
from export.eval.sample import Sample, any_order, listed
from export.eval.tasks import TASKS, WINDOWS, Case, cases, decoded_of, multiturn
from plugins.errors import UserError

TOKENIZER = tiny_tokenizer()
TEXTS = [Text.of("topics", default_text().content[:60_000]), Text.of("other", default_text().content[60_000:90_000])]
HAY = Haystack.of(TOKENIZER, TEXTS[0].content)
LENGTH = 1800


def made(*tasks: str, seed: int = 0, count: int = 3, length: int = LENGTH) -> list[Case]:
    return cases(TOKENIZER, TEXTS, tasks, (length,), count, seed)


def context(sample: Sample) -> str:
    return TOKENIZER.decode(sample.ids[: sample.first])


def answers(sample: Sample, variant: str) -> list[str]:
    return [TOKENIZER.decode(sample.ids[item.start : item.stop]) for item in sample.answers[variant]]


def test_every_sample_has_the_length_asked_for_and_is_scored_where_it_is_decoded():
    found = made(*TASKS)
    assert {case.task for case in found} == {WINDOWS, "niah", "kvrecall", "multiturn", "ruler"}
    for case in found:
        sample = case.sample
        assert len(sample.ids) == LENGTH and 0 < sample.first < LENGTH
        assert min(sample.picks) >= sample.first and max(sample.picks) < LENGTH
        assert len(sample.feeds) > 1 and (case.task == "multiturn") == (max(sample.feeds) > 1)


def test_questions_are_about_what_stands_in_the_text():
    for case in made("niah", "kvrecall", "multiturn", "ruler"):
        for variant in case.sample.answers:
            for answer in answers(case.sample, variant):
                assert answer.strip() and answer.strip() in context(case.sample)


def test_windows_are_of_each_text_and_their_end_is_decoded():
    found = made("ppl", "kld", count=2)
    assert [(case.text, case.index) for case in found] == [("topics", 0), ("topics", 1), ("other", 0), ("other", 1)]
    assert all(case.sample.feeds == (1,) * (LENGTH // 4) and not case.sample.answers for case in found)
    assert found[0].sample.picks == list(range(LENGTH - LENGTH // 4, LENGTH))
    assert [decoded_of(length) for length in (1024, 2047, 2048, 8192)] == [256, 511, 512, 512]
    assert TOKENIZER.decode(found[2].sample.ids[1:]) in TEXTS[1].content


def test_a_second_turn_brings_a_chunk_and_asks_again():
    for sample in multiturn(TOKENIZER, HAY, LENGTH, 5, 0):
        chunk, turn = max(sample.feeds), LENGTH - LENGTH // 8
        ones = (len(sample.feeds) - 1) // 2
        assert sample.feeds == (1,) * ones + (chunk,) + (1,) * ones
        assert sample.first + ones == turn and chunk + ones == LENGTH // 8
        first, again = (sample.ids[turn - ones : turn], sample.ids[-ones:])
        assert first == again and answers(sample, "first") == answers(sample, "again")
        place = re.search(r"number of (\w+)\?", TOKENIZER.decode(first))[1]
        assert f"The secret number of {place} is{answers(sample, 'again')[0]}." in context(sample)
        assert TOKENIZER.decode(sample.ids[turn : turn + chunk]) in TEXTS[0].content


def test_needles_are_spread_over_the_depths():
    depths = [case.sample.depth for case in made("niah", count=5, length=3500)]
    assert depths == pytest.approx(DEPTHS, abs=0.05)


@pytest.mark.parametrize(("kind", "stated", "asked"), [
    ("niah_single", 1, 1), ("niah_multikey", 4, 1), ("niah_multivalue", 4, 4),
])  # fmt: skip
def test_ruler_hides_numbers_under_keys(kind, stated, asked):
    for sample in ruler.samples(kind, TOKENIZER, HAY, LENGTH, 4, 0):
        pairs = re.findall(r"A magic number of ([a-z]+-[a-z]+) is (\d{7})\.", context(sample))
        assert len(pairs) == stated and len({number for _, number in pairs}) == stated
        assert len({key for key, _ in pairs}) == (stated if kind == "niah_multikey" else 1)
        key = re.search(r"magic numbers? of ([a-z]+-[a-z]+) ", TOKENIZER.decode(sample.ids[sample.first :]))[1]
        assert {f" {number}" for name, number in pairs if name == key} == set(answers(sample, kind))
        assert len(answers(sample, kind)) == asked
        last = context(sample).rindex("A magic number")
        assert len(TOKENIZER(context(sample)[last:]).input_ids) > ASIDE
        assert 0 < sample.depth < 1


def test_ruler_tracks_a_chain_of_variables():
    for sample in ruler.samples("vt", TOKENIZER, HAY, LENGTH, 4, 0):
        chain = re.findall(r"VAR ([A-Z]{5}) = (\d{5}|VAR [A-Z]{5})", context(sample))
        assert len(chain) == ruler.HOPS + 1
        value = chain[0][1]
        assert all(source == f"VAR {name}" for (name, _), (_, source) in zip(chain, chain[1:], strict=False))
        assert [f" {name}" for name, _ in chain] == answers(sample, "vt")
        assert f"value {value} are" in TOKENIZER.decode(sample.ids[sample.first :])


@pytest.mark.parametrize("length", [LENGTH, 8000])
def test_ruler_asks_for_the_words_that_are_listed_most_often(length):
    for sample in ruler.samples("cwe", TOKENIZER, HAY, length, 3, 0):
        counts = Counter(re.findall(r"\d+\. ([a-z]+)", context(sample).split("A list of words:")[1]))
        common = {word for word, _ in counts.most_common(10)}
        assert common == {word.strip() for word in answers(sample, "cwe")}
        times = {counts[word] for word in common}
        assert len(times) == 1 and max(times) <= 30 and max(times) > ruler.RARE_TIMES
        assert length < 8000 or times == {30}
        assert {count for word, count in counts.items() if word not in common} <= {ruler.RARE_TIMES}


def test_ruler_asks_for_the_most_frequent_words_of_a_zeta_distribution():
    for sample in ruler.samples("fwe", TOKENIZER, HAY, 3000, 3, 0):
        counts = Counter(context(sample).split("A coded text:\n")[1].split())
        (noise, most), *ranked = counts.most_common()
        assert noise == "..." and [f" {word}" for word, _ in ranked[:3]] == answers(sample, "fwe")
        assert [count for _, count in ranked[:4]] == [round(most / rank**2) for rank in (2, 3, 4, 5)]


def test_samples_follow_from_their_seed():
    one, same, other = (made("niah", "multiturn", "ruler", seed=seed, count=1) for seed in (0, 0, 1))
    assert [case.sample.digest for case in one] == [case.sample.digest for case in same]
    assert not {case.sample.digest for case in one} & {case.sample.digest for case in other}


def test_items_of_a_list_may_come_in_any_order():
    ids = [0, 5, 1, 2, 9, 1, 3, 9, 4, 2]
    items = any_order(ids, [(2, 4), (5, 7), (8, 10)])
    assert items[0].allowed == ((1, 4), (2, 3))  # after a 1, the second item would go on with 3
    assert items[1].allowed == ((1, 4), (3,))
    assert items[2].allowed == ((4,), (2,))


def test_the_tokens_of_each_item_are_found():
    draw = random.Random(0)
    items = [f"{draw.randrange(10**6)}" for _ in range(4)] + ["anchor", "the-and"]
    ids, spans = listed(TOKENIZER, "\nAnswer: They are", items)
    assert [TOKENIZER.decode(ids[start:stop]) for start, stop in spans] == [f" {item}" for item in items]
    assert TOKENIZER.decode(ids) == "\nAnswer: They are " + ", ".join(items)


def test_what_is_too_short_or_unknown_is_refused():
    with pytest.raises(UserError, match="--text other has fewer than the 40000 tokens"):
        cases(TOKENIZER, [TEXTS[1]], ("ppl",), (40_000,), 1, 0)
    with pytest.raises(UserError, match="--text other has .* fewer than the 40000 of --lengths"):
        cases(TOKENIZER, [TEXTS[1]], ("niah",), (40_000,), 1, 0)
    with pytest.raises(UserError, match="RULER task 'haiku' is unknown"):
        ruler.samples("haiku", TOKENIZER, HAY, LENGTH, 1, 0)
    for kind in ruler.KINDS:
        with pytest.raises(UserError, match="too short"):
            ruler.samples(kind, TOKENIZER, HAY, 300, 1, 0)
    with pytest.raises(UserError, match="too short"):
        multiturn(TOKENIZER, HAY, 500, 1, 0)
