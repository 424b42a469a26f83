"""Zero-shot items as the lm-evaluation-harness takes them: its own tasks on local files, the same from the hub, and a cloze of our own text.

    hellaswag_val_full.txt.bz2 (or .txt)      six lines an item: `activity: context`, the label, four endings
    arc_easy.jsonl arc_challenge.jsonl piqa.jsonl openbook_qa.jsonl      query, choices, gold
    lambada_openai.jsonl                      context, continuation

in $PREDMOE_EVAL_DATA, else shared/eval beside the repository. Prompts, targets and metrics are the harness's own task definitions; only
where the items come from is changed, so a file's row is turned back into what that benchmark's dataset holds.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import paths, variables
from .config import EVAL_TASKS, ConfigError, DownstreamConfig
from .data import Tokens
from .files import parse_json

CLOZE = "heldout_cloze"
CLOZE_WORDS, CLOZE_CHOICES = 40, 4   # words of a passage, the last of them to be found; answers to choose from
LETTERS = "ABCDEFGH"
KIND_WORDS = {str: "non-empty text", list: "list of answers", int: "number of an answer"}


class Unavailable(ConfigError):
    """Items that are not here; the message says why, and what to do."""


@dataclass(frozen=True)
class Benchmark:
    """One task of the harness: where it is defined there, our file and how a row of it becomes the benchmark's own; `split` that is evaluated."""

    definition: str
    file: str
    split: str
    row: Callable[[Mapping], dict]


# --- rows of the files -----------------------------------------------------------------------------------------------------

def _question(row: Mapping) -> str:
    return row["query"].removeprefix("Question: ").rstrip("\n")


def _lettered(row: Mapping) -> dict:
    return {"choices": {"text": row["choices"], "label": list(LETTERS[: len(row["choices"])])}, "answerKey": LETTERS[row["gold"]]}


def _hellaswag(row: Mapping) -> dict:
    """The harness joins the end of the context in capitals, as the file does not: an unfinished last sentence is that end."""
    activity, _, context = row["query"].partition(": ")
    unfinished = re.search(r"(?<=[.!?\"')]) ([a-z][^.!?]*)$", context)
    end = unfinished[1] if unfinished else ""
    return {"activity_label": activity, "ctx_a": context.removesuffix(f" {end}") if end else context, "ctx_b": end, "endings": row["choices"], "label": str(row["gold"])}


BENCHMARKS = {
    "hellaswag": Benchmark("hellaswag/hellaswag.yaml", "hellaswag_val_full.txt", "validation", _hellaswag),
    "arc_easy": Benchmark("arc/arc_easy.yaml", "arc_easy.jsonl", "test", lambda row: {"question": _question(row)} | _lettered(row)),
    "arc_challenge": Benchmark("arc/arc_challenge.yaml", "arc_challenge.jsonl", "test", lambda row: {"question": _question(row)} | _lettered(row)),
    "piqa": Benchmark("piqa/piqa.yaml", "piqa.jsonl", "validation",
                      lambda row: {"goal": _question(row), "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"]}),
    "openbookqa": Benchmark("openbookqa/openbookqa.yaml", "openbook_qa.jsonl", "test", lambda row: {"question_stem": row["query"]} | _lettered(row)),
    "lambada_openai": Benchmark("lambada/lambada_openai.yaml", "lambada_openai.jsonl", "test", lambda row: {"text": f"{row['context']} {row['continuation']}"}),
}  # fmt: skip
NUM_CHOICES = {"piqa": (2,), "hellaswag": (4,), "openbookqa": (4,), "arc_easy": (3, 4, 5), "arc_challenge": (3, 4, 5)}
assert tuple(BENCHMARKS) == EVAL_TASKS


def folder() -> Path | None:
    """Where local items lie: $PREDMOE_EVAL_DATA, or shared/eval beside the repository; None where there is no such folder."""
    found = variables.folder("PREDMOE_EVAL_DATA") or paths.ROOT.parent / "shared" / "eval"
    return found if found.is_dir() else None


def missing(tasks: Sequence[str], *, hub: bool = False) -> dict[str, str]:
    """Of `tasks`, those whose items are not here, each with the reason. With `hub` each is asked for there, which takes a network."""
    found = {}
    for task in tasks:
        try:
            _from_hub(task) if hub else _file(task)
        except Unavailable as error:
            found[task] = str(error)
    return found


def _file(task: str) -> Path:
    where, name = folder(), BENCHMARKS[task].file
    if where is None:   # without its value: what is said here may be published
        raise Unavailable("PREDMOE_EVAL_DATA names no folder that is there: point it at one that holds the items, or take them from the hub (`--hub`, in a notebook `hub`)")
    for path in (where / name, where / f"{name}.bz2"):
        if path.is_file():
            return path
    raise Unavailable(f"the folder of local items has no {name}{' (or .bz2)' if name.endswith('.txt') else ''}: put it there, or take them from the hub (`--hub`, in a notebook `hub`)")


