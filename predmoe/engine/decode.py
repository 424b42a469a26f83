"""The engine: text from a model whose experts stay on disk.

    with Engine(folder, cache=Cache(slots=32), prefetch=Prefetch(source="ranking", horizon=2)) as engine:
        engine.generate([prompt], max_new_tokens=100)
        print(engine.summary())

A pass is what the trace schema calls so: all prompts at once, then one token of each running sequence. Greedy tokens do not depend on cache,
prefetch or budget: they are the resident model's.
"""
# N tokens of a pass, B sequences, L layers, D model width, E experts, K chosen, M guesses, V vocabulary

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..config import ConfigError
from ..process import kernel_bytes
from ..simulator import Cache, Prefetch, uses
from ..simulator.config import ORACLE
from ..traces.schema import DECODE, PREFILL, Trace
from . import fused
from .asked import check_prompts, check_settings, check_tokens
from .cache import ExpertCache
from .experts import Blocks
from .foresight import live_routing, routing_of
from .layout import EXPERTS, Manifest, load_manifest
from .loop import NAN_GUESS, NAN_ROUTER, OTHER, Loop, kernels_of
from .recorder import Recorder
from .resident import Guesser, KeyValues, Resident, best, check_tensors
from .storage import BlockFile, EngineError
from .summary import Clock, Summary, summarise
from .table import prepare, ready

KINDS = {"next_router": fused.NEXT_ROUTER, "linear": fused.LINEAR, "ranking": fused.RANKING}
COMPILING = "compiling the kernels, once per machine: half a minute, longer on a busy one"


@dataclass
class Running:
    """One prompt and what follows it."""

    prompt: list[int]
    number: int
    keys: KeyValues
    tokens: list[int] = field(default_factory=list)

    @property
    def fed(self) -> list[int]:
        """The tokens of its next pass."""
        return self.tokens[-1:] if self.tokens else self.prompt


