import dataclasses

import numpy as np
import pytest
import torch
from families import tiny_tokenizer

from calib import vqkv
from calib.record import RIDGE, held_out, metric_root
from calib.texts import Text
from plugins.vqkv import VQKVConfig
from plugins.vqkv.reference import nearest

PLAN = vqkv.Effort(vectors=20, least=4, share=1.0, queries=16, warm=4, sweeps=3)
TEXT = Text.of("words", " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40)))


def config(**changes) -> VQKVConfig:
    values = {"head_dim": 32, "k_groups": 8, "v_groups": 4, "k_stages": (8, 4), "v_stages": (4,)}
    return VQKVConfig(**{**values, "k_entries": 16, "v_entries": 8, **changes})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fitted_side(x: torch.Tensor, metric=None, weight=None, side="k", **changes):
    settings = config(k_stages=(8,), **changes)
    return vqkv.fit_side(x, x, metric, weight, settings, side, PLAN, generator())


# -- arithmetic


@pytest.mark.parametrize(("entries", "dim"), [(16, 4), (256, 4), (200, 8), (1000, 3)])
def test_fast_assignment_picks_codewords_as_near_as_the_nearest(entries, dim):
    y, books = torch.randn(3, 700, dim, generator=generator()), torch.randn(3, entries, dim, generator=generator())
    distance = torch.cdist(y.double(), books.double())
    got = distance.gather(2, vqkv.assign(y, books)[..., None])[..., 0]
    assert torch.all(got.square() <= distance.amin(-1).square() + 1e-3)
    assert (vqkv.assign(y, books) == distance.argmin(-1)).float().mean() > 0.99


def test_cluster_sums_equal_a_loop():
    y, weight = torch.randn(2, 50, 3, generator=generator()), torch.rand(2, 50, generator=generator())
    code = torch.randint(0, 6, (2, 50), generator=generator())
    total, count = vqkv.cluster_sums(y, weight, code, 7)
    for table in range(2):
        for entry in range(7):
            chosen = code[table] == entry
            expected = (y[table, chosen] * weight[table, chosen, None]).sum(0)
            torch.testing.assert_close(total[table, entry], expected)
            torch.testing.assert_close(count[table, entry], weight[table, chosen].sum())
    assert torch.all(total[:, 6] == 0)


def test_kmeans_finds_well_separated_clusters():
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10], [10, 10], [20, 20], [30, 0], [0, 30], [-20, 5]])
    y = centres.repeat(100, 1) + 0.1 * torch.randn(800, 2, generator=generator())
    plan = dataclasses.replace(PLAN, warm=20)
    books = vqkv.kmeans(y[None], torch.ones(1, 800), 32, plan, generator())[0]
    assert torch.cdist(centres, books).amin(1).max() < 0.2
    assert (y - books[nearest(y[None], books[None])[0]]).square().sum(1).mean() < 0.02


def test_a_codeword_that_nothing_chose_restarts_on_a_vector():
    y = torch.randn(1, 64, 2, generator=generator())
    books = torch.full((1, 4, 2), 1e3)
    books[0, 0] = 0
    assert torch.cdist(vqkv.lloyd(y, torch.ones(1, 64), books, 1, generator())[0, 1:], y[0]).amin(1).max() == 0


def test_weights_pull_codewords_towards_heavy_vectors():
    y = torch.tensor([[[0.0], [1.0]]])
    books = vqkv.lloyd(y, torch.tensor([[1.0, 3.0]]), torch.tensor([[[0.4]]]), 1, generator())
    assert books.item() == pytest.approx(0.75)


def test_a_projected_codebook_spans_the_data_as_kmeans_does():
    scale = torch.tensor([3.0, 1.0, 0.3, 0.1])
    y = torch.randn(1, 4000, 4, generator=generator()) * scale

    def error(books: torch.Tensor) -> float:
        return float((y[0] - books[0][nearest(y, books)[0]]).square().sum() / y.square().sum())

    plan, weight = dataclasses.replace(PLAN, warm=10), torch.ones(1, 4000)
    projected = error(vqkv.simvq(y, weight, 64, plan, generator()))
    plain = error(vqkv.kmeans(y, weight, 64, plan, generator()))
    assert projected < 1.15 * plain < 0.1