def read(task: str) -> list[dict]:
    """The items of a local file as the benchmark's own rows. Raises Unavailable without the file, ConfigError that names file, line and field of a bad row."""
    path = _file(task)
    rows = _text_rows(path) if ".txt" in path.name else _json_rows(path, task)
    if not rows:
        raise ConfigError(f"{path.name} is empty: it holds no item; fetch it again")
    return [BENCHMARKS[task].row(row) for row in rows]


def _lines(path: Path) -> list[str]:
    try:
        raw = bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
        text = raw.decode("utf-8-sig")   # a byte order mark, and CR before LF, are what an editor adds; a line's own text has neither
        return [line.removesuffix("\r") for line in text.split("\n")]   # not splitlines: items hold other separators
    except (OSError, ValueError, EOFError) as error:   # bz2's and the decoder's own among them
        raise ConfigError(f"{path.name} cannot be read as {'bzip2-compressed ' if path.suffix == '.bz2' else ''}UTF-8 text: {error}; fetch it again") from None


def _text_rows(path: Path) -> list[dict]:
    lines = _lines(path)
    if lines[-1] == "":
        lines.pop()
    rows = []
    for first in range(0, len(lines), 6):
        number, item = first // 6 + 1, lines[first : first + 6]
        where = f"{path.name}, item {number} (line {first + 1})"
        if len(item) < 6:
            raise ConfigError(f"{where} has {len(item)} of its 6 lines (context, label, four endings): the file is cut short; fetch it again")
        if item[1] not in ("0", "1", "2", "3"):
            raise ConfigError(f"{where}: the label on line {first + 2} is {item[1]!r}, not 0 to 3: a line is missing here or before; fetch the file again")
        if not item[0].partition(": ")[2].strip():
            raise ConfigError(f"{where}: {item[0]!r} is not `activity: context`; correct or remove the item")
        if blank := [i for i in range(2, 6) if not item[i].strip()]:
            raise ConfigError(f"{where}: the ending on line {first + blank[0] + 1} is empty; correct or remove the item")
        rows.append({"query": item[0], "gold": int(item[1]), "choices": item[2:]})
    return rows


def _json_rows(path: Path, task: str) -> list[dict]:
    kinds = {"context": str, "continuation": str} if task == "lambada_openai" else {"query": str, "choices": list, "gold": int}
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}; correct or remove the line") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is {type(row).__name__}, not an object with {', '.join(kinds)}; correct or remove the line")
        for name, kind in kinds.items():
            if name not in row:
                raise ConfigError(f"{where} lacks the field {name!r}: an item has {', '.join(kinds)}; add it or remove the line")
            if type(row[name]) is not kind or (kind is str and not row[name].removeprefix("Question: ").strip()):
                raise ConfigError(f"{where}: {name}={row[name]!r} is no {KIND_WORDS[kind]}; correct or remove the line")
        if any("\ud800" <= letter <= "\udfff" for text in row.values() for part in (text if isinstance(text, list) else [text]) if isinstance(part, str) for letter in part):
            raise ConfigError(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; correct or remove the line")
        if "choices" in row:
            _check_choices(row, task, where)
        elif len(row["continuation"].split(" ")) != 1:
            raise ConfigError(f"{where}: continuation={row['continuation']!r} must be one word, the passage's last; correct or remove the line")
        rows.append(row)
    return rows


def _check_choices(row: Mapping, task: str, where: str) -> None:
    choices, allowed = row["choices"], NUM_CHOICES[task]
    if bad := [i for i, choice in enumerate(choices) if not isinstance(choice, str) or not choice.strip()]:
        raise ConfigError(f"{where}: choices[{bad[0]}]={choices[bad[0]]!r} is no text; correct or remove the line")
    if len(choices) not in allowed:
        raise ConfigError(f"{where}: choices has {len(choices)} answers, {task} has {' or '.join(map(str, allowed))}; correct or remove the line")
    if not 0 <= row["gold"] < len(choices):
        raise ConfigError(f"{where}: gold={row['gold']} names none of the {len(choices)} choices, which count from 0; correct or remove the line")


# --- tasks of the harness --------------------------------------------------------------------------------------------------

def _definition(task: str) -> dict:
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml   # the harness's reader of its own definitions; its public one loads the dataset as well

    found = load_yaml(Path(tasks.__file__).parent / BENCHMARKS[task].definition)
    return {name: value for name, value in found.items() if name != "tag"}


def _from_hub(task: str) -> list[dict]:
    import datasets

    from . import hf_models

    defined = _definition(task)
    try:
        with quiet(), hf_models.quiet():   # and without a line for each retry
            return list(datasets.load_dataset(defined["dataset_path"], defined["dataset_name"], split=BENCHMARKS[task].split))
    except Exception as error:   # whatever a network, a hub and a dataset's files can raise
        raise Unavailable(f"the hub gives no {defined['dataset_path']} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no word'}): "
                          "connect to the network, or take local files (hub off)") from None   # fmt: skip


def build(definition: Mapping, rows: Sequence[Mapping], split: str):
    """A task of the harness as `definition` says, on `rows` in place of its dataset; nothing is downloaded."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    class Local(ConfigurableTask):
        def download(self, *args, **kwargs) -> None:
            self.dataset = {split: datasets.Dataset.from_list(list(rows))}

        def of(self, indices: Iterable[int]):
            """The same task on some of its items, not yet asked."""
            return build(definition, [rows[i] for i in indices], split)

    only = {f"{name}_split": name if name == split else None for name in ("training", "validation", "test")}
    datasets.disable_progress_bars()   # for good: a task's items may be mapped anew each time they are read
    with quiet():
        return Local(config=dict(definition) | only)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of the harness and its libraries, nor its remarks; errors are raised as ever."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def chosen(total: int, items: int, seed: int) -> list[int]:
    """Which of `total` items are taken, in their order: `items` drawn with `seed`, or all (0, or not so many)."""
    if not items or items >= total:
        return list(range(total))
    return np.sort(np.random.default_rng(seed).choice(total, items, replace=False)).tolist()


def load(config: DownstreamConfig, tokens: Tokens | None) -> dict[str, object]:
    """name -> task of everything `config` asks for. `tokens`: the run's text, for the cloze. Raises Unavailable where items are not here."""
    found = {}
    for task in config.tasks:
        rows = _from_hub(task) if config.hub else read(task)
        found[task] = build(_definition(task), [rows[i] for i in chosen(len(rows), config.items, config.seed)], BENCHMARKS[task].split)
    if config.cloze and tokens is not None:
        rows = cloze(tokens, config.cloze, config.seed)
        found[CLOZE] = build(CLOZE_DEFINITION, rows, "test")
    return found


def fingerprint(task) -> str:
    """12 hex digits of a task's items: models are compared on the same ones only."""
    return hashlib.sha256(json.dumps(list(task.eval_docs), sort_keys=True).encode()).hexdigest()[:12]


# --- a cloze of our own ------------------------------------------------------------------------------------------------------

CLOZE_DEFINITION = {
    "task": CLOZE, "output_type": "multiple_choice", "doc_to_text": "{{passage}}", "doc_to_target": "{{gold}}", "doc_to_choice": "{{words}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")], "metadata": {"version": 1.0},
}  # fmt: skip
_WORD = re.compile(r"[a-z]{4,}")


