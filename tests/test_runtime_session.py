"""The cache of a session: contents, growth, batches, copies, threads, failures. Expected logits come from numpy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_artefact as tiny
from tiny_artefact import prompt

from plugins.contract import CAPACITY_STEP, TensorSpec, bytes_at
from plugins.errors import UserError
from plugins.geometry import Geometry
from runtime.artefact import state_bytes
from runtime.engine import Engine
from runtime.session import ContextOverflow, Interrupted, StepFailed
from runtime.state import State

LIMIT = 1500
KINDS = {"dense": None, "coded": tiny.SMALL, "with references": tiny.SELECTING}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny.make(tmp_path_factory.mktemp("e"), geometry=KINDS[request.param], max_length=LIMIT)
    with Engine.open(folder, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("first", [1, 2, 6, 7, 8, 9, 10, 11, 31, 32, 33, 255, 256, 257])
def test_prefill_then_decode_equals_the_uncached_reference(engine: Engine, first: int) -> None:
    tokens = prompt(first + 40)
    expected = tiny.reference(tokens)
    with engine.session() as session:
        np.testing.assert_array_equal(session.prefill(tokens[:first], "all")[0], expected[:first])
        for position in range(first, len(tokens)):
            np.testing.assert_array_equal(session.decode([tokens[position]])[0], expected[position])


def test_growth_keeps_the_content_and_follows_the_use(engine: Engine) -> None:
    tokens = prompt(LIMIT)
    expected = tiny.reference(tokens)
    capacities = []
    with engine.session() as session:
        assert session.nbytes == 0
        for start in range(0, LIMIT, 100):
            got = session.prefill(tokens[start : start + 100], "all")[0]
            np.testing.assert_array_equal(got, expected[start : start + 100])
            assert session.lengths[0] <= session.capacity <= max(session.lengths[0] * 1.25 + CAPACITY_STEP, 256)
            capacities.append(session.capacity)
    assert capacities[0] == CAPACITY_STEP and capacities[-1] == LIMIT
    assert len(set(capacities)) > 3


def test_held_bytes_are_the_bytes_of_the_buffers_and_equal_the_plan(engine: Engine) -> None:
    with engine.session(batch=3) as session:
        session.prefill([prompt(300), prompt(10), prompt(200)])
        states = engine.artefact.states
        assert session.nbytes == sum(session.state(spec.name).nbytes for spec in states)
        assert session.nbytes == state_bytes(engine.artefact, 300, batch=3)
        assert session.nbytes == bytes_at(states, 512, engine.artefact.geometry, batch=3)
        assert engine.nbytes == session.nbytes
    assert engine.nbytes == 0


def test_every_sequence_of_a_batch_equals_its_single_run(engine: Engine) -> None:
    lengths = [1, 7, 40, 300, 13]
    rng = np.random.default_rng(3)
    texts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    with engine.session(batch=len(texts)) as session:
        got = session.step(texts)[:, 0]
        for _ in range(30):
            np.testing.assert_array_equal(got, [tiny.reference(text)[-1] for text in texts])
            more = [prompt(int(rng.integers(1, 5)), int(rng.integers(99))) for _ in texts]
            texts = [text + new for text, new in zip(texts, more, strict=True)]
            got = session.step(more)[:, 0]


def test_a_finished_sequence_keeps_its_content_while_the_others_go_on(engine: Engine) -> None:
    first, second = prompt(20, 1), prompt(33, 2)
    with engine.session(batch=2) as session:
        session.step([first, second])
        for token in prompt(50, 3):
            session.step([[], [token]])
        assert session.lengths.tolist() == [20, 83]
        got = session.step([[5], []])[0, 0]
    np.testing.assert_array_equal(got, tiny.reference([*first, 5])[-1])


def test_logits_are_returned_for_the_asked_positions(engine: Engine) -> None:
    texts = [prompt(9, 1), prompt(5, 2)]
    expected = [tiny.reference(text) for text in texts]
    with engine.session(batch=2) as session:
        got = session.prefill(texts, [0, 4])
    np.testing.assert_array_equal(got, [reference[[0, 4]] for reference in expected])
    with engine.session(batch=2) as session:
        got = session.prefill(texts, np.array([[8, 0, 2], [4, 4, 1]]))
    np.testing.assert_array_equal(got, [expected[0][[8, 0, 2]], expected[1][[4, 4, 1]]])
    with engine.session(batch=2) as session, pytest.raises(UserError, match="between 0 and 8"):
        session.prefill(texts, [9])


def test_feeding_in_turns_equals_one_prompt(engine: Engine) -> None:
    tokens = prompt(120)
    with engine.session() as once, engine.session() as turns:
        whole = once.prefill(tokens)
        turns.prefill(tokens[:50])
        turns.prefill(tokens[50:53])
        np.testing.assert_array_equal(turns.prefill(tokens[53:]), whole)


def test_overflow_leaves_the_session_as_it_was(engine: Engine) -> None:
    tokens = prompt(LIMIT)
    expected = tiny.reference(tokens)
    with engine.session() as session:
        session.prefill(tokens[:-2])
        before, held = session.lengths.copy(), session.nbytes
        with pytest.raises(ContextOverflow, match=r"sequence 0 holds 1498 tokens and 3 more exceed .* limit of 1500"):
            session.prefill([1, 2, 3])
        assert (session.lengths == before).all() and session.nbytes == held
        np.testing.assert_array_equal(session.prefill(tokens[-2:], "all")[0], expected[-2:])
        with pytest.raises(ContextOverflow):
            session.decode([1])


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([[1], [2]], "2 token lists were given to a session of batch 1"),
        ([[tiny.VOCAB]], f"token {tiny.VOCAB} of sequence 0 is outside the vocabulary"),
        ([[3, -1]], "token -1 of sequence 0 is outside the vocabulary"),
        ([[0.5]], "not a list of integers"),
        ([[]], "the prompt is empty"),
    ],
)
def test_wrong_tokens_are_refused_before_anything_is_written(engine: Engine, tokens: list, complaint: str) -> None:
    with engine.session() as session:
        session.prefill([1, 2])
        with pytest.raises(UserError, match=complaint):
            session.step(tokens)
        np.testing.assert_array_equal(session.decode([3])[0], tiny.reference([1, 2, 3])[-1])


def test_closed_sessions_and_engines_say_so(engine: Engine) -> None:
    session = engine.session()
    session.close()
    session.close()
    with pytest.raises(UserError, match="session is closed"):
        session.prefill([1])
    other = Engine.open(engine.artefact.path, threads=1)
    left = other.session()
    other.close()
    with pytest.raises(UserError, match="session is closed"):
        left.decode([1])
    with pytest.raises(UserError, match="engine is closed"):
        other.session()


def test_a_fork_goes_its_own_way(engine: Engine) -> None:
    tokens = prompt(70)
    with engine.session() as session:
        session.prefill(tokens)
        with session.fork() as fork:
            for token in prompt(20, 8):
                fork.decode([token])
            np.testing.assert_array_equal(session.decode([9])[0], tiny.reference([*tokens, 9])[-1])
            expected = tiny.reference([*tokens, *prompt(20, 8), 7])[-1]
            np.testing.assert_array_equal(fork.decode([7])[0], expected)


def test_a_snapshot_can_be_restored_again_and_again(engine: Engine) -> None:
    tokens = prompt(300)
    with engine.session() as session:
        empty = session.snapshot()
        session.prefill(tokens)
        snapshot = session.snapshot()
        assert snapshot.nbytes <= session.nbytes
        for _ in range(2):
            session.prefill(prompt(400, 5))
            session.reset()
            session.restore(snapshot)
            assert session.lengths.tolist() == [300]
            np.testing.assert_array_equal(session.decode([1])[0], tiny.reference([*tokens, 1])[-1])
        session.restore(empty)
        np.testing.assert_array_equal(session.prefill([4, 5])[0, 0], tiny.reference([4, 5])[-1])
    with engine.session(batch=2) as other, pytest.raises(UserError, match="holds 1 sequences and the session 2"):
        other.restore(snapshot)


def test_a_reset_session_equals_a_fresh_one(engine: Engine) -> None:
    with engine.session() as session:
        session.prefill(prompt(333))
        held = session.nbytes
        session.reset()
        assert session.nbytes == held
        np.testing.assert_array_equal(session.prefill(prompt(50, 2), "all")[0], tiny.reference(prompt(50, 2)))


def test_sessions_run_from_several_threads_at_once(engine: Engine) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        tokens = prompt(150, seed)
        expected = tiny.reference(tokens)
        with engine.session() as session:
            got = [session.prefill(tokens[: seed + 3])[0, 0]]
            got += [session.decode([token])[0] for token in tokens[seed + 3 :]]
        if not np.array_equal(got, expected[seed + 2 :]):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_second_thread_on_one_session_is_refused(engine: Engine) -> None:
    with engine.session() as session:
        session._busy.acquire()  # what a step in another thread holds
        with pytest.raises(UserError, match="in use by another thread"):
            session.prefill([1])
        session._busy.release()
        session.prefill([1])


def test_the_memory_limit_counts_all_sessions_and_stops_before_allocating(engine: Engine) -> None:
    one = state_bytes(engine.artefact, 256)
    with Engine.open(engine.artefact.path, threads=1, memory_limit=2 * one) as limited:
        first, second, third = (limited.session() for _ in range(3))
        first.prefill([1])
        second.prefill([1])
        with pytest.raises(UserError, match=r"needs .* bytes, other sessions hold .* --memory-limit"):
            third.prefill([1])
        assert third.nbytes == 0 and third.lengths.tolist() == [0]
        with pytest.raises(UserError, match="--memory-limit"):
            first.prefill(prompt(300))
        np.testing.assert_array_equal(first.decode([2])[0], tiny.reference([1, 2])[-1])
        second.close()
        third.prefill([1])
        del third
        gc.collect()
        second = limited.session(capacity=256)
        assert second.nbytes == one


def test_a_failed_step_breaks_only_a_cache_that_it_may_have_overwritten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(30)
    with engine.session() as session:
        session.prefill(tokens)
        snapshot = session.snapshot()

        class Failing:
            def run_with_iobinding(self, binding: object, options: object) -> None:
                raise RuntimeError("bad allocation\nmore")

        failure = pytest.raises(StepFailed, match=r"appending 1 tokens to 30 failed .*\(bad allocation\)")
        with monkeypatch.context() as patch, failure:
            patch.setattr(engine.backend, "inference", Failing())
            session.decode([1])
        assert session.lengths.tolist() == [30]
        if engine.artefact.geometry is None:
            assert not session.broken
        else:
            with pytest.raises(UserError, match="restore a snapshot or reset"):
                session.decode([1])
            session.restore(snapshot)
        np.testing.assert_array_equal(session.decode([1])[0], tiny.reference([*tokens, 1])[-1])


def test_an_interrupted_first_prefill_leaves_an_empty_usable_session(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.session(capacity=256) as session:
        session.interrupt()  # nothing runs: nothing happens
        working = engine.backend.inference

        class Interrupting:
            def run_with_iobinding(self, binding: object, options: object) -> None:
                session.interrupt()
                working.run_with_iobinding(binding, options)

        with monkeypatch.context() as patch, pytest.raises(Interrupted, match="was interrupted"):
            patch.setattr(engine.backend, "inference", Interrupting())
            session.prefill(prompt(50))
        np.testing.assert_array_equal(session.prefill(prompt(40), "all")[0], tiny.reference(prompt(40)))


def test_capacity_may_be_allocated_ahead_within_the_limit(engine: Engine) -> None:
    with engine.session(capacity=700) as session:
        assert session.capacity == 700
        np.testing.assert_array_equal(session.prefill(prompt(690), "all")[0], tiny.reference(prompt(690)))
        assert session.capacity == 700
    with pytest.raises(UserError, match="allows 1 to 1500 tokens"):
        engine.session(capacity=1501)
    with pytest.raises(UserError, match="at least one sequence"):
        engine.session(batch=0)


def test_state_memory_is_updated_in_place(engine: Engine) -> None:
    with engine.session() as session:
        session.prefill(prompt(5))
        name = engine.artefact.states[0].name
        before, address = session.state(name).copy(), session.state(name).ctypes.data
        session.prefill(prompt(3))
        assert session.state(name).ctypes.data == address
        assert not np.array_equal(session.state(name), before)


def test_the_rows_that_a_step_selects_are_kept_when_watched(tmp_path: Path) -> None:
    geometry = tiny.SELECTING
    with Engine.open(tiny.make(tmp_path / "e", geometry=geometry), threads=1) as engine:
        assert engine.artefact.selected == {0: "layer0.selected"}
        with engine.session(batch=2) as session:
            session.prefill([prompt(400), prompt(150)])
            assert session.selected == {}
            session.watch_selected = True
            for counts in ([1, 1], [2, 3], [1, 0], [1, 1]):
                past = session.lengths.astype(np.int64)
                logits = session.step([prompt(n, seed=n) for n in counts])
                assert logits.shape == (2, 1, tiny.VOCAB)
                rows = (past - 7) // 3 * 3  # beyond sinks and window, in whole blocks
                expected = np.ceil(0.3 * rows).astype(int) if max(counts) == 1 else rows
                live = -(-int(past.max()) // 32) * 32
                room = (live - 7) // 3 * 3
                width = min(-(-int(expected.max()) // 32) * 32, room) if max(counts) == 1 else room
                got = session.selected[0]
                assert got.shape == (2, width) and got.dtype == np.int32
                for sequence, count in enumerate(expected):
                    assert got[sequence].tolist() == [*range(count)] + [-1] * (width - count)
            session.watch_selected = False
            session.decode(prompt(2))
            assert session.selected == {}


def test_the_first_watched_step_of_an_empty_cache_selects_nothing(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e", geometry=tiny.SELECTING)
    with Engine.open(folder, threads=1) as engine, engine.session() as session:
        session.watch_selected = True
        for token in prompt(3):
            session.decode([token])
            assert session.selected[0].shape[0] == 1 and (session.selected[0] == -1).all()


def test_synthetic_content_names_only_references_that_exist() -> None:
    geometry = Geometry(sinks=4, window=16, block=8, stride=10)
    spec = TensorSpec("index", "state", "int16", ("batch", 1, "code_rows", 3), "index_out")
    state = State([spec], geometry, batch=2)
    state.allocate(2000)
    state.fill()
    named = state.array("index")
    last = 4 + np.arange(named.shape[2]) // 10  # the sinks, and one reference for every ten rows begun
    assert (named >= 0).all() and (named < last[:, None]).all()
    assert len(np.unique(named[..., -500:, :])) > 150


def test_missing_folder_provider_and_threads_are_one_sentence(tmp_path: Path, engine: Engine) -> None:
    with pytest.raises(UserError, match="not an engine folder"):
        Engine.open(tmp_path / "nothing")
    with pytest.raises(UserError, match="unknown provider 'tpu'"):
        Engine.open(engine.artefact.path, provider="tpu")
    with pytest.raises(UserError, match=r"pip install 'kvpack\[cuda\]'"):
        Engine.open(engine.artefact.path, provider="cuda")
    with pytest.raises(UserError, match="threads is 0"):
        Engine.open(engine.artefact.path, threads=0)
