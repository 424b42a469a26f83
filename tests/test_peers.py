"""The engine's contenders: each in a process of its own, the same tokens, and where asked the same memory."""

import sys

import pandas as pd
import pytest
from engine_models import house

from predmoe import gguf_file, peers
from predmoe.config import ConfigError
from predmoe.process import forget, memory_group

NO_LLAMA = gguf_file.missing()
WITHOUT_LLAMA = [kind for kind in peers.KINDS if kind != peers.LLAMA]


@pytest.fixture
def group():
    with memory_group() as made:
        if made is None:
            pytest.skip("no memory control group can be made here (no right to, or none mounted)")
        yield made


def row(kind, **more):
    return dict(kind=kind, tok_s=10.0, peak_mb=10.0, memory_mb=0.0, limited=False, ran=True) | more


def test_peers_that_nobody_knows_or_that_fail_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="peers: 'llama' is unknown; choose of transformers, offload, engine, engine-disk, llama.cpp"):
        peers.compare(["llama"], tmp_path, tmp_path, [[1]], new_tokens=2, share=0.5)
    with pytest.raises(ConfigError, match="peers: a memory limit of -5 MB is none"):
        peers.compare(["engine-disk"], tmp_path, tmp_path, [[1]], new_tokens=2, share=0.5, memory_mb=-5)
    monkeypatch.setattr(gguf_file, "WANTED", {"no-such-package": "1.0"})
    with pytest.raises(ConfigError, match="peers: llama.cpp needs no-such-package, which is not installed: pip install --no-deps"):
        peers.compare(["llama.cpp"], tmp_path, tmp_path, [[1]], new_tokens=2, share=0.5)
    nobody = peers.compare([], tmp_path, tmp_path, [[1]], new_tokens=2, share=0.5)
    assert list(nobody.columns) == peers.COLUMNS and peers.say(nobody) == []


def test_ratios_are_said_of_those_that_ran():
    table = pd.DataFrame([row("engine", tok_s=30.0), row("transformers"), row("engine-disk", tok_s=20.0)])
    (said,) = peers.say(table)
    assert "3.00 times the decoding tokens/s of transformers (30.0 against 10.0)" in said


def test_a_limit_is_said_as_it_was():
    disk = [row("engine-disk", tok_s=20.0, memory_mb=512.0, limited=True), row("llama.cpp", memory_mb=512.0, limited=True)]
    killed = row("offload", tok_s=float("nan"), memory_mb=512.0, limited=True, ran=False)
    ratio, said = peers.say(pd.DataFrame([*disk, killed]))
    assert "2.00 times the decoding tokens/s of llama.cpp" in ratio
    assert said == "Each of engine-disk, llama.cpp, offload in a memory control group of 512 MB, its page cache included; within that offload does not run."
    (_, said) = peers.say(pd.DataFrame([one | {"limited": False} for one in disk]))
    assert said == "A limit of 512 MB was asked for, but no memory control group can be had here: engine-disk, llama.cpp ran without a limit."


