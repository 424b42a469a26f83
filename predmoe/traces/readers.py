"""Readers of public trace formats. Each gives a checked Trace, or a TraceError with the file's line.

    route      route_trace v1 CSV (BigMoeOnEdge): `#` lines with sizes, then turn,phase,step,layer,slot,expert,weight,...
    tokens     one JSON object a line, {"tok": n, "layers": [[ids], ...]} (WASTE)
    prompts    one JSON object, prompts.NAME.{prefill[pos][layer], decode[step][layer]} (onnx-genai)
    arrays     npz with ids [tokens, layers, k] and seq_offsets (MoE fingerprints)
    colibri    ROUTE_TRACE lines, `call row layer expert:gate ...` (Colibri)
"""

from __future__ import annotations

import inspect
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..files import parse_json
from .schema import ABSENT, DECODE, PREFILL, Meta, Trace, TraceError, build

READERS: dict[str, Callable[..., Trace]] = {}
NAME_IT = "name it with --format (route, tokens, prompts, arrays, colibri)"


def read(path: str | os.PathLike, kind: str | None = None, **options) -> Trace:
    """Read `path` as `kind` (a key of READERS), which is guessed from the file's name and first line where not given.

    `options` go to the reader: num_experts, expert_bytes, prompt, sequences, source, domain, on_policy.
    """
    path = Path(path)
    kind = kind or guess(path)
    if kind not in READERS:
        raise TraceError(f"{path}: unknown format {kind!r}; it must be one of {', '.join(READERS)}")
    taken = inspect.signature(READERS[kind]).parameters
    if unknown := [name for name in options if name not in taken]:
        raise TraceError(f"{path}: the format {kind} takes no {', '.join(unknown)}; it takes {', '.join(list(taken)[1:])}")
    if missing := [name for name, p in taken.items() if p.kind == p.KEYWORD_ONLY and p.default is p.empty and name not in options]:
        raise TraceError(f"{path}: the format {kind} does not say {', '.join(missing)}: give it")
    try:
        return READERS[kind](path, **options)
    except RecursionError:
        raise TraceError(f"{path}: not a trace of the format {kind}, its JSON is nested too deep") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text (byte {error.start}), so not a trace of the format {kind}") from None
    except TraceError as error:
        raise error if str(error).startswith(str(path)) else TraceError(f"{path}: {error}") from None


def guess(path: Path) -> str:
    """The format of a file by its name and first line."""
    if path.suffix == ".npz":
        return "arrays"
    with open(path, "rb") as file:
        line = file.readline(65536).strip()
    if not line:
        raise TraceError(f"{path}: the file is empty")
    if line.startswith(b"# route_trace"):
        return "route"
    if line.startswith(b"{"):
        return "tokens" if b'"layers"' in line and line.endswith(b"}") else "prompts"
    if line[:1].isdigit() and b":" in line:
        return "colibri"
    raise TraceError(f"{path}: the format is not recognised; {NAME_IT}")


def highest(path: Path) -> int:
    """The highest expert id in ROUTE_TRACE lines, 0 where there is none: for who must assume how many experts there are."""
    return max((int(id) for id in re.findall(r"(?<=\s)\d{1,6}(?=:)", path.read_text(encoding="utf-8", errors="replace"))), default=0)


def reader(name: str):
    def register(function):
        READERS[name] = function
        return function

    return register


def _sizes(expert_bytes, layers: int) -> tuple[int, ...]:
    return (int(expert_bytes),) * layers if np.isscalar(expert_bytes) else tuple(expert_bytes)


def _experts(num_experts: int | None, highest: int) -> int:
    """Experts per layer, where the format does not say and the caller may."""
    return highest + 1 if num_experts is None else num_experts


def _number(text: str, kind: type, line: int, path: Path, name: str):
    try:
        return kind(text)
    except ValueError:
        raise TraceError(f"{path}, line {line}: {name} is {text!r}, not a number") from None


def _small(text: str) -> bool:
    """A whole number that could be a count of layers or experts."""
    return text.isdecimal() and len(text) < 10