def test_the_metric_root_squares_to_the_scaled_metric():
    a = torch.randn(2, 6, 6, generator=generator())
    metric = a @ a.transpose(1, 2)
    root = metric_root(metric)
    scaled = metric / metric.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + RIDGE * torch.eye(6)
    torch.testing.assert_close(root @ root, scaled, atol=1e-5, rtol=1e-4)


def test_axes_are_orthogonal_and_share_the_variance_between_equal_groups():
    y = torch.randn(1, 5000, 8, generator=generator()) * torch.logspace(0, 2, 8)
    axes = vqkv.balanced_axes(y, torch.ones(1, 5000), [8.0, 8.0])
    torch.testing.assert_close(axes[0] @ axes[0].T, torch.eye(8), atol=1e-5, rtol=0)
    log = (y[0] @ axes[0]).var(0).log().view(2, 4).sum(1)
    assert abs(log[0] - log[1]) < 3 and abs(log.sum()) > 20


def test_groups_with_more_bits_take_as_much_more_variance_as_they_can_remove():
    y = torch.randn(1, 5000, 16, generator=generator()) * torch.logspace(0, 1, 16)
    axes = vqkv.balanced_axes(y, torch.ones(1, 5000), [16.0, 8.0])
    log = (y[0] @ axes[0]).var(0).log().view(2, 8).sum(1)
    assert log[0] - log[1] == pytest.approx(2 * 8 * np.log(2), abs=1)


# -- one quantiser


def test_the_quantiser_inverts_its_transform_and_reports_its_own_error():
    x = torch.randn(2, 600, 32, generator=generator()) + 5
    quantiser, errors = fitted_side(x)
    torch.testing.assert_close(quantiser.encode @ quantiser.decode, torch.eye(32).expand(2, -1, -1), atol=1e-4, rtol=0)
    lost = (quantiser.rebuild(x) - x).square().sum() / (x - x.mean(1, keepdim=True)).square().sum()
    assert errors["plain"] == pytest.approx(float(lost), rel=1e-3)
    assert errors["stages"][-1] == pytest.approx(float(lost), rel=1e-3)  # no metric: the fitted error is the plain one


def test_each_stage_lowers_the_held_out_error():
    x = torch.randn(2, 900, 32, generator=generator())
    settings = config(k_stages=(8, 8, 4))
    _, errors = vqkv.fit_side(x[:, :800], x[:, 800:], None, None, settings, "k", PLAN, generator())
    assert len(errors["stages"]) == 3
    assert errors["stages"] == sorted(errors["stages"], reverse=True)
    assert errors["train"] < errors["stages"][-1] < 0.6


def test_a_metric_moves_the_error_out_of_the_directions_that_matter():
    x = torch.randn(1, 2000, 32, generator=generator())
    metric = torch.diag(torch.tensor([100.0] * 4 + [1.0] * 28))[None]
    lost = [(q.rebuild(x) - x).square().mean((0, 1))[:4].mean() for q, _ in (fitted_side(x), fitted_side(x, metric))]
    assert lost[1] < 0.7 * lost[0]


def test_without_mean_an_offset_costs_accuracy():
    x = torch.randn(1, 800, 32, generator=generator()) + 10 * torch.randn(32, generator=generator())
    lost = [(fitted_side(x, mean=mean)[0].rebuild(x) - x).square().sum() for mean in (True, False)]
    assert lost[0] < lost[1]
    assert torch.all(fitted_side(x, mean=False)[0].mean == 0)


def test_tables_of_a_layer_are_shared_by_its_heads_but_means_are_not():
    x = torch.randn(2, 600, 32, generator=generator()) + torch.tensor([0.0, 7.0])[:, None, None]
    quantiser, _ = fitted_side(x, tables="layer")
    assert quantiser.books.shape == (1, 8, 16, 4) and quantiser.encode.shape == (1, 32, 32)
    torch.testing.assert_close(quantiser.mean, x.mean(1))
    assert (quantiser.rebuild(x) - x).square().mean() < 0.6


def test_the_model_is_read_in_windows_of_the_context_asked_for(monkeypatch):
    monkeypatch.setitem(vqkv.EFFORTS, "quick", PLAN)
    plan = vqkv.plan(tiny_tokenizer(), config(), [TEXT], "quick", 128)
    assert {len(window) for window in plan.windows} == {128}
    assert plan.vectors == plan.rows * held_out(len(plan.windows)).count(False)
    assert plan.vectors >= 20 * 16 and plan.rows <= 128 - config().sinks
