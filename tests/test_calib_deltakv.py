import json

import pytest
import torch
from families import tiny, tiny_tokenizer

from calib import codec as codecs
from calib import deltakv, fit
from calib.record import WindowRecord
from calib.texts import Text
from plugins.deltakv.config import DeltaKVConfig
from plugins.errors import UserError

TEXT = Text.of("words", " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40)))
PLAN = deltakv.Effort(tokens=8, least=2, queries=16)


def config(**changes) -> DeltaKVConfig:
    values = {"head_dim": 8, "kv_heads": 2, "latents": "16x4", "stride": 4, "full_layers": ()}
    return DeltaKVConfig(**{**values, "neighbors": 2, "sinks": 2, "window": 8, "block": 4, **changes})


def seen(windows: int = 4, length: int = 200, metric: torch.Tensor | None = None, seed: int = 0) -> WindowRecord:
    """Windows of tokens that resemble one of a few earlier ones, with unequal directions."""
    generator = torch.Generator().manual_seed(seed)
    kinds = 3 * torch.randn(6, 32, generator=generator)
    kind = torch.randint(0, 6, (windows, length), generator=generator)
    noise = torch.randn(windows, length, 32, generator=generator) * torch.logspace(0, -1.5, 32)
    metric = torch.eye(8).repeat(4, 1, 1) if metric is None else metric
    return WindowRecord(kinds[kind] + noise + 5, metric, 2.0, torch.zeros(windows, 0, dtype=torch.int64))


def lost(tables, rows: torch.Tensor) -> torch.Tensor:
    """Errors of what the cache gives back of the compressed tokens that are no references: [n, X]."""
    count = torch.arange(rows.shape[1] - tables.config.sinks)
    return (tables.rebuild(rows) - rows)[:, tables.config.sinks :][:, count % tables.config.stride != 0].flatten(0, 1)


def test_errors_are_those_of_the_held_out_window_read_back_from_the_cache():
    record = seen()
    tables, errors = deltakv.fit_layer(record, config(), (0, 0))
    rows = record.rows[3:]
    error = lost(tables, rows).square().sum()
    spread = (rows[0, 2:] - record.rows[:3].flatten(0, 1).mean(0))[torch.arange(198) % 4 != 0].square().sum()
    assert errors["x"] == pytest.approx(float(error / spread), rel=1e-4)
    assert errors["plain"] == pytest.approx(errors["residual"], rel=1e-4)  # the metric is the identity
    assert errors["output"] == pytest.approx(0.75 * float(error) / 148 / 2.0, rel=1e-4)
    assert errors["references"] == pytest.approx(errors["x"] / errors["residual"], rel=1e-4)
    assert errors["references"] < 0.5 and errors["residual"] < 0.3


def test_unquantised_latents_keep_the_principal_part_of_the_residuals():
    record, settings = seen(), config(latents="12x16")
    tables, errors = deltakv.fit_layer(record, settings, (0, 0))
    pairs = list(deltakv.residuals(record.rows[:3], settings, tables.center))
    residual = torch.cat([x - mean for x, mean in pairs]).double()
    value = torch.linalg.svdvals(residual).square()
    # the metric root is ridged alike in all directions, so the identity stays one up to scale
    assert errors["train"] == pytest.approx(float(value[12:].sum() / value.sum()), rel=1e-3)


def test_all_of_the_latents_lose_nothing():
    record = seen()
    tables, _ = deltakv.fit_layer(record, config(latents="32x16"), (0, 0))
    assert lost(tables, record.rows).abs().max() < 1e-3


def test_more_bits_and_more_dimensions_lose_less():
    record = seen()
    by_bits = [deltakv.fit_layer(record, config(latents=f"16x{bits}"), (0, 0))[1]["residual"] for bits in (2, 4, 8, 16)]
    by_size = [deltakv.fit_layer(record, config(latents=f"{size}x4"), (0, 0))[1]["residual"] for size in (8, 16, 24)]
    assert by_bits == sorted(by_bits, reverse=True) and by_size == sorted(by_size, reverse=True)


def test_latents_have_like_variances():
    record = seen()
    tables, _ = deltakv.fit_layer(record, config(latents="16x16"), (0, 0))
    pairs = deltakv.residuals(record.rows[:3], tables.config, tables.center)
    variance = torch.cat([deltakv.latents(tables, x, mean) for x, mean in pairs]).square().mean(0)
    torch.testing.assert_close(variance, variance.mean().expand(16), rtol=2e-3, atol=0)


def test_a_segment_has_like_variances_and_more_of_them_than_the_next():
    record, settings = seen(), config(latents="8x8+16x4")
    tables, _ = deltakv.fit_layer(record, settings, (0, 0))
    z = torch.cat([tables.residual(x, mean) for x, mean in deltakv.residuals(record.rows[:3], settings, tables.center)])
    first, second = z.square().mean(0).split((8, 16))
    for part in (first, second):
        torch.testing.assert_close(part, part.mean().expand(len(part)), rtol=2e-3, atol=0)
    assert first.mean() > 2 * second.mean()


def test_at_equal_bytes_unequal_bits_lose_less_than_equal_ones():
    record = seen()
    one, mixed = (deltakv.fit_layer(record, config(latents=latents), (0, 0))[1] for latents in ("16x4", "8x4+16x2"))
    assert mixed["residual"] < 0.8 * one["residual"]


def test_the_metric_moves_the_error_out_of_the_heads_that_matter():
    metric = torch.eye(8).repeat(4, 1, 1) * torch.tensor([1.0, 1.0, 1.0, 1000.0])[:, None, None]
    plain, weighed = (
        lost(deltakv.fit_layer(record, config(latents="8x16"), (0, 0))[0], record.rows)
        for record in (seen(), seen(metric=metric))
    )
    assert weighed[:, 24:].square().sum() < 0.2 * plain[:, 24:].square().sum()
    assert weighed.square().sum() > plain.square().sum()


def test_decompression_is_no_worse_than_any_other_map_of_the_latents():
    record = seen()
    tables, _ = deltakv.fit_layer(record, config(latents="8x4+8x2"), (0, 0))
    pairs = list(deltakv.residuals(record.rows[:3], tables.config, tables.center))
    z = torch.cat([deltakv.latents(tables, x, mean) for x, mean in pairs])
    residual = torch.cat([x - mean for x, mean in pairs])
    expected = torch.linalg.lstsq(z.double(), residual.double()).solution
    torch.testing.assert_close(tables.decompress, expected.float(), atol=1e-3, rtol=1e-3)


def test_a_swiglu_starts_as_the_linear_fit():
    record = seen()
    plain, _ = deltakv.fit_layer(record, config(), (0, 0))
    gated, _ = deltakv.fit_layer(record, config(compressor="swiglu", hidden=64), (0, 0))
    torch.testing.assert_close(gated.f(record.rows), plain.f(record.rows))
    assert torch.all(gated.down == 0)
    response = (record.rows - gated.center) @ gated.gate
    assert 0.5 < float(response.std()) < 2


def test_a_layer_whose_latents_lose_everything_is_named(monkeypatch):
    monkeypatch.setattr(deltakv, "fit_layer", lambda *arguments: (None, {"residual": float("nan")}))
    with pytest.raises(UserError, match="layer 5: the latents lose nan .* --set full_layers=5"):
        deltakv.Plan(config(), PLAN, [[0] * 200] * 4).fit_layer(seen(), 5, 0)


def test_rotations_give_a_covariance_equal_variances():
    a = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, 24)
    turn = deltakv.levelled(a.T @ a, torch.Generator().manual_seed(1))
    torch.testing.assert_close(turn.T @ turn, torch.eye(24, dtype=torch.float64))
    variance = (a @ turn).square().sum(0)
    torch.testing.assert_close(variance, variance.mean().expand(24), rtol=1e-8, atol=0)