@reader("route")
def route_csv(path: Path, *, source: str = "", domain: str = "", on_policy: bool | None = None) -> Trace:
    """route_trace v1. Each turn is a sequence; prefill rows of a turn form one pass, each decode step another.

    An engine records the last layer of a prefill only for the tokens it goes on with: the others' rows are absent.
    """
    facts, sizes, rows, lines = {}, {}, [], []
    columns: list[str] | None = None
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if number == 1:
                if text != "# route_trace v1":
                    raise TraceError(f"{path}, line 1: {text[:40]!r}, but only '# route_trace v1' is known")
            elif text.startswith("#"):
                pairs = dict(item.split("=", 1) for item in text[1:].split() if "=" in item)
                if "layer" in pairs:
                    sizes[_number(pairs["layer"], int, number, path, "layer")] = _number(pairs.get("expert_bytes", ""), int, number, path, "expert_bytes")
                facts.update(pairs)
            elif columns is None:
                columns = text.split(",")
                missing = {"turn", "phase", "step", "layer", "slot", "expert", "weight"} - set(columns)
                if missing:
                    raise TraceError(f"{path}, line {number}: the columns {', '.join(sorted(missing))} are missing")
            elif text:
                fields = text.split(",")
                if len(fields) < len(columns):
                    raise TraceError(f"{path}, line {number}: {len(fields)} fields of {len(columns)}; is the file cut short?")
                row = dict(zip(columns, fields))
                rows.append([_number(row[name], int, number, path, name) for name in ("turn", "phase", "step", "layer", "slot", "expert")]
                            + [_number(row["weight"], float, number, path, "weight")])  # fmt: skip
                lines.append(number)
    if not rows:
        raise TraceError(f"{path}: the trace is empty: no row")
    for name in ("n_expert", "n_expert_used"):
        if not _small(facts.get(name, "")):
            raise TraceError(f"{path}: the '#' lines do not give {name} as a number")
    if not _small(facts.get("n_layer", "0")):
        raise TraceError(f"{path}: n_layer is {facts['n_layer']!r}, not a number")
    if negative := [layer for layer in sizes if sizes[layer] < 0]:
        raise TraceError(f"{path}: the expert_bytes of layer {negative[0]} are negative")
    layers = sorted(layer for layer in sizes if sizes[layer] > 0)   # the dense ones have none
    meta = Meta(model=facts.get("model", ""), num_experts=int(facts["n_expert"]), top_k=int(facts["n_expert_used"]), layers=layers,
                expert_bytes=[sizes[layer] for layer in layers], model_layers=int(facts.get("n_layer", 0)), source=source, domain=domain, on_policy=on_policy)  # fmt: skip
    return _from_rows(path, meta, rows, lines)


def _from_rows(path: Path, meta: Meta, rows: list[list], lines: list[int]) -> Trace:
    """Rows (turn, phase, step, layer, rank, expert, weight), checked against their order, as a Trace."""
    of_layer = {layer: l for l, layer in enumerate(meta.layers)}
    tokens: dict[tuple[int, int, int], int] = {}
    cells: dict[tuple[int, int], list] = {}
    last = (-1, -1, -1, -1)
    for (turn, phase, step, layer, rank, expert, weight), line in zip(rows, lines):
        at = f"{path}, line {line}"
        if layer not in of_layer:
            raise TraceError(f"{at}: layer {layer} is none of the {len(of_layer)} mixture-of-experts layers")
        if phase not in (PREFILL, DECODE):
            raise TraceError(f"{at}: phase {phase} is neither 0 (prefill) nor 1 (decode)")
        # prefill runs layer by layer over all tokens or token by token; decode always token by token
        order = (turn, phase, 0, 0) if phase == PREFILL else (turn, phase, step, layer)
        if order < last:
            raise TraceError(f"{at}: layers out of order: layer {layer} of step {step} comes too late")
        last = order
        n = tokens.setdefault((turn, phase, step), len(tokens))
        cell = cells.setdefault((n, of_layer[layer]), [line])
        if rank != len(cell) - 1:
            raise TraceError(f"{at}: slot {rank} follows {len(cell) - 1} experts of this token and layer")
        if not 0 <= expert < meta.num_experts:
            raise TraceError(f"{at}: expert id {expert} is outside 0..{meta.num_experts - 1}")
        if not np.isfinite(weight):
            raise TraceError(f"{at}: the gate weight is not finite")
        cell.append((expert, weight))
    N, L, K = len(tokens), len(meta.layers), meta.top_k
    experts = np.full((N, L, K), ABSENT, np.int16)
    weights = np.zeros((N, L, K), np.float32)
    for (n, l), (line, *chosen) in cells.items():
        if len(chosen) != K:
            raise TraceError(f"{path}, line {line}: {len(chosen)} experts, not top-{K}")
        experts[n, l] = [expert for expert, _ in chosen]
        weights[n, l] = [weight for _, weight in chosen]
    keys = list(tokens)
    turns = {turn: i for i, turn in enumerate(dict.fromkeys(turn for turn, _, _ in keys))}
    opens = [i for i, key in enumerate(keys) if i == 0 or key[1] == DECODE or keys[i - 1][:2] != key[:2]]
    trace = build(meta, experts, starts=[*opens, N], phase=[keys[i][1] for i in opens], sequence=[turns[key[0]] for key in keys], weights_NLK=weights,
                  where=lambda n, l: f"{path}, line {cells[n, l][0]}")  # fmt: skip
    return _all_layers(trace, lambda n: f"{path}, line {max(cell[0] for (of, _), cell in cells.items() if of == n)}")


