"""Engines of TensorRT plans, on a machine without: the module and the GPU are those of `fake_plans`."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_plans
import numpy as np
import onnx
import pytest
import tiny_artefact as tiny
from engines import make_engine
from fake_plans import FakeTensorRT, Gpu, make_plan
from tiny_artefact import decode_all, prompt

from export.verify import verify
from plugins.contract import TensorSpec
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.vqkv.config import VQKVConfig
from runtime import canary
from runtime.artefact import Artefact, state_bytes, write_config
from runtime.backend import provider_for
from runtime.bench.latency import visit
from runtime.bench.oom import base, longest_planned, trial
from runtime.bench.process import asked
from runtime.canary import CANARY_STEPS
from runtime.cli import main
from runtime.engine import Engine
from runtime.parts import joined, split
from runtime.plan import _runs_on
from runtime.sampling import SamplingParams
from runtime.session import Interrupted, StepFailed
from runtime.state import State
from runtime.tensorrt import PlanSteps

LIMIT = 1500
KINDS = {"dense": None, "coded": tiny.SMALL, "selecting": tiny.SELECTING}
# A plan with plugins that write in place, and one of function bodies that writes other buffers.
FLAVOURS: dict[str, dict[str, Any]] = {
    "plugins": {},
    "bodies": {"backend": "tensorrt-rtx", "plugins": False, "in_place": False},
}


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def fake(request: pytest.FixtureRequest, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRT:
    """The module that the test's engine loads."""
    bodies = "bodies" in request.node.name
    module = FakeTensorRT(gpu, rtx=bodies)
    monkeypatch.setattr("runtime.plan.device", lambda: gpu)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx" if bodies else "tensorrt", module)
    monkeypatch.setenv("KVPACK_CACHE", str(tmp_path / "cache"))
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same engines for ONNX Runtime."""
    return {
        kind: tiny.make(tmp_path_factory.mktemp(kind), geometry=geometry, max_length=LIMIT)
        for kind, geometry in KINDS.items()
    }


@pytest.fixture(scope="module", params=[(kind, flavour) for kind in KINDS for flavour in FLAVOURS], ids="-".join)
def pair(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An engine for ONNX Runtime, and its plan."""
    kind, flavour = request.param
    copy = shutil.copytree(models[kind], tmp_path_factory.mktemp("plan") / "e")
    return models[kind], make_plan(copy, **FLAVOURS[flavour])


@pytest.fixture
def engine(pair: tuple[Path, Path], fake: FakeTensorRT) -> Iterator[Engine]:
    with Engine.open(pair[1]) as opened:
        yield opened


@pytest.fixture
def plan(models: dict[str, Path], tmp_path: Path) -> Path:
    """One that may be changed: with a ring, in place."""
    return make_plan(shutil.copytree(models["coded"], tmp_path / "e"))


