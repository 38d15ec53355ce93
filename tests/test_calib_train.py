import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import VOCAB, tiny, tiny_tokenizer
from test_calib_quality import deltakv_codec

from calib import passes
from calib import train as training
from calib.codec import Codec
from calib.compressors import Compressors, residual_latents, restore
from calib.passes import compressed_pass, exact_pass, next_token, tiles
from calib.quality import compressed_mask
from calib.reference import ReferenceModel
from calib.texts import Text
from calib.train import PLANS, Stream, TrainPlan, World, train
from plugins.errors import UserError
from plugins.geometry import Geometry

TEXT = Text.of("words", " ".join(f"the {a} and {b} in {a * b % 97}" for a in range(40) for b in range(25)))
PLAN = TrainPlan(tokens=6 * 256, batch=256, micro=256, lr=0.02, recall_share=0.25)
CONTEXT, LAYERS = 64, (1, 2, 3)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def codec(**changes) -> Codec:
    made = deltakv_codec(LAYERS, full_layers=(0,), **({"latents": "24x4"} | changes))
    return replace(made, info=replace(made.info, model={"name": "tiny", "num_kv_heads": 2}))


def compressors(made: Codec, **plan) -> Compressors:
    seen = {layer: torch.randn(2, 40, made.config.width) for layer in made.layers}
    return Compressors.start(made.layers, seen, 0)


def fit(folder: Path, plan: TrainPlan = PLAN, made: Codec | None = None, **changes) -> Codec:
    return train(tiny("llama"), tiny_tokenizer(), made or codec(**changes), [TEXT], plan, 0, CONTEXT, folder, False)


VARIANTS = [
    {"latents": "24x16"},
    {"latents": "24x4"},
    {"latents": "8x8+16x2", "reference_bits": 8},
    {"latents": "24x8", "compressor": "swiglu", "hidden": 16},
]


# -- what a query sees