# -- a whole codec


def run(folder, model=None, **changes):
    settings = config(head_dim=32, latents="64x4", full_layers=(1,))
    arguments = {"effort": "quick", "seed": 0, "context": 256, "out_dir": folder, "progress": False, **changes}
    settings, texts = arguments.pop("settings", settings), arguments.pop("texts", [TEXT])
    return fit.fit_codec(model or tiny("llama", num_hidden_layers=3), tiny_tokenizer(), settings, texts, **arguments)


@pytest.fixture
def efforts(monkeypatch):
    monkeypatch.setitem(deltakv.EFFORTS, "quick", PLAN)


def test_a_fitted_codec_reads_back_with_its_reasons(tmp_path, efforts):
    run(tmp_path / "codec", choice={"error": 0.5})
    codec = codecs.load(tmp_path / "codec")
    assert sorted(codec.layers) == [0, 2]
    assert {name: tuple(t.shape) for name, t in codec.layers[2].tensors().items()} == {
        "center": (128,),
        "compress": (128, 64),
        "decompress": (64, 128),
    }
    description = json.loads((tmp_path / "codec" / codecs.DESCRIPTION).read_text())
    assert (description["fit"], description["choice"]) == ("fast", {"error": 0.5})
    assert 0 < description["errors"]["2"]["residual"] < 1
    assert description["vectors"] == 4 * (254 - 64)


def test_the_same_seed_gives_the_same_codec_in_one_pass_or_several(tmp_path, efforts, monkeypatch):
    run(tmp_path / "one")
    monkeypatch.setattr(fit, "RECORD_BYTES", 1)
    run(tmp_path / "several")
    run(tmp_path / "other", seed=1)
    one, several, other = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("one", "several", "other"))
    assert one == several and one != other


def test_an_interrupted_fit_goes_on_from_its_finished_layers(tmp_path, efforts, monkeypatch):
    run(tmp_path / "whole")
    original, done = deltakv.fit_layer, []

    def failing(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return original(*arguments)

    monkeypatch.setattr(deltakv, "fit_layer", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed")
    done.clear()
    monkeypatch.setattr(deltakv, "fit_layer", lambda *arguments: done.append(1) or original(*arguments))
    run(tmp_path / "resumed")
    assert len(done) == 1
    whole, resumed = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed


def test_a_short_text_is_refused_with_the_tokens_there_and_needed(tmp_path, efforts):
    short = Text.of("short", TEXT.content[:300])
    with pytest.raises(UserError, match="the texts give 0 tokens in windows of 256, a quick fit needs 512"):
        run(tmp_path / "codec", texts=[short])


def test_only_deltakv_can_be_trained():
    with pytest.raises(UserError, match="--fit quality trains deltakv's compressors and vqkv has none"):
        fit.check_fit("vqkv", "quality")
    with pytest.raises(UserError, match="--fit slow is unknown"):
        fit.check_fit("deltakv", "slow")