class Engine:
    """An exported model, its expert cache and its reading threads.

    `prefetch.source`: a predictor of the export, "next_router", or "oracle", which needs the trace of the same passes as `future`; so does
    the policy "belady". `lanes`: reads at a time. `usage`: uses per (layer, expert) by which pinned and static experts are chosen (default: those
    of `future`). `record`: predictor -> horizons to keep for `trace()`, beside the routing. `warmup`: passes whose prefetches the ledger leaves out.
    `announce` is told what the user should know. Raises ConfigError for what cannot be done.
    """

    def __init__(self, folder: str | Path, *, cache: Cache, prefetch: Prefetch | None = None, lanes: int = 4, direct: bool = True, verify: str = "first",
                 future: Trace | None = None, usage: np.ndarray | None = None, record: Mapping[str, Iterable[int]] | None = None, warmup: int = 0,
                 announce: Callable[[str], None] = print, preadv: Callable = os.preadv, patience: float = 30.0):  # fmt: skip
        folder = Path(folder)
        self.manifest = load_manifest(folder)
        config = self.manifest.model
        check_settings(cache, prefetch, future, usage, self.manifest)
        self.cache_settings, self.prefetch, self.lanes = cache, prefetch, lanes
        self._early = config.early_by if config.routing == "early" else 0
        self._oracle = prefetch is not None and prefetch.source == ORACLE
        self._future = future if self._oracle or cache.policy == "belady" else None
        kernels = kernels_of(fits(self.manifest))
        if not ready(kernels):
            announce(COMPILING)
        prepare(kernels)
        named = [*([prefetch.source] if prefetch else []), *(record or {})]
        self.recorded = tuple(record or ())
        check_tensors(folder, self.manifest, heads=any(source in self.manifest.heads for source in named), sums=verify != "never")
        self._resident = Resident(folder, self.manifest)
        guesser = lambda source, horizons: Guesser(folder, self.manifest, self._resident, source, horizons)  # noqa: E731
        self._guesser = guesser(prefetch.source, prefetch.horizons) if prefetch and not self._oracle else None
        self._recorder = Recorder(config, {name: (guesser(name, tuple(hs)), tuple(hs)) for name, hs in record.items()}) if record is not None else None
        self._wanted = config.top_k + prefetch.budget if prefetch else 0
        counted = usage if usage is not None else uses(future) if future is not None else np.zeros(config.num_layers * config.num_experts)
        self._file = BlockFile(folder / EXPERTS, direct=direct, announce=announce, preadv=preadv)
        self.kernel_bytes_before = kernel_bytes() or 0
        try:
            self.experts = ExpertCache(
                self._file, self.manifest, cache, prefetch, lanes=lanes, routing=routing_of(self._future, bool(prefetch and prefetch.cross_token)) if self._future else live_routing(config),
                oracle=self._oracle, guesses=self._wanted, usage=np.asarray(counted).reshape(-1).astype(np.int64), verify=verify, patience=patience, warmup=warmup,
            )  # fmt: skip
        except BaseException:
            self._file.close()
            raise
        self._blocks = Blocks(self.experts.buffers, config, self.manifest.dtype, self.manifest.block)
        self._mixed_KD = torch.empty(config.top_k, config.hidden_size)
        self._rows = list(self._mixed_KD.unbind(0))
        self._pass = self._token = self._sequences = 0
        self._loop = self._fused() if fits(self.manifest) else None
        self._attached: KeyValues | None = None
        self.clock = Clock(config.num_layers)

    def _fused(self) -> Loop:
        """The compiled path of single tokens: see `fused`."""
        guesser, prefetch = self._guesser, self.prefetch
        asked = {} if guesser is None else {"kind": KINDS[guesser.source], "predictor": guesser.plain(), "wanted": self._wanted, "threshold": prefetch.threshold}
        net = fused.create(self.manifest.model, weights=self._resident.plain(), blocks=self.experts.buffers.whole.view(np.float32), **asked)
        self.experts.control.take(net=net)
        return Loop(self.experts.control, known=self._future is not None, guessing=guesser is not None, foretelling=prefetch is not None)

    # --- use ----------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0, stop: int | None = None,
                 on_tokens: Callable[[list[tuple[int, int]]], None] = lambda new: None, on_logits: Callable[[Tensor], None] = lambda logits_BV: None) -> list[list[int]]:  # fmt: skip
        """The tokens that follow each prompt, up to `max_new_tokens`; a sequence ends before that with the token `stop`.

        `temperature` 0 takes the likeliest token (the lower id of equals), else tokens are drawn with `seed`. `on_tokens` gets each pass's
        new (prompt, token) pairs, `on_logits` its logits, one row per running sequence. Raises ConfigError for prompts that cannot be, EngineError where the disk fails; the engine can be used again.
        """
        check_prompts(prompts, max_new_tokens, temperature, self.manifest.model)
        running = [Running(list(prompt), self._sequences + i, KeyValues(self.manifest.model, len(prompt) + max_new_tokens)) for i, prompt in enumerate(prompts)]
        every, first = list(running), self._sequences
        self._sequences += len(prompts)
        generator = torch.Generator().manual_seed(seed)
        self.clock.begin()
        phase = PREFILL
        while running:
            logits_BV = self._forward(running, phase)
            on_logits(logits_BV)
            drawn = logits_BV.argmax(1) if not temperature else sampled(logits_BV, temperature, generator)
            for sequence, token in zip(running, drawn.tolist()):
                sequence.tokens.append(token)
            self.clock.token(len(running))
            on_tokens([(sequence.number - first, sequence.tokens[-1]) for sequence in running])
            running = [sequence for sequence in running if len(sequence.tokens) < max_new_tokens and sequence.tokens[-1] != stop]
            phase = DECODE
        return [sequence.tokens for sequence in every]

    @torch.inference_mode()
    def states(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """States (N, D) of all tokens of `sequences`, one after another, in one pass; `logits` makes logits of them. Raises as `generate`."""
        check_tokens(sequences, 0, self.manifest.model)
        running = [Running(list(tokens), self._sequences + i, KeyValues(self.manifest.model, len(tokens))) for i, tokens in enumerate(sequences)]
        self._sequences += len(sequences)
        self.clock.begin()
        x_ND = self._states(running, PREFILL)
        self.clock.passed(PREFILL, len(x_ND) == 1, self.experts.stalled)
        return x_ND

    def logits(self, x_ND: Tensor) -> Tensor:
        """Logits (N, V) of `states`."""
        return self._resident.logits(x_ND)

    def empty(self) -> None:
        """Forget all experts but the pinned ones, as before the first token."""
        self.experts.empty()

    def summary(self) -> Summary:
        """What the engine really did since it was opened."""
        return summarise(self)

    def trace(self, **origin) -> Trace:
        """What was recorded, as a trace whose experts have the size of a read; `origin`: source, domain, notes. Raises ConfigError unless `record` was given."""
        if self._recorder is None:
            raise ConfigError("nothing was recorded: open the engine with record")
        return self._recorder.trace(self.manifest, **origin)

    @property
    def file(self) -> BlockFile:
        return self._file

    def close(self) -> None:
        if self.experts.close():   # else a thread still reads from it
            self._file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # --- one pass -----------------------------------------------------------------------------------------------------------

    def _forward(self, running: list[Running], phase: int) -> Tensor:
        """Logits (B, V) after the running sequences' next tokens."""
        if self._loop and phase == DECODE and len(running) == 1:
            return self._forward_one(running[0])
        x_ND = self._states(running, phase)
        if phase == PREFILL:
            x_ND = x_ND[torch.tensor([len(sequence.fed) for sequence in running]).cumsum(0) - 1]
        logits_BV = self._resident.logits(x_ND)
        self.clock.passed(phase, sum(len(sequence.fed) for sequence in running) == 1, self.experts.stalled)
        return logits_BV

    def _forward_one(self, sequence: Running) -> Tensor:
        """Logits (1, V) after one sequence's next token, by compiled code."""
        (token,), keys, loop, net = sequence.fed, sequence.keys, self._loop, self._loop.net
        s, rows = self._open_pass(1, sequence.number)
        if self._attached is not keys:
            net = loop.net = net._replace(**keys.plain)
            self.experts.control.take(net=net)
            self._attached = keys
        if self._recorder:
            self._recorder.open(torch.tensor([token]), [sequence.number], DECODE)
        net.x[:] = self._resident.row(token)
        net.times[:] = 0.0
        loop.begin(s, rows.start, keys.length)
        self.clock.opened()
        if self.experts.queued:
            self.experts.begin()
            while code := loop.go_on():
                self._see_to(code)
            self.experts.finished()
        else:
            for layer in range(len(net.hidden)):
                self._layer_by_threads(layer, s, rows.start)
        keys.length += 1
        if self._recorder:
            for layer, hidden_D in enumerate(net.hidden):
                self._recorder.layer(layer, torch.from_numpy(hidden_D)[None], net.chosen[layer : layer + 1], torch.from_numpy(net.gates[layer : layer + 1]))
        self.clock.layers(net.times)
        logits_BV = torch.from_numpy(loop.logits())[None]
        self.clock.passed(DECODE, True, self.experts.stalled)
        return logits_BV

    def _layer_by_threads(self, layer: int, s: int, row: int) -> None:
        """What `loop` does for a layer, where threads read."""
        loop, experts, E = self._loop, self.experts, self.manifest.model.num_experts
        began = time.perf_counter()
        if code := loop.attended(layer, row) or loop.chosen(layer, row):
            self._see_to(code)
        experts.ask(s, layer)
        if self.prefetch:
            experts.foretell(s, layer)
        routed, stalled = time.perf_counter(), experts.stalled
        chosen = loop.net.chosen[layer].tolist()
        for key, buffer in experts.members():
            loop.expert(layer, chosen.index(key % E), buffer)
        loop.mixed(layer)
        loop.net.times[layer] += routed - began, time.perf_counter() - routed - (experts.stalled - stalled)

    def _see_to(self, code: int) -> None:
        """What the compiled code came back for. Raises EngineError for what a pass cannot go on from."""
        at = self._loop.net.at[fused.NOW]
        if code in (NAN_ROUTER, NAN_GUESS):
            raise EngineError(f"{'router of' if code == NAN_ROUTER else 'predictor at'} layer {at}: token 0 of the pass has NaN scores, so no expert can be chosen")
        if code == OTHER:
            raise self._other(at)
        self.experts.see_to(code)

    def _states(self, running: list[Running], phase: int) -> Tensor:
        """States (N, D) of all tokens of a pass before the last norm, sequence after sequence."""
        fed = [sequence.fed for sequence in running]
        places = [(sequence.keys, len(tokens)) for sequence, tokens in zip(running, fed)]
        tokens_N = torch.tensor([token for tokens in fed for token in tokens])
        numbers = [sequence.number for sequence, tokens in zip(running, fed) for _ in tokens]
        s, rows = self._open_pass(len(tokens_N), numbers)
        if self._recorder:
            self._recorder.open(tokens_N, numbers, phase)
        x_ND = self._resident.embedded(tokens_N)
        hidden: list[Tensor] = []
        for layer in range(self.manifest.model.num_layers):
            self.clock.start(layer)
            x_ND = self._resident.attend(layer, x_ND, places)
            m_ND = self._resident.moe_input(layer, x_ND)
            hidden.append(m_ND)
            experts_NK, gates_NK = self._resident.route(layer, hidden[max(layer - self._early, 0)] if self._early else m_ND, tokens_N)
            self._chosen(rows, layer, experts_NK)
            self.experts.ask(s, layer)
            if self.prefetch:
                self._guess(s, rows, layer, m_ND)
            if self._recorder:
                self._recorder.layer(layer, m_ND, experts_NK, gates_NK)
            self.clock.routed(layer, self.experts.stalled)
            x_ND = self._mixture(x_ND, m_ND, experts_NK, gates_NK)
            self.clock.computed(layer, self.experts.stalled, len(tokens_N) == 1)
        for keys, n in places:
            keys.length += n
        return x_ND

    def _open_pass(self, n: int, numbers: list[int] | int) -> tuple[int, slice]:
        """(pass, rows of its n tokens) in the arrays of the cache's bookkeeping."""
        routing = self.experts.control.routing
        if self._future is not None:
            s = self._pass
            self._pass += 1
            if s >= self._future.num_passes or routing.starts[s + 1] - routing.starts[s] != n:
                raise EngineError(f"pass {s} has {n} tokens, the trace of the future {'ends before it' if s >= self._future.num_passes else 'another number'}: it is of another generation")
            return s, slice(int(routing.starts[s]), int(routing.starts[s + 1]))
        if self._pass == len(routing.starts) - 1 or self._token + n > len(routing.experts_NLK):
            self.experts.rebase(self._pass, n)
            self._pass = self._token = 0
            routing = self.experts.control.routing
        s, first = self._pass, self._token
        routing.starts[s], routing.starts[s + 1] = first, first + n
        routing.sequence[first : first + n] = numbers
        self._pass, self._token = s + 1, first + n
        return s, slice(first, first + n)

    def _chosen(self, rows: slice, layer: int, experts_NK: np.ndarray) -> None:
        held = self.experts.control.routing.experts_NLK
        if self._future is None:
            held[rows, layer] = experts_NK
        elif (held[rows, layer] != experts_NK).any():
            raise self._other(layer)

    def _other(self, layer: int) -> EngineError:
        return EngineError(f"layer {layer} of pass {self._pass - 1} chose other experts than the trace of the future has: it is of another generation")

    def _guess(self, s: int, rows: slice, layer: int, hidden_ND: Tensor) -> None:
        held = self.experts.control.guesses
        for i, horizon in enumerate(self.prefetch.horizons if self._guesser else ()):
            scores_NE = self._guesser.scores(layer, horizon, hidden_ND)
            if scores_NE is None:
                held.limit_HNL[i, rows, layer] = 0
                continue
            ids_NM = best(scores_NE.numpy(), self._wanted, f"predictor at layer {layer}")
            held.experts_HNLM[i, rows, layer] = ids_NM
            threshold = self.prefetch.threshold
            if threshold is not None:
                probabilities = np.take_along_axis(scores_NE.double().softmax(1).numpy(), ids_NM, 1)
            held.limit_HNL[i, rows, layer] = self._wanted if threshold is None else (probabilities >= threshold).sum(1)
        self.experts.foretell(s, layer)

    def _mixture(self, x_ND: Tensor, m_ND: Tensor, experts_NK: np.ndarray, gates_NK: Tensor) -> Tensor:
        """x + the chosen experts' weighted outputs, each computed as soon as it is there, summed in the order of the choice."""
        N, K = experts_NK.shape
        E = self.manifest.model.num_experts
        if N == 1:
            chosen, m_D = experts_NK[0].tolist(), m_ND[0]
            for key, buffer in self.experts.members():
                self._blocks.one(buffer, m_D, self._rows[chosen.index(key % E)])
            return torch.addmm(x_ND, gates_NK, self._mixed_KD)
        flat = experts_NK.reshape(-1)
        mixed = torch.empty(N * K, x_ND.shape[1])
        for key, buffer in self.experts.members():
            pairs = torch.from_numpy(np.flatnonzero(flat == key % E))
            mixed[pairs] = self._blocks.many(buffer, m_ND[pairs // K])
        return x_ND + torch.bmm(gates_NK.unsqueeze(1), mixed.view(N, K, -1))[:, 0]


def sampled(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """A token per row, drawn by one uniform number each from the summed probabilities (torch.multinomial draws one per entry of the vocabulary)."""
    summed_BV = (logits_BV.double() / temperature).softmax(1).cumsum(1)
    uniform_B1 = torch.rand(len(summed_BV), 1, generator=generator, dtype=torch.float64)
    return torch.searchsorted(summed_BV, uniform_B1 * summed_BV[:, -1:], right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)


def fits(manifest: Manifest) -> bool:
    """Whether single tokens take the compiled path, which depends on the model alone."""
    config = manifest.model
    return manifest.dtype == "float32" and config.routing == "topk" and manifest.block.weights <= 4 * fused.LARGEST
