"""Where things lie: found from the package, so that a notebook works from any working directory."""

from pathlib import Path

from predmoe import variables
from predmoe.strict import ConfigError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"
COMMITTED = ROOT / "outputs"   # what the repository itself holds


def outputs(profile: str) -> Path:
    """The folder of a profile's results: outputs/PROFILE, or below the folder that PREDMOE_OUTPUTS names."""
    return (variables.folder("PREDMOE_OUTPUTS") or COMMITTED).absolute() / profile


def profiles() -> list[str]:
    """The names that a profile can have: smoke, whose parameters are the notebooks' own, and those that params/ has files for."""
    return sorted({"smoke"} | {path.stem for path in PARAMS.glob("*/*.yaml")})


def check_profile(profile: str) -> None:
    """Raises ConfigError that lists the profiles where there is none of this name."""
    if profile not in (known := profiles()):
        raise ConfigError(f"unknown profile {profile!r}; there are parameters for {', '.join(known)}")


def borrowed(profile: str, name: str) -> Path:
    """The file `name` of a profile whose results another one reads (05 and 08 read the cpu profile's, at smoke too): of the folder that
    PREDMOE_OUTPUTS names, or, where that lacks it, the one that the repository holds. The path in the former where neither has it."""
    own, committed = outputs(profile) / name, COMMITTED / profile / name
    return own if own.exists() or not committed.exists() else committed


def say_borrowed(profile: str, what: str, *files: Path) -> None:
    """Print that `what`, of which these are the files, is not in the folder that PREDMOE_OUTPUTS names, where any of them is `borrowed`."""
    if not all(file.is_relative_to(outputs(profile)) for file in files):
        print(f"{outputs(profile)} has no {what}: those that the repository holds are taken.")


def cache_folder() -> Path:
    """$PREDMOE_CACHE, else ~/.cache/predmoe."""
    return variables.folder("PREDMOE_CACHE") or Path("~/.cache/predmoe").expanduser()
