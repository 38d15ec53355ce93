import dataclasses

import pytest
import torch
from families import VOCAB, tiny
from torch import nn

from calib import record as recording
from calib.adapter import exact, intercept
from calib.record import attention_statistics, causal_attention, output_metric, record
from plugins.attention import rotate
from plugins.errors import UserError
from plugins.vqkv import VQKVConfig

BASE = {"head_dim": 32, "k_groups": 8, "v_groups": 8, "k_stages": (8,), "v_stages": (8,)}
BASE |= {"sinks": 2, "window": 8, "block": 4}


def windows(count: int, length: int) -> list[list[int]]:
    return torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def first_call(model, length: int = 40):
    calls = []

    def handler(call):
        calls.append(call)
        return exact(call)

    with intercept(model, handler):
        model(input_ids=torch.tensor(windows(1, length)), use_cache=False)
    return calls[1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_keys_and_values_are_those_of_the_models_own_cache(family):
    model, texts = tiny(family), windows(3, 30)
    config = VQKVConfig(**BASE, key_space="post_rope")
    seen = record(model, texts, range(4), 28, 16, config, seed=0)
    for layer in range(4):
        caches = [model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values.layers[layer] for ids in texts]
        keys = torch.cat([cache.keys[0, :, 2:] for cache in caches], dim=1)  # all but the sinks, in order
        values = torch.cat([cache.values[0, :, 2:] for cache in caches], dim=1)
        torch.testing.assert_close(seen[layer].keys, keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(seen[layer].values, values, atol=1e-4, rtol=1e-4)


def test_keys_before_rope_are_those_after_it_turned_back():
    model, texts = tiny("llama"), windows(2, 30)
    before = record(model, texts, [1], 28, 16, VQKVConfig(**BASE), seed=0)[1].keys
    after = record(model, texts, [1], 28, 16, VQKVConfig(**BASE, key_space="post_rope"), seed=0)[1].keys
    call = first_call(model, 30)
    turned = rotate(before.view(2, 2, 28, 32).transpose(0, 1), call.cos[:, 2:], call.sin[:, 2:])
    torch.testing.assert_close(turned.transpose(0, 1).reshape(2, 56, 32), after, atol=1e-4, rtol=1e-4)


def test_the_tokens_kept_depend_on_the_seed_and_not_on_the_layers():
    model, texts, config = tiny("llama"), windows(2, 64), VQKVConfig(**BASE)
    both = record(model, texts, [0, 2], 20, 16, config, seed=3)
    alone = record(model, texts, [2], 20, 16, config, seed=3)
    other = record(model, texts, [2], 20, 16, config, seed=4)
    assert both[2].keys.shape == (2, 40, 32)
    for name in ("keys", "values", "query_metric", "value_metric", "attention"):
        assert torch.equal(getattr(both[2], name), getattr(alone[2], name))
    assert not torch.equal(alone[2].keys, other[2].keys)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "smollm3"])
def test_tiled_attention_is_the_models_attention(family, monkeypatch):
    monkeypatch.setattr(recording, "TILE", 16)
    model, ids = tiny(family), torch.tensor(windows(1, 50))
    with intercept(model, causal_attention):
        ours = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours, model(input_ids=ids).logits, atol=2e-4, rtol=1e-4)


