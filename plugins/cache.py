"""Where kvpack keeps what it can make again: downloads, fitted codecs, compiled libraries."""

from __future__ import annotations

import os
from pathlib import Path

from plugins.errors import UserError


def cache_folder() -> Path:
    """KVPACK_CACHE, or kvpack in XDG_CACHE_HOME or ~/.cache; made when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("KVPACK_CACHE") or Path(base) / "kvpack").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be made ({error.strerror}); set KVPACK_CACHE") from error
    return folder
