import dataclasses
import json

import numpy as np
import pytest
import torch
from families import tiny, tiny_tokenizer

from calib import codec as codecs
from calib import fit
from calib.adapter import layer_specs
from calib.record import LayerRecord
from calib.texts import Text
from plugins.errors import UserError
from plugins.vqkv import VQKVConfig
from plugins.vqkv.reference import nearest

PLAN = fit.Effort(vectors=20, least=4, share=1.0, queries=16, warm=4, sweeps=3)
TEXT = Text.of("words", " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40)))


def config(**changes) -> VQKVConfig:
    values = {"head_dim": 32, "k_groups": 8, "v_groups": 4, "k_stages": (8, 4), "v_stages": (4,)}
    return VQKVConfig(**{**values, "k_entries": 16, "v_entries": 8, **changes})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fitted_side(x: torch.Tensor, metric=None, weight=None, side="k", **changes):
    settings = config(k_stages=(8,), **changes)
    return fit.fit_side(x, x, metric, weight, settings, side, PLAN, generator())


@pytest.fixture
def efforts(monkeypatch):
    monkeypatch.setitem(fit.EFFORTS, "quick", PLAN)


def run(folder, model=None, settings=None, **changes):
    arguments = {"effort": "quick", "seed": 0, "context": 256, "out_dir": folder, "progress": False, **changes}
    texts = arguments.pop("texts", [TEXT])
    return fit.fit_codec(
        model or tiny("llama", num_hidden_layers=3), tiny_tokenizer(), settings or config(), texts, **arguments
    )


# -- arithmetic


@pytest.mark.parametrize(("entries", "dim"), [(16, 4), (256, 4), (200, 8), (1000, 3)])
def test_fast_assignment_picks_codewords_as_near_as_the_nearest(entries, dim):
    y, books = torch.randn(3, 700, dim, generator=generator()), torch.randn(3, entries, dim, generator=generator())
    distance = torch.cdist(y.double(), books.double())
    got = distance.gather(2, fit.assign(y, books)[..., None])[..., 0]
    assert torch.all(got.square() <= distance.amin(-1).square() + 1e-3)
    assert (fit.assign(y, books) == distance.argmin(-1)).float().mean() > 0.99


def test_cluster_sums_equal_a_loop():
    y, weight = torch.randn(2, 50, 3, generator=generator()), torch.rand(2, 50, generator=generator())
    code = torch.randint(0, 6, (2, 50), generator=generator())
    total, count = fit.cluster_sums(y, weight, code, 7)
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
    books = fit.kmeans(y[None], torch.ones(1, 800), 32, plan, generator())[0]
    assert torch.cdist(centres, books).amin(1).max() < 0.2
    assert (y - books[nearest(y[None], books[None])[0]]).square().sum(1).mean() < 0.02


def test_a_codeword_that_nothing_chose_restarts_on_a_vector():
    y = torch.randn(1, 64, 2, generator=generator())
    books = torch.full((1, 4, 2), 1e3)
    books[0, 0] = 0
    assert torch.cdist(fit.lloyd(y, torch.ones(1, 64), books, 1, generator())[0, 1:], y[0]).amin(1).max() == 0


def test_weights_pull_codewords_towards_heavy_vectors():
    y = torch.tensor([[[0.0], [1.0]]])
    books = fit.lloyd(y, torch.tensor([[1.0, 3.0]]), torch.tensor([[[0.4]]]), 1, generator())
    assert books.item() == pytest.approx(0.75)


def test_a_projected_codebook_spans_the_data_as_kmeans_does():
    scale = torch.tensor([3.0, 1.0, 0.3, 0.1])
    y = torch.randn(1, 4000, 4, generator=generator()) * scale

    def error(books: torch.Tensor) -> float:
        return float((y[0] - books[0][nearest(y, books)[0]]).square().sum() / y.square().sum())

    plan, weight = dataclasses.replace(PLAN, warm=10), torch.ones(1, 4000)
    projected = error(fit.simvq(y, weight, 64, plan, generator()))
    plain = error(fit.kmeans(y, weight, 64, plan, generator()))
    assert projected < 1.15 * plain < 0.1


def test_the_metric_root_squares_to_the_scaled_metric():
    a = torch.randn(2, 6, 6, generator=generator())
    metric = a @ a.transpose(1, 2)
    root = fit.metric_root(metric)
    scaled = metric / metric.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + fit.RIDGE * torch.eye(6)
    torch.testing.assert_close(root @ root, scaled, atol=1e-5, rtol=1e-4)


def test_axes_are_orthogonal_and_share_the_variance_between_equal_groups():
    y = torch.randn(1, 5000, 8, generator=generator()) * torch.logspace(0, 2, 8)
    axes = fit.balanced_axes(y, torch.ones(1, 5000), [8.0, 8.0])
    torch.testing.assert_close(axes[0] @ axes[0].T, torch.eye(8), atol=1e-5, rtol=0)
    log = (y[0] @ axes[0]).var(0).log().view(2, 4).sum(1)
    assert abs(log[0] - log[1]) < 3 and abs(log.sum()) > 20


def test_groups_with_more_bits_take_as_much_more_variance_as_they_can_remove():
    y = torch.randn(1, 5000, 16, generator=generator()) * torch.logspace(0, 1, 16)
    axes = fit.balanced_axes(y, torch.ones(1, 5000), [16.0, 8.0])
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
    _, errors = fit.fit_side(x[:, :800], x[:, 800:], None, None, settings, "k", PLAN, generator())
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


# -- a whole codec


def test_the_same_seed_gives_the_same_codec_and_another_seed_another(tmp_path, efforts):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in "abc")
    assert a == b and a != c


