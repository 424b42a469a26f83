"""Where things lie: found from the package, so that a notebook works from any working directory."""

from pathlib import Path

from predmoe import variables

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"
COMMITTED = ROOT / "outputs"   # what the repository itself holds


def outputs(profile: str) -> Path:
    """The folder of a profile's results: outputs/PROFILE, or below the folder that PREDMOE_OUTPUTS names."""
    return (variables.folder("PREDMOE_OUTPUTS") or COMMITTED).absolute() / profile


def borrowed(profile: str, name: str) -> Path:
    """The file `name` of a profile whose results another one reads (05 and 08 read the cpu profile's, at smoke too): of the folder that
    PREDMOE_OUTPUTS names, or, where that lacks it, the one that the repository holds. The path in the former where neither has it."""
    own, committed = outputs(profile) / name, COMMITTED / profile / name
    return own if own.exists() or not committed.exists() else committed


def cache_folder() -> Path:
    """$PREDMOE_CACHE, else ~/.cache/predmoe."""
    return variables.folder("PREDMOE_CACHE") or Path("~/.cache/predmoe").expanduser()