def _all_layers(trace: Trace, where: Callable[[int], str]) -> Trace:
    """`trace`, if every pass has a row of every layer: a file that was cut between two lines lacks the last layers of its last pass.

    `where` names a token's last line.
    """
    without = np.logical_and.reduceat(trace.experts_NLK[..., 0] == ABSENT, trace.starts[:-1], axis=0)
    for s, l in np.argwhere(without)[:1].tolist():
        raise TraceError(f"{where(int(trace.starts[s + 1]) - 1)}: this pass has no row of layer {trace.meta.layers[l]}; is the file cut short?")
    return trace


@reader("tokens")
def token_jsonl(path: Path, *, num_experts: int | None = None, expert_bytes=1, model: str = "", source: str = "", domain: str = "",
                on_policy: bool | None = None) -> Trace:  # fmt: skip
    """One decode token a line. The format gives neither experts nor sizes: pass `num_experts` (default: highest id + 1)."""
    rows, lines = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                layers = parse_json(line)["layers"]
                shape = (len(layers), len(layers[0]))
            except (ValueError, KeyError, TypeError, IndexError):
                raise TraceError(f"{path}, line {number}: no JSON object with layers; is the file cut short?") from None
            first = (len(rows[0]), len(rows[0][0])) if rows else shape
            _rectangle(layers, first, f"{path}, line {number}")
            rows.append(layers)
            lines.append(number)
    if not rows:
        raise TraceError(f"{path}: the trace is empty: no token")
    experts = np.array(rows, np.int64)
    meta = Meta(model=model, num_experts=_experts(num_experts, int(experts.max())), top_k=experts.shape[2], layers=range(experts.shape[1]),
                expert_bytes=_sizes(expert_bytes, experts.shape[1]), source=source, domain=domain, on_policy=on_policy)  # fmt: skip
    return build(meta, experts, where=lambda n, l: f"{path}, line {lines[n]}, layer {l}")


def _rectangle(layers, shape: tuple[int, int], at: str) -> None:
    if not isinstance(layers, list) or not all(isinstance(ids, list) for ids in layers):
        raise TraceError(f"{at}: not a list of expert ids for each layer")
    if 0 in shape:
        raise TraceError(f"{at}: no expert id")
    if len(layers) != shape[0]:
        raise TraceError(f"{at}: {len(layers)} layers, not {shape[0]}")
    for l, ids in enumerate(layers):
        if len(ids) != shape[1]:
            raise TraceError(f"{at}, layer {l}: {len(ids)} experts, not top-{shape[1]}")
        if not all(type(i) is int and 0 <= i <= np.iinfo(np.int16).max for i in ids):   # true is no id
            raise TraceError(f"{at}, layer {l}: {ids} are not all expert ids")


