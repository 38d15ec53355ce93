"""The model `kvpack` of lm-eval: its numbers against transformers and the reference caches, and lm-eval itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_engine
from families import BOS, VOCAB, tiny_tokenizer
from transformers import PreTrainedModel

from calib.codec import Codec
from calib.reference import ReferenceModel
from export.lm_eval.generation import sampling_params, texts
from export.lm_eval.scoring import Pair, Scorer, windows
from plugins.errors import UserError
from plugins.vqkv.config import VQKVConfig
from runtime import Engine, SamplingParams

ROOT = Path(__file__).parent.parent
LIMIT = 240
WORDS = (
    "the",
    "hen",
    "and",
    "ant",
    "in",
    "den",
    "ran",
    "on",
    "to",
    "inn",
    "then",
    "rat",
    "tan",
    "hat",
    "sat",
    "a",
    "tin",
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, Engine]]:
    folder = tmp_path_factory.mktemp("lm-eval") / "dense"
    model, _ = make_engine(folder, "llama", num_hidden_layers=2, max_position_embeddings=LIMIT)
    with Engine.open(folder, threads=1) as engine:
        yield model, engine


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, Codec, Engine]]:
    folder = tmp_path_factory.mktemp("lm-eval") / "coded"
    config = VQKVConfig.from_ratio(0.172, 32, window=16, block=8)
    model, codec = make_engine(folder, "llama", config, num_hidden_layers=2, max_position_embeddings=LIMIT)
    assert codec is not None
    with Engine.open(folder, threads=1) as engine:
        yield model, codec, engine


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def judged(rows: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """rows: the logits [N, V] from which each of the N tokens of the continuation was predicted."""
    own = torch.log_softmax(rows.double(), -1)[torch.arange(len(continuation)), continuation].sum()
    return float(own), rows.argmax(-1).tolist() == continuation


def eager(model: PreTrainedModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + continuation]), use_cache=False).logits[0]
    return judged(logits[len(context) - 1 : -1], continuation)


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def scored(scorer: Scorer, pairs: list[Pair]) -> list[tuple[float, bool]]:
    found = {score.index: (score.log_likelihood, score.greedy) for score in scorer.scores(pairs)}
    assert len(found) == len(pairs)
    return [found[index] for index in range(len(pairs))]


def check(got: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in expected], rtol=0, atol=2e-3)
    assert [right for _, right in got] == [right for _, right in expected]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch": 3},
        {"batch": 8, "tail": 5, "chunk": 4},
        {"batch": 3, "read": "prefill"},
    ],
    ids=str,
)
def test_scores_equal_the_eager_model_where_nothing_is_compressed(dense, settings: dict) -> None:
    model, engine = dense
    first, second, third = tokens(40, 0), tokens(7, 1), tokens(150, 2)
    pairs: list[Pair] = [(first, tokens(size, size)) for size in (1, 9, 4)]  # one context, several continuations
    pairs += [(second, greedy(model, second, 5)), (third, tokens(20, 3)), ([BOS], tokens(30, 4))]
    expected = [eager(model, context, continuation) for context, continuation in pairs]
    assert {right for _, right in expected} == {True, False}
    check(scored(Scorer(engine, **settings), pairs), expected)


@pytest.mark.parametrize(("tail", "chunk"), [(1, 1), (6, 1), (6, 4)])
def test_every_scored_token_is_predicted_from_the_compressed_cache(coded, tail: int, chunk: int) -> None:
    model, codec, engine = coded
    pairs: list[Pair] = [(tokens(150, 0), tokens(1, 1)), (tokens(90, 2), tokens(40, 3)), (tokens(90, 2), tokens(3, 4))]
    expected = []
    for context, continuation in pairs:
        cache = ReferenceModel(model, codec, LIMIT)
        cache.step(context[:-tail])
        steps = [context[-tail:][at : at + chunk] for at in range(0, tail, chunk)]
        steps += [continuation[:-1][at : at + chunk] for at in range(0, len(continuation) - 1, chunk)]
        logits = torch.cat([cache.step(step) for step in steps])
        expected.append(judged(logits[tail - 1 :], continuation))
    got = scored(Scorer(engine, batch=2, tail=tail, chunk=chunk), pairs)
    check(got, expected)
    exact = [eager(model, *pair) for pair in pairs]
    assert min(abs(own[0] - whole[0]) for own, whole in zip(got, exact, strict=True)) > 0.01
    check(scored(Scorer(engine, read="prefill"), pairs), exact)


def test_a_long_context_loses_its_first_tokens_and_a_long_continuation_is_refused(dense) -> None:
    model, engine = dense
    context, continuation = tokens(300, 5), tokens(12, 6)
    kept = context[-(LIMIT - 11) :]
    check(scored(Scorer(engine), [(context, continuation)]), [eager(model, kept, continuation)])
    check(scored(Scorer(engine, max_length=20), [(context, continuation)]), [eager(model, context[-9:], continuation)])
    with pytest.raises(UserError, match="continuation of 22 tokens exceeds the limit of 20"):
        scored(Scorer(engine, max_length=20), [(context, tokens(22, 7))])
    with pytest.raises(UserError, match="no context"):
        scored(Scorer(engine), [([], continuation)])
    assert scored(Scorer(engine), [(context, [])]) == [(0.0, True)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"tail": 0}, "tail is 0"),
        ({"chunk": "4"}, "chunk is '4'"),
        ({"read": "exact"}, "read='exact' is unknown"),
        ({"max_length": LIMIT + 1}, f"max_length is {LIMIT + 1}: this engine allows 2 to {LIMIT}"),
    ],
)
def test_settings_out_of_range_are_refused(dense, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Scorer(dense[1], **settings)


def test_windows_predict_every_token_once_with_all_the_context_that_fits(dense) -> None:
    assert windows(list(range(10)), -1, 4) == [([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert windows([5, 6], -1, 4) == [([-1], [5, 6])]
    assert windows([], -1, 4) == []
    model, engine = dense
    text = tokens(70, 8)
    got = scored(Scorer(engine, batch=2, max_length=32), windows(text, BOS, 32))
    logits = []
    for start, end, skip in ((-1, 31, 0), (31, 63, 0), (37, 69, 26)):  # tokens of each input, the first new one
        ids = [BOS, *text][start + 1 : end + 1]
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, skip:])
    assert sum(value for value, _ in got) == pytest.approx(judged(torch.cat(logits), text)[0], abs=2e-3)


def test_generated_texts_are_the_eager_models(dense) -> None:
    model, engine = dense
    prompts = [tokens(size, size) for size in (30, 5, 64)]
    whole = [engine.text.decode(prompt + greedy(model, prompt, 24)) for prompt in prompts]
    starts = [len(engine.text.decode(prompt)) for prompt in prompts]
    params = [sampling_params({"until": []}, 24, number) for number in range(3)]
    got = dict(texts(engine, prompts, params, 2, LIMIT))
    expected = [text[start:].rstrip("\ufffd") for text, start in zip(whole, starts, strict=True)]
    assert [got[number] for number in range(3)] == expected
    stop = expected[2][4:7]
    params = [sampling_params({"until": [stop, ""], "max_gen_toks": 24}, 7, number) for number in range(3)]
    got = dict(texts(engine, prompts, params, 3, LIMIT))
    assert [got[number] for number in range(3)] == [text.partition(stop)[0] for text in expected]
    kept = prompts[2][-(30 - 23) :]
    (got,) = texts(engine, [prompts[2]], [SamplingParams(max_tokens=24)], 1, 30)
    whole = engine.text.decode(kept + greedy(model, kept, 24))
    assert got == (0, whole[len(engine.text.decode(kept)) :].rstrip("\ufffd"))
    with pytest.raises(UserError, match="24 new tokens exceed the limit of 20"):
        dict(texts(engine, prompts, [SamplingParams(max_tokens=24)] * 3, 1, 20))


def test_generation_options_become_sampling_params() -> None:
    assert sampling_params({}, 9, 5) == SamplingParams(max_tokens=9, seed=5)
    assert sampling_params({"until": "\n", "do_sample": False, "temperature": 0.7, "max_new_tokens": 3}, 9, 5) == (
        SamplingParams(max_tokens=3, stop=("\n",), seed=5)
    )
    assert sampling_params({"do_sample": True, "top_p": 0.9, "top_k": 4, "num_beams": 1}, 9, 5) == (
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, top_k=4, seed=5)
    )
    assert sampling_params({"temperature": 0.2}, 9, 5).temperature == 0.2
    with pytest.raises(UserError, match="'repetition_penalty' is unknown"):
        sampling_params({"repetition_penalty": 1.2}, 9, 5)
    with pytest.raises(UserError, match="num_beams is 4"):
        sampling_params({"num_beams": 4}, 9, 5)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_without_lm_eval_the_command_says_how_to_get_it() -> None:
    source = "import runpy, sys; sys.modules['lm_eval'] = None; runpy.run_module('export.lm_eval', run_name='__main__')"
    done = run("-c", source)
    assert done.returncode == 2
    assert "pip install 'kvpack[lm-eval]'" in done.stderr and "Traceback" not in done.stderr


needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
TASKS = {
    "tiny_choice": r"""
