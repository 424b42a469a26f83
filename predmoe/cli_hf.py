"""The commands on transformers models: `predmoe probe --model` and `predmoe trace record --model`. See `cli` for how errors are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import arguments
from .config import ConfigError
from .files import write_text
from .measurements import RANKING_LOSSES


def add_model(command, purpose: str, *, required: bool) -> None:
    """The options that name a model and its text's tokens."""
    group = command.add_argument_group("a transformers model")
    group.add_argument("--model", required=required, metavar="PATH_OR_HUB_ID",
                       help=f"{purpose}: a folder (a checkpoint, or a run of the store) or a hub id; only models whose gates are recognised")  # fmt: skip
    group.add_argument("--tokenizer", help="bpe8k, gpt2, a folder or a hub id (default: the model's own)")
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: auto, as stored)")
    group.add_argument("--device", type=arguments.device, help="cpu, cuda or cuda:N (default: cpu)")


def add_recording(command) -> None:
    """The options of `trace record` that go with --model alone."""
    add_model(command, "record this model instead of a profile's", required=False)
    command.add_argument("--text", nargs="+", type=arguments.text, default=[], metavar="TEXT", help="with --model: texts, one sequence each")
    command.add_argument("--text-file", nargs="+", default=[], type=arguments.path, metavar="FILE", help="with --model: files of text, one sequence each")
    command.add_argument("--horizon", nargs="+", type=int, metavar="H", help="with --model: MoE layers ahead (default: those of --heads, else 1 2 4)")
    command.add_argument("--heads", nargs="+", default=[], metavar="KIND=FILE", help="with --model: predictors of `probe --save`: linear=FILE ranking=FILE")


def add(commands) -> None:
    """Add `probe` to the parser's subcommands."""
    from .cli_traces import _told   # which imports this module

    command = commands.add_parser("probe", help="how far ahead a transformers model's routing can be foretold: hit@k per horizon and layer",
                                  epilog="Confounds beside the fitted predictors: the layer's own router applied early, a lookup by token id, the most popular experts.")  # fmt: skip
    add_model(command, "the model to probe, frozen", required=True)
    command.add_argument("--corpus", default="offline", help="offline, fineweb-edu or files:PATH (default: offline)")
    command.add_argument("--horizon", nargs="+", type=int, metavar="H", help="layers ahead, in MoE layers (default: 1 2 4, as far as the model has them)")
    command.add_argument("--context", type=int, metavar="T", help="tokens of a window (default: 512, or the model's context)")
    whole = (("tokens", 100_000, "training tokens"), ("heldout-tokens", 65_536, "tokens that are evaluated"),
             ("dev-tokens", 32_768, "tokens that say when a fit has converged"), ("batch-tokens", 2048, "tokens of a step of the fit"),
             ("max-steps", 6000, "steps of a fit at most"), ("seed", 0, "of the heads and of the order of their batches"))  # fmt: skip
    for name, default, what in whole:
        command.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    command.add_argument("--ranking-loss", choices=RANKING_LOSSES, default="margin_all",
                         help="what the ranking MLP is fitted by (default: margin_all, of every expert; margin, the reference study's, is weak where many are chosen)")  # fmt: skip
    command.add_argument("--memory-mb", type=arguments.number(above=0), default=4000.0, metavar="N",
                         help="budget of activations in memory; what is cached beyond it goes to a file (default: 4000; model and heads come on top)")  # fmt: skip
    command.add_argument("--scratch", type=arguments.folder, help="folder of that file (default: the system's temporary one)")
    command.add_argument("--save", type=arguments.folder, metavar="FOLDER", help="keep the fitted predictors, for `trace record --model --heads`")
    command.add_argument("--json", type=arguments.path, help="write every number")
    command.add_argument("--quiet", action="store_true", help="no progress")
    command.set_defaults(command=_told(_probe))