@pytest.mark.parametrize("changes", VARIANTS)
def test_restored_vectors_are_those_of_the_codec(changes):
    tables = codec(**changes).layers[1]
    x = torch.randn(2, 50, tables.config.width, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(restore(tables, x), tables.rebuild(x))
    torch.testing.assert_close(restore(tables, x.requires_grad_()).detach(), tables.rebuild(x.detach()))


@pytest.mark.parametrize("bits", [4, 16])
def test_gradients_pass_straight_through_roundings(bits):
    made = codec(latents=f"24x{bits}")
    x = torch.randn(2, 50, made.config.width, generator=torch.Generator().manual_seed(2))
    live, tables = compressors(made), made.layers[1]
    (restore(live.layer(1), x) - x).square().sum().backward()
    rows, references = x[:, 2:], tables.reference_rows(x)
    residual = rows - tables.means(references, tables.assign(rows, references)[0])
    error = 2 * (tables.rebuild(x) - x)[:, 2:].flatten(0, 1)
    exact = residual.flatten(0, 1) @ tables.compress
    mean = rows - residual
    stored = tables.decoded(*tables.latents(rows, mean)).flatten(0, 1) if bits < 16 else exact
    for name, wanted in (
        ("decompress", stored.T @ error),
        ("compress", residual.flatten(0, 1).T @ (error @ tables.decompress.T)),
    ):
        key = f"layers.1.{name}"
        torch.testing.assert_close(live.parameters[key].grad, wanted * live.scales[key], atol=1e-2, rtol=1e-3)


def test_own_vectors_take_gradients_through_references_and_residuals():
    tables = codec(latents="24x16").layers[1]
    x = torch.randn(1, 30, tables.config.width, generator=torch.Generator().manual_seed(2)).requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    (restore(tables, x) * direction).sum().backward()
    step = 1e-2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    index = tables.assign(x.detach()[:, 2:], tables.reference_rows(x.detach()))[0]

    def value(y: torch.Tensor) -> torch.Tensor:
        mean = tables.means(tables.reference_rows(y), index)
        back = (y[:, 2:] - mean) @ tables.compress @ tables.decompress + mean
        return (torch.cat((y[:, :2], back), 1).double() * direction).sum()

    numeric = value(x.detach() + step) - value(x.detach() - step)
    assert float(2 * (x.grad * step).sum()) == pytest.approx(float(numeric), rel=1e-3)


@pytest.mark.parametrize("total", [3, 20, 61, 96])
def test_tiles_together_show_every_query_what_inference_shows(total):
    geometry = Geometry(sinks=2, window=8, block=4)
    coded, exact = torch.zeros(total, total, dtype=torch.int64), torch.zeros(total, total, dtype=torch.int64)
    for tile in tiles(geometry, total, size=16):
        near = [*range(min(2, tile.rows.stop)), *range(tile.exact.start, tile.exact.stop)]
        columns = [(coded, j) for j in range(2, tile.edge)] + [(exact, j) for j in near]
        assert tile.mask.shape == (tile.rows.stop - tile.rows.start, len(columns))
        for seen, (target, j) in zip(tile.mask.T, columns, strict=True):
            target[tile.rows, j] += seen
    wanted = compressed_mask(geometry, np.arange(total), total)
    assert torch.equal(coded, wanted.long())
    assert torch.equal(exact, (torch.ones(total, total).tril().bool() & ~wanted).long())


@pytest.mark.parametrize(
    ("family", "full", "changes"),
    [
        ("llama", (0,), VARIANTS[1]),
        ("qwen2", (), VARIANTS[2]),
        ("gemma2", (), VARIANTS[1]),
        ("smollm3", (0, 2), VARIANTS[3]),
        ("phi3", (1,), VARIANTS[0]),
    ],
)
def test_the_second_pass_equals_tokens_fed_one_by_one_through_the_reference_cache(monkeypatch, family, full, changes):
    sliding = (0, 2) if family == "gemma2" else ()
    layers = [layer for layer in range(4) if layer not in full + sliding]
    model, ids, made = tiny(family), tokens(1, 48), deltakv_codec(layers, full_layers=full, **changes)
    exact = exact_pass(model, ids, layers)
    parts = tiles(made.config.geometry(), 48, size=16)
    hidden, errors = compressed_pass(model, ids, exact, compressors_as_they_are(made), "own", parts)
    reference = ReferenceModel(model, made, 64)
    one_by_one = torch.cat([reference.step([token]) for token in ids[0].tolist()])
    logits = model.get_output_embeddings()(hidden)[0]
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(logits, one_by_one, atol=2e-3, rtol=1e-3)
    first = layers[0]
    x, tables = exact.x[first], made.layers[first]
    wanted = (tables.rebuild(x) - x).square().sum() / (x - tables.center).square().sum()
    assert float(errors[0].detach()) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"])
def test_mixed_precision_gives_nearly_the_same(family):
    layers = {"gemma2": (1, 3), "gemma3": (2, 3)}.get(family, (0, 1, 2, 3))
    model, ids, made = tiny(family), tokens(2, 48), deltakv_codec(layers, full_layers=())
    live, parts = compressors(made), tiles(made.config.geometry(), 48, size=16)
    found = {}
    for mixed in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            exact = exact_pass(model, ids, layers)
            hidden, errors = compressed_pass(model, ids, exact, live, "exact", parts)
            term = next_token(model, hidden, exact.hidden, ids, "ce")
        term.backward()
        gradients = [x.grad.flatten() for key, x in live.parameters.items() if f"layers.{layers[0]}." in key]
        found[mixed] = exact.hidden.float(), errors.detach(), term.item(), torch.cat(gradients).clone()
        for x in live.parameters.values():
            x.grad = None
    plain, mixed = found[False], found[True]
    assert float((mixed[0] - plain[0]).norm() / plain[0].norm()) < 0.03
    torch.testing.assert_close(mixed[1], plain[1], rtol=0.02, atol=0)
    assert mixed[2] == pytest.approx(plain[2], rel=0.02)
    assert float(torch.cosine_similarity(mixed[3], plain[3], dim=0)) > 0.9


def compressors_as_they_are(made: Codec) -> Compressors:
    ones = {
        f"layers.{layer}.{name}": torch.ones(1, 1) for layer, tables in made.layers.items() for name in tables.tensors()
    }
    return Compressors(made.layers, ones)


def test_exact_inputs_compress_what_the_exact_pass_saw():
    model, ids, made = tiny("llama"), tokens(2, 48), codec()
    exact, parts = exact_pass(model, ids, LAYERS), tiles(made.config.geometry(), 48)
    both = [compressed_pass(model, ids, exact, compressors_as_they_are(made), kind, parts) for kind in ("exact", "own")]
    own = [(made.layers[n].rebuild(exact.x[n]) - exact.x[n]).square().sum((1, 2)) for n in LAYERS]
    energy = [(exact.x[n] - made.layers[n].center).square().sum((1, 2)) for n in LAYERS]
    wanted = [(error / size).mean() for error, size in zip(own, energy, strict=True)]
    torch.testing.assert_close(both[0][1], torch.stack(wanted))
    assert (both[0][0] - both[1][0]).abs().max() > 1e-3
    last = Codec(made.info, {3: made.layers[3]})  # nothing before the last layer differs from the exact pass
    exact = exact_pass(model, ids, [3])
    same = [compressed_pass(model, ids, exact, compressors_as_they_are(last), kind, parts) for kind in ("exact", "own")]
    torch.testing.assert_close(same[0], same[1])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_next_token_term_and_its_gradient_are_those_of_all_logits_at_once(monkeypatch, family):
    monkeypatch.setattr(passes, "LOGITS", 7 * VOCAB)
    model, ids = tiny(family), tokens(2, 20)
    truth = exact_pass(model, ids, ()).hidden
    torch.testing.assert_close(truth, model.base_model(input_ids=ids).last_hidden_state, atol=1e-4, rtol=1e-4)
    hidden = (truth + 0.1 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))).requires_grad_()

    def log_probabilities(x: torch.Tensor) -> torch.Tensor:
        y = model.get_output_embeddings()(x)[:, :-1]
        cap = getattr(model.config, "final_logit_softcapping", None)
        return torch.log_softmax(cap * torch.tanh(y / cap) if cap else y, -1)

    q, p = log_probabilities(hidden), log_probabilities(truth)
    wanted = {"kl": (p.exp() * (p - q)).sum(-1).mean(), "ce": -q.gather(2, ids[:, 1:, None]).mean()}
    for objective, term in wanted.items():
        found = next_token(model, hidden, truth, ids, objective)
        assert found.item() == pytest.approx(term.item(), rel=1e-4)
        gradients = [torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (found, term)]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-3)


