"""Our models in the lm-evaluation-harness: checkpoints, runs of the store, and exports, by one adaptor.

    lm = load("outputs/cpu/runs/HASH")            a run's folder, its checkpoint, any OLMoE-format folder, or what `predmoe export` wrote
    lm_eval.evaluator.evaluate(lm, {"piqa": task})

Log-likelihoods are those of the harness's own transformers class. What is faster is only how they are computed: requests that begin alike are
one tree of tokens, whose common part is computed once; trees of like length share a forward pass; the head is applied where a token is scored.
"""
# R trees of a pass, T tokens of the longest, n states, D model width, V vocabulary

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor

from predmoe.checkpoint import find_checkpoint, load_checkpoint
from predmoe.config import ConfigError, ModelConfig
from predmoe.files import parse_json
from predmoe.model import MoEModel
from predmoe.tokenizer import GPT2_SPLIT, Tokenizer, load_tokenizer
from predmoe.train import check_device

BATCH_TOKENS = 2048   # of a forward pass: logits of as many positions are 64 MB at a vocabulary of 8,192
PADDING = 256         # ids that a model may have beyond its tokenizer's: vocabularies are padded to round numbers
MAX_NEW_TOKENS = 64   # of a generated answer where the task does not say


# --- requests as trees -------------------------------------------------------------------------------------------------