def test_a_codec_has_the_tensors_the_contract_names(tmp_path, efforts):
    info = run(tmp_path / "codec", model_name="tiny", model_sha256="ab" * 32)
    tensors = codecs.load(tmp_path / "codec").tensors()
    assert {name: tuple(t.shape) for name, t in tensors.items() if name.startswith("layers.2.")} == {
        "layers.2.k.books": (2, 12, 16, 4),
        "layers.2.k.encode": (2, 32, 32),
        "layers.2.k.decode": (2, 32, 32),
        "layers.2.k.mean": (2, 32),
        "layers.2.v.books": (2, 4, 8, 8),
        "layers.2.v.encode": (2, 32, 32),
        "layers.2.v.decode": (2, 32, 32),
        "layers.2.v.mean": (2, 32),
    }
    description = json.loads((tmp_path / "codec" / codecs.DESCRIPTION).read_text())
    assert description["texts"] == [{"name": "words", "sha256": TEXT.sha256}]
    assert (description["model"]["name"], description["effort"], description["seed"]) == ("tiny", "quick", 0)
    assert len(info.errors["0"]["k"]["stages"]) == 2 and info.errors["0"]["k"]["stages"][-1] < 0.5


def test_full_and_sliding_window_layers_get_no_codes(tmp_path, efforts):
    run(tmp_path / "codec", tiny("gemma2"), config(full_layers=(3,)))
    assert sorted(codecs.load(tmp_path / "codec").layers) == [1]


def test_an_interrupted_fit_goes_on_and_ends_with_the_same_codec(tmp_path, efforts, monkeypatch):
    run(tmp_path / "whole")
    original, done = fit.fit_layer, []

    def failing(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(fit, "fit_layer", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed")
    assert not (tmp_path / "resumed").exists()
    done.clear()
    monkeypatch.setattr(fit, "fit_layer", lambda *arguments: done.append(1) or original(*arguments))
    run(tmp_path / "resumed")
    assert len(done) == 1
    whole, resumed = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    assert not (tmp_path / "resumed.partial").exists()


def test_layers_left_by_a_fit_with_other_arguments_are_not_used(tmp_path, efforts, monkeypatch):
    stop = fit.Partial.remove
    monkeypatch.setattr(fit.Partial, "remove", lambda self: None)
    run(tmp_path / "codec")
    monkeypatch.setattr(fit.Partial, "remove", stop)
    run(tmp_path / "codec", seed=5)
    run(tmp_path / "fresh", seed=5)
    old, new = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("codec", "fresh"))
    assert old == new


def test_layers_recorded_in_several_passes_give_the_same_codec(tmp_path, efforts, monkeypatch):
    run(tmp_path / "one")
    monkeypatch.setattr(fit, "RECORD_BYTES", 1)
    run(tmp_path / "many")
    one, many = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("one", "many"))
    assert one == many


def test_a_short_text_is_refused_with_the_tokens_there_and_needed(tmp_path, efforts):
    tokens = len(tiny_tokenizer()(TEXT.content).input_ids)
    short = Text.of("short", TEXT.content[: len(TEXT.content) * 300 // tokens])
    with pytest.raises(UserError, match="the texts give 256 tokens in windows of 256, a quick fit needs 512"):
        run(tmp_path / "codec", texts=[short], settings=config(k_entries=32))
    assert not list(tmp_path.iterdir())


def test_a_layer_whose_codes_lose_everything_is_named(tmp_path, efforts, monkeypatch):
    def useless(seen: LayerRecord, *arguments):
        sides, errors = original(seen, *arguments)
        errors["v"]["stages"][-1] = float("nan")
        return sides, errors

    original = fit.fit_layer
    monkeypatch.setattr(fit, "fit_layer", useless)
    with pytest.raises(UserError, match="layer 0: the v codes lose nan .* --set full_layers=0"):
        run(tmp_path / "codec")


def test_a_folder_that_is_no_codec_is_not_overwritten(tmp_path, efforts):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists and is not a codec folder"):
        run(tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_the_head_size_must_be_the_models(tmp_path, efforts):
    with pytest.raises(UserError, match="layer 0 has head_dim 32, the configuration is for 64"):
        run(tmp_path / "codec", settings=VQKVConfig.from_ratio(0.172, 64))


def test_every_eighth_window_is_held_out_and_at_least_one():
    assert np.flatnonzero(fit.held_out(20)).tolist() == [7, 15]
    assert fit.held_out(3) == [False, False, True]


def test_the_model_is_read_in_windows_of_the_context_asked_for():
    windows, rows = fit.plan_windows(tiny_tokenizer(), config(), [TEXT], PLAN, 128, "quick")
    fitted = len(windows) - sum(fit.held_out(len(windows)))
    assert {len(window) for window in windows} == {128}
    assert fitted * rows >= 20 * 16 and rows <= 128 - config().sinks


def test_specs_name_the_layers_that_get_codes():
    specs = layer_specs(tiny("gemma3"))
    assert codecs.compressed_layers(config(), specs) == [2, 3]
    with pytest.raises(UserError, match=r"full_layers=\[9\] are no layers"):
        codecs.compressed_layers(config(full_layers=(9,)), specs)
    with pytest.raises(UserError, match="no layer is left"):
        codecs.compressed_layers(config(full_layers=(2, 3)), specs)
