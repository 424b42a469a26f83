"""Training that cannot go on, and what it finds damaged: one sentence each that names it."""

import json

import pytest
import torch
from tiny_runs import folder_of, tiny

from predmoe import train, worker
from predmoe.budget import parameters
from predmoe.config import ConfigError, to_dict
from predmoe.train import Trainer, TrainingError

pytestmark = pytest.mark.usefixtures("one_thread")


# ----------------------------------------------------------------------------------------------------------- bad input


def test_a_loss_that_is_not_finite_is_named_with_its_terms(corpus, tmp_path):
    trainer = Trainer(tiny(corpus), tmp_path)
    trainer.step = 7
    trainer.model.head.weight.data[0] = float("inf")
    with pytest.raises(TrainingError, match=r"not finite at step 7 \(lm (nan|inf), balance 0\.01\d*, pred \d.*\); lower"):
        trainer.training_step()


def test_a_router_that_is_not_finite_is_named_with_the_step(corpus, tmp_path):
    trainer = Trainer(tiny(corpus), tmp_path)
    trainer.step = 7
    trainer.model.layers[1].router.weight.data.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"not finite at step 7 \(router scores of token 0 are NaN.*\); lower"):
        trainer.training_step()


def test_a_run_that_diverges_ends_with_one_sentence(corpus, tmp_path, capsys):
    folder = folder_of(tiny(corpus, lr=1e30, warmup_steps=0), tmp_path / "run")
    assert worker.main([str(folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("predmoe: the loss is not finite at step ") and "lower the learning rate" in error and "\n" not in error
    assert not (folder / "finished.json").exists() and not (folder / "lock").exists()


def test_a_device_that_is_not_there_is_refused(corpus, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    folder = folder_of(tiny(corpus, device="cuda"), tmp_path / "run")
    assert worker.main([str(folder)]) == 2
    assert capsys.readouterr().err == "predmoe: device='cuda': no CUDA device here; use device: cpu\n"


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="tokenizer bpe8k has 8192 entries, the model only vocab_size=8191"):
        Trainer(tiny(corpus, model={"vocab_size": 8191}), tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert worker.main([str(tmp_path / "nothing")]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"text", None])
def test_a_damaged_checkpoint_is_a_sentence_that_names_it(corpus, tmp_path, capsys, damage):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    trainer = Trainer(tiny(corpus), folder)
    trainer.restore()
    trainer.save()
    state = folder / "state.pt"
    state.write_bytes(state.read_bytes()[:1000] if damage is None else damage)
    assert worker.main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"predmoe: cannot resume from {state}") and said.count("\n") == 1


def test_a_log_shorter_than_its_checkpoint_says_is_refused_not_filled_with_zeros(corpus, tmp_path, capsys):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    trainer = Trainer(tiny(corpus), folder)
    trainer.restore()
    trainer.log(terms={"lm": 9.0})
    trainer.save()
    (folder / "metrics.jsonl").write_text("{")
    assert worker.main([str(folder)]) == 2
    assert "metrics.jsonl has 1 bytes, at step 0 it had" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == "{"


@pytest.mark.parametrize("change", [{"step": "x"}, {"step": -5}, {"step": 99}, {"log_bytes": "x"}])
def test_a_checkpoint_that_says_what_cannot_be_is_refused(corpus, tmp_path, capsys, change):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    trainer = Trainer(tiny(corpus), folder)
    trainer.restore()
    trainer.save()
    torch.save(torch.load(folder / "state.pt") | change, folder / "state.pt")
    assert worker.main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"predmoe: cannot resume from {folder / 'state.pt'}: it is damaged") and said.count("\n") == 1


def test_a_flipped_bit_in_a_checkpoint_is_noticed(corpus, tmp_path, capsys):
    """torch would load it without a word, and the run end with other weights."""
    folder = folder_of(tiny(corpus), tmp_path / "run")
    trainer = Trainer(tiny(corpus), folder)
    trainer.restore()
    trainer.save()
    state = bytearray((folder / "state.pt").read_bytes())
    state[len(state) // 2] ^= 1
    (folder / "state.pt").write_bytes(state)
    assert worker.main([str(folder)]) == 2
    assert "it is damaged or of another run (the checksum of" in capsys.readouterr().err


def test_a_damaged_line_of_the_log_is_found_when_the_run_goes_on_and_not_when_it_is_over(corpus, tmp_path, capsys):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    trainer = Trainer(tiny(corpus), folder)
    trainer.restore()
    trainer.log(terms={"lm": 9.0})
    trainer.save()
    log = folder / "metrics.jsonl"
    log.write_bytes(bytes(log.stat().st_size))
    assert worker.main([str(folder)]) == 2
    assert f"{log}, line 1 is damaged" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_checkpoints_folder_is_told_before_training(corpus, tmp_path, capsys):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    (folder / "checkpoint").write_text("")
    assert worker.main([str(folder)]) == 2
    assert f"{folder / 'checkpoint'} is no folder; remove it" in capsys.readouterr().err and not (folder / "metrics.jsonl").exists()


def test_a_batch_too_large_for_memory_is_a_sentence(corpus, tmp_path, capsys):
    folder = folder_of(tiny(corpus, batch_size=100_000_000), tmp_path / "run")
    assert worker.main([str(folder)]) == 2
    assert "batch_size=100000000 sequences" in (said := capsys.readouterr().err) and "lower batch_size" in said and said.count("\n") == 1


def test_a_damaged_configuration_is_a_sentence(corpus, tmp_path, capsys):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    (folder / "config.json").write_text("{")
    assert worker.main([str(folder)]) == 2
    assert f"{folder / 'config.json'} is damaged" in capsys.readouterr().err
    for text in ("{}", '{"model": ' + "[" * 100_000, '{"model": ' + "9" * 5000 + "}", json.dumps(to_dict(tiny(corpus)) | {"data": {"seed": 1}})):
        (folder / "config.json").write_text(text)
        assert worker.main([str(folder)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"predmoe: {folder / 'config.json'} is damaged") and "restore it from a copy, or remove the folder" in said and said.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_a_damaged_finished_json_is_noticed_before_training(corpus, tmp_path, capsys, monkeypatch, text):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    (folder / "finished.json").write_text(text)
    monkeypatch.setattr(worker, "Trainer", lambda *_, **__: pytest.fail("it trains"))
    assert worker.main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"predmoe: {folder / 'finished.json'} is damaged") and "trained again, to the same bits" in said and said.count("\n") == 1


@pytest.mark.parametrize("text, said", [('{"folder": "state-00000007", "step": 7, "seconds": 1.0, "log_bytes": 0}', "names the checkpoint state-00000007, which is not there"),
                                        ("{}", "without a usable folder, step, seconds, log_bytes")])  # fmt: skip
def test_a_pointer_to_no_checkpoint_is_a_sentence(corpus, tmp_path, capsys, text, said):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    (folder / "state.json").write_text(text)
    assert worker.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"predmoe: {folder / 'state.json'} ") and said in error and "to train the run from its start" in error and error.count("\n") == 1


@pytest.mark.parametrize("model", [{"hidden_size": 2**21}, {"num_layers": 2**31 - 1}, {"hidden_size": 2**30, "expert_size": 2**31 - 1}], ids=str)
def test_a_model_too_large_for_memory_is_a_sentence_with_its_size(corpus, tmp_path, capsys, model):
    config = tiny(corpus, model=model)
    folder = folder_of(config, tmp_path / "run")
    assert worker.main([str(folder)]) == 2
    said, count = capsys.readouterr().err, parameters(config)
    assert f"its {count['total'] + count['heads']:,} parameters" in said and f"holds {12.0 * (count['total'] + count['heads']):,.0f} bytes" in said and said.count("\n") == 1


def test_memory_that_cannot_be_had_is_a_sentence_with_the_models_size(corpus, tmp_path, capsys, monkeypatch):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    monkeypatch.setattr(train, "build_parts", lambda config: torch.empty(1 << 60))   # torch's own error
    assert worker.main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert "too large for memory" in said and "can't allocate memory" in said and said.count("\n") == 1
