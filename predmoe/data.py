"""From text to tokens: the tokenizer, memory-mapped token files, the shuffled stream and the sets never trained on.

A corpus is encoded once into a cache folder ($PREDMOE_CACHE, else ~/.cache/predmoe), addressed by corpus and tokenizer.
Documents lie there in a fixed pseudo-random order, each followed by end-of-text. The split is a function of that file
and of the sizes asked for: whole documents, stratified by domain, chosen by a hash of their names and by no run's seed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predmoe.config import ConfigError, DataConfig
from predmoe.corpora import corpus
from predmoe.paths import cache_folder
from predmoe.token_files import contents, token_folder
from predmoe.tokenizer import Tokenizer, load_tokenizer

# B batch, T time, W windows of an evaluation set, S tokens of the whole file, D documents


# ------------------------------------------------------------------------------------------------------- token files


@dataclass(frozen=True, eq=False)
class EvalSet:
    """Windows of whole held-out documents; `document` and `domain` belong to each input token.

    tokens (W, T+1) int64: inputs are [:, :-1], targets [:, 1:]. document (W, T) int32: index into the token file.
    domain (W, T) int16: index into `Tokens.domains`.
    """

    tokens: np.ndarray
    document: np.ndarray
    domain: np.ndarray


@dataclass(frozen=True, eq=False)
class Split:
    """Document indices, disjoint: `heldout` and `dev` in reading order, `train` in file order."""

    heldout: np.ndarray
    dev: np.ndarray
    train: np.ndarray


@dataclass(frozen=True, eq=False)
class Tokens:
    """An encoded corpus and its split. Document d is tokens[offsets[d] : offsets[d + 1]], its last token end-of-text.

    tokens (S,) memory-mapped uint16 or uint32; offsets (D+1,) int64; domain (D,) int16, index into `domains`;
    `hash`: of the contents and the split, for a run's provenance.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    domain: np.ndarray
    domains: tuple[str, ...]
    split: Split
    config: DataConfig
    tokenizer: Tokenizer
    folder: Path
    hash: str

    @property
    def lengths(self) -> np.ndarray:
        """(D,) int64: tokens of each document, end-of-text included."""
        return np.diff(self.offsets)

    @functools.cached_property
    def names(self) -> list[str]:
        """The documents' names, by index."""
        try:
            return json.loads((self.folder / "names.json").read_text())
        except ValueError:
            raise ConfigError(f"{self.folder / 'names.json'} is damaged; delete its folder and run again") from None

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def heldout(self, context: int) -> EvalSet:
        """The held-out set in config.heldout_tokens // context windows: reported numbers come from here."""
        return self._windows("heldout_tokens", self.config.heldout_tokens, self.split.heldout, context)

    def dev(self, context: int) -> EvalSet:
        """The development set in config.dev_tokens // context windows: decisions are taken here."""
        return self._windows("dev_tokens", self.config.dev_tokens, self.split.dev, context)

    def stream(self, order_seed: int | None = None, shuffle_buffer: int | None = None) -> Stream:
        """The training documents in the order of a seed; what is None is taken from the configuration."""
        return Stream(
            self,
            self.config.order_seed if order_seed is None else order_seed,
            self.config.shuffle_buffer if shuffle_buffer is None else shuffle_buffer,
        )

    def _windows(self, name: str, wanted: int, documents: np.ndarray, context: int) -> EvalSet:
        count = wanted // context
        if not count:
            raise ConfigError(f"{name}={wanted} must be at least one context of {context} tokens")
        span = count * context
        flat = np.concatenate([self.document(d) for d in documents])[: span + 1].astype(np.int64)
        owner = np.repeat(documents, self.lengths[documents])[:span].astype(np.int32).reshape(count, context)
        return EvalSet(_overlapping(flat, context), owner, self.domain[owner])


def prepare(config: DataConfig, *, cache: Path | None = None, tokenizer: Tokenizer | None = None) -> Tokens:
    """The tokens of config.corpus under config.tokenizer, encoded now if no earlier run has, and split. `tokenizer`: the one that
    config.tokenizer names, where it is none of ours (`hf_models.HubTokenizer`).

    `cache`: folder of token files, by default $PREDMOE_CACHE or ~/.cache/predmoe. Raises ConfigError for a corpus that
    cannot be read, is empty, or is too small for the held-out and development sets.
    """
    source, tokenizer = corpus(config.corpus), tokenizer or load_tokenizer(config.tokenizer)
    folder = token_folder(source, tokenizer, cache or cache_folder())
    found = contents(config, source, tokenizer, folder)
    split = _split(config, np.diff(found.offsets), found.domain, found.lot, found.domains)
    digest = hashlib.sha256(found.hash.encode())
    for part in (split.heldout, split.dev):
        digest.update(part.astype("<i8").tobytes())
    return Tokens(
        tokens=found.tokens, offsets=found.offsets, domain=found.domain, domains=tuple(found.domains), split=split, config=config,
        tokenizer=tokenizer, folder=folder, hash=digest.hexdigest()[:16],
    )


# ------------------------------------------------------------------------------------------------------------- split