# -- parameters


def test_parameters_start_as_the_fast_fit_and_of_one_size():
    made = codec()
    live = compressors(made)
    for layer, tables in live.tables().items():
        torch.testing.assert_close(tables.compress, made.layers[layer].compress)
        torch.testing.assert_close(tables.decompress, made.layers[layer].decompress)
        assert float(live.parameters[f"layers.{layer}.compress"].detach().square().mean()) == pytest.approx(1, rel=0.05)


def test_an_idle_swiglu_starts_without_effect_and_with_units_that_see_values_of_one():
    made = codec(compressor="swiglu", hidden=16)
    for tables in made.layers.values():
        tables.down.zero_()
    live = compressors(made)
    tables = live.tables()[2]
    x = torch.randn(2, 40, made.config.width)
    torch.testing.assert_close(tables.f(x), made.layers[2].f(x))
    assert float((x @ tables.gate).std()) == pytest.approx(1, rel=0.2)
    size = residual_latents(tables, x).square().mean().sqrt() / 4  # of 16 units
    assert float(live.scales["layers.2.down"].mean()) == pytest.approx(float(size), rel=0.3)


# -- data


def test_the_stream_gives_every_text_window_each_round_but_for_those_that_train_recall():
    windows = [[number] * 16 for number in range(10)]
    plain = Stream(tiny_tokenizer(), windows, 0.0, 16, 3)
    rounds = [[plain[number][0] for number in range(first, first + 10)] for first in (0, 10)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(10)) and rounds[0] != rounds[1]
    mixed = Stream(tiny_tokenizer(), windows, 0.3, 16, 3)
    made = [number for number in range(400) if mixed[number] not in windows]
    assert 90 < len(made) < 150 and mixed[made[0]] != mixed[made[1]]
    assert [mixed[number] for number in range(20)] == [
        Stream(tiny_tokenizer(), windows, 0.3, 16, 3)[n] for n in range(20)
    ]


