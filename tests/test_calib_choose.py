import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
import torch
from families import tiny, tiny_tokenizer

from calib import choose as choosing
from calib import deltakv
from calib.adapter import layer_specs
from calib.choose import ErrorModel, Search, choose, plan_layers, selections
from calib.record import output_weight, record_windows
from calib.texts import Text
from plugins.attention import causal_mask
from plugins.config import RATIO_SLACK
from plugins.deltakv.config import DeltaKVConfig
from plugins.errors import UserError
from plugins.geometry import Geometry

TEXT = Text.of("words", " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40)))
SMALL = ["window=8", "block=4", "sinks=4"]


def chosen(ratio=0.4, settings=(), model=None, **changes):
    model = model or tiny("llama")
    return choose(
        model, tiny_tokenizer(), [TEXT], ratio, [*SMALL, *settings], layer_specs(model), **{"context": 256, **changes}
    )


# -- the dynamic programme


def brute(cost: np.ndarray, forced: set[int], count: int, head: np.ndarray | None) -> float:
    best = np.inf
    for full in itertools.combinations(range(len(cost)), count):
        if not forced <= set(full):
            continue
        total, anchor = 0.0, -1
        for node in range(len(cost)):
            if node in full:
                anchor = node
            elif anchor >= 0:
                total += cost[anchor, node]
            else:
                total += np.inf if head is None else head[node]
        best = min(best, total)
    return best


@pytest.mark.parametrize("forced", [set(), {0}, {0, 4}])
@pytest.mark.parametrize("free", [True, False])
def test_the_full_layers_are_the_best_of_all_sets(forced, free):
    draw = np.random.default_rng(0)
    cost, head = draw.random((8, 8)), draw.random(8) if free else None
    for count in range(max(1, len(forced)), 8):
        total, nodes = plan_layers(cost, forced, count, head)
        assert total == pytest.approx(brute(cost, forced, count, head))
        assert len(nodes) == count and forced <= set(nodes)
        priced = np.where(np.isin(np.arange(8), nodes)[None], 0, cost)
        assert total >= priced.min(0).sum() - 1 or not np.isfinite(total)


def test_without_full_layers_every_layer_pays():
    head = np.array([1.0, 2.0, 4.0])
    assert plan_layers(np.zeros((3, 3)), set(), 0, head) == (7.0, [])
    assert plan_layers(np.zeros((3, 3)), {1}, 0, head)[0] == np.inf
    assert plan_layers(np.zeros((3, 3)), set(), 0)[0] == np.inf


# -- what compressing and selecting cost


def records(attention: bool = True, length: int = 120):
    model = tiny("llama")
    ids = torch.randint(3, 200, (2, length), generator=torch.Generator().manual_seed(0)).tolist()
    return model, record_windows(model, ids, [0, 1, 2, 3], 12, 4, 8, 0, attention=attention)


def test_expected_errors_are_those_of_a_fit_on_the_same_windows(monkeypatch):
    _, seen = records(attention=False)
    base = DeltaKVConfig(32, 2, 128, full_layers=(), sinks=4, window=8, block=4, latent_bits=16)
    expected = ErrorModel.of(seen, base, (4, 10))
    monkeypatch.setattr(deltakv, "held_out", lambda windows: [True] * windows)  # fitted and judged on all
    for stride, size in ((4, 40), (10, 96)):
        settings = DeltaKVConfig(32, 2, size, stride, 4, 16, full_layers=(), sinks=4, window=8, block=4)
        for node in range(4):
            output = deltakv.fit_layer(seen[node], settings, (0, node))[1]["output"]
            # the ridge of the metric root counts in one and not in the other
            assert expected.error(stride, size, 16)[node] == pytest.approx(output, rel=0.15)


def test_quantised_latents_are_expected_to_lose_what_they_do(monkeypatch):
    _, seen = records(attention=False, length=800)
    base = DeltaKVConfig(32, 2, 128, full_layers=(), sinks=4, window=8, block=4)
    expected = ErrorModel.of(seen, base, (10,))
    monkeypatch.setattr(deltakv, "held_out", lambda windows: [True] * windows)
    for bits in (2, 4, 8):
        settings = dataclasses.replace(base, latent_dim=64, latent_bits=bits)
        for node in range(4):
            output = deltakv.fit_layer(seen[node], settings, (0, node))[1]["output"]
            assert expected.error(10, 64, bits)[node] == pytest.approx(output, rel=0.3)


def test_of_a_known_spectrum_the_tail_and_the_noise_are_lost():
    model = ErrorModel({10: np.array([[4.0, 4.0, 1.0]])})
    assert model.error(10, 2, 16) == pytest.approx([1.0])
    assert model.error(10, 2, 4) == pytest.approx([1.0 + 0.01154 * 8.0])
    noise = 0.1188 / 0.8812 * 3.0
    assert model.error(10, 3, 2) == pytest.approx([2 * 4 * noise / (4 + noise) + noise / (1 + noise)])


@pytest.mark.parametrize("budget", [{"select_fraction": 0.3}, {"select_count": 9}])
def test_missed_and_coverage_equal_a_loop_over_queries(budget):
    model, seen = records()
    geometry = Geometry(4, 8, 4, 10, **budget)
    weights = {layer: output_weight(model, layer) for layer in range(4)}
    found = selections(seen, weights, geometry)
    for i, j in ((0, 1), (1, 3)):
        missed = energy = shared = 0.0
        for window in range(2):
            moved = whole = 0.0
            for row, position in enumerate(seen[j].asked[window].tolist()):
                rows = int(geometry.encoded(position))
                count = int(geometry.selected(np.array([position]))[0])
                own, other = (
                    set(seen[n].attention[window, :, row].amax(0)[4 : 4 + rows].topk(count).indices.tolist())
                    for n in (j, i)
                )
                shared += len(own & other) / count / 24
                read = causal_mask(120, 120, 0)[position].clone()
                read[4 : 4 + rows] = False
                read[[4 + n for n in other]] = True
                value = seen[j].rows[window, :, 64:].view(120, 2, 32).repeat_interleave(2, dim=1)  # [N, Hq, D]
                chance = seen[j].attention[window, :, row]  # [Hq, N]
                before = torch.einsum("hn,nhd->hd", chance, value).flatten() @ weights[j].T
                kept = chance * read
                after = torch.einsum("hn,nhd->hd", kept / kept.sum(1, keepdim=True), value).flatten() @ weights[j].T
                moved += float((after - before).square().sum())
                whole += float(before.square().sum())
            missed += moved / whole / 2
            energy += whole
        assert found.missed[i, j] == pytest.approx(missed, rel=1e-3) and energy > 0
        assert found.coverage[i, j] == pytest.approx(shared, rel=1e-6)


# -- the search


def test_the_choice_is_the_cheapest_configuration_within_the_ratio():
    config, choice = chosen(0.4)
    assert config.ratio(4) <= 0.4 + RATIO_SLACK and config.latent_dim % 8 == 0
    assert choice["full_layers"] == list(config.full_layers)
    assert choice["error"] == min(item["error"] for item in choice["alternatives"])
    assert choice["error"] == pytest.approx(sum(layer["error"] for layer in choice["layers"].values()))
    assert sorted(map(int, choice["layers"])) == sorted(set(range(4)) - set(config.full_layers))
    sizes = [len(item["full_layers"]) for item in choice["alternatives"]]
    assert sizes == sorted(set(sizes))
    assert all(item["ratio"] <= 0.405 for item in choice["alternatives"])
    json.dumps(choice)


def test_a_selection_keeps_the_first_layer_full_and_tells_who_observes():
    config, choice = chosen(0.6, ["select_fraction=0.2"])
    assert 0 in config.full_layers and config.select_fraction == 0.2
    for layer, told in choice["layers"].items():
        assert told["observer"] == max(full for full in config.full_layers if full < int(layer))
        assert told["missed"] > 0 and 0 < told["coverage"] <= 1
    total = sum(told["error"] + told["missed"] for told in choice["layers"].values())
    assert choice["error"] == pytest.approx(total)


def test_the_choice_is_the_same_every_time():
    assert chosen(0.4, ["select_count=20"]) == chosen(0.4, ["select_count=20"])


def test_fields_that_set_fixes_stay_as_they_are():
    config, choice = chosen(0.5, ["stride=7", "latent_bits=8", "full_layers=1", "neighbors=3"])
    assert (config.stride, config.latent_bits, config.full_layers, config.neighbors) == (7, 8, (1,), 3)
    assert len(choice["alternatives"]) == 1
    assert config.latent_dim == 48 and config.ratio(4) <= 0.505  # the largest: 56 would take 0.521


def test_when_everything_is_fixed_the_ratio_is_theirs():
    fixed = ["stride=5", "latent_bits=16", "latent_dim=100", "full_layers=0,1"]
    config, _ = chosen(0.2, fixed)
    assert (config.latent_dim, config.full_layers) == (100, (0, 1)) and config.ratio(4) > 0.9


@pytest.mark.parametrize(
    ("ratio", "settings", "said"),
    [
        (0.001, [], "ratio 0.001 is out of reach: --ratio takes 0.0234 to 1.0000"),
        (1.5, [], "ratio 1.5 is out of reach"),
        (0.2, ["full_layers=0,1"], "ratio 0.2 is out of reach: --ratio takes 0.5117 to 1.0000"),
        (0.3, ["full_layers=0,1,2,3"], "no layer is left to compress"),
        (0.3, ["full_layers=9"], "full_layers=[9] are no layers"),
        (0.3, ["nonsense=1"], "one of the keys latent_dim"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(ratio, settings, said):
    with pytest.raises(UserError, match=re.escape(said)):
        chosen(ratio, settings)


def test_a_context_that_leaves_nothing_compressed_is_refused():
    with pytest.raises(UserError, match="a context of 64 tokens holds nothing compressed"):
        chosen(0.4, ["window=100"], context=64)
    with pytest.raises(UserError, match="the texts hold no window of 2048 tokens"):
        choose(
            *(tiny("llama"), tiny_tokenizer(), [Text.of("short", "a few words")], 0.4, SMALL),
            *(layer_specs(tiny("llama")), 0, choosing.CONTEXT),
        )


def test_sliding_window_layers_are_neither_full_nor_compressed():
    config, choice = chosen(0.5, model=tiny("gemma3"))
    assert set(config.full_layers) <= {2, 3}
    assert set(choice["layers"]) == {str(layer) for layer in {2, 3} - set(config.full_layers)}
    selecting, choice = chosen(0.9, ["select_fraction=0.5"], model=tiny("gemma3"))
    assert selecting.full_layers == (2,) and choice["layers"]["3"]["observer"] == 2


def test_layers_of_unlike_shapes_are_refused():
    specs = layer_specs(tiny("llama"))
    specs[2] = dataclasses.replace(specs[2], num_kv_heads=4)
    with pytest.raises(UserError, match="layer 2 has 4 KV heads of 32 and layer 0 2 of 32"):
        Search(specs, SMALL, 0.6)
