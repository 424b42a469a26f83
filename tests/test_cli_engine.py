"""`predmoe export` and `predmoe generate`: what they write and print, and one sentence for whatever is wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from commands import refused
from engine_models import heads, house
from storage_double import EIO, Faulty
from tiny_models import lively

from predmoe import cli, traces
from predmoe.checkpoint import save_checkpoint
from predmoe.engine import Engine, export, load_manifest
from predmoe.engine.layout import EXPERTS, MANIFEST, RESIDENT
from predmoe.simulator import Cache, count
from predmoe.tokenizer import load_tokenizer

BLOCK = 12288
IDS = "5,9,2,40,33,7"   # of a vocabulary of 61


def command(folder, *more, mb=(6 + 4) * BLOCK / 1e6, prompt=IDS):
    return ["generate", "--model", str(folder), "--prompt-ids", *prompt.split(), "--cache-mb", str(mb), *map(str, more)]


def expected(prompt, new):
    from engine_models import resident_tokens

    return resident_tokens(house().model, [prompt], new)[0][0]


def test_export_takes_a_runs_folder_and_says_what_it_wrote(tmp_path, capsys):
    model = lively()
    save_checkpoint(model, tmp_path / "run" / "checkpoint")
    heads(tmp_path / "linear.safetensors", model, "linear")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "int8", "--heads", f"linear={tmp_path / 'linear.safetensors'}", "--name", "small"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out'}: 4 layers x 8 experts of 0.004096 MB (int8), linear\n" and "layer 4 of 4" in printed.err
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "unnamed")]) == 0 and load_manifest(tmp_path / "unnamed").name == "run"
    manifest = load_manifest(tmp_path / "out")
    assert manifest.name == "small" and manifest.heads == {"linear": (1, 2)} and manifest.dtype == "int8"


def test_generate_streams_the_models_tokens_and_ends_with_one_summary(tmp_path, capsys):
    h = house()
    out, trace = tmp_path / "summary.json", tmp_path / "t.trace"
    assert cli.main(command(h.folder, "--max-new-tokens", 40, "--prefetch", "next_router", "--horizon", "1+2", "--json", out, "--record", trace)) == 0
    printed = capsys.readouterr()
    assert [int(word) for word in printed.out.split()] == expected([5, 9, 2, 40, 33, 7], 40)
    for part in ("I/O ", "tok/s", "p99", "hit rate", "issued =", "peak resident", "the kernel counted", "(6 cached experts, 4 reads at a time)",
                 "recorded   what next_router, linear, ranking foretell at every token"):
        assert printed.err.count(part) == 1, printed.err
    summary = json.loads(out.read_text())
    assert summary["tokens"] == 40 and summary["buffer_bytes"] == 10 * BLOCK and summary["read_bytes"] == summary["demand_bytes"] + summary["prefetch_bytes"]
    held = traces.load(trace)
    assert held.predictors == {"linear": (1, 2), "next_router": (1, 2), "ranking": (1, 2)} and held.num_passes == 40

    # the recorded future: an oracle, Belady and pinned experts can be asked for, and demand gives the simulator's counts
    for more, cache in ((["--prefetch", "oracle"], None), (["--policy", "belady"], Cache(slots=6, policy="belady")), (["--pinned", 3], Cache(slots=6, pinned=3))):
        assert cli.main(command(h.folder, "--max-new-tokens", 40, "--future", trace, "--json", out, *more)) == 0
        assert [int(word) for word in capsys.readouterr().out.split()] == expected([5, 9, 2, 40, 33, 7], 40)
        if cache:
            summary, simulated = json.loads(out.read_text()), count(held, cache)
            assert (summary["accesses"], summary["hits"], summary["demand_bytes"]) == (simulated.accesses, simulated.hits, simulated.read_bytes)


@pytest.mark.parametrize("option, name", [("--record", EXPERTS), ("--record", RESIDENT), ("--json", MANIFEST)])
def test_the_model_itself_is_not_written_over(option, name, capsys):
    h = house()
    before = (h.folder / name).read_bytes()
    assert cli.main(command(h.folder, "--max-new-tokens", 2, option, h.folder / name)) == 2
    assert "would overwrite a file that the same command reads or writes" in capsys.readouterr().err and (h.folder / name).read_bytes() == before


@pytest.mark.parametrize("option", ["--record", "--json"])
def test_nothing_is_written_into_the_models_folder(option, tmp_path, capsys):
    h = house()
    before = sorted(h.folder.iterdir())
    (tmp_path / "model").symlink_to(h.folder)
    for out in (h.folder / "new", h.folder / ".." / h.folder.name / "new", tmp_path / "model" / "new"):
        refused(capsys, command(h.folder, option, out), f"{out} would lie in the model's own folder, {h.folder}; name a file elsewhere")
    assert sorted(h.folder.iterdir()) == before


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for out, said in (("/dev/full", "is no regular file"), ("/dev/null", "is no regular file"), (tmp_path / "pipe", "is no regular file"), (tmp_path, "is a folder"), ("/proc/t", "cannot be written")):
        refused(capsys, command(tmp_path / "none", "--record", out), said)
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_written_at_the_end_leaves_text_summary_and_the_other_file(tmp_path, monkeypatch, capsys):
    h, trace, out = house(), tmp_path / "t.trace", tmp_path / "s.json"
    known = expected([5, 9, 2, 40, 33, 7], 5)
    assert cli.main(command(h.folder, "--max-new-tokens", 5, "--json", "/dev/full", "--record", trace)) == 2
    printed = capsys.readouterr()
    assert [int(word) for word in printed.out.split()] == known and "hit rate" in printed.err
    assert printed.err.endswith("\npredmoe: /dev/full cannot be written: No space left on device; name a file elsewhere and run the same command again\n")
    assert traces.load(trace).num_passes == 5

    def full(*_):
        raise traces.TraceError(f"{trace} cannot be written: No space left on device")

    monkeypatch.setattr(traces, "save", full)
    assert cli.main(command(h.folder, "--max-new-tokens", 5, "--json", out, "--record", trace)) == 2
    printed = capsys.readouterr()
    assert [int(word) for word in printed.out.split()] == known and "hit rate" in printed.err
    assert printed.err.endswith(f"\npredmoe: {trace} cannot be written: No space left on device\n") and json.loads(out.read_text())["tokens"] == 5


def test_a_cache_of_more_than_the_model_takes_the_models_size(tmp_path, capsys):
    for scope in ("global", "layer"):
        assert cli.main(command(house().folder, "--max-new-tokens", 5, "--scope", scope, "--json", tmp_path / "s.json", mb=1e15)) == 0
        assert [int(word) for word in capsys.readouterr().out.split()] == expected([5, 9, 2, 40, 33, 7], 5)
        assert json.loads((tmp_path / "s.json").read_text())["buffer_bytes"] == (4 * 8 + 4) * BLOCK


def test_numbers_that_cannot_be_are_refused_before_anything_is_loaded(tmp_path, capsys):
    for option, value in (("--max-new-tokens", 0), ("--max-new-tokens", -1), ("--max-new-tokens", 10**25), ("--lanes", 0), ("--seed", 10**20)):
        refused(capsys, command(tmp_path / "none", option, value), f"{option}={value} must lie in ")


def test_a_predictor_that_an_export_has_not_is_refused(tmp_path, capsys):
    export(house().root / "checkpoint", tmp_path / "out", dtype="float32")
    refused(capsys, command(tmp_path / "out", "--prefetch", "ranking"), "the export has no predictor 'ranking'; it has none, next_router, oracle; fitted ones come with a run that a notebook or `predmoe plan --train` has measured, or with --heads")


def test_several_prompts_are_one_batch(capsys):
    h = house()
    prompts = [",".join(map(str, prompt)) for prompt in h.prompts[:2]]
    assert cli.main(command(h.folder, "--max-new-tokens", 12, "--buffered", "--scope", "layer", prompt=" ".join(prompts), mb=12 * BLOCK / 1e6)) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(f"[{i}] {' '.join(map(str, h.tokens[i][:12]))}\n" for i in (0, 1)) and "buffered (asked for)" in printed.err


def test_text_goes_in_and_out(tmp_path, capsys):
    tokenizer = load_tokenizer("bpe8k")
    model = lively(vocab_size=tokenizer.vocab_size, num_layers=2, context=64)
    export(save_checkpoint(model, tmp_path / "c"), tmp_path / "out", dtype="float32", tokenizer="bpe8k")
    prompt, new = "Four score and seven years ago", 20
    assert cli.main(["generate", "--model", str(tmp_path / "out"), "--prompt", prompt, "--cache-mb", "1", "--max-new-tokens", str(new), "--no-stop", "--prefetch", "next_router"]) == 0
    from engine_models import resident_tokens

    tokens = resident_tokens(model, [tokenizer.encode(prompt)], new)[0][0]
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}").rstrip("\n")


def test_a_prompt_that_is_no_text_is_refused(tmp_path, capsys):
    refused(capsys, ["generate", "--model", tmp_path, "--cache-mb", 1, "--prompt", "whole", os.fsdecode(b"caf\xe9")], "--prompt: it is not UTF-8 text: character 4 cannot be read")


def test_a_token_that_ends_within_a_character_waits_for_the_rest():
    from types import SimpleNamespace

    from predmoe.engine.text import Stream

    parts = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"z"}
    stream = Stream(SimpleNamespace(decode=lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace")))
    assert [stream.add([i]) for i in (0, 1, 2, 3)] == ["a", "", "é", "z"]


def test_ctrl_c_ends_at_once_with_the_summary(tmp_path, capsys):
    model = lively(context=20_000, num_layers=2)
    export(save_checkpoint(model, tmp_path / "c"), tmp_path / "out", dtype="float32")
    at = []

    def interrupt(*_):
        at.append(time.process_time())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        code = cli.main(command(tmp_path / "out", "--max-new-tokens", 19_000, "--prefetch", "next_router"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert code == 130 and time.process_time() - at[0] < 1.0
    assert "tok/s" in capsys.readouterr().err and not any(thread.name.startswith("reader") for thread in threading.enumerate())


@pytest.mark.parametrize("how, code, said", [(signal.SIGINT, 130, ""), (signal.SIGTERM, 143, "predmoe: stopped by SIGTERM; the same command begins anew\n")])
def test_a_stopped_program_ends_without_taking_itself_apart(tmp_path, how, code, said):
    """From the signal to the end: on a busy machine each tenth of a second of processor time may be a second of waiting. Also, the summary, and nothing that is not true."""
    model = lively(context=20_000, num_layers=2)
    export(save_checkpoint(model, tmp_path / "c"), tmp_path / "out", dtype="float32")
    heard = lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)]  # noqa: E731
    program = [sys.executable, "-m", "predmoe", *command(tmp_path / "out", "--max-new-tokens", 19_000)]
    with open(tmp_path / "err", "w+") as err, subprocess.Popen(program, stdout=subprocess.PIPE, stderr=err, preexec_fn=heard) as process:
        process.stdout.read(20)
        fields = open(f"/proc/{process.pid}/stat").read().rsplit(")", 1)[1].split()
        process.send_signal(how)
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        told = err.seek(0) or err.read()
    assert process.returncode == code and "hit rate" in told and told.endswith(said) and told.count("begins anew") == bool(said) and "goes on" not in told
    spent = used.ru_utime + used.ru_stime - sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    assert spent < 0.4, f"{spent} s of a core after the signal"


def test_a_reader_that_leaves_is_one_sentence(tmp_path):
    program = [sys.executable, "-m", "predmoe", *command(house().folder, "--max-new-tokens", 120)]
    with open(tmp_path / "err", "w+") as err, subprocess.Popen(program, stdout=subprocess.PIPE, stderr=err) as process:
        process.stdout.read(3)
        process.stdout.close()
        assert process.wait() == 141
        told = (err.seek(0) or err.read()).splitlines()
    assert told[-1] == "predmoe: whoever read what is printed has closed it (head, for instance): the rest is not computed" and not any("Traceback" in line for line in told)


def test_the_program_cleans_up_before_it_leaves(monkeypatch):
    done, again = [], []
    monkeypatch.setattr(sys, "argv", ["predmoe", "generate"])
    monkeypatch.setattr(cli.signal, "signal", lambda *how: again.append(how))
    monkeypatch.setattr(cli.atexit, "_run_exitfuncs", lambda: done.append("atexit"))
    monkeypatch.setattr(cli.os, "_exit", done.append)
    for code, ends in ((130, ["atexit", 130]), (143, ["atexit", 143]), (2, []), (0, [])):
        monkeypatch.setattr(cli, "_run", lambda arguments, code=code: code)
        assert cli.main() == code and done == ends and cli.main(["generate"]) == code and done == ends
        done.clear()
    assert again == [(signal.SIGINT, signal.SIG_DFL)] * 2   # a second Ctrl-C meanwhile is no traceback


def test_an_export_that_is_stopped_says_what_is_true_of_it(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["predmoe.engine.export"], "_write_experts", stopped)   # the package has a function of the module's name
    assert cli.main(["export", str(house().root / "checkpoint"), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.endswith("predmoe: interrupted; what is not whole is removed, and the same command begins anew\n") and not list(tmp_path.iterdir())


def test_kernels_are_compiled_by_a_child_before_any_clock_and_said_to_be(monkeypatch, capsys):
    h, started = house(), []
    monkeypatch.setattr("predmoe.engine.table.ready", lambda kernels: False)
    monkeypatch.setattr("predmoe.cli_engine.subprocess.run", lambda program, **how: started.append(program))
    assert cli.main(command(h.folder, "--max-new-tokens", 2)) == 0
    assert capsys.readouterr().err.count("compiling the kernels") == 1
    ((_, _, text),) = started
    assert text == "from predmoe.engine import loop, table; table.prepare(loop.kernels_of(True))"
    monkeypatch.undo()
    assert cli.main(command(h.folder, "--max-new-tokens", 2)) == 0 and "compiling" not in capsys.readouterr().err


def test_the_default_of_new_tokens_fits_the_context(capsys):
    h = house()   # a context of 136
    for prompt, new in ((6, 64), (100, 36), (135, 1)):
        assert cli.main(command(h.folder, prompt=",".join("5" * prompt))) == 0
        assert len(capsys.readouterr().out.split()) == new
    refused(capsys, command(h.folder, prompt=",".join("5" * 136)), "prompt 0: 136 tokens and 1 new ones exceed the model's context of 136")
    refused(capsys, command(h.folder, "--max-new-tokens", 37, prompt=",".join("5" * 100)), "prompt 0: 100 tokens and 37 new ones exceed")


def test_a_failing_disk_ends_with_a_sentence_and_the_summary(monkeypatch, capsys):
    monkeypatch.setattr(Engine.__init__, "__kwdefaults__", Engine.__init__.__kwdefaults__ | {"preadv": Faulty(errors={"always": EIO})})
    assert cli.main(command(house().folder)) == 1
    printed = capsys.readouterr()
    assert "failed: Input/output error" in printed.err and "hit rate" in printed.err


@pytest.mark.parametrize("arguments, said", [
    (["--cache-mb", "0.05"], "--cache-mb 0.05 is too small: a top-2 set and 4 reads at a time need 0.074"),
    (["--prefetch", "cotrained"], "the export has no predictor 'cotrained'; it has none, next_router, linear, ranking, oracle"),
    (["--prefetch", "linear", "--horizon", "4"], "horizon 4 is beyond the last layer"),
    (["--prefetch", "oracle"], "the oracle must know the future"),
    (["--prefetch", "linear", "--guard", "window"], "guard='window' is for the simulator only"),
    (["--policy", "arc"], "policy='arc' is unknown; choose one of lru,"),
    (["--max-new-tokens", "131"], "6 tokens and 131 new ones exceed the model's context of 136"),
    (["--verify", "no"], "verify='no' is unknown"),
    (["--threads", "0"], "--threads=0 must lie in 1.."), (["--threads", "1000000"], f"--threads=1000000 must lie in 1..{4 * os.cpu_count()}"),
    (["--lanes", "0"], "--lanes=0 must lie in 1..1024"), (["--lanes", "10000000000"], "--lanes=10000000000 must lie in 1..1024"),
    (["--cache-mb", "nan"], "--cache-mb: nan is not a finite number above 0"),
    (["--cache-mb", "inf"], "--cache-mb: inf is not a finite number above 0"),
    (["--temperature", "1e-320"], "temperature=1e-320 must be 0, for the likeliest token, or finite and at least 1e-06"),
    (["--prefetch", "linear", "--threshold", "1.5"], "threshold=1.5 must lie in 0..1: here a guess's score is a probability"),
    (["--prefetch", "linear", "--threshold", "-1"], "threshold=-1.0 must lie in 0..1"),
    (["--policy", "static"], "give the trace of an earlier generation (--future), or usage"),
    (["--temperature", "nan"], "--temperature: nan is not a finite number of at least 0"),
    (["--temperature", "1", "--seed", "-99999999999999999999"], "--seed=-99999999999999999999 must lie in"),
    (["--record", "/none/t.trace"], "/none: no such folder to write t.trace in"),
    (["--future", "/none.trace", "--pinned", "1"], "/none.trace: No such file or directory"),
    (["--budget", "0", "--horizon", "1+2"], "--horizon, --budget would have no effect without a prefetch: name one with --prefetch, or leave them out"),
    (["--prefetch", "none", "--no-expire"], "--no-expire would have no effect without a prefetch"),
    (["--threshold", "0.5", "--guard", "none", "--cancel"], "--threshold, --guard, --cancel would have no effect without a prefetch"),
    (["--seed", "0"], "--seed would have no effect at --temperature 0, where nothing is drawn: give a temperature, or leave it out"),
    (["--future", "/none.trace", "--prefetch", "linear"], "--future would have no effect here: give --prefetch oracle, --policy belady or static, or --pinned"),
])  # fmt: skip
def test_what_cannot_be_generated_is_one_sentence(capsys, arguments, said):
    refused(capsys, [*command(house().folder), *arguments], said)


def test_models_that_cannot_be_used_are_one_sentence(tmp_path, capsys):
    h = house()
    refused(capsys, command(tmp_path / "none"), "holds no manifest.json: it is not an exported model")
    refused(capsys, command(h.root / "checkpoint"), "holds no manifest.json: it is not an exported model")
    refused(capsys, ["generate", "--model", h.folder, "--prompt", "text", "--cache-mb", "1"], "came without a tokenizer: give the prompt as token ids")
    refused(capsys, ["generate", "--model", h.folder, "--prompt-ids", "61", "--cache-mb", "1"], "prompt 0 has a token id outside 0..60")
    copy = shutil.copytree(h.folder, tmp_path / "copy")
    raw = bytearray((copy / "resident.safetensors").read_bytes())
    (copy / "resident.safetensors").write_bytes(raw[:-100])
    refused(capsys, command(copy), "resident.safetensors is damaged")


@pytest.mark.parametrize("arguments, said", [
    (["--dtype", "int4"], "dtype='int4' is unknown; choose one of float32, bf16, int8"),
    (["--heads", "linear"], "--heads 'linear' is not KIND=FILE"),
    (["--tokenizer", "foo"], "tokenizer='foo' is unknown; choose one of bpe8k, gpt2, or tokenizer.json"), (["--tokenizer", "tokenizer.json"], "tokenizer.json: no such file"),
    (["--heads", "linear=/a", "linear=/b"], "--heads names two linear predictors, /a and /b; give one of them"),
    (["--heads", "linear=/none"], "/none cannot be read as the weights of a linear predictor"),
])
def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(tmp_path, capsys, arguments, said):
    refused(capsys, ["export", house().root / "checkpoint", tmp_path / "out", *arguments], said)
    refused(capsys, ["export", tmp_path, tmp_path / "out"], "holds no config.json: it is not a checkpoint")
    assert not list(tmp_path.iterdir())


def test_an_empty_prompt_is_one_sentence(tmp_path, capsys):
    export(house().root / "checkpoint", tmp_path / "out", dtype="float32", tokenizer="bpe8k")
    refused(capsys, ["generate", "--model", tmp_path / "out", "--prompt", "", "--cache-mb", "1"], "prompt 0 is empty: the model needs at least one token")


@pytest.mark.slow
def test_a_soak_keeps_its_memory_and_its_books():
    """20,800 tokens with a cache of one top-k set: memory within 2%, the ledger balanced, no buffer lost, no thread left."""
    import psutil
    from engine_models import NEW, opened

    from predmoe.simulator import Prefetch

    h, memory = house(), []
    with opened(h.folder, cache=Cache(slots=2), prefetch=Prefetch(source="next_router", horizon=(1, 2), budget=1)) as engine:
        for _ in range(20):
            assert engine.generate(h.prompts, max_new_tokens=NEW) == h.tokens
            memory.append(psutil.Process().memory_info().rss)
        engine.experts.quiet()
        engine.summary().ledger.check()
        assert engine.summary().tokens == 20 * len(h.prompts) * NEW and engine.experts.leaked() == 0
    assert np.ptp(memory[2:]) < 0.02 * memory[2]
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())
