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


def brute(cost: np.ndarray, count: int) -> float:
    best = np.inf
    for rest in itertools.combinations(range(1, len(cost)), count - 1):
        total, anchor = 0.0, 0
        for node in range(1, len(cost)):
            if node in rest:
                anchor = node
            else:
                total += cost[anchor, node]
        best = min(best, total)
    return best


def test_the_full_layers_are_the_best_of_all_sets():
    cost = np.random.default_rng(0).random((8, 8))
    for count in range(1, 8):
        total, nodes = plan_layers(cost, count)
        assert total == pytest.approx(brute(cost, count))
        assert len(nodes) == count and nodes[0] == 0
        paid = [cost[max(full for full in nodes if full < node), node] for node in range(8) if node not in nodes]
        assert total == pytest.approx(sum(paid))


# -- what compressing and selecting cost


def records(attention: bool = True, length: int = 120):
    model = tiny("llama")
    ids = torch.randint(3, 200, (2, length), generator=torch.Generator().manual_seed(0)).tolist()
    return model, record_windows(model, ids, [0, 1, 2, 3], 12, 4, 8, 0, attention=attention)


def test_expected_errors_are_those_of_a_fit_on_the_same_windows(monkeypatch):
    _, seen = records(attention=False)
    base = DeltaKVConfig(32, 2, "128x16", full_layers=(), sinks=4, window=8, block=4)
    expected = ErrorModel.of(seen, base, (4, 10))
    monkeypatch.setattr(deltakv, "held_out", lambda windows: [True] * windows)  # fitted and judged on all
    for stride, size in ((4, 40), (10, 96)):
        settings = dataclasses.replace(base, latents=f"{size}x16", stride=stride)
        for node in range(4):
            output = deltakv.fit_layer(seen[node], settings, (0, node))[1]["output"]
            # the ridge of the metric root counts in one and not in the other
            assert expected.error(stride, ((size, 16),))[node] == pytest.approx(output, rel=0.15)


def test_quantised_latents_are_expected_to_lose_what_they_do(monkeypatch):
    _, seen = records(attention=False, length=800)
    base = DeltaKVConfig(32, 2, "128x4", full_layers=(), sinks=4, window=8, block=4)
    expected = ErrorModel.of(seen, base, (10,))
    monkeypatch.setattr(deltakv, "held_out", lambda windows: [True] * windows)
    for latents in ("64x2", "64x4", "64x8", "16x8+24x4+40x2"):
        settings = dataclasses.replace(base, latents=latents)
        for node in range(4):
            output = deltakv.fit_layer(seen[node], settings, (0, node))[1]["output"]
            assert expected.error(10, settings.segments)[node] == pytest.approx(output, rel=0.3)


def test_of_a_known_spectrum_the_tail_and_the_noise_are_lost():
    model = ErrorModel({10: np.array([[4.0, 4.0, 1.0]])})
    assert model.error(10, ((2, 16),)) == pytest.approx([1.0])
    assert model.error(10, ((2, 4),)) == pytest.approx([1.0 + 0.01154 * 8.0])
    noise = 0.1188 / 0.8812 * 3.0
    assert model.error(10, ((3, 2),)) == pytest.approx([2 * 4 * noise / (4 + noise) + noise / (1 + noise)])
    noise = 0.1188 / 0.8812
    assert model.error(10, ((2, 4), (1, 2))) == pytest.approx([0.01154 * 8.0 + noise / (1 + noise)])


def test_bits_go_where_the_energy_is():
    energy = np.exp(-np.arange(96) / 12)[None]
    model = ErrorModel({10: energy})
    segments = model.best_segments(10, 300)
    assert sum(size * bits for size, bits in segments) <= 300 and sum(size for size, _ in segments) <= 96
    assert [bits for _, bits in segments] == sorted((bits for _, bits in segments), reverse=True)
    everything = [
        ((a, 8), (b, 4), (c, 2))
        for a, b, c in itertools.product(range(0, 97, 8), repeat=3)
        if 0 < a + b + c <= 96 and 8 * a + 4 * b + 2 * c <= 300
    ]
    lowest = min(choosing.lost(energy, tuple(s for s in item if s[0]), choosing.SHIFT)[0] for item in everything)
    assert model.cost(10, segments)[0] == pytest.approx(lowest)
    assert lowest < 0.7 * model.cost(10, ((72, 4),))[0]  # what one width of bits leaves
    assert model.best_segments(10, 15) is None


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
    assert config.ratio(4) <= 0.4 + RATIO_SLACK and all(size % 8 == 0 for size, _ in config.segments)
    assert choice["full_layers"] == list(config.full_layers)
    assert choice["error"] == min(item["error"] for item in choice["alternatives"])
    assert choice["error"] == pytest.approx(sum(layer["error"] for layer in choice["layers"].values()))
    assert sorted(map(int, choice["layers"])) == sorted(set(range(4)) - set(config.full_layers))
    assert config.full_layers == ()
    strides = [item["stride"] for item in choice["alternatives"]]
    assert strides == sorted(set(strides)) and config.stride in strides
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
    sizes = [len(item["full_layers"]) for item in choice["alternatives"]]
    assert sizes == sorted(set(sizes)) and min(sizes) == 1


def test_the_choice_is_the_same_every_time():
    assert chosen(0.4, ["select_count=20"]) == chosen(0.4, ["select_count=20"])


def test_fields_that_set_fixes_stay_as_they_are():
    config, choice = chosen(0.5, ["stride=7", "latents=48x8", "full_layers=1", "neighbors=3"])
    assert (config.stride, config.latents, config.full_layers, config.neighbors) == (7, "48x8", (1,), 3)
    assert len(choice["alternatives"]) == 1


def test_when_everything_is_fixed_the_ratio_is_theirs():
    fixed = ["stride=5", "latents=100x16", "full_layers=0,1"]
    config, _ = chosen(0.2, fixed)
    assert (config.latents, config.full_layers) == ("100x16", (0, 1)) and config.ratio(4) > 0.9


@pytest.mark.parametrize(
    ("ratio", "settings", "said"),
    [
        (0.001, [], "ratio 0.001 is out of reach: --ratio takes 0.0234 to 0.7000"),
        (1.5, [], "ratio 1.5 is out of reach"),
        (0.2, ["full_layers=0,1"], "ratio 0.2 is out of reach: --ratio takes 0.5117 to 0.8500"),
        (0.3, ["full_layers=0,1,2,3"], "no layer is left to compress"),
        (0.3, ["full_layers=9"], "full_layers=[9] are no layers"),
        (0.3, ["nonsense=1"], "one of the keys latents"),
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
    assert config.full_layers == () and set(choice["layers"]) == {"2", "3"}
    selecting, choice = chosen(0.7, ["select_fraction=0.5"], model=tiny("gemma3"))
    assert selecting.full_layers == (2,) and choice["layers"]["3"]["observer"] == 2


def test_layers_of_unlike_shapes_are_refused():
    specs = layer_specs(tiny("llama"))
    specs[2] = dataclasses.replace(specs[2], num_kv_heads=4)
    with pytest.raises(UserError, match="layer 2 has 4 KV heads of 32 and layer 0 2 of 32"):
        Search(specs, SMALL, 0.6)
