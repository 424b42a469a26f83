"""An exported model's tokenizer: one of `tokenizer.load_tokenizer`, or the tokenizer.json that came with the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config import ConfigError
from .layout import TOKENIZER, Manifest, check_file


class Text:
    """`encode` and `decode`, and `end`, the id of end-of-text (None where the tokenizer does not say)."""

    def __init__(self, folder: Path, manifest: Manifest):
        if manifest.tokenizer is None:
            raise ConfigError(f"{folder} came without a tokenizer: give the prompt as token ids (--prompt-ids), or export with --tokenizer")
        if manifest.tokenizer == TOKENIZER:
            from tokenizers import Tokenizer

            check_file(folder, manifest, TOKENIZER)
            try:
                held = Tokenizer.from_file(str(folder / TOKENIZER))
            except Exception as error:   # the library raises nothing narrower
                raise ConfigError(f"{folder / TOKENIZER} is not a tokenizer: {error}; export the checkpoint again with its own, or with --tokenizer") from None
            self.encode, self.decode = lambda text: held.encode(text).ids, lambda ids: held.decode(list(ids))
            self.end = next((held.token_to_id(name) for name in ("<|endoftext|>", "</s>") if held.token_to_id(name) is not None), None)
        else:
            from ..tokenizer import load_tokenizer

            held = load_tokenizer(manifest.tokenizer)
            self.encode, self.decode, self.end = held.encode, held.decode, held.eot


class Stream:
    """Token ids come in, whole characters go out: a token may end within one."""

    def __init__(self, text: Text):
        self._text, self._ids, self._shown = text, [], ""

    def add(self, ids: Sequence[int]) -> str:
        """What can be shown now."""
        self._ids += ids
        whole = self._text.decode(self._ids).rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[len(self._shown) :]
        self._shown = whole
        return new