def brute_statistics(call, config):
    """The key metric and the attention received, one (query, key) pair at a time."""
    heads, dim = call.k.shape[1], call.k.shape[3]
    group, length = call.q.shape[1] // heads, call.k.shape[2]
    q, k = rotate(call.q, call.cos, call.sin)[0], rotate(call.k, call.cos, call.sin)[0]
    eye = torch.eye(dim)[:, None, None].expand(dim, 1, length, dim)
    turn = rotate(eye, call.cos, call.sin)[:, 0].permute(1, 2, 0)  # R_j, so that the stored key is R_j k
    metric, received, able = torch.zeros(heads, dim, dim), torch.zeros(heads, length), torch.zeros(length)
    for head in range(call.q.shape[1]):
        for i in range(config.sinks, length):
            score = q[head, i] @ k[head // group, : i + 1].T * call.scale
            if call.softcap:
                score = call.softcap * torch.tanh(score / call.softcap)
            chance = torch.softmax(score, -1)
            for j in range(config.sinks, i + 1 - config.window):
                u = q[head, i] if config.key_space == "post_rope" else turn[j].T @ q[head, i]
                metric[head // group] += chance[j] ** 2 * torch.outer(u, u)
                received[head // group, j] += chance[j] ** 2
                able[j] += 1 / heads
    return metric, (received / able.clamp_min(1)).sqrt()


@pytest.mark.parametrize(("family", "key_space"), [("llama", "post_rope"), ("llama", "pre_rope"), ("phi3", "pre_rope")])
def test_the_key_metric_is_the_sum_over_pairs_weighted_by_squared_attention(family, key_space, monkeypatch):
    monkeypatch.setattr(recording, "PAIRS", 3000)
    call, config = first_call(tiny(family)), VQKVConfig(**BASE, key_space=key_space)
    metric, received = attention_statistics(call, torch.arange(2, 40), config, torch.Generator().manual_seed(0))
    expected, mass = brute_statistics(call, config)
    tolerance = 1e-5 if key_space == "post_rope" else 0.02  # before RoPE keys are drawn
    assert (metric - expected).norm() < tolerance * expected.norm()
    torch.testing.assert_close(received, mass, atol=1e-6, rtol=1e-4)


def test_a_key_errors_effect_is_what_the_metric_says():
    """Perturb every far key alike: the squared change of scores, weighted by attention, is e^T M e."""
    call, config = first_call(tiny("llama")), VQKVConfig(**BASE, key_space="post_rope")
    metric, _ = attention_statistics(call, torch.arange(2, 40), config, torch.Generator())
    error = torch.randn(32, generator=torch.Generator().manual_seed(1))
    q, k = rotate(call.q, call.cos, call.sin)[0], rotate(call.k, call.cos, call.sin)[0]
    total = 0.0
    for head in range(4):
        score = (q[head] @ k[head // 2].T) * call.scale
        moved = (q[head] @ (k[head // 2] + error).T) * call.scale
        chance = torch.softmax(score.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -1e30), -1)
        behind = torch.arange(40)[:, None] - torch.arange(40)
        far = (behind >= 8) & (torch.arange(40) >= 2)
        total += ((moved - score) ** 2 * chance**2 * far).sum() / call.scale**2
    assert float(error @ metric.sum(0) @ error) == pytest.approx(float(total), rel=1e-4)


def test_the_value_metric_measures_what_reaches_the_hidden_state():
    model = tiny("llama")
    metric = output_metric(model, 2, kv_heads=2, dim=32)
    error = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    weight = model.model.layers[2].self_attn.o_proj.weight
    for kv in range(2):
        moved = [weight[:, 32 * head : 32 * (head + 1)] @ error[kv] for head in (2 * kv, 2 * kv + 1)]
        expected = sum(float(m.square().sum()) for m in moved)
        assert float(error[kv] @ metric[kv] @ error[kv]) == pytest.approx(expected, rel=1e-4)


def test_a_model_without_a_known_output_projection_is_refused():
    class Attention(nn.Module):
        layer_idx = 0

    with pytest.raises(UserError, match="layer 0 of Attention has no output projection .* value_weighting=false"):
        output_metric(Attention(), 0, 2, 32)


# -- whole windows


SINKS, WINDOW = 2, 8


def statistics(call, model, asked, seed=0):
    seen = recording._ask(call, asked, SINKS, WINDOW)
    weight = model.model.layers[call.layer].self_attn.o_proj.weight
    return recording.output_statistics(call, seen, asked, weight, torch.Generator().manual_seed(seed)), weight


def outputs(call, weight):
    """The attention block's output for every query: float64 [S, hidden]."""
    parts = {name: getattr(call, name).double() for name in ("q", "k", "v")}
    return exact(dataclasses.replace(call, **parts))[0].transpose(0, 1).flatten(1) @ weight.T.double()


@pytest.mark.parametrize("family", ["llama", "gemma2", "smollm3"])
def test_the_metric_says_how_much_an_error_of_each_far_token_changes_the_output(family, monkeypatch):
    monkeypatch.setattr(recording, "PAIRS", 2000)
    model = tiny(family)
    call, asked = first_call(model), torch.tensor([15, 22, 31, 39])
    (metric, energy), weight = statistics(call, model, asked)
    before = outputs(call, weight)
    assert energy == pytest.approx(float(before[asked].square().sum(1).mean()), rel=1e-4)
    error = 1e-3 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    for side in ("k", "v"):
        for head in range(2):
            changed = 0.0
            for j in range(SINKS, 40 - WINDOW):
                moved = dataclasses.replace(call, **{side: getattr(call, side).double()})
                getattr(moved, side)[0, head, j] += error
                far = asked[asked - j >= WINDOW]
                changed += float((outputs(moved, weight) - before)[far].square().sum()) / len(asked)
            block = metric[head if side == "k" else 2 + head]
            assert float(error @ block @ error) == pytest.approx(changed, rel=0.05 if side == "k" else 1e-3)


def test_whole_windows_are_recorded_before_rope():
    model, texts = tiny("llama"), windows(2, 30)
    seen = recording.record_windows(model, texts, [1], 8, SINKS, WINDOW, seed=0, attention=True)[1]
    call = first_call(model, 30)
    assert seen.rows.shape == (2, 30, 128) and seen.metric.shape == (4, 32, 32)
    for number, ids in enumerate(texts):
        cache = model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values.layers[1]
        keys = seen.rows[number, :, :64].view(30, 2, 32).transpose(0, 1)[None]
        torch.testing.assert_close(rotate(keys, call.cos, call.sin), cache.keys, atol=1e-4, rtol=1e-4)
        values = seen.rows[number, :, 64:].view(30, 2, 32).transpose(0, 1)[None]
        torch.testing.assert_close(values, cache.values, atol=1e-4, rtol=1e-4)
    assert seen.attention.shape == (2, 4, 8, 30) and int(seen.asked.min()) >= SINKS + WINDOW
    torch.testing.assert_close(seen.attention.sum(-1), torch.ones(2, 4, 8))


def test_records_of_windows_do_not_depend_on_the_other_layers():
    model, texts = tiny("llama"), windows(2, 40)
    both = recording.record_windows(model, texts, [0, 2], 8, SINKS, WINDOW, seed=3)
    alone = recording.record_windows(model, texts, [2], 8, SINKS, WINDOW, seed=3)
    assert torch.equal(both[2].metric, alone[2].metric) and torch.equal(both[2].rows, alone[2].rows)
    assert both[2].energy == alone[2].energy and both[2].attention is None