def _probe(options) -> int:
    from .cli_traces import may_write
    from .config import DataConfig, PosthocConfig
    from .hf_models import seems_foreign, tokenizer_of
    from .hf_record import save_heads
    from .probe import ProbeConfig, probe, table

    may_write(options.json, outside=Path(options.model))
    if options.save and not options.save.parent.is_dir():
        raise ConfigError(f"{options.save.parent}: no such folder to write {options.save.name} in")
    config = ProbeConfig(horizons=tuple(options.horizon) if options.horizon else None, context=options.context,
                         data=DataConfig(corpus=options.corpus, heldout_tokens=options.heldout_tokens, dev_tokens=options.dev_tokens),
                         fit=PosthocConfig(tokens=options.tokens, batch_tokens=options.batch_tokens, max_steps=options.max_steps, seed=options.seed, ranking_loss=options.ranking_loss,
                                           eval_every=max(1, min(PosthocConfig.eval_every, options.max_steps))),
                         memory=int(options.memory_mb * 1e6), scratch=str(options.scratch) if options.scratch else None)  # fmt: skip
    say = (lambda line: None) if options.quiet else lambda line: print(line, file=sys.stderr, flush=True)
    backbone = _load(options, say)
    result, fitted = probe(backbone, tokenizer_of(options.model, options.tokenizer), config, name=options.model, progress=say)
    sizes = backbone.config
    print(f"{options.model}: {sizes.num_layers} MoE layers of {backbone.model_layers} x {sizes.num_experts} experts, top-{sizes.top_k}; "
          f"validation loss {result['val_loss']:.4f} nats")  # fmt: skip
    for h in result["hit"]["linear"]:
        print(f"\nhit@{sizes.top_k}, {h} MoE layer{'' if h == '1' else 's'} ahead (chance {sizes.top_k / sizes.num_experts:.4f})")
        print(table(result, int(h)).to_string(float_format=lambda value: f"{value:.4f}"))
    for kind, done in result["converged"].items():
        if not done:
            print(f"predmoe: warning: the {kind} predictor had not converged after {options.max_steps} steps: its hit@k is a lower bound", file=sys.stderr)
    if seems_foreign(result["val_loss"], sizes.vocab_size):
        cost = f"text costs {result['val_loss']:.2f} nats a token, more than guessing among all ids"
        print(f"predmoe: warning: {cost}: is {result['tokenizer']} the model's tokenizer?", file=sys.stderr)
    if options.save:
        print("\npredictors: " + " ".join(f"{path.stem}={path}" for path in save_heads(fitted, options.save)))
    if options.json:
        write_text(options.json, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return 0


def record(options):
    """What `trace record --model` does; returns the trace that it has written."""
    from . import traces
    from .cli_traces import may_write
    from .hf_models import tokenizer_of
    from .hf_record import record_texts

    others = {"profile": options.profile, "arm": options.arm, "seed": options.seed, "set": options.changes, "generated": options.generated or None, "per-domain": options.per_domain,
              "temperature": options.temperature, "generation-seed": options.generation_seed, "predictors": options.predictors}  # fmt: skip
    if given := [f"--{name}" for name, value in others.items() if value is not None and value != []]:
        raise ConfigError(f"{', '.join(given)} cannot go with --model: {'it belongs' if len(given) == 1 else 'they belong'} to recording a profile's model")
    if options.out is None:
        raise ConfigError("--model needs --out, the trace's file")
    may_write(trace=options.out, but=options.text_file, outside=Path(options.model))
    if not options.text and not options.text_file:
        raise ConfigError("--model needs text to record: --text TEXT..., or --text-file FILE...")
    names = [f"text {i}" for i in range(1, len(options.text) + 1)] + [str(path) for path in options.text_file]
    texts = options.text + [_read(path) for path in options.text_file]
    heads = {}
    for given in options.heads:
        kind, equals, file = given.partition("=")
        if not (equals and file):
            raise ConfigError(f"--heads {given!r} is not KIND=FILE, such as ranking=heads.safetensors")
        heads[kind] = Path(file)
    backbone = _load(options, lambda line: print(line, file=sys.stderr, flush=True))
    called = Path(options.model).resolve().name if Path(options.model).exists() else options.model   # where it lies is nobody's business
    trace = record_texts(backbone, tokenizer_of(options.model, options.tokenizer), texts, names, model=called, prompt=options.prompt, tokens=options.tokens,
                         horizons=options.horizon, heads=heads, guesses=options.guesses)  # fmt: skip
    traces.save(trace, options.out)
    return trace


def _load(options, say):
    """The model that the options name. Of a hub's it is told before, as the libraries ask for a minute until they give a hub up."""
    from .hf_models import checkpoint_folder, load

    if not Path(checkpoint_folder(options.model)).exists():
        say(f"{options.model} is no folder here: asking the hub for it, a minute at least where there is no network")
    return load(options.model, dtype=options.dtype or "auto", device=options.device or "cpu")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")   # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
