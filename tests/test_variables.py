import socket

import pytest

from predmoe import children, cli, distributed, paths, variables
from predmoe.config import ConfigError
from predmoe.runs import default_store
from commands import refused


@pytest.mark.parametrize("name, text, said", [
    ("NUMBA_NUM_THREADS", "many", "NUMBA_NUM_THREADS='many' must be a whole number from 1 to 4096"),
    ("NUMBA_NUM_THREADS", "0", "NUMBA_NUM_THREADS='0' must be"),
    ("NUMBA_NUM_THREADS", "", "NUMBA_NUM_THREADS is empty"),
    ("OMP_NUM_THREADS", "-2", "OMP_NUM_THREADS='-2' must be"),
    ("MKL_NUM_THREADS", "1.5", "MKL_NUM_THREADS='1.5' must be"),
    ("WORLD_SIZE", "two", "WORLD_SIZE='two' must be a whole number from 1"),
    ("RANK", "-1", "RANK='-1' must be a whole number from 0"),
    ("LOCAL_RANK", "nan", "LOCAL_RANK='nan' must be"),
    ("MASTER_PORT", "http", "MASTER_PORT='http' must be a whole number from 0 to 65535"),
    ("MASTER_PORT", "65536", "MASTER_PORT='65536' must be"),
    ("PREDMOE_OUTPUTS", "{file}", "names a file: it must name a folder"),
    ("PREDMOE_STORE", "{file}", "PREDMOE_STORE='"),
    ("PREDMOE_CACHE", "~nobody-of-that-name/x", "names a home that is not here"),
    ("PREDMOE_TRACES", "{file}", "names a file"),
    ("PREDMOE_EVAL_DATA", "{file}", "names a file"),
])  # fmt: skip
def test_nonsense_in_a_variable_is_one_sentence_before_anything_is_done(house, monkeypatch, capsys, name, text, said):
    file = house.root / "file"
    file.write_text("kept")
    before = sorted(house.root.rglob("*"))
    if name == "MASTER_PORT":
        monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, text.format(file=file))
    refused(capsys, ["plan", "--profile", "smoke"], said)
    assert sorted(house.root.rglob("*")) == before


def test_what_is_meant_passes(monkeypatch, tmp_path):
    for name, text in {"OMP_NUM_THREADS": "4,2", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "", "PREDMOE_STORE": str(tmp_path / "new")}.items():
        monkeypatch.setenv(name, text)
    variables.check()
    assert variables.threads() == 4 and distributed.world_size() == 2 and variables.whole("LOCAL_RANK", 0) == 0 and default_store("cpu") == tmp_path / "new"
    assert cli.main(["trace", "info", str(tmp_path / "none")]) == 2   # which is about the file


def test_a_rank_beyond_its_team_and_a_team_without_a_meeting_place_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 must be below WORLD_SIZE=2: start the processes with torchrun"):
        variables.check()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 and no MASTER_ADDR, MASTER_PORT: start the processes with torchrun"), distributed.team("cpu"):
        pass


def test_a_port_is_of_no_concern_to_a_single_process(monkeypatch):
    """Kubernetes sets MASTER_PORT=tcp://... for a service named master."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    variables.check()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_PORT='tcp://10.0.0.1:80' must be a whole number from 0 to 65535"):
        variables.check()


def test_a_port_that_is_taken_is_told(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, text in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"^process 0 cannot meet the others at 127.0.0.1, port {port} .MASTER_ADDR, MASTER_PORT.: .*; see that all 2 processes"), distributed.team("cpu"):
            pass


def test_a_parent_that_is_no_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(children.PARENT, "me")
    with pytest.raises(ConfigError, match="PREDMOE_PARENT='me' must be a whole number"):
        children.end_with_parent(tmp_path)


def test_another_profiles_file_is_the_repositorys_where_the_named_folder_lacks_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    committed = paths.ROOT / "outputs" / "cpu" / "02_horizons" / "results.json"
    assert committed.exists() and paths.borrowed("cpu", "02_horizons/results.json") == committed
    own = tmp_path / "cpu" / "02_horizons" / "results.json"
    assert paths.borrowed("cpu", "02_horizons/other.json") == own.with_name("other.json")
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert paths.borrowed("cpu", "02_horizons/results.json") == own