def cloze(tokens: Tokens, count: int, seed: int) -> list[dict]:
    """Up to `count` passages of the held-out documents, each to be ended by the true word or one of three others: passage, words, gold, domain.

    A passage is CLOZE_WORDS words; passages do not overlap. Its last word is of small letters, four at least; the wrong ones are drawn from
    what the passages of the same domain end with, as often as they do, so that how common a word is does not tell the true one. Program
    text is left out. Raises ConfigError where a domain has too few different words to draw from.
    """
    passages = [passage for document in tokens.split.heldout if tokens.domains[tokens.domain[document]] != "code" for passage in _passages(tokens, document)]
    ends: dict[str, list[str]] = {}
    for _, word, domain in passages:
        ends.setdefault(domain, []).append(word)
    scarce = [domain for domain, words in ends.items() if len(set(words)) < CLOZE_CHOICES]
    if scarce or not passages:
        raise ConfigError(f"the held-out text of {scarce[0] if scarce else 'every domain'} has too few passages of {CLOZE_WORDS} words for a cloze of {CLOZE_CHOICES} answers: "
                          "raise heldout_tokens, or set cloze: 0")   # fmt: skip
    rng, rows = np.random.default_rng(seed), []
    for passage, word, domain in (passages[i] for i in chosen(len(passages), count, seed)):
        drawn = dict.fromkeys(str(other) for other in rng.permutation(ends[domain]) if other != word)
        words, gold = list(drawn)[: CLOZE_CHOICES - 1], int(rng.integers(CLOZE_CHOICES))
        rows.append({"passage": passage, "words": [*words[:gold], word, *words[gold:]], "gold": gold, "domain": domain})
    return rows


def _passages(tokens: Tokens, document: int) -> list[tuple[str, str, str]]:
    text, domain = tokens.tokenizer.decode(tokens.document(document)[:-1]), tokens.domains[tokens.domain[document]]
    words = [(match.start(), match[0]) for match in re.finditer(r"\S+", text)]
    found, first, i = [], 0, CLOZE_WORDS - 1
    while i < len(words):
        at, word = words[i]
        bare = re.sub(r"[^\w]+$", "", word)   # the mark after it is no part of the word
        if _WORD.fullmatch(bare) and text[at - 1] == " ":
            found.append((text[words[first][0] : at - 1], bare, domain))
            first, i = i + 1, i + CLOZE_WORDS
        else:
            first, i = first + 1, i + 1
    return found