@dataclass
class Tree:
    """Tokens that share their beginnings: `parent` is the index of the token before (-1: none).

    `reads`: (request, indices of the tokens that foretell its continuation, the continuation's tokens).
    """

    tokens: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    reads: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    _place: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, request: int, line: Sequence[int], continuation: list[int]) -> None:
        """A request: the last token of `line` foretells the last one of `continuation`."""
        at, path = -1, []
        for token in line:
            known = self._place.get((at, token))
            if known is None:
                known = self._place[at, token] = len(self.tokens)
                self.tokens.append(token)
                self.parent.append(at)
            at = known
            path.append(at)
        self.reads.append((request, path[len(path) - len(continuation) :], continuation))

    def seen(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Position of each token, [size], and which tokens each one sees, [size, size] bool; padding sees itself."""
        position, seen = np.zeros(size, dtype=np.int64), np.eye(size, dtype=bool)
        for i, parent in enumerate(self.parent):
            if parent >= 0:
                position[i] = position[parent] + 1
                seen[i] |= seen[parent]
        return position, seen


def plant(requests: Sequence[tuple[list[int], list[int]]], max_length: int, *, share: bool) -> list[Tree]:
    """The requests, each (context, continuation) as token ids, as trees, the largest first.

    Too long ones lose their beginning, as in the harness. Without `share` only requests that differ in their last token share a tree, so
    that every tree is a line. Raises ConfigError for a continuation that the model's context cannot hold, or that has nothing before it.
    """
    trees: dict[tuple[int, ...], Tree] = {}
    for i, (context, continuation) in enumerate(requests):
        if not continuation or len(continuation) > max_length:
            raise ConfigError(f"request {i}: a continuation of {len(continuation)} tokens cannot be scored; it takes 1 to {max_length}, the model's context")
        if not context:
            raise ConfigError(f"request {i}: no token stands before its continuation, so that the first one cannot be scored: remove the item")
        line = (context + continuation)[-(max_length + 1) : -1]
        root = tuple(line[: len(line) - len(continuation) + 1]) if share else tuple(line)
        trees.setdefault(root, Tree()).add(i, line, continuation)
    return sorted(trees.values(), key=lambda tree: -len(tree.tokens))


def batches(trees: Sequence[Tree], budget: int) -> Iterator[list[Tree]]:
    """Trees of like size together: no more than `budget` tokens with the padding, but at least one tree."""
    first = 0
    for i in range(1, len(trees) + 1):
        if i == len(trees) or (i + 1 - first) * len(trees[first].tokens) > budget:
            yield list(trees[first:i])
            first = i


# --- models --------------------------------------------------------------------------------------------------------------

class Model(Protocol):
    """What the adaptor needs of a model; `branches`: whether a tree may be more than a line."""

    config: ModelConfig
    branches: bool

    def states(self, trees: Sequence[Tree]) -> Tensor:
        """(n, D): the states of the trees' tokens, one tree after another. Raises ConfigError where a router's scores are NaN."""

    def logits(self, states_nD: Tensor) -> Tensor:
        """(n, V) float32."""


class Whole:
    """A checkpoint's model, all in memory."""

    branches = True

    def __init__(self, model: MoEModel):
        self.model, self.config = model.requires_grad_(False), model.config

    def states(self, trees: Sequence[Tree]) -> Tensor:
        size = len(trees[0].tokens)
        tokens_RT = np.zeros((len(trees), size), dtype=np.int64)
        for row, tree in zip(tokens_RT, trees):
            row[: len(tree.tokens)] = tree.tokens
        device = self.model.device
        position_RT, seen_RTT = map(np.stack, zip(*(tree.seen(size) for tree in trees)))
        tree = torch.from_numpy(position_RT).to(device), torch.from_numpy(seen_RTT).unsqueeze(1).to(device)
        try:
            hidden_RTD, _ = self.model.body(torch.from_numpy(tokens_RT).to(device), tree)
        except ValueError as error:
            if "NaN" not in str(error):
                raise
            raise ConfigError(f"the model cannot be scored: {error}; its weights are damaged, or it diverged in training") from None
        return torch.cat([hidden[: len(tree.tokens)] for hidden, tree in zip(hidden_RTD, trees)])

    def logits(self, states_nD: Tensor) -> Tensor:
        return self.model.head(states_nD).float()


class Exported:
    """An export, by the engine's own forward pass with every expert in its cache."""

    branches = False

    def __init__(self, folder: Path):
        from predmoe.engine import Engine, load_manifest
        from predmoe.simulator import Cache

        self.config = load_manifest(folder).model
        self.engine = Engine(folder, cache=Cache(slots=self.config.num_layers * self.config.num_experts), announce=lambda line: None)
        weakref.finalize(self, self.engine.close)   # its reading threads end with it

    def states(self, trees: Sequence[Tree]) -> Tensor:
        return self.engine.states([tree.tokens for tree in trees])

    def logits(self, states_nD: Tensor) -> Tensor:
        return self.engine.logits(states_nD)


@torch.inference_mode()
def score(model: Model, requests: Sequence[tuple[list[int], list[int]]], *, budget: int = BATCH_TOKENS) -> list[tuple[float, bool]]:
    """Log-likelihood (nats) of each request's continuation, and whether it is the likeliest token at each step. Errors as `plant`."""
    total, greedy = np.zeros(len(requests)), np.ones(len(requests), dtype=bool)
    for batch in batches(plant(requests, model.config.context, share=model.branches), budget):
        states = model.states(batch)
        first = np.cumsum([0] + [len(tree.tokens) for tree in batch])
        owner, node, target = (np.concatenate(parts) for parts in zip(*(
            (np.full(len(nodes), request), start + np.array(nodes), np.array(targets))
            for start, tree in zip(first, batch) for request, nodes, targets in tree.reads)))   # fmt: skip
        read, inverse = np.unique(node, return_inverse=True)
        logits_nV = model.logits(states[torch.from_numpy(read).to(states.device)])
        likely = torch.from_numpy(target).to(states.device)
        row = torch.from_numpy(inverse).to(states.device)
        logp = (logits_nV[row, likely] - logits_nV.logsumexp(1)[row]).double().cpu().numpy()
        np.add.at(total, owner, logp)
        np.logical_and.at(greedy, owner, (logits_nV.argmax(1)[row] == likely).cpu().numpy())
    return [(float(ll), bool(same)) for ll, same in zip(total, greedy)]


# --- tokenizers ------------------------------------------------------------------------------------------------------------

class Words(NamedTuple):
    """A tokenizer as the adaptor takes it; `end`: id of end-of-text."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int
    size: int


def words_of(name: str | None, folder: Path) -> Words:
    """The tokenizer `name` of `tokenizer.load_tokenizer`, or the tokenizer.json in `folder`. Raises ConfigError where there is none, or no end-of-text."""
    if name is not None and name != "tokenizer.json":
        held = load_tokenizer(name)
        return Words(held.name, held.encode, held.decode, held.eot, held.vocab_size)
    source = folder / "tokenizer.json"
    if not source.is_file():
        raise ConfigError(f"{folder} does not say which tokenizer its model has: name it (bpe8k or gpt2), or put its tokenizer.json there")
    from tokenizers import Tokenizer as Fast

    try:
        fast = Fast.from_file(str(source))
    except Exception as error:   # the library raises nothing narrower
        raise ConfigError(f"{source} is damaged: {error}") from None
    end = next((fast.token_to_id(token) for token in ("<|endoftext|>", "</s>") if fast.token_to_id(token) is not None), None)
    if end is None:
        raise ConfigError(f"{source} has neither <|endoftext|> nor </s>: an empty context could not be scored")
    return Words(str(source), lambda text: fast.encode(text, add_special_tokens=False).ids, lambda ids: fast.decode(list(ids)), end, fast.get_vocab_size())


def check_fit(words: Words, config: ModelConfig) -> None:
    """Raise a ConfigError unless the tokenizer can be the model's: every id known to the model, and few of the model's ids unused."""
    if not config.vocab_size - PADDING <= words.size <= config.vocab_size:
        raise ConfigError(f"tokenizer {words.name} has {words.size} entries and the model's vocabulary {config.vocab_size}: it is not the one that the model was trained with")


def transformers_tokenizer(tokenizer: Tokenizer):
    """One of our tokenizers as a transformers tokenizer: the same ids for every text but one that spells out a special token."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    shown, ranks = bytes_to_unicode(), tokenizer.encoding._mergeable_ranks
    spell = lambda token: "".join(shown[byte] for byte in token)  # noqa: E731
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):   # a pair merges as early as what it makes ranks
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(spell(a), spell(b)) for a, b in sorted(halves, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    fast = Fast(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    # The same split without possessive marks, and with \z for the end: in that library's expressions $ is the end of any line.
    pattern = GPT2_SPLIT.replace("++", "+").replace("$", r"\z")
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    end = tokenizer.decode([tokenizer.eot])
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False)


# --- the adaptor -------------------------------------------------------------------------------------------------------------

@register_model("predmoe")
class PredmoeLM(TemplateLM):
    """A model of ours for the harness. `model`: a loaded one, or None to load `pretrained`, a folder (see `load`)."""

    backend = "causal"

    def __init__(self, pretrained: str | Path = "", *, model: Model | None = None, words: Words | None = None, tokenizer: str | None = None, device: str = "cpu",
                 batch_tokens: int | str = BATCH_TOKENS, **unused):  # fmt: skip
        super().__init__()
        if unknown := sorted(set(unused) - {"batch_size", "max_batch_size"}):   # the harness always gives these; trees of tokens are batched by length
            raise ConfigError(f"the adaptor takes no {unknown[0]}; it takes pretrained, tokenizer, device, batch_tokens")
        if model is None:
            model, words = _open(Path(pretrained), tokenizer, device)
        check_fit(words, model.config)
        self.model, self.words, self.batch_tokens = model, words, int(batch_tokens)
        self.tokenizer = None   # none of transformers'
        self.cut = 0   # requests so far whose beginning the model's context did not hold

    @property
    def eot_token_id(self) -> int:
        return self.words.end

    @property
    def tokenizer_name(self) -> str:
        return self.words.name

    @property
    def max_length(self) -> int:
        return self.model.config.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.words.encode(string)

    def length(self, context: str, continuation: str) -> int:
        """Tokens of a continuation as they are scored after `context`, which is not empty."""
        return len(self._encode_pair(context, continuation)[1])

    def line(self, context: str, continuation: str) -> list[int]:
        """The tokens that a request's forward pass reads."""
        before, after = self._encode_pair(context, continuation)
        return (before + after)[-(self.max_length + 1) : -1]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self.cut += sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        answers = score(self.model, pairs, budget=self.batch_tokens)
        for (text, _, _), answer in zip(requests, answers):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owner = [], []
        for i, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            found = [utils.make_disjoint_window(window) for window in rolling]
            windows += [(list(context), list(continuation)) for context, continuation in found]
            owner += [i] * len(found)
        scored = [ll for ll, _ in score(self.model, windows, budget=self.batch_tokens)]
        return np.bincount(owner, weights=scored, minlength=len(requests)).tolist() if windows else [0.0] * len(requests)

    @torch.inference_mode()
    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            context, settings = request.args[0], dict(request.args[1])
            if settings.get("do_sample") or settings.get("temperature"):
                raise ConfigError("the adaptor gives the likeliest tokens only: leave do_sample and temperature out of the task's generation_kwargs")
            stops = settings.get("until") or []
            answers.append(self._go_on(context, [stops] if isinstance(stops, str) else stops, int(settings.get("max_gen_toks", MAX_NEW_TOKENS))))
        return answers

    def _go_on(self, context: str, stops: Sequence[str], most: int) -> str:
        ids, new, text = self.tok_encode(context) or [self.prefix_token_id], [], ""
        while len(new) < most:
            tree = Tree()
            tree.add(0, (ids + new)[-self.max_length :], [0])
            token = int(self.model.logits(self.model.states([tree])[-1:]).argmax())
            if token == self.eot_token_id:
                break
            new.append(token)
            text = self.words.decode(new)
            if found := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(found)]
        return text