def test_the_rate_rises_then_falls_to_nothing():
    plan = TrainPlan(tokens=1, lr=2.0, warmup=0.1)
    rates = [plan.rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) and max(rates) == rates[9]
    assert rates[-1] == pytest.approx(2 / 90) and rates == [*sorted(rates[:10]), *sorted(rates[10:], reverse=True)]


# -- training


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({}, {"objective": "ce", "inputs": "own"}),
        ({"compressor": "swiglu", "hidden": 16, "latents": "24x2"}, {}),
    ],
)
def test_training_lowers_the_loss_on_text_it_has_not_seen(tmp_path, changes, settings, bfloat16):
    plan = replace(PLAN, tokens=20 * 256, bfloat16=bfloat16, **settings)
    made = codec(**changes)
    trained = fit(tmp_path, plan, made)
    report = trained.info.choice["training"]
    assert report["steps"] == 20 and report["held_out_after"] < report["held_out_before"]
    assert trained.info.fit == "quality" and set(trained.info.errors) == {"1", "2", "3"}
    if plan.objective == "kl":
        assert trained.info.errors["2"]["after"] < trained.info.errors["2"]["before"]
    assert sorted(trained.layers) == [1, 2, 3]
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in trained.tensors().values())
    assert torch.equal(trained.layers[1].center, made.layers[1].center)
    lines = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, *range(1, 21), 20]


@pytest.mark.parametrize("bits", [4, 16])
def test_an_interrupted_training_goes_on_to_the_same_parameters(tmp_path, monkeypatch, bits):
    made = codec(latents=f"24x{bits}", compressor="swiglu", hidden=16)
    for tables in made.layers.values():
        tables.down.zero_()
    whole = fit(tmp_path / "whole", made=made)
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    step, count = training._Trainer.step, 0

    def dies(self, stream, number, per_step):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step(self, stream, number, per_step)

    monkeypatch.setattr(training._Trainer, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", made=made)
    count = 4
    resumed = fit(tmp_path / "parts", made=made)
    assert count == 4 + 3  # six steps in all
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name
    assert resumed.info.choice == whole.info.choice
    logs = [
        [json.loads(x) for x in (tmp_path / n / "training.jsonl").read_text().splitlines()] for n in ("whole", "parts")
    ]
    assert [line | {"tokens_per_s": 0} for line in logs[0]] == [line | {"tokens_per_s": 0} for line in logs[1]]


def test_a_checkpoint_of_another_training_is_not_used(tmp_path):
    first = fit(tmp_path)
    assert not torch.equal(fit(tmp_path, replace(PLAN, lr=0.01)).layers[1].compress, first.layers[1].compress)
    assert torch.equal(fit(tmp_path).layers[1].compress, first.layers[1].compress)


def test_the_model_comes_back_as_it_was(tmp_path):
    model = tiny("llama").requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, tiny_tokenizer(), codec(), [TEXT], PLAN, 0, CONTEXT, tmp_path, False)
    assert all(x.requires_grad and x.grad is None for x in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == "eager"


def test_small_pieces_of_a_batch_give_the_same_step(tmp_path):
    plan = replace(PLAN, tokens=2 * 256)
    whole, pieces = fit(tmp_path / "whole", plan), fit(tmp_path / "pieces", replace(plan, micro=64))
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(tensor, pieces.tensors()[name], atol=2e-3, rtol=1e-2)


def torchrun(folder: Path, script: str) -> None:
    """Run a script in two processes on the CPU, with `folder` as its argument."""
    (folder / "worker.py").write_text(script)
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": f"{here.parent}:{here}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(folder / "worker.py")]
    subprocess.run([sys.executable, *command, str(folder)], env=environment, check=True, capture_output=True)


