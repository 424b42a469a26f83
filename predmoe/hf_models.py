"""Models and tokenizers from a folder or the hub, for `hf.Backbone`: what cannot be used is one sentence that names it."""
# T time

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from predmoe.checkpoint import check_floating, counted, headers, weight_files
from predmoe.config import TOKENIZERS, ConfigError
from predmoe.hf import Backbone
from predmoe.strict import device as known_device
from predmoe.tokenizer import Tokenizer, load_tokenizer

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint_folder(name: str) -> str:
    """`name`, or the checkpoint in it where it is a run's folder of the store. Raises ConfigError for a path that is not there."""
    folder = Path(name).expanduser()
    if not name.strip() or folder.is_file():
        raise ConfigError(f"{name!r} is {'a file' if name.strip() else 'no name'}: a model is the folder of a checkpoint, or a hub id")
    if (folder / "checkpoint" / "config.json").is_file():
        return str(folder / "checkpoint")
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConfigError(f"{name}: no such folder")
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(f"{name} holds no config.json: it is not a checkpoint")
    return str(folder) if folder.exists() else name


def load(name: str, *, dtype: str = "auto", device: str = "cpu") -> Backbone:
    """The causal language model in a folder (of a checkpoint or of one of our runs) or of a hub id, frozen, in evaluation mode.

    No code that comes with a model is run. Raises ConfigError for what is not there or cannot be read, for a hub id that is neither cached nor
    reachable, for a checkpoint with weights too few or too many, for a dense model, and for one whose gates are not recognised.
    """
    from transformers import AutoModelForCausalLM

    from predmoe.train import check_device

    known_device(device)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    check_device(device)
    source = checkpoint_folder(name)
    stored = _stored(Path(source))
    try:
        with quiet():
            model, found = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype], trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:   # the libraries below raise a dozen kinds for a file or an id that is not what it should be
        raise ConfigError(_told(name, source, error, "model")) from None
    if missing := sorted(found["missing_keys"]) or sorted(key[0] for key in found["mismatched_keys"]):   # the library would go on with random weights
        raise ConfigError(f"{name}: the checkpoint has no {missing[0]} of the shape that its config.json asks for: it is incomplete or another model's")
    if surplus := found["unexpected_keys"]:   # without what the library itself passes over: rotary buffers, a family's heads for later tokens
        raise ConfigError(f"{name}: the checkpoint has {counted(surplus)}, which the model that its config.json describes has not: one of the two is another model's")
    weights = model.state_dict()
    if getattr(model, "hf_quantizer", None) is None:   # a quantised model's own numbers are its library's business
        with _named(name):
            check_floating({entry: dtype for entry, dtype in stored.items() if entry in weights and weights[entry].is_floating_point()})
            check_finite(dict(model.named_parameters()))
    try:
        with _named(name):
            return Backbone(model.to(device).requires_grad_(False).eval())
    except ConfigError:
        raise
    except Exception as error:   # the model's own code, on two tokens: its configuration asks for what its layers cannot do
        raise ConfigError(f"{name}: two tokens do not pass through the model that its config.json describes ({_reason(error)}): correct it, or download it again") from error


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Within, a ConfigError's sentence begins with the model's name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _stored(folder: Path) -> dict[str, str]:
    """Entry -> safetensors' name of its dtype, of a folder of safetensors files. Raises ConfigError that names a file which is missing or cut; a hub id, or a folder of
    other files, is the library's business."""
    if not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        return {}
    return {entry: dtype for file in weight_files(folder) for entry, (_, dtype) in headers(file).items()}


def check_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError that names the first floating-point weight with a NaN or an infinite number in it; attention may hide one from what comes after."""
    bad = {entry: tensor.dtype for entry, tensor in weights.items() if tensor.dtype in _FLOATS and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all()}
    if bad:
        which = f"the weight {counted(bad)} is" if len(bad) == 1 else f"the weights {counted(bad)} are"
        kind = str(bad[min(bad)]).removeprefix("torch.")
        raise ConfigError(f"{which} not finite in {kind} (NaN or infinite numbers): the checkpoint is damaged, or its numbers are too large for that dtype")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within, the libraries tell of nothing but errors: missing weights and a hub that cannot be reached are errors of ours, and need no line for each retry before."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    told = logging.get_verbosity(), hub.get_verbosity()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(told[0])
        hub.set_verbosity(told[1])


def _reason(error: Exception) -> str:
    """An error's first line, and the next where that ends in a colon; its kind where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


def _told(name: str, source: str, error: Exception, what: str) -> str:
    reason = _reason(error)
    if Path(source).exists():
        return f"{name}: its {what} cannot be loaded: {reason}"
    return (f"{name}: no such folder, and the hub gave no {what} of that name ({type(error).__name__}: {reason}); without a network, download it elsewhere "
            "and give its folder")  # fmt: skip


