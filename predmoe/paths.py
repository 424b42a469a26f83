"""Where things lie: found from the package, so that a notebook works from any working directory."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"


def outputs(profile: str) -> Path:
    """The folder of a profile's results: outputs/PROFILE, or below the folder that PREDMOE_OUTPUTS names."""
    return Path(os.environ.get("PREDMOE_OUTPUTS") or ROOT / "outputs").expanduser().absolute() / profile


def cache_folder() -> Path:
    """$PREDMOE_CACHE, else ~/.cache/predmoe."""
    return Path(os.environ.get("PREDMOE_CACHE") or "~/.cache/predmoe").expanduser()