output_type: multiple_choice
doc_to_text: '{{question}}'
target_delimiter: ''
doc_to_choice: '{{choices}}'
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "tiny_rolling": r"""
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list: [{metric: byte_perplexity}]
""",
    "tiny_until": r"""
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{reply}}'
generation_kwargs: {until: ["\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def tasks(dense, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A folder of lm-eval tasks, one per kind of request, and their documents."""
    model, engine = dense
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    documents = []
    for number in range(6):
        question = " ".join(rng.choice(WORDS, 30)) + "\nThen"
        choices = [" " + " ".join(rng.choice(WORDS, size)) for size in (1, 2, 4)]
        prompt = engine.text.encode(question)
        reply = engine.text.decode(prompt + greedy(model, prompt, 12))[len(question) :].rstrip("\ufffd")
        text = " ".join(rng.choice(WORDS, 20 * (1 + number)))
        right = reply.partition("\n")[0] if number < 4 else "something else"
        documents.append({"question": question, "choices": choices, "answer": 0, "text": text, "reply": right})
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, body in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{body}")
    return folder, documents


@needs_lm_eval
def test_lm_eval_runs_its_tasks_on_an_engine(dense, tasks, tmp_path: Path) -> None:
    model, engine = dense
    folder, documents = tasks
    arguments = [
        "-m", "export.lm_eval", "--model", "kvpack", "--model_args", f"engine={engine.artefact.path},threads=1",
        "--batch_size", "4", "--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(tmp_path),
        "--log_samples",
    ]  # fmt: skip
    done = run(*arguments, HF_HOME=str(tmp_path / "hf"), TQDM_DISABLE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["config"]["engine_digest"] == engine.artefact.config["digest"]

    def encode(text: str) -> list[int]:
        return tiny_tokenizer()(text, add_special_tokens=False).input_ids

    (samples,) = tmp_path.rglob("samples_tiny_choice_*.jsonl")
    right = 0
    for line, document in zip(samples.read_text().splitlines(), documents, strict=True):
        context = encode(document["question"])
        expected = [eager(model, context, encode(choice)) for choice in document["choices"]]
        got = [(float(value), str(greedy) == "True") for ((value, greedy),) in json.loads(line)["resps"]]
        check(got, expected)
        right += int(np.argmax([value for value, _ in expected])) == document["answer"]
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(right / len(documents))

    nats = octets = 0.0
    for document in documents:
        pairs = windows(encode(document["text"]), BOS, LIMIT)
        nats += sum(eager(model, list(context), list(rest))[0] for context, rest in pairs)
        octets += len(document["text"].encode())
    expected = np.exp(-nats / octets)
    assert results["results"]["tiny_rolling"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-4)
    assert results["results"]["tiny_until"]["exact_match,none"] == pytest.approx(4 / 6)


@needs_lm_eval
def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from lm_eval.api.registry import get_model

    from export.lm_eval.__main__ import main

    arguments = {"engine": f"{tmp_path}/none", "batch_size": 1, "device": "cuda:0"}
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: get_model("kvpack").create_from_arg_obj(arguments))
    assert main() == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/none is not an engine folder: pass the folder that `python -m export build` wrote.\n"
    )


@needs_lm_eval
def test_a_conversation_is_rendered_by_the_engines_template(dense) -> None:
    from export.lm_eval.model import KVPackLM

    lm = KVPackLM(str(dense[1].artefact.path), threads=1)
    chat = [{"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    begun = [*chat, {"role": "assistant", "content": "well"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False).endswith("<|im_start|>assistant\nwell")
    assert lm.chat_template(False) is None and "<|im_start|>user" in (lm.chat_template(True) or "")
    assert lm.tok_encode("hi", add_special_tokens=False) == lm.tok_encode("hi")  # this tokenizer adds no BOS
    assert (lm.prefix_token_id, lm.eot_token_id, lm.max_length) == (BOS, 2, LIMIT)
    for wrong, words in (({"batch_size": "auto"}, "batch_size is 'auto'"), ({"provider": "tpu"}, "provider 'tpu'")):
        with pytest.raises(UserError, match=words):
            KVPackLM(str(dense[1].artefact.path), threads=1, **wrong)