def _split(config: DataConfig, lengths: np.ndarray, domain: np.ndarray, lot: np.ndarray, domains: list[str]) -> Split:
    """Held-out, dev and training documents: per domain a share of each set in proportion to its tokens.

    Documents are drawn in the order of their lots. One longer than a quarter of its domain's share is passed over,
    unless it is among the shortest tenth of the domain, so that no document dominates a set.
    """
    total, wanted = int(lengths.sum()), config.heldout_tokens + config.dev_tokens
    advice = "use a larger corpus, or lower heldout_tokens and dev_tokens"
    if 2 * wanted > total:
        raise ConfigError(
            f"corpus={config.corpus!r} has {total} tokens, but heldout_tokens + dev_tokens = {wanted} is more than half of them; {advice}"
        )
    chosen: dict[str, list[np.ndarray]] = {"heldout": [], "dev": []}
    for index, name in enumerate(domains):
        members = np.flatnonzero(domain == index)
        share = lengths[members].sum() / total
        free = members[np.argsort(lot[members], kind="stable")]
        if len(free) < 3:
            raise ConfigError(
                f"domain {name!r} of corpus={config.corpus!r} has {len(free)} documents, but held-out, dev and training sets need "
                "one each; split its text into more documents, or leave the domain out"
            )
        for part, size in (("heldout", config.heldout_tokens), ("dev", config.dev_tokens)):
            quota = int(np.ceil((size + 1) * share))  # one more: the last window's last target
            bound = max(quota / 4, np.quantile(lengths[members], 0.1))
            long = lengths[free] > bound
            queue = np.concatenate([free[~long], free[long][np.argsort(lengths[free[long]], kind="stable")]])
            count = int(np.searchsorted(np.cumsum(lengths[queue]), quota)) + 1
            taken = queue[:count]
            free = free[~np.isin(free, taken)]
            if count > len(queue) or not len(free):
                raise ConfigError(
                    f"domain {name!r} of corpus={config.corpus!r} has too few documents to take {quota} tokens for "
                    f"{part}_tokens={size} and keep one to train on; {advice}"
                )
            chosen[part].append(taken)
    heldout, dev = (_interleave(chosen[part], lengths) for part in ("heldout", "dev"))
    train = np.setdiff1d(np.arange(len(lengths)), np.concatenate([heldout, dev]))
    return Split(heldout, dev, train)


def _interleave(groups: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """The documents of all groups, each group spread evenly: every prefix has about the proportions of the whole."""
    begins = [(np.cumsum(lengths[group]) - lengths[group]) / lengths[group].sum() for group in groups]
    return np.concatenate(groups)[np.argsort(np.concatenate(begins), kind="stable")]


# ------------------------------------------------------------------------------------------------------------ stream


def buffer_shuffle(count: int, buffer: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) int64: the order in which a shuffle buffer lets 0..count-1 go.

    The buffer holds the first `buffer` items; a random one leaves and the next item takes its place, until no item is
    left to come; the rest leaves in random order. So item i leaves at place i - buffer + 1 or later.
    """
    buffer = min(buffer, count)
    held = list(range(buffer))
    order = np.empty(count, dtype=np.int64)
    for place, slot in enumerate(rng.integers(0, buffer, size=count - buffer).tolist()):
        order[place] = held[slot]
        held[slot] = place + buffer
    order[count - buffer :] = rng.permutation(np.array(held, dtype=np.int64))
    return order


class Stream:
    """Training batches as a pure function of the step: a resumed run sees what an uninterrupted one would have seen.

    The stream is endless: training documents through the shuffle buffer, each with its end-of-text, one epoch after the
    other, each epoch in an order of its own drawn from (order_seed, epoch).
    """

    def __init__(self, tokens: Tokens, order_seed: int, shuffle_buffer: int):
        if order_seed < 0:
            raise ConfigError(f"order_seed={order_seed} must be at least 0")
        self.source, self.order_seed, self.shuffle_buffer = tokens, order_seed, shuffle_buffer
        self.epoch_tokens = int(tokens.lengths[tokens.split.train].sum())
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents in order (D,), the stream position within the epoch at which each ends (D,))."""
        if number not in self._epochs:
            train = self.source.split.train
            rng = np.random.default_rng([self.order_seed, number])
            documents = train[buffer_shuffle(len(train), self.shuffle_buffer, rng)]
            if len(self._epochs) > 1:
                self._epochs.clear()
            self._epochs[number] = documents, np.cumsum(self.source.lengths[documents])
        return self._epochs[number]

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: stream tokens start .. start+count-1."""
        out, filled = np.empty(count, dtype=np.int64), 0
        while filled < count:
            number, position = divmod(start + filled, self.epoch_tokens)
            documents, ends = self.epoch(number)
            index = int(np.searchsorted(ends, position, side="right"))
            while filled < count and index < len(documents):
                document = self.source.document(documents[index])
                piece = document[len(document) - (ends[index] - position) :][: count - filled]
                out[filled : filled + len(piece)] = piece
                filled, position, index = filled + len(piece), position + len(piece), index + 1
        return out

    def batch(self, step: int, batch_size: int, context: int, rows: slice = slice(None)) -> np.ndarray:
        """(B, T+1) int64: T inputs and, one further, T targets of each row. `rows`: which of them, for a process that computes a part.

        Row b reads on from step to step in a lane of its own, which begins at b/B of the epoch, so that a batch holds B places
        of the corpus. Rows that follow one another in the stream come from a few long documents of one or two domains, and
        the gradients of such batches made training chaotic.
        """
        starts = np.arange(batch_size)[rows] * self.epoch_tokens // batch_size + step * context
        return np.stack([self.read(int(start), context + 1) for start in starts])


def _overlapping(flat: np.ndarray, context: int) -> np.ndarray:
    """(n*T + 1,) -> (n, T+1): row i begins at i*T, so that its last token is the first of the next row."""
    return np.lib.stride_tricks.sliding_window_view(flat, context + 1)[::context].copy()
