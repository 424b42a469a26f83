"""pyproject.toml, requirements.lock and environment.yml say the same, and the environment at hand is what they say."""

import ast
import re
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from predmoe import gguf_file, paths

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
COMPARISON = [Requirement(text) for text in EXTRAS.pop("comparison")]   # pinned in pyproject.toml itself, installed without dependencies
PEERS = [Requirement(text) for text in EXTRAS.pop("peers")]   # likewise, but only by who wants them
ASKED = [Requirement(text) for text in PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"] + sum(EXTRAS.values(), [])]
CORPORA = {canonicalize_name(Requirement(text).name) for text in EXTRAS["corpus"]}
PINS = [line for line in (paths.ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
LOCK = {canonicalize_name(name): version for name, version in (pin.split("==") for pin in PINS)}


def test_the_lock_pins_exact_versions_only():
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in PINS)
    assert len(LOCK) == len(PINS), "a package is pinned twice"
    assert LOCK["torch"] == "2.13.0"


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_every_dependency_is_locked_at_a_version_it_allows(asked):
    assert asked.specifier.contains(LOCK[canonicalize_name(asked.name)])


@pytest.mark.parametrize("folder, extras", [("predmoe", ["eval"]), ("scripts", ["test"]), ("tests", ["test", "eval"])])
def test_everything_imported_is_a_declared_dependency(folder, extras):
    """Not only what some other package happens to bring along."""
    declared = PROJECT["project"]["dependencies"] + sum((EXTRAS[extra] for extra in extras), [])
    allowed = {canonicalize_name(Requirement(text).name) for text in declared}
    allowed |= {canonicalize_name(r.name) for r in COMPARISON * (folder == "tests") + PEERS * (folder != "scripts")} | {"llama_cpp"}
    allowed |= {"predmoe"} | {path.stem for path in (paths.ROOT / folder).glob("*.py")} | sys.stdlib_module_names
    providers = metadata.packages_distributions()
    for path in (paths.ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for top in {name.split(".")[0] for name in names}:
                assert allowed & {top, *map(canonicalize_name, providers.get(top, []))}, f"{path.name} imports {top}, which pyproject.toml does not list"


def test_the_lock_has_nothing_that_nobody_asked_for():
    reached, open_ = set(), [(canonicalize_name(r.name), tuple(r.extras)) for r in ASKED]
    while open_:
        name, extras = item = open_.pop()
        if item in reached:
            continue
        reached.add(item)
        if name not in CORPORA:
            open_ += [(canonicalize_name(r.name), tuple(r.extras)) for r in needs(name, extras) if canonicalize_name(r.name) in LOCK]
    assert set(LOCK) - {name for name, _ in reached} == set()


def test_what_is_installed_equals_the_lock():
    differing = {name: (version, metadata.version(name)) for name, version in LOCK.items() if Version(metadata.version(name)).public != version}
    assert differing == {}


@pytest.mark.parametrize("name", sorted(set(LOCK) - CORPORA))
def test_no_dependency_is_missing_or_too_old(name):
    for needed in needs(name):
        assert needed.specifier.contains(metadata.version(needed.name), prereleases=True), f"{name} needs {needed}"


def test_conda_users_get_the_same_pins():
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    assert {item.split("=")[0] for item in conda} == {"python", "make", "pip"}
    (python,) = [item.split("=")[1] for item in conda if item.startswith("python")]
    assert PROJECT["project"]["requires-python"] == f">={python}"


@pytest.mark.parametrize("asked", COMPARISON, ids=str)
def test_what_the_tests_compare_with_is_pinned_the_same_everywhere(asked):
    """It is in no lock, so that `make`, the conda comment and the tests' advice must say pyproject's version; the package never imports it."""
    assert re.fullmatch(r"==[\d.]+", str(asked.specifier)) and canonicalize_name(asked.name) not in LOCK
    for file in ("Makefile", "environment.yml", "tests/test_simulator_cache.py"):
        assert f"pip install --no-deps {asked}" in (paths.ROOT / file).read_text(), file
    assert metadata.version(asked.name) == str(asked.specifier).removeprefix("==")
    assert not any(asked.name in path.read_text() for path in (paths.ROOT / "predmoe").rglob("*.py"))


def test_llama_cpp_is_pinned_the_same_everywhere_and_asks_for_nothing_new():
    """It is in no lock and nobody installs it unasked; whoever does gets pyproject's versions, and finds the rest of what they need in the lock."""
    assert {r.name: str(r.specifier).removeprefix("==") for r in PEERS} == gguf_file.WANTED and not {canonicalize_name(r.name) for r in PEERS} & set(LOCK)
    for file in ("README.md", "environment.yml"):
        assert gguf_file.INSTALL in (paths.ROOT / file).read_text(), file
    assert not any(r.name in (paths.ROOT / "Makefile").read_text() for r in PEERS)
    for asked in PEERS:
        if installed(asked.name):
            assert metadata.version(asked.name) == gguf_file.WANTED[asked.name]
            assert {canonicalize_name(r.name) for r in needs(asked.name)} <= set(LOCK) | {r.name for r in PEERS}


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needs(name, extras=()):
    """What an installed package requires here, with these extras."""
    required = [Requirement(text) for text in metadata.requires(name) or []]
    return [r for r in required if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in ("", *extras))]