@dataclass(frozen=True, eq=False)
class HubTokenizer:
    """A transformers tokenizer with the names of `tokenizer.Tokenizer`; special tokens written in a text are ordinary text, none is added."""

    name: str
    held: object
    eot: int
    hash: str

    @property
    def vocab_size(self) -> int:
        return len(self.held)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self.held(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        return self.held.decode([int(i) for i in ids])


def tokenizer_of(name: str, asked: str | None = None) -> Tokenizer | HubTokenizer:
    """The tokenizer `asked` (bpe8k, gpt2, a folder or a hub id), by default the one that came with the model `name`: its run's, or its files'.

    Raises ConfigError where there is none, or none that ends a text.
    """
    from predmoe.engine.export import own_tokenizer
    from predmoe.engine.layout import TOKENIZER

    source = checkpoint_folder(name)
    own = own_tokenizer(Path(source)) if asked is None else None
    asked = asked or (own if own != TOKENIZER else None)
    if asked in TOKENIZERS:
        return load_tokenizer(asked)
    from transformers import AutoTokenizer

    source = checkpoint_folder(asked) if asked and not Path(asked).exists() else asked or source
    try:
        with quiet():
            held = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:   # as in `load`
        hint = "" if asked else "; name one with --tokenizer (bpe8k, gpt2, a folder or a hub id)"
        raise ConfigError(_told(asked or name, source, error, "tokenizer") + hint) from None
    if not held("a word", add_special_tokens=False)["input_ids"]:   # where there are no files, the library makes an empty one for some families
        raise ConfigError(f"{asked or name} has no tokenizer: name one with --tokenizer (bpe8k, gpt2, a folder or a hub id)")
    end = held.eos_token_id if held.eos_token_id is not None else held.sep_token_id
    if end is None:
        raise ConfigError(f"the tokenizer {asked or name} has no end-of-text token, which stands between documents")
    raw = held.backend_tokenizer.to_str() if getattr(held, "is_fast", False) else json.dumps([type(held).__name__, held.get_vocab()], sort_keys=True)
    return HubTokenizer(Path(str(source)).name, held, int(end), hashlib.sha256(raw.encode()).hexdigest()[:16])


def check_tokenizer(tokenizer: Tokenizer | HubTokenizer, backbone: Backbone, name: str) -> None:
    """Raise ConfigError where the tokenizer has more ids than the model has embeddings."""
    if tokenizer.vocab_size > backbone.config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} ids, the vocabulary of {name} {backbone.config.vocab_size:,}"
        raise ConfigError(f"the tokenizer {tokenizer.name} has {sizes}: it is another model's")


def encode(texts: Sequence[str], names: Sequence[str], tokenizer, backbone: Backbone, *, tokens: int | None = None) -> tuple[torch.Tensor, list[int]]:
    """Token ids (B, T), each row padded at its end with end-of-text, and the rows' lengths; `tokens` cuts each text to its first ones.

    Raises ConfigError that names (`names`) a text that is empty or no text, longer than the model's context, or of ids that the model has not.
    """
    if tokens is not None and not 1 <= tokens <= backbone.config.context:
        raise ConfigError(f"tokens={tokens} must lie in 1..{backbone.config.context}, the model's context")
    rows = []
    for name, text in zip(names, texts):
        if half := next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None):   # the shell's word for a byte that is not UTF-8
            raise ConfigError(f"{name} is not UTF-8 text: character {text.index(half) + 1} is {half!r}, half of a surrogate pair or a byte that cannot be read")
        ids = tokenizer.encode(text)[:tokens]
        if not ids:
            raise ConfigError(f"{name} is empty: there is nothing to record")
        if len(ids) > backbone.config.context:
            raise ConfigError(f"{name} has {len(ids)} tokens, the model's context takes {backbone.config.context}: cut it, or record its first ones (--tokens)")
        if max(ids) >= backbone.config.vocab_size:
            last = backbone.config.vocab_size - 1
            raise ConfigError(f"{name}: the tokenizer {tokenizer.name} gives id {max(ids)}, the model's vocabulary ends at {last}: it is another model's")
        rows.append(ids)
    lengths = [len(ids) for ids in rows]
    padded = torch.full((len(rows), max(lengths)), min(tokenizer.eot, backbone.config.vocab_size - 1))
    for row, ids in zip(padded, rows):
        row[: len(ids)] = torch.tensor(ids)
    return padded, lengths


def seems_foreign(val_loss: float, vocab_size: int) -> bool:
    """Whether text costs more than guessing evenly among all ids: the tokenizer, or the weights, are most likely not the model's."""
    return not val_loss < math.log(vocab_size)
