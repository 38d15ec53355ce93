"""Fixtures of the slow tests: the built-in model, read once per session. Imports wait until they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from calib.models import LoadedModel

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process per core: threads would only wait for each other


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where engines are built. Codecs are fitted anew in a cache of its own; the model comes from the user's."""
    from calib import builtin

    folder = tmp_path_factory.mktemp("real")
    model = builtin.folder(progress=False)
    (folder / "cache").mkdir()
    (folder / "cache" / model.name).symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPACK_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="session")
def loaded(home: Path) -> LoadedModel:
    from calib import models

    return models.load("smollm2", progress=False)


@pytest.fixture(scope="session")
def ids(loaded: LoadedModel) -> list[int]:
    from calib.texts import default_text

    return loaded.tokenizer(default_text().content[: 1 << 17]).input_ids


@pytest.fixture(scope="session")
def none(home: Path) -> Path:
    """The uncompressed engine, its cache in float32."""
    from real import built

    return built(home / "none", "--method", "none")
