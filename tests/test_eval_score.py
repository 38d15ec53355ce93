import math

import numpy as np
import pytest
import torch

from export.eval.sample import Item, Sample, any_order, single
from export.eval.score import cells, mean_interval, measure, wilson
from export.eval.tasks import WINDOWS, Case

VOCAB = 12


def logits(rows: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def window(seed: int, decoded: int = 24) -> tuple[Sample, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    exact = logits(decoded, seed)
    return Sample(ids, (1,) * decoded), exact, exact + 0.3 * logits(decoded, seed + 100)


def plain(sample: Sample, rows: torch.Tensor) -> float:
    """Mean negative log-likelihood of the tokens after the first one decoded."""
    return torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(sample.ids[sample.first + 1 :])).item()


def test_windows_give_perplexity_and_divergence_with_intervals_over_windows():
    made = [window(seed) for seed in range(6)]
    plan = [Case(WINDOWS, "", "text", 40, index, sample) for index, (sample, _, _) in enumerate(made)]
    ppl, kld = cells(plan, [measure(*parts) for parts in made], "vqkv", ("ppl", "kld"))
    exact, coded = (np.array([plain(parts[0], parts[side]) for parts in made]) for side in (1, 2))
    assert ppl["exact"] == pytest.approx(math.exp(exact.mean()), rel=1e-5)
    assert ppl["value"] == pytest.approx(math.exp(coded.mean()), rel=1e-5)
    assert ppl["change"] == pytest.approx(math.expm1((coded - exact).mean()), rel=1e-4)
    low, high = ppl["interval"]
    error = (coded - exact).std() / 6**0.5
    assert low < ppl["change"] < high and high - low == pytest.approx(2 * 1.96 * error * (1 + ppl["change"]), rel=0.2)
    divergence = []
    for _, true, approx in made:
        p, q = (torch.softmax(x.double(), -1) for x in (true, approx))
        divergence.append(float((p * (p / q).log()).sum(-1).mean()))
    assert kld["value"] == pytest.approx(np.mean(divergence), rel=1e-4)
    assert kld["interval"] == pytest.approx(mean_interval(np.array(divergence)), rel=1e-3)
    same = np.mean([(true.argmax(-1) == approx.argmax(-1)).float().mean().item() for _, true, approx in made])
    assert kld["top1"] == pytest.approx(same)
    assert (ppl["samples"], ppl["text"], ppl["length"], ppl["subject"], kld["task"]) == (6, "text", 40, "vqkv", "kld")


def test_loss_by_position_is_of_that_part_of_the_window():
    made = [window(seed) for seed in range(3)]
    plan = [Case(WINDOWS, "", "text", 40, index, sample) for index, (sample, _, _) in enumerate(made)]
    ppl, kld = cells(plan, [measure(*parts) for parts in made], "vqkv", ("ppl", "kld"))
    assert [(part["from"], part["to"]) for part in kld["positions"]] == [(n, n + 3) for n in range(0, 24, 3)]
    differences, divergences = [], []
    for sample, exact, coded in made:
        true, approx = torch.log_softmax(exact, -1), torch.log_softmax(coded, -1)
        places = range(21, 23)  # the last token's successor is unknown
        differences.append(np.mean([float((true - approx)[n, sample.ids[sample.first + n + 1]]) for n in places]))
        divergences.append(float((true.exp() * (true - approx)).sum(-1)[21:24].mean()))
    assert ppl["positions"][7]["change"] == pytest.approx(math.expm1(np.mean(differences)), rel=1e-3)
    assert kld["positions"][7]["kl"] == pytest.approx(np.mean(divergences), rel=1e-3)


def asked(answers: dict[str, tuple[Item, ...]], ids: list[int]) -> Sample:
    return Sample(ids, (1,) * 8, answers, 0.3)


def rows_for(sample: Sample, best: dict[int, int]) -> torch.Tensor:
    """Logits of the picks that prefer best[position] at that position, else the sample's own next token."""
    rows = torch.zeros(len(sample.picks), VOCAB)
    for row, position in enumerate(sample.picks):
        rows[row, best.get(position, sample.ids[position + 1])] = 3.0
    return rows


def test_an_answer_is_right_when_each_of_its_tokens_is_the_most_likely_one():
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    sample = asked({"first": single(ids, 4, 6), "again": single(ids, 8, 10)}, ids)
    assert sample.picks == [3, 4, 7, 8]
    found = measure(sample, rows_for(sample, {}), rows_for(sample, {8: 0}))["answers"]
    assert [found[name]["right"] for name in ("first", "again")] == [1, 0]
    assert [found[name]["exact_right"] for name in ("first", "again")] == [1, 1]
    sure = 3 - math.log(math.e**3 + VOCAB - 1)
    assert found["first"]["log_likelihood"] == pytest.approx(sure, rel=1e-5)
    assert found["again"]["log_likelihood"] == pytest.approx(sure - 1.5, rel=1e-5)
    assert found["again"]["exact_log_likelihood"] == pytest.approx(sure, rel=1e-5)


def test_an_item_of_a_list_may_be_another_one_that_is_not_listed_yet():
    ids = [0, 0, 5, 1, 9, 6, 2, 9, 7, 3]
    sample = asked({"list": any_order(ids, [(2, 4), (5, 7), (8, 10)])}, ids)
    own = rows_for(sample, {})
    share = lambda best: measure(sample, own, rows_for(sample, best))["answers"]["list"]["right"]  # noqa: E731
    assert share({}) == share({1: 6}) == share({1: 7, 4: 7}) == 1
    assert share({4: 5}) == share({7: 6}) == pytest.approx(2 / 3)  # those are listed already
    assert share({2: 2}) == pytest.approx(2 / 3)  # after a 5 only the first item goes on
    assert share({1: 8, 4: 8, 7: 8}) == 0


def test_accuracy_is_told_by_depth_and_with_wilsons_interval():
    plan, found = [], []
    for index, right in enumerate((1.0, 0.5, 0.0, 1.0)):
        sample = Sample([1, 2, 3], (1, 1), {"single": single([1, 2, 3], 2, 3)}, 0.1 + 0.2 * (index % 2))
        plan.append(Case("niah", "single", "text", 3, index, sample))
        answer = {"right": right, "log_likelihood": -1.0 - index, "exact_right": 1.0, "exact_log_likelihood": -0.5}
        found.append({"answers": {"single": answer}})
    (cell,) = cells(plan, found, "int4", ("niah",))
    assert (cell["value"], cell["exact"], cell["samples"]) == (0.625, 1.0, 4)
    assert cell["by_depth"] == {"0.1": 0.5, "0.3": 0.75}
    assert (cell["log_likelihood"], cell["exact_log_likelihood"]) == (-2.5, -0.5)
    assert cell["interval"] == wilson(0.625, 4)


def test_wilsons_interval_is_the_published_one():
    assert wilson(0.0, 10) == pytest.approx([0, 0.2775], abs=1e-4)  # Brown, Cai and DasGupta (2001), table of n = 10
    assert wilson(0.5, 10) == pytest.approx([0.2366, 0.7634], abs=1e-4)
    for share, count in ((0.25, 8), (0.9, 40)):  # the shares whose own normal interval just reaches the one seen
        for bound in wilson(share, count):
            assert abs(share - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / count), rel=1e-6)