def load(folder: str | Path, *, tokenizer: str | None = None, device: str = "cpu", batch_tokens: int = BATCH_TOKENS) -> PredmoeLM:
    """The adaptor of a run's folder, a checkpoint, or an export. `tokenizer`: its name where the folder does not say it.

    Raises ConfigError where the folder is none of these or is damaged, and where the tokenizer does not fit the model.
    """
    return PredmoeLM(folder, tokenizer=tokenizer, device=device, batch_tokens=batch_tokens)


def _open(folder: Path, tokenizer: str | None, device: str) -> tuple[Model, Words]:
    if (folder / "manifest.json").is_file():
        from predmoe.engine import load_manifest
        from predmoe.engine.layout import check_file

        if device != "cpu":
            raise ConfigError(f"device={device!r}: the engine computes on the CPU; score the checkpoint itself, or take device='cpu'")
        manifest = load_manifest(folder)
        name = tokenizer or manifest.tokenizer
        if name in manifest.files:   # the one that came with the export
            check_file(folder, manifest, name)
        words = words_of(name, folder)
        return Exported(folder), words
    if (folder / "checkpoint" / "config.json").is_file():   # a run of the store
        folder = folder / "checkpoint"
    config, _ = find_checkpoint(folder)
    words = words_of(tokenizer or _run_tokenizer(folder), folder)
    check_fit(words, config)   # before the weights are read
    check_device(device)
    return Whole(load_checkpoint(folder, config).to(device)), words


def _run_tokenizer(folder: Path) -> str | None:
    """The tokenizer of the run whose checkpoint `folder` is; None where it is none of ours."""
    source = folder.parent / "config.json"
    if folder.name != "checkpoint" or not source.is_file():
        return None
    try:
        return parse_json(source.read_text())["data"]["tokenizer"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{source} is damaged: it does not say which tokenizer its run has") from None
