"""Token files to carry to a machine without a network: one archive with the tokens of a corpus and, where it is GPT-2's, the tokenizer."""

from __future__ import annotations

import base64
import contextlib
import io
import lzma
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

from .config import ConfigError, DataConfig
from .corpora import corpus
from .data import Tokens, prepare
from .files import read_json
from .paths import cache_folder
from .token_files import sound, token_folder
from .tokenizer import load_tokenizer

LIMIT = 60_000_000   # bytes of an archive
PARTS = {"tokens.bin", "documents.npz", "names.json", "meta.json"}


def pack(config: DataConfig, out: Path, *, cache: Path | None = None) -> dict:
    """Encode the corpus where need be and write its archive (tar, xz); returns its tokens, documents, bytes and hash.

    Raises ConfigError where it would be larger than LIMIT (take fewer documents), or cannot be written.
    """
    if out.is_dir():   # before the text is encoded, which takes minutes
        raise ConfigError(f"{out} is a folder: name the file that the archive is to be, such as {out / 'tokens.tar.xz'}")
    tokens = prepare(config, cache=cache)
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(tokens, partial)
        if (size := partial.stat().st_size) > LIMIT:
            raise ConfigError(f"the tokens of corpus={config.corpus!r} take {size / 1e6:.0f} MB packed, more than {LIMIT / 1e6:.0f}: take fewer documents, as in fineweb-edu:25000")
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; name a place that can be written and has room for it") from None
    finally:   # of an interruption, too
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return {"tokens": int(tokens.offsets[-1]), "documents": len(tokens.domain), "bytes": size, "hash": tokens.hash}


def _write(tokens: Tokens, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as file:
        for name in sorted(PARTS):
            file.add(tokens.folder / name, f"tokens/{tokens.folder.name}/{name}")
        if tokens.config.tokenizer == "gpt2":
            ranks = tokens.tokenizer.encoding._mergeable_ranks
            text = b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
            entry = tarfile.TarInfo("gpt2.tiktoken")
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text))


def unpack(archive: Path, *, cache: Path | None = None) -> Path:
    """Put an archive's files where `prepare` finds them; returns the token folder. Raises ConfigError where it is damaged or another file."""
    cache = cache or cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch, tarfile.open(archive) as found:
            found.extractall(scratch, filter="data")
            folders = list((Path(scratch) / "tokens").iterdir()) if (Path(scratch) / "tokens").is_dir() else []
            if len(folders) != 1 or {file.name for file in folders[0].iterdir()} != PARTS:
                raise ConfigError(f"{archive} is no archive of tokens: make it with scripts/prepare_corpus.py")
            target = cache / "tokens" / folders[0].name
            if not sound(target):
                if not sound(folders[0]):
                    raise ConfigError(f"the token files in {archive} are damaged: make it anew with scripts/prepare_corpus.py")
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                shutil.move(folders[0], target)
            if (ranks := Path(scratch) / "gpt2.tiktoken").is_file():
                ranks.replace(cache / "gpt2.tiktoken")
            return target
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ConfigError(f"cannot unpack {archive}: it is cut off, damaged or no archive ({(str(error).splitlines() or [type(error).__name__])[0].rstrip(':')}); carry it anew") from None
    except OSError as error:
        raise ConfigError(f"cannot unpack {archive} into {cache}: {error.strerror or error}; name the archive that was carried, or set PREDMOE_CACHE to a folder that can be written") from None


def bring(archive: Path, config: DataConfig) -> Path | None:
    """Unpack the archive where the tokens of the corpus are not in the cache folder yet, and return their folder; None where they are.

    Raises ConfigError as `unpack`, and where the archive holds the tokens of another corpus or tokenizer.
    """
    if not archive.is_file():   # told at once and not on the first machine that needs it
        raise ConfigError(f"there is no file {archive}: name the archive that scripts/prepare_corpus.py made, or leave --tokens out where its tokens are unpacked")
    with contextlib.suppress(ConfigError):   # GPT-2's vocabulary cannot be had: the archive brings it
        if is_here(config):
            return None
    folder = unpack(archive)
    if not is_here(config):
        held = read_json(folder / "meta.json", {"corpus": str, "tokenizer": str})
        if (held["corpus"], held["tokenizer"]) == (config.corpus, config.tokenizer):
            raise ConfigError(f"{archive} was made by another version of this project, which reads corpus={config.corpus!r} otherwise: make it with scripts/prepare_corpus.py of this one")
        raise ConfigError(f"{archive} holds the tokens of corpus={held['corpus']!r} under tokenizer={held['tokenizer']!r}, and wanted are those of {config.corpus!r} under {config.tokenizer!r}: "
                          f"add --set data.corpus={held['corpus']} data.tokenizer={held['tokenizer']}, or make the other with scripts/prepare_corpus.py")  # fmt: skip
    return folder


def is_here(config: DataConfig) -> bool:
    """Whether the tokens of the corpus are in the cache folder and undamaged, so that nothing has to be read or fetched."""
    return sound(token_folder(corpus(config.corpus), load_tokenizer(config.tokenizer), cache_folder()))
