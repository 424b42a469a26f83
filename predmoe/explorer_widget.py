"""The explorer in a notebook: one anywidget that shows `explore.view` of what its sliders say, simulated at every change.

    explorer(sources("cpu"))                     our models' traces, synthetic ones, and a file of the user's own
    explorer({"mine": {"as recorded": trace}})   any traces, by name and arm
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import anywidget
import numpy as np
import traitlets

from . import cache_study, explore, reference_table, traces
from .config import ConfigError
from .explore import Held, Settings
from .simulator import SimulationError
from .traces import COLIBRI, Accuracy, Trace, TraceError

ASSETS = Path(__file__).parent / "assets"
EXPERT_BYTES = reference_table.REFERENCE["expert_bytes"]   # as in 05_cache_simulation: our routing, a large model's machine
LARGEST_FILE = 8_000_000                                   # bytes: a notebook's server closes the line at 10 MiB
LARGEST_UNPACKED = 256_000_000                             # bytes, of a compressed one
IMPORTED = "as imported"
MEASURED = ("slots", "gb_per_s", "latency_ms", "layer_ms")   # of these the first position is offered as it is, whatever else is
FAULTS = (ConfigError, SimulationError, TraceError, OSError)
Sources = Mapping[str, Mapping[str, "Trace | Held | Callable[[], Held]"]]   # trace -> arm -> what is replayed, or what makes it when it is first chosen


class Explorer(anywidget.AnyWidget):
    """Controls, numbers, timeline and map over `sources`. Traits: `settings` (of the controls), `view` (`explore.view` of them), `controls`.

    Whatever goes wrong is a sentence in the widget, in the place of the numbers.
    """

    _esm = traitlets.Unicode((ASSETS / "explorer.js").read_text()).tag(sync=True)
    _css = traitlets.Unicode((ASSETS / "explorer.css").read_text()).tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    settings = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    imports = traitlets.Int(LARGEST_FILE).tag(sync=True)

    def __init__(self, sources: Sources, settings: Mapping | None = None, imports: bool = True):
        self.sources = {name: dict(arms) for name, arms in sources.items()}
        self._held: dict[tuple[str, str], Held] = {}
        self._files = 0   # that were chosen in the browser
        self._more = {name: value for name, value in (settings or {}).items() if name in MEASURED}
        first = next(iter(self.sources))
        start = {"trace": first, "arm": next(iter(self.sources[first]))} | dict(settings or {})
        super().__init__(imports=LARGEST_FILE if imports else 0)
        defaults = {field.name: field.default for field in dataclasses.fields(Settings) if field.default is not dataclasses.MISSING}
        self._show(defaults | {"slots": self._quarter(start), "predictor": "ranking"} | start)
        self.observe(lambda change: self._show(change.new), "settings")
        self.on_msg(self._receive)

    def held(self, trace: str, arm: str) -> Held:
        """The chosen trace, made when it is first asked for. Raises ConfigError for a name that is not offered."""
        if trace not in self.sources or arm not in self.sources[trace]:
            raise ConfigError(f"there is no trace {trace!r} of {arm!r}")
        if (trace, arm) not in self._held:
            given = self.sources[trace][arm]
            made = given() if callable(given) else given
            self._held[trace, arm] = made if isinstance(made, Held) else Held(made, describe(made))
        return self._held[trace, arm]

    def _quarter(self, start: Mapping) -> int:
        trace = self.held(start["trace"], start["arm"]).trace
        return max(1, trace.num_layers * trace.meta.num_experts // 4)

    def _show(self, settings: Mapping) -> None:
        """Bring controls and view in line with `settings`; on another trace or arm the controls are its own."""
        try:
            settings = dict(settings)
            arms = tuple(self.sources.get(settings.get("trace"), {}))
            if arms and settings.get("arm") not in arms:
                settings["arm"] = arms[0]
            held = self.held(settings.get("trace"), settings.get("arm"))
            offered = explore.controls(held, {"trace": tuple(self.sources), "arm": arms}, self._more)
            if offered != self.controls:
                settings = explore.nearest(settings, offered, self.controls)
            view = explore.view(held, Settings.read(settings))
        except FAULTS as error:
            self.view = explore.failed(settings, str(error))
        except Exception as error:
            self.view = explore.failed(settings, f"a fault of this program ({type(error).__name__}: {error}); the kernel's log has the details")
            raise
        else:
            with self.hold_trait_notifications(), self.hold_sync():
                self.settings, self.controls, self.view = settings, offered, view

    def _receive(self, widget, content: Mapping, buffers: list) -> None:
        """A file that was chosen in the browser."""
        if content.get("kind") != "import" or len(buffers) != 1:
            return
        name = os.path.basename(str(content.get("name", "")).replace("\\", "/")) or "file"
        label = f"imported: {name}"
        self._files += 1
        try:
            self.sources[label] = {IMPORTED: read_file(name, bytes(buffers[0]))}
            self._held.pop((label, IMPORTED), None)
        except FAULTS as error:
            self.view = explore.failed(self.settings, str(error)) | {"file": self._files}   # an answer, though it be the last one's
        except Exception as error:
            self.view = explore.failed(self.settings, f"{name} cannot be read ({type(error).__name__}: {error})") | {"file": self._files}
            raise
        else:
            self._show(self.settings | {"trace": label, "arm": IMPORTED})
            self.view = self.view | {"file": self._files}


def explorer(sources: Sources, **settings) -> Explorer:
    """The widget over `sources`; `settings` are the controls' first positions, by the names of `explore.Settings`, numbers to three digits."""
    return Explorer(sources, {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in settings.items()})