def test_two_processes_train_as_one_does(tmp_path):
    plan = replace(PLAN, tokens=3 * 256)
    alone = fit(tmp_path / "alone", plan)
    script = (
        "import os, sys, torch; from pathlib import Path; from test_calib_train import PLAN, fit, replace\n"
        "made = fit(Path(sys.argv[1]), replace(PLAN, tokens=3 * 256))\n"
        "torch.save(made.tensors(), Path(sys.argv[1]) / ('rank' + os.environ['RANK'] + '.pt'))\n"
    )
    (tmp_path / "two").mkdir()
    torchrun(tmp_path / "two", script)
    first, second = (torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    for name, tensor in alone.tensors().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, atol=2e-3, rtol=1e-2)
    moved = (alone.layers[1].compress - codec().layers[1].compress).abs().max()
    assert moved > 4e-3


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(UserError, match="objective='mse' must be kl or ce"):
        replace(PLAN, objective="mse")
    with pytest.raises(UserError, match="inputs='raw' must be exact or own"):
        replace(PLAN, inputs="raw")
    with pytest.raises(UserError, match="recall_share=1.5"):
        replace(PLAN, recall_share=1.5)
    with pytest.raises(UserError, match="--context 13: nothing is compressed in it"):
        train(tiny("llama"), tiny_tokenizer(), codec(), [TEXT], PLAN, 0, 13, tmp_path, False)
    short = Text.of("short", "the end")
    with pytest.raises(UserError, match="0 windows of 64 tokens"):
        train(tiny("llama"), tiny_tokenizer(), codec(), [short], PLAN, 0, CONTEXT, tmp_path, False)
    broken = codec()
    broken.layers[2].decompress.fill_(torch.inf)
    with pytest.raises(UserError, match="step 1 is not finite"):
        fit(tmp_path, made=broken)


def test_efforts_are_plans_and_alone_a_process_is_the_only_one():
    assert PLANS["quick"].tokens < PLANS["full"].tokens
    with World.joined() as world:
        assert (world.rank, world.size) == (0, 1)
        assert world.first(lambda: [3]) == [3]
        world.wait()


def test_a_process_without_a_gpu_of_its_own_is_told_how_many_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with (
        pytest.raises(UserError, match="process 3 has no GPU: this host has 2; use --nproc-per-node 2"),
        World.joined(),
    ):
        pass


def test_what_the_first_process_makes_or_fails_at_ends_in_all(tmp_path):
    script = (
        "import sys\n"
        "from calib.train import World\n"
        "from plugins.errors import UserError\n"
        "from pathlib import Path\n"
        "def refuse(): raise UserError('no')\n"
        "with World.joined() as world:\n"
        "    made = world.first(lambda: {'rank': world.rank, 'steps': (1, 2)})\n"
        "    (Path(sys.argv[1]) / f'rank{world.rank}').write_text(repr(made))\n"
        "    world.wait()\n"
        "    try:\n"
        "        world.first(refuse)\n"
        "    except (UserError, SystemExit) as error:\n"
        "        (Path(sys.argv[1]) / f'end{world.rank}').write_text(repr(error))\n"
    )
    torchrun(tmp_path, script)
    told = {path.name: path.read_text() for path in tmp_path.glob("[re]*[0-9]")}
    assert told == {
        "rank0": "{'rank': 0, 'steps': (1, 2)}",
        "rank1": "{'rank': 0, 'steps': (1, 2)}",
        "end0": "UserError('no')",
        "end1": "SystemExit(2)",
    }
