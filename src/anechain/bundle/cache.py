"""Where results that can be computed again are kept on this machine."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where results that can be computed again are kept: ANECHAIN_CACHE, or the user's cache folder."""
    if own := os.environ.get("ANECHAIN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anechain"