def read_file(name: str, content: bytes) -> Held:
    """A trace from a file's bytes: ours, or a public format (`traces.read`). Raises TraceError, with the file's name, for what is neither or is unsound.

    Where the format does not say how large an expert is, it counts as the large machine's (EXPERT_BYTES), and `about` says so.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{Path(name).suffix[:16]}"   # the name is another machine's: too long for this one, perhaps, or with characters that no file has here
        try:
            path.write_bytes(content)
            if name.endswith(".safetensors"):
                trace, more = traces.load(path), ""
                trace = dataclasses.replace(trace, **_in_memory(trace))   # its file goes with the folder
            else:
                trace, more = _public(path)
        except TraceError as error:
            raise TraceError(str(error).replace(str(path), name).replace(traces.readers.NAME_IT, "it must be a trace of predmoe (.safetensors), a route_trace CSV, token JSONL, per-prompt JSON, npz, or ROUTE_TRACE lines")) from None
        except OSError as error:
            raise TraceError(f"{name}: the kernel cannot keep a copy to read ({error.strerror}): free some space in {tempfile.gettempdir()}") from None
    return Held(trace, describe(trace) + more)


def _public(path: Path) -> tuple[Trace, str]:
    """A trace of a public format, and what is assumed of it where the format does not say."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            size = sum(item.file_size for item in file.infolist())
        if size > LARGEST_UNPACKED:
            raise TraceError(f"{path}: unpacks to {size / 1e6:,.0f} MB, more than the {LARGEST_UNPACKED / 1e6:.0f} MB that are read here: load it in the notebook and give it to explorer()")
    kind = traces.readers.guess(path)
    taken = inspect.signature(traces.READERS[kind]).parameters
    assumed = {"expert_bytes": EXPERT_BYTES} if "expert_bytes" in taken else {}
    if "num_experts" in taken and taken["num_experts"].default is inspect.Parameter.empty:
        assumed["num_experts"] = traces.readers.highest(path) + 1
    trace = traces.read(path, kind, **assumed)
    more = f" The format does not say how large an expert is: {EXPERT_BYTES / 1e6:g} MB are assumed." if assumed else ""
    return trace, more + (f" Nor does it say how many there are: {trace.meta.num_experts} are assumed, up to the highest that is used." if "num_experts" in taken else "")


def _in_memory(trace: Trace) -> dict:
    copied = lambda array: None if array is None else np.array(array)  # noqa: E731
    held = {key: traces.Prediction(p.horizon, np.array(p.experts_NLM), np.array(p.scores_NLM)) for key, p in trace.predictions.items()}
    return {name: copied(getattr(trace, name)) for name in ("experts_NLK", "starts", "phase", "sequence", "weights_NLK", "token_ids")} | {"predictions": held}


def describe(trace: Trace) -> str:
    """A sentence on what a trace is."""
    meta = trace.meta
    sizes = sorted(set(meta.expert_bytes))
    size = f"{sizes[0] / 1e6:.3g}" if len(sizes) == 1 else f"{sizes[0] / 1e6:.3g} to {sizes[-1] / 1e6:.3g}"
    of = f" of {meta.model}" if meta.model else ""
    return f"{trace.num_tokens:,} tokens{of}, {trace.num_layers} MoE layers of {meta.num_experts} experts of {size} MB, top-{meta.top_k}{f'; {meta.source}' if meta.source else ''}."


# --- what the notebook offers ------------------------------------------------------------------------------------------------------

def sources(profile: str, *, tokens: int = 400, size: int = EXPERT_BYTES) -> dict[str, dict]:
    """The traces to choose from: those recorded of a profile's models, on given text and on their own where they are there, and synthetic ones in
    our models' shape and in that of a large model; the arms are the ordinary and the jointly trained model.

    Our models' experts count as `size` bytes, as in 05_cache_simulation: their own routing on a large model's machine. `tokens`: of the synthetic ones.
    """
    found: dict[str, dict] = {}
    for label, suffix in (("ours, given text", ""), ("ours, own text", "-generated")):
        files = cache_study.recordings(profile, suffix)
        if all(path.exists() for path in files.values()):
            found[label] = {model: functools.partial(_recorded, path, size) for model, path in files.items()}
    found["synthetic, our shape"] = {model: functools.partial(_synthetic, model, cache_study.OURS | {"expert_bytes": size}, tokens, cache_study.OUR_REUSE) for model in cache_study.MODELS}
    found["synthetic, large model"] = {model: functools.partial(_synthetic, model, dict(COLIBRI), 24, 0.35) for model in cache_study.MODELS}
    return found


def _recorded(path: Path, size: int) -> Held:
    trace = traces.load(path)
    return Held(cache_study.of_size(trace, size), f"Recorded: {describe(trace)[:-1]}; here each counts as {size / 1e6:g} MB.")


def _synthetic(model: str, shape: Mapping, tokens: int, reuse: float) -> Held:
    """Routing by lot with the reference study's accuracies of a model's predictors."""
    known = {h: reference_table.published_accuracies(h) for h in (1, 2, 4)}
    predictors = {name: Accuracy(recall={h: known[h][f"{model}-{name}"] for h in known}, spare=4) for name in ("linear", "ranking")}
    predictors["next_router"] = Accuracy(recall={1: known[1]["next-router"]}, spare=4)
    trace = traces.synthetic(tokens=tokens, **shape, reuse=reuse, predictors=predictors, seed=0)
    return Held(trace, f"SYNTHETIC: {describe(trace)[:-1]}; reuse {reuse:g}, the reference study's hit@k of the {model} model, errors that are near misses.")