@reader("prompts")
def prompt_json(path: Path, *, prompt: str | None = None, expert_bytes=1, source: str = "", on_policy: bool | None = None) -> Trace:
    """All prompts as sequences one after the other, or the one named `prompt`: one prefill pass each, then its decode steps."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        prompts = data["prompts"]
        shape = (int(data["num_layers"]), int(data["top_k"]))
        if min(shape) < 1:
            raise ValueError(f"{shape[0]} layers, top-{shape[1]}")
        num_experts = int(data["num_experts"])
        steps = {name: [(part, kind, list(prompts[name].get(part, []))) for part, kind in (("prefill", PREFILL), ("decode", DECODE))] for name in prompts}
    except UnicodeDecodeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise TraceError(f"{path}: not a per-prompt trace, or cut short ({error})") from None
    if prompt is not None and prompt not in prompts:
        raise TraceError(f"{path}: no prompt {prompt!r}; it has {', '.join(prompts)}")
    rows, names, starts, phase, sequence = [], [], [0], [], []
    for index, name in enumerate([prompt] if prompt is not None else prompts):
        for part, kind, tokens in steps[name]:
            for step, layers in enumerate(tokens):
                _rectangle(layers, shape, f"{path}, {name}, {part} {step}")
                rows.append(layers)
                names.append(f"{name}, {part} {step}")
                sequence.append(index)
                if kind == DECODE:
                    starts.append(len(rows))
                    phase.append(kind)
            if kind == PREFILL and len(rows) > starts[-1]:
                starts.append(len(rows))
                phase.append(kind)
    if not rows:
        raise TraceError(f"{path}: the trace is empty: no token")
    meta = Meta(model=str(data.get("model", "")), num_experts=num_experts, top_k=shape[1], layers=range(shape[0]), expert_bytes=_sizes(expert_bytes, shape[0]),
                source=source, domain=prompt or "", on_policy=on_policy)  # fmt: skip
    return build(meta, np.array(rows, np.int64), starts=starts, phase=phase, sequence=sequence, where=lambda n, l: f"{path}, {names[n]}, layer {l}")


@reader("arrays")
def array_npz(path: Path, *, num_experts: int | None = None, expert_bytes=1, sequences=None, model: str = "", source: str = "", domain: str = "",
              on_policy: bool | None = True) -> Trace:  # fmt: skip
    """Decode tokens of many sequences; `sequences` picks some of them by number. Weights are kept where all picked sequences have them."""
    try:
        with np.load(path) as file:
            ids, offsets = file["ids"], file["seq_offsets"].astype(np.int64)
            held = {name: file[name] for name in ("weight_seq", "weight_offsets", "weights_bf16_bits") if name in file}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise TraceError(f"{path}: not an npz with ids and seq_offsets, or cut short ({error})") from None
    if ids.ndim != 3 or not ids.size:
        raise TraceError(f"{path}: the trace is empty, or ids has the shape {ids.shape} instead of (tokens, layers, k)")
    if ids.dtype.kind not in "iu":
        raise TraceError(f"{path}: ids are {ids.dtype}, not integers")
    if (negative := (ids < 0).any((1, 2))).any():
        raise TraceError(f"{path}, row {int(np.argmax(negative))}: a negative expert id")
    if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 1).any():
        raise TraceError(f"{path}: seq_offsets must rise from 0 to the {len(ids)} tokens")
    chosen = np.arange(len(offsets) - 1) if sequences is None else np.asarray(sequences)
    if not len(chosen) or chosen.min() < 0 or chosen.max() >= len(offsets) - 1:
        raise TraceError(f"{path}: sequences must be numbers of 0..{len(offsets) - 2}")
    if len(set(chosen.tolist())) < len(chosen):
        raise TraceError(f"{path}: a sequence is asked for twice")
    pick = np.concatenate([np.arange(offsets[q], offsets[q + 1]) for q in chosen])
    weights = None
    if wrong := [name for name, array in held.items() if array.dtype.kind not in "iu" or name != "weights_bf16_bits" and array.ndim != 1]:
        raise TraceError(f"{path}: {wrong[0]} is no list of whole numbers")
    if len(held) == 3 and np.isin(chosen, held["weight_seq"]).all():
        if len(held["weight_offsets"]) != len(held["weight_seq"]) + 1:
            raise TraceError(f"{path}: weight_offsets must have one entry more than the {len(held['weight_seq'])} of weight_seq")
        place = {int(q): i for i, q in enumerate(held["weight_seq"])}
        parts = [held["weights_bf16_bits"][held["weight_offsets"][place[int(q)]] : held["weight_offsets"][place[int(q)] + 1]] for q in chosen]
        weights = (np.concatenate(parts).astype(np.uint32) << 16).view(np.float32)
    experts = ids[pick].astype(np.int64)
    L, K = experts.shape[1:]
    meta = Meta(model=model, num_experts=_experts(num_experts, int(ids.max())), top_k=K, layers=range(L), expert_bytes=_sizes(expert_bytes, L), source=source,
                domain=domain, on_policy=on_policy)  # fmt: skip
    return build(meta, experts, sequence=np.repeat(chosen, np.diff(offsets)[chosen]), weights_NLK=weights, where=lambda n, l: f"{path}, row {pick[n]}, layer {l}")


@reader("colibri")
def colibri_lines(path: Path, *, num_experts: int, expert_bytes=1, model: str = "", source: str = "", domain: str = "", on_policy: bool | None = None) -> Trace:
    """One line per (call, row, layer). A call is a forward pass, of several rows where it is prefill; all is one sequence."""
    cells: dict[tuple[int, int], dict[int, tuple[int, list]]] = {}
    last = (-1, -1)
    width = 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            fields = line.split()
            if not fields:
                continue
            at = f"{path}, line {number}"
            if len(fields) < 4:
                raise TraceError(f"{at}: {len(fields)} fields, expected call row layer expert:gate ...; is the file cut short?")
            call, row, layer = (_number(text, int, number, path, name) for text, name in zip(fields, ("call", "row", "layer")))
            if (call, layer) < last:
                raise TraceError(f"{at}: layers out of order: layer {layer} of call {call} after layer {last[1]} of call {last[0]}")
            last = (call, layer)
            chosen = []
            for item in fields[3:]:
                expert, colon, gate = item.partition(":")
                if not colon:
                    raise TraceError(f"{at}: {item!r} is not expert:gate")
                chosen.append((_number(expert, int, number, path, "expert"), _number(gate, float, number, path, "gate")))
                if chosen[-1][0] < 0:
                    raise TraceError(f"{at}: a negative expert id")
                if chosen[-1][0] >= num_experts:
                    raise TraceError(f"{at}: an expert id is not below num_experts={num_experts}")
            width = width or len(chosen)
            if len(chosen) != width:
                raise TraceError(f"{at}: {len(chosen)} experts, not top-{width}")
            if layer in cells.setdefault((call, row), {}):
                raise TraceError(f"{at}: call {call}, row {row}, layer {layer} appears twice")
            cells[call, row][layer] = (number, chosen)
    if not cells:
        raise TraceError(f"{path}: the trace is empty: no line")
    keys = sorted(cells)
    layers = sorted({layer for held in cells.values() for layer in held})
    experts = np.full((len(keys), len(layers), width), ABSENT, np.int64)
    weights = np.zeros(experts.shape, np.float32)
    for n, key in enumerate(keys):
        for l, layer in enumerate(layers):
            if layer in cells[key]:
                experts[n, l] = [expert for expert, _ in cells[key][layer][1]]
                weights[n, l] = [gate for _, gate in cells[key][layer][1]]
    opens = [n for n, (call, _) in enumerate(keys) if n == 0 or keys[n - 1][0] != call]
    sizes = np.diff([*opens, len(keys)])
    meta = Meta(model=model, num_experts=num_experts, top_k=width, layers=layers, expert_bytes=_sizes(expert_bytes, len(layers)), source=source, domain=domain,
                on_policy=on_policy)  # fmt: skip
    trace = build(meta, experts, starts=[*opens, len(keys)], phase=np.where(sizes > 1, PREFILL, DECODE), weights_NLK=weights,
                  where=lambda n, l: f"{path}, line {cells[keys[n]].get(layers[l], (0,))[0]}")  # fmt: skip
    return _all_layers(trace, lambda n: f"{path}, line {max(number for number, _ in cells[keys[n]].values())}")