def change(folder: Path, **target: Any) -> Path:
    """Sign the folder anew with other entries of its target."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in ("files", "digest")}
    write_config(folder, config | {"target": config["target"] | target})
    return folder


# -- the same as with ONNX Runtime


def test_a_plan_gives_the_logits_of_the_reference_across_blocks_and_growth(
    engine: Engine, gpu: Gpu, fake: FakeTensorRT
) -> None:
    tokens = prompt(330)
    with engine.session() as session:
        session.prefill(tokens[:20])
        decode_all(session, tokens, 20)
    assert engine.provider == "cuda" and engine.kernels.endswith(", CUDA graphs")
    assert gpu.launched > 120 and fake.profiles[0] == 1 and set(fake.profiles[1:]) == {0}


def test_a_prompt_of_many_parts_gives_all_its_logits(engine: Engine, fake: FakeTensorRT, caplog) -> None:
    tokens = prompt(64 * 5 + 1)  # the last token has a part of its own, which is no decode step
    with engine.session() as session, caplog.at_level(logging.WARNING, "kvpack"):
        np.testing.assert_array_equal(session.prefill(tokens, "all")[0], tiny.reference(tokens))
        assert session.lengths.tolist() == [len(tokens)] and set(fake.profiles) == {1}
        decode_all(session, tokens + prompt(9, seed=1), len(tokens))
    with engine.session() as session:
        assert caplog.text.count("larger --prefill-tokens") == (engine.artefact.geometry is not None)
        picks = [300, 3, 64, 63, 3, 320]
        np.testing.assert_array_equal(session.prefill(tokens, picks)[0], tiny.reference(tokens)[picks])


def test_ragged_sequences_are_told_apart_in_parts_and_graphs(engine: Engine, gpu: Gpu) -> None:
    rows = [prompt(170, seed=1), prompt(45, seed=2), prompt(120, seed=3)]
    starts = [140, 15, 90]
    with engine.session(batch=3) as session:
        first = session.prefill([row[:start] for row, start in zip(rows, starts, strict=True)])
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            np.testing.assert_array_equal(first[b, 0], tiny.reference(row[:start])[-1])
        for step in range(30):
            got = session.decode([row[start + step] for row, start in zip(rows, starts, strict=True)])
            for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
                np.testing.assert_array_equal(got[b], tiny.reference(row[: start + step + 1])[-1])
        session.step([rows[0][:2], [], rows[2][:70]])
    assert gpu.launched > 8


def test_sessions_of_several_threads_share_the_gpu(engine: Engine) -> None:
    wanted, found = {}, {}

    def run(seed: int, into: dict[int, list[int]]) -> None:
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=seed)
        with engine.session() as session:
            into[seed] = [token.id for token in session.generate(prompt(70 + seed, seed), params)]

    for seed in range(4):
        run(seed, wanted)
    threads = [threading.Thread(target=run, args=(seed, found)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted and len(set(map(tuple, found.values()))) == 4


def test_generated_tokens_and_selections_are_those_of_onnx_runtime(pair: tuple[Path, Path], fake: FakeTensorRT) -> None:
    texts = ["the first prompt, which is the longer one by far and has two parts, so that both are seen", "another"]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, seed=4) for t in (0.0, 0.9)]
    found = []
    for folder in pair:
        with Engine.open(folder) as engine, engine.session() as session:
            found.append([(one.tokens, one.text) for one in engine.generate(texts, params)])
            session.prefill(prompt(60))
            session.watch_selected = True
            for token in prompt(40, seed=2):
                session.decode([token])
                found[-1].append({layer: rows.tolist() for layer, rows in session.selected.items()})
    assert found[0] == found[1]


def test_snapshots_cross_between_onnx_runtime_and_a_plan(
    pair: tuple[Path, Path], fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(120)
    with Engine.open(pair[0]) as plain, Engine.open(pair[1]) as engine:
        monkeypatch.setitem(plain.artefact.config, "digest", engine.artefact.config["digest"])
        with plain.session() as host, engine.session() as device:
            device.prefill(tokens[:71])
            host.restore(device.snapshot())
            np.testing.assert_array_equal(host.prefill(tokens[71:])[0, -1], tiny.reference(tokens)[-1])
            with device.fork() as fork:
                decode_all(fork, tokens, 71)
            device.restore(host.snapshot())
            decode_all(device, [*tokens, *prompt(20, seed=9)], 120)
            device.reset()
            decode_all(device, tokens[:30], 0)


def test_a_small_capacity_is_rounded_up_to_what_the_plan_takes(engine: Engine) -> None:
    with engine.session(capacity=30) as session:
        assert session.capacity == 256
        decode_all(session, prompt(20), 0)


def test_synthetic_content_is_read_without_complaint(engine: Engine) -> None:
    with engine.session(capacity=400) as session:
        session.fill(350)
        assert np.isfinite(session.decode([3])).all() and session.lengths.tolist() == [351]
        for spec in engine.artefact.states:
            assert session.state(spec.name).any()


def test_the_self_check_replays_the_canary_on_the_plan(pair: tuple[Path, Path], fake: FakeTensorRT, tmp_path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "e")
    with Engine.open(pair[0]) as plain:
        canary.record(plain, np.array([prompt(100 + CANARY_STEPS, seed) for seed in (1, 2)]), folder)
    change(folder)
    with Engine.open(folder) as engine:
        assert all(check.ok for check in engine.self_check())


def test_a_plan_for_one_sequence_replays_the_canary_one_by_one(
    models: dict[str, Path], tmp_path: Path, fake: FakeTensorRT
) -> None:
    folder = make_plan(shutil.copytree(models["coded"], tmp_path / "e"), batch=(1, 1))
    with Engine.open(models["coded"]) as plain:
        canary.record(plain, np.array([prompt(30 + CANARY_STEPS, seed) for seed in (1, 2)]), folder)
    with Engine.open(change(folder)) as engine:
        assert engine.sequences == 1 and all(check.ok for check in engine.self_check())


@pytest.mark.parametrize(
    ("method", "flavour"),
    [
        ("vqkv", "bodies"),
        pytest.param("vqkv", "plugins", marks=pytest.mark.slow),
        pytest.param("none", "bodies", marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_a_model_is_verified_against_it_and_its_references(
    method: str, flavour: str, tmp_path: Path, fake: FakeTensorRT
) -> None:
    config = VQKVConfig.from_ratio(0.25, 32) if method == "vqkv" else None
    make_engine(tmp_path / "e", "llama", config, num_hidden_layers=2)
    folder = make_plan(tmp_path / "e", **FLAVOURS[flavour])
    checks = verify(folder, str(tmp_path / "e-model"))  # a prompt has four parts
    assert len(checks) == 3 + (method == "vqkv") and all(check.ok for check in checks)
    assert max(fake.profiles) == 1


def test_numbers_that_the_device_reads_are_brought_there(
    models: dict[str, Path], tmp_path: Path, fake: FakeTensorRT, gpu: Gpu
) -> None:
    folder = make_plan(shutil.copytree(models["dense"], tmp_path / "e"), on_host=False)
    tokens = prompt(80)
    with Engine.open(folder) as engine, engine.session() as session:
        session.prefill(tokens[:60])
        decode_all(session, tokens, 60)
    assert gpu.launched > 10


def test_a_plan_without_weights_takes_those_of_the_graph(
    models: dict[str, Path], tmp_path: Path, fake: FakeTensorRT
) -> None:
    folder = make_plan(shutil.copytree(models["coded"], tmp_path / "e"), stripped=True)
    with Engine.open(folder) as engine, engine.session() as session:
        decode_all(session, prompt(20), 0)
    graph = onnx.load(folder / "plan.onnx", load_external_data=False)
    del graph.graph.initializer[1:]
    onnx.save(graph, folder / "plan.onnx")
    with pytest.raises(UserError, match=r"does not take the weights of .*plan.onnx \(weights are missing\)"):
        Engine.open(change(folder))


# -- graphs


def test_replayed_steps_equal_those_that_are_launched_anew(pair: tuple[Path, Path], fake, gpu: Gpu) -> None:
    tokens, found = prompt(200), []
    for graphs in (True, False):
        with Engine.open(pair[1], cuda_graphs=graphs) as engine, engine.session() as session:
            session.prefill(tokens[:50])
            found.append(np.stack([session.decode([token]) for token in tokens[50:]]))
            assert ("CUDA graphs" in engine.kernels) == graphs
            launched = gpu.launched
    np.testing.assert_array_equal(*found)
    assert 0 < gpu.launched == launched


def test_growing_memory_for_activations_makes_graphs_anew(engine: Engine, gpu: Gpu) -> None:
    tokens, more = prompt(60), prompt(120, seed=5)
    with engine.session() as session, engine.session() as other:
        session.prefill(tokens[:4])
        decode_all(session, tokens[:40], 4)
        before, graphs = engine.workspace, len(gpu.graphs)
        other.prefill(more, "all")
        assert engine.workspace > before
        decode_all(session, tokens, 40)
    assert len(gpu.graphs) > graphs


def test_a_capture_that_fails_ends_all_captures_and_loses_nothing(engine: Engine, gpu: Gpu, caplog) -> None:
    tokens = prompt(60)
    gpu.refuses_captures = True
    with engine.session() as session, caplog.at_level(logging.WARNING, "kvpack"):
        session.prefill(tokens[:20])
        decode_all(session, tokens, 20)
    assert engine.kernels.endswith(", no CUDA graphs: operation not permitted when stream is capturing")
    assert "without CUDA graphs" in caplog.text and gpu.launched == 0


def test_a_step_that_fails_while_it_is_captured_runs_without(engine: Engine, fake: FakeTensorRT, gpu: Gpu) -> None:
    tokens = prompt(60)
    with engine.session() as session:
        session.prefill(tokens[:20])
        decode_all(session, tokens[:22], 20)
        create = engine.backend.create_context

        def fails(captured: bool) -> Any:
            fake.fail = "no memory for tables" if captured else ""
            return create(captured)

        engine.backend.create_context = fails
        decode_all(session, tokens, 22)
    assert engine.kernels.endswith(", no CUDA graphs: no memory for tables") and gpu.launched == 0


def test_few_graphs_are_kept_and_closed_sessions_give_theirs_back(engine: Engine, gpu: Gpu) -> None:
    engine.backend.graphs.limit = 1
    tokens = prompt(50)
    for _ in range(2):
        with engine.session() as session:
            session.prefill(tokens[:20])
            decode_all(session, tokens, 20)
            assert engine.backend.graphs.used == 1
        gc.collect()
        assert engine.backend.graphs.used == 0
    assert sum(map(bool, gpu.graphs.values())) == 0 < gpu.launched


def test_all_memory_comes_back(pair: tuple[Path, Path], fake: FakeTensorRT, gpu: Gpu) -> None:
    whole = gpu.left
    with Engine.open(pair[1]) as engine:
        for seed in range(3):
            with engine.session(batch=2) as session:
                session.prefill([prompt(300, seed), prompt(20, seed)])
                assert session.nbytes == state_bytes(engine.artefact, 300, 2)
                for token in prompt(8):
                    session.decode([token, token])
        gc.collect()
        assert whole - gpu.left == engine.workspace > 0
    gc.collect()
    assert gpu.left == whole and not gpu.held and not any(gpu.queues.values())


def test_kernels_compiled_for_a_gpu_are_shared_and_kept(
    models: dict[str, Path], tmp_path: Path, fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.rtx, fake.DynamicShapesKernelSpecializationStrategy = True, fake_plans.Specialization
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake)
    folder = make_plan(shutil.copytree(models["dense"], tmp_path / "e"), **FLAVOURS["bodies"])
    for _ in range(2):
        with Engine.open(folder) as engine, engine.session() as session:
            session.prefill(prompt(20))
            for token in prompt(8):
                session.decode([token])
    first, second = fake.caches  # one per engine; the second begins with what the first had
    assert first.kernels == ["LAZY", "LAZY", "EAGER", "EAGER"]  # by profile, and for graphs over either buffer
    assert second.kernels == 2 * first.kernels
    assert [path.suffix for path in (tmp_path / "cache" / "tensorrt-rtx").iterdir()] == [".cache"]


# -- failures


def test_a_step_that_fails_says_what_tensorrt_said(engine: Engine, fake: FakeTensorRT) -> None:
    tokens = prompt(60)
    with engine.session() as session:
        fake.fail = "no kernel"
        with pytest.raises(StepFailed, match=r"appending 20 tokens to 0 failed inside TensorRT\S* 11.4 \(no kernel\)"):
            session.prefill(tokens[:20])
        assert not session.broken
        session.prefill(tokens[:20])
        before = session.snapshot()
        fake.fail = "CUDA error 700"
        with pytest.raises(StepFailed, match="CUDA error 700"):
            session.decode([1])
        if engine.artefact.geometry is not None:
            with pytest.raises(UserError, match="lost its cache"):
                session.decode([1])
        session.restore(before)
        decode_all(session, tokens, 20)
        assert engine.kernels.endswith(", CUDA graphs")


def test_a_prompt_that_fails_in_a_later_part_breaks_a_cache_that_it_wrote_to(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(230)
    run, calls = PlanSteps._run, []

    def third_fails(self: PlanSteps, feeds: Any, *rest: Any) -> Any:
        calls.append(feeds["tokens"].shape[1])
        if len(calls) == 3:
            raise MemoryError("the GPU is out of memory")
        return run(self, feeds, *rest)

    with engine.session() as session:
        session.prefill(tokens[:10])
        kept = session.snapshot()
        with monkeypatch.context() as patch, pytest.raises(StepFailed, match="220 tokens to 10 .*out of memory"):
            patch.setattr(PlanSteps, "_run", third_fails)
            session.prefill(tokens[10:])
        assert calls == [64, 64, 64] and session.lengths.tolist() == [10]
        assert session.broken == (engine.artefact.geometry is not None)
        session.restore(kept)
        np.testing.assert_array_equal(session.prefill(tokens[10:])[0, -1], tiny.reference(tokens)[-1])


def test_an_interrupt_ends_a_long_prompt_between_its_parts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, run = prompt(200), PlanSteps._run
    with engine.session() as session:
        session.interrupt()  # nothing runs: nothing happens

        def interrupted(self: PlanSteps, feeds: Any, *rest: Any) -> Any:
            session.interrupt()
            return run(self, feeds, *rest)

        with monkeypatch.context() as patch, pytest.raises(Interrupted, match="200 tokens to 0 was interrupted"):
            patch.setattr(PlanSteps, "_run", interrupted)
            session.prefill(tokens)
        assert not session.broken and session.lengths.tolist() == [0]
        np.testing.assert_array_equal(session.prefill(tokens, "all")[0], tiny.reference(tokens))


def test_memory_that_runs_out_before_a_step_leaves_the_session_as_it_was(engine: Engine, gpu: Gpu) -> None:
    tokens = prompt(100)
    with engine.session(capacity=256) as session:
        session.prefill(tokens[:4])
        kept, gpu.left = gpu.left, 100
        with pytest.raises(StepFailed, match=r"out of memory: no [\d,]+ bytes to work in"):
            session.prefill(tokens[4:60])
        assert not session.broken
        with pytest.raises(UserError, match="no memory for a cache"):
            session.prefill(prompt(400))
        decode_all(session, tokens[:40], 4)  # without graphs: they would need memory
        gpu.left = kept
        decode_all(session, tokens, 40)


def test_what_no_profile_holds_is_refused_before_anything_is_written(plan: Path, fake: FakeTensorRT) -> None:
    with Engine.open(plan) as engine:
        with pytest.raises(UserError, match="takes 1 to 4 sequences at once, not 5"):
            engine.session(batch=5)
        with engine.session() as session:
            session.prefill([1, 2, 3])
            with pytest.raises(UserError, match=r"no profile of .* holds such a step \(codes .* is not between"):
                session.allocate(5000)
            assert session.capacity == 256
            session.allocate(257)
            assert session.capacity == 257
            decode_all(session, [1, 2, 3, 4, 5], 3)


def test_a_plan_for_decode_steps_alone_reads_prompts_token_by_token(
    models: dict[str, Path], tmp_path: Path, fake: FakeTensorRT
) -> None:
    folder = make_plan(shutil.copytree(models["coded"], tmp_path / "e"), tokens=[(1, 1)])
    tokens = prompt(30)
    with Engine.open(folder) as engine, engine.session() as session:
        np.testing.assert_array_equal(session.prefill(tokens, "all")[0], tiny.reference(tokens))
        assert len(fake.profiles) <= 30


def test_a_plan_with_few_logits_per_step_gives_all_of_them(
    models: dict[str, Path], tmp_path: Path, fake: FakeTensorRT
) -> None:
    folder = make_plan(shutil.copytree(models["dense"], tmp_path / "e"), tokens=[(1, 1), (2, 16), (2, 64)], picks=1)
    change_picks = prompt(100)
    with Engine.open(folder) as engine, engine.session() as session:
        np.testing.assert_array_equal(session.prefill(change_picks, "all")[0], tiny.reference(change_picks))
        session.reset()
        np.testing.assert_array_equal(session.prefill(change_picks)[0, 0], tiny.reference(change_picks)[-1])


# -- what is refused at once


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ({}, {"provider": "cpu"}, "plan of tensorrt, which runs on NVIDIA GPUs only: use --provider cuda"),
        ({}, {"threads": 2}, "knows no --threads 2"),
        ({}, {"library": False}, "a plan of plugins, which cannot run without"),
        ({}, {"library": "nowhere.so"}, "no library nowhere.so"),
        ({"plugins": None}, {"library": "x.so"}, "a plan without plugins, so --library x.so has no use"),
        ({"sm": ["8.9"], "weights": "plan.onnx"}, {}, "has the target file 'plan.onnx' and does not list it"),
        ({"sm": ["8.0", "12.0"]}, {}, "was built for GPUs of SM 8.0, 12.0 and this one is of SM 8.9"),
        ({"plan": "other.plan"}, {}, "has the target file 'other.plan' and does not list it"),
        ({"plugins": "other.so"}, {}, "has the target file 'other.so' and does not list it"),
        ({"sm": ["sm_89"]}, {}, "was built for GPUs of SM sm_89 and this one is of SM 8.9"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(
    target: dict[str, Any], options: dict[str, Any], told: str, plan: Path, fake: FakeTensorRT
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        Engine.open(change(plan, **target), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_missing_package_says_how_to_install_it(
    backend: str, plan: Path, fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"not installed: pip install 'kvpack\[{backend}\]'"):
        Engine.open(change(plan, backend=backend))


def test_a_plan_of_another_version_tells_both(plan: Path, fake: FakeTensorRT) -> None:
    (plan / "engine.plan").write_bytes(b"of another version")
    with pytest.raises(UserError) as caught:
        Engine.open(change(plan, versions={"tensorrt": "10.14.1"}, sm=["current"]))
    for part in ("kEXPECTED_MAGIC_TAG", "tensorrt 10.14.1 for SM current", "TensorRT 11.4.0.7 and SM 8.9", "rebuild"):
        assert part in str(caught.value)


def test_a_plan_for_ampere_and_newer_runs_on_this_gpu(plan: Path, fake: FakeTensorRT) -> None:
    with Engine.open(change(plan, sm=["8.0"], hardware_compatible=True)) as engine, engine.session() as session:
        decode_all(session, prompt(5), 0)


def test_a_plan_that_is_damaged_is_not_loaded(plan: Path, fake: FakeTensorRT) -> None:
    data = bytearray((plan / "engine.plan").read_bytes())
    data[-1] ^= 1
    (plan / "engine.plan").write_bytes(data)
    with pytest.raises(UserError, match="engine.plan is damaged"):
        Engine.open(plan)
    assert not fake.libraries


def test_the_plan_and_the_contract_must_agree(plan: Path, fake: FakeTensorRT) -> None:
    config = {key: value for key, value in Artefact.open(plan).config.items() if key not in ("files", "digest")}
    for entry in (*config["inputs"], *config["outputs"]):
        if entry["name"].startswith("codes"):
            entry["dtype"] = "int16"
    write_config(plan, config)
    with pytest.raises(UserError, match=r"has 'codes' as int8 \[-1, 1, -1, 8\] and config.json as int16"):
        Engine.open(plan)


def test_plugins_come_from_the_folder_or_from_where_they_are_asked_for(
    plan: Path, tmp_path: Path, fake: FakeTensorRT
) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"plugins")
    for library in (None, None, other):  # a registry that has them refuses them, which does no harm
        with Engine.open(plan, library=library) as engine, engine.session() as session:
            session.prefill([1, 2])
    assert fake.libraries == [str(plan / "libkvpack_tensorrt.so"), str(other)]
    fake.registry.clear()
    with pytest.raises(UserError, match=r"TensorRT cannot load the plugins of .*Unable to load library"):
        Engine.open(plan)


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        (["8.9"], True), (["8.0"], False), (["8.0+"], True), (["9.0+"], False), (["current"], True),
        (["12.0", "8.9"], True),
    ],
)  # fmt: skip
def test_which_gpus_a_plan_runs_on(wanted: list[str], runs: bool) -> None:
    assert _runs_on(wanted, "8.9") == runs


# -- the commands


def test_the_commands_choose_the_gpu_and_say_what_computes(
    plan: Path, fake: FakeTensorRT, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--engine", str(plan), "--prompt", "hello", "--max-tokens", "20"]) == 0
    told = capsys.readouterr()
    assert told.out.strip() and told.err.strip().endswith("; TensorRT 11.4, plugins, CUDA graphs")
    assert main(["generate", "--engine", str(plan), "--prompt", "hello", "--max-tokens", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == "TensorRT 11.4, plugins, CUDA graphs" and report["workspace_bytes"] > 0
    assert main(["generate", "--engine", str(plan), "--provider", "cpu", "--prompt", "hello"]) == 2
    assert "use --provider cuda" in capsys.readouterr().err
    bench = ["bench", "capacity", "--engine", str(plan), "--length", "100", "--capacities", "256,512", "--steps", "3"]
    assert main([*bench, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


def test_info_tells_what_an_engine_is_and_what_computes_it(
    plan: Path, fake: FakeTensorRT, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--engine", str(plan), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["backend"], told["provider"], told["max_length"]) == ("tensorrt", "cuda", LIMIT)
    assert told["kernels"] == "TensorRT 11.4, plugins, CUDA graphs"
    assert main(["info", "--engine", str(plan), "--no-cuda-graphs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "kernels: TensorRT 11.4, plugins" in lines and "profiles: decode, prefill-64" in lines
    assert f"cache bytes: {told['cache_bytes']:,}" in lines


def test_benches_measure_a_plan(plan: Path, fake: FakeTensorRT, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.left = 1 << 24
    monkeypatch.setattr("runtime.bench.memory.device", lambda: gpu)
    job = asked(str(plan), provider_for([Artefact.open(plan)], None), None, True, False) | {
        "input_len": 70, "output_len": 4, "batch": 2, "prefill": [70], "past": [100], "decode": [[2, 90]], "seed": 0,
        "memory": 1 << 22, "untouched": 0, "what": "context", "tokens": 512,
    }  # fmt: skip
    seen = visit(job)
    assert seen["kernels"] == "TensorRT 11.4, plugins, CUDA graphs" and gpu.launched > 0
    assert base(job)["base"] > 0
    assert 0 < trial(job)["peak"] < 1 << 22  # leaves a ballast behind
    assert longest_planned(Artefact.open(plan), 1 << 30) == LIMIT // 256 * 256


# -- parts of a step


def test_a_step_is_split_only_where_it_must_be() -> None:
    tokens, new, picks = np.arange(10)[None], np.array([10], np.int32), np.array([[9]])
    assert len(split(tokens, new, picks, None)) == len(split(tokens, new, picks, (10, 1))) == 1
    assert [part.tokens.shape[1] for part in split(tokens, new, picks, (4, 4))] == [4, 4, 2]
    assert [part.tokens.shape[1] for part in split(tokens, new, picks, (3, 1))] == [3, 3, 3, 2]  # padded
    assert [part.tokens.shape[1] for part in split(tokens, new, picks, (1, 1))] == [1] * 10
    every = np.arange(10)[None]
    assert [part.picks.shape[1] for part in split(tokens, new, every, (8, 3))] == [3, 3, 3, 1]


@pytest.mark.parametrize("most", [(3, 3), (4, 2), (7, 1), (1, 1)])
def test_parts_bring_every_pick_of_every_sequence_back(most: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    tokens, new = rng.integers(1, 100, (3, 13)), np.array([13, 4, 9], np.int32)
    picks = np.array([[12, 0, 5, 5], [3, 3, 3, 0], [8, 7, 0, 1]])
    parts = split(tokens, new, picks, most)
    assert sum(part.new for part in parts).tolist() == new.tolist()
    assert all(part.tokens.shape[1] <= max(most[0], 1) and part.picks.shape[1] <= most[1] for part in parts)
    answers = [np.take_along_axis(part.tokens, part.picks, 1)[..., None].astype(np.float32) for part in parts]
    np.testing.assert_array_equal(joined(parts, answers, picks)[..., 0], np.take_along_axis(tokens, picks, 1))


def test_ordinals_in_two_bytes_name_only_references_that_exist() -> None:
    geometry = Geometry(sinks=4, window=16, block=8, stride=2)
    spec = TensorSpec("layer0.index", "state", "int8", ("batch", 1, "code_rows", 6), "layer0.index_out")
    state = State([spec], geometry, batch=2)
    state.allocate(3000)
    state.fill()
    named = state.array("layer0.index").view(np.int16)
    last = 4 + np.arange(named.shape[2]) // 2
    assert (named >= 0).all() and (named < last[:, None]).all() and named.max() > 255


# -- against NVIDIA's own module


@pytest.fixture(scope="module")
def bindings() -> Any:
    return pytest.importorskip("tensorrt_rtx_bindings", reason="tensorrt-rtx-cu13-bindings are not installed")


def test_everything_that_is_called_exists_in_tensorrt(bindings: Any) -> None:
    own = {"error", "values", "strategy", "cache"}
    names = {
        "Runtime": fake_plans.Runtime,
        "IPluginRegistry": fake_plans.Registry,
        "ICudaEngine": fake_plans.Plan,
        "IExecutionContext": fake_plans.Context,
        "ILogger": fake_plans.ILogger,
        "IRuntimeConfig": fake_plans.RtxConfig,
        "IRuntimeCache": fake_plans.Cache,
        "Refitter": fake_plans.Refitter,
        "OnnxParserRefitter": fake_plans.OnnxParserRefitter,
    }
    seen = 0
    for name, stand_in in names.items():
        for member, _ in inspect.getmembers(stand_in):
            if not member.startswith("_") and member not in own:
                assert hasattr(getattr(bindings, name), member), f"{name}.{member}"
                seen += 1
    assert seen > 20
    assert hasattr(bindings.Runtime, "engine_host_code_allowed") and hasattr(bindings.Runtime, "logger")
    assert hasattr(bindings.IPluginCreatorV3One, "plugin_namespace")
    for group, members in (
        ("ExecutionContextAllocationStrategy", {"USER_MANAGED"}),
        ("DynamicShapesKernelSpecializationStrategy", {"EAGER"}),
        ("TensorIOMode", {"INPUT", "OUTPUT"}),
        ("TensorLocation", {"HOST", "DEVICE"}),
        ("DataType", set(fake_plans.DTYPES.values())),
    ):
        assert members <= set(getattr(bindings, group).__members__)
    severities = {severity.name for severity in bindings.ILogger.Severity.__members__.values()}
    assert severities == {severity.name for severity in fake_plans.Severity}


def test_tensorrts_own_runtime_says_why_a_file_is_no_plan(
    bindings: Any, plan: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.plan.device", lambda: gpu)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", bindings)
    change(plan, backend="tensorrt-rtx", plugins=None, versions={"tensorrt_rtx": "1.6.0"})
    with pytest.raises(UserError) as caught:
        Engine.open(plan)
    for part in ("magicTag", "tensorrt_rtx 1.6.0", f"TensorRT-RTX {bindings.__version__}", "rebuild"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