def test_tokens_before_the_first_difference_count_as_the_same():
    assert peers._same([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8
    assert peers._same([[1, 2]], [[3, 2]]) == 0 and peers._same(None, [[1]]) is None
    with pytest.raises(peers.PeerFailed, match="engine, transformers do not give the same greedy tokens"):
        peers._agree({"transformers": [[1]], "engine": [[2]], "llama.cpp": [[3]]}, "float32")
    peers._agree({"transformers": [[1]], "engine": [[2]], "offload": None, "llama.cpp": [[3]]}, "bf16")   # rounded in another way
    with pytest.raises(peers.PeerFailed, match="transformers, offload do not give"):
        peers._agree({"transformers": [[1]], "engine": [[2]], "offload": [[2]]}, "bf16")


@pytest.mark.slow
def test_all_contenders_give_the_same_tokens_in_processes_of_their_own():
    h = house()
    table = peers.compare(WITHOUT_LLAMA, h.root / "checkpoint", h.folder, h.prompts[:2], new_tokens=12, share=0.3)
    assert table.kind.tolist() == WITHOUT_LLAMA and (table.tok_s > 0).all() and (table.tokens == 22).all() and (table.peak_mb > 50).all()
    assert table.ran.all() and (table.same_tokens == 1).all() and not table.limited.any() and table.charged_mb.isna().all()


@pytest.mark.slow
@pytest.mark.skipif(NO_LLAMA is not None, reason=str(NO_LLAMA))
def test_llama_cpp_takes_part():
    h = house()
    table = peers.compare(["engine", "llama.cpp"], h.root / "checkpoint", h.folder, h.prompts[:2], new_tokens=12, share=0.3).set_index("kind")
    assert table.tokens["llama.cpp"] == 22 and table.tok_s["llama.cpp"] > 0 and table.peak_mb["llama.cpp"] < table.peak_mb["engine"]
    assert table.same_tokens["llama.cpp"] >= 0.25, "bf16 rounds, but the model is the same"
    assert not list(h.root.glob("*/model.gguf"))


# --- memory ---------------------------------------------------------------------------------------------------------------------

READ = """
import mmap, sys
from predmoe.process import MemoryGroup, Path, kernel_bytes, major_faults
group, file = MemoryGroup(Path(sys.argv[1])), open(sys.argv[2], "rb")
assert group.limit(24)
peak, read, faults = group.peak(), kernel_bytes(), major_faults()
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for turn in range(2):
    sum(mapped[i] for i in range(0, len(mapped), 4096))
print(peak(), kernel_bytes() - read, major_faults() - faults)
"""


def run(command):
    import subprocess

    return subprocess.run(command, capture_output=True, text=True)


def test_a_limit_holds_the_page_cache_too(group, tmp_path):
    """A mapped file of 48 MB, read twice within 24 MB, comes from the disk twice: the kernel cannot keep it."""
    from predmoe.process import kernel_bytes

    file = tmp_path / "file"
    file.write_bytes(b"\x01" * 48_000_000)
    forget([file])
    if kernel_bytes() is None:
        pytest.skip("the kernel does not count this process's bytes")
    done = run(group.command([sys.executable, "-c", READ, str(group.folder), str(file)]))
    assert done.returncode == 0, done.stderr
    peak, read, faults = map(int, done.stdout.split())
    assert peak <= 24_000_000 and faults > 0
    if not read:
        pytest.skip("the temporary folder is in memory: its files are never read from a disk")
    assert read >= 1.5 * 48_000_000


def test_what_does_not_fit_a_limit_is_ended_and_the_group_goes_away(tmp_path):
    hoard = "from predmoe.process import MemoryGroup, Path; import sys; print(MemoryGroup(Path(sys.argv[1])).limit(32)); x = bytearray(b'x') * 200_000_000"
    with memory_group() as group:
        if group is None:
            pytest.skip("no memory control group can be made here (no right to, or none mounted)")
        done = run(group.command([sys.executable, "-u", "-c", hoard, str(group.folder)]))
        assert done.returncode == -9 and done.stdout == "True\n", done.stderr
        assert group.folder.exists()
    assert not group.folder.exists()


@pytest.mark.slow
def test_contenders_under_a_limit_say_so_or_do_not_run(group):
    h = house()
    few = dict(new_tokens=4, share=0.3)
    charged = peers.charge_of("engine-disk", h.root / "checkpoint", h.folder, h.prompts[:1], **few)
    table = peers.compare(["engine-disk"], h.root / "checkpoint", h.folder, h.prompts[:1], **few, memory_mb=1.5 * charged)
    assert table.limited.all() and table.ran.all() and table.charged_mb[0] <= table.memory_mb[0] == 1.5 * charged
    table = peers.compare(["engine-disk"], h.root / "checkpoint", h.folder, h.prompts[:1], **few, memory_mb=20)
    assert table.limited.all() and not table.ran.any() and table.tok_s.isna().all()
    assert "within that engine-disk does not run" in peers.say(table)[-1]


def test_without_control_groups_there_is_none(tmp_path):
    own = tmp_path / "own"
    with memory_group(tmp_path, tmp_path / "nothing") as group:
        assert group is None
    for text in ("4:memory:/a\n0::/\n", "0::/a\n", "3:cpu:/\n"):   # folders that are no control groups: made, seen through and removed
        own.write_text(text)
        for folder in (tmp_path / "memory" / "a", tmp_path / "a"):
            folder.mkdir(parents=True, exist_ok=True)
        with memory_group(tmp_path, own) as group:
            assert group is None
        assert not list(tmp_path.rglob("predmoe-*"))
