"""Exports on a thread: the folder is the one a direct save writes, and a failure neither raises nor leaves anything."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jinja2 import Environment
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.weights import hf, hf_export
from megarl.weights.hf_export import BackgroundExport
from tests.tiny import build_hf_model, save_hf_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return Path(save_hf_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=2))


def named_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield from build_hf_model("llama", num_hidden_layers=2).state_dict().items()


def test_shards_index_and_companions_are_what_transformers_reads(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 200_000)
    monkeypatch.setattr(hf_export, "STAGED_BYTES", 100_000)
    (model_path / "generation_config.json").write_text('{"eos_token_id": [1]}')
    export = BackgroundExport()
    export.run(named_tensors(), tmp_path / "out", model_path, torch.float32)
    export.wait()
    assert export.take_messages() == [f"saved {tmp_path / 'out'}"] and export.take_messages() == []
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in named_tensors())
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": [1]}'
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in named_tensors())


def test_a_folder_with_a_score_head_says_so_and_its_chats_end_where_the_score_is_read(
    model_path: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(model_path, tmp_path / "model")
    template = "{% for message in messages %}<{{ message['content'] }}|end>\n{% endfor %}"
    (source / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}answer\n{% endif %}")
    (source / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]})
    )
    head = ("score.weight", torch.ones(1, build_hf_model("llama").config.hidden_size))
    tensors = [pair for pair in named_tensors() if "lm_head" not in pair[0]] + [head]
    hf.save_hf_folder(tensors, tmp_path / "once", source, torch.float32)
    hf.save_hf_folder(tensors, tmp_path / "twice", tmp_path / "once", torch.float32)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model, notes = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert model.config.architectures == ["LlamaForSequenceClassification"] and model.config.num_labels == 1
        assert not notes["missing_keys"] and torch.equal(model.score.weight, head[1])
        write = Environment().from_string((folder / "chat_template.jinja").read_text())
        chat = [{"content": "2+3?"}, {"content": "5"}]
        assert write.render(messages=chat) == "<2+3?|end>\n<5|end>"
        assert write.render(messages=chat[:1], add_generation_prompt=True) == "<2+3?|end>\nanswer\n"


def test_the_caller_does_not_wait_for_the_disk(model_path: Path, tmp_path: Path, monkeypatch) -> None:
    may_write = threading.Event()
    true_save = hf.save_file

    def slow_save(*args, **kwargs) -> None:
        assert may_write.wait(30)
        true_save(*args, **kwargs)

    monkeypatch.setattr(hf, "save_file", slow_save)
    export = BackgroundExport()
    export.run(named_tensors(), tmp_path / "out", model_path, torch.float32)
    assert not (tmp_path / "out").exists()
    may_write.set()
    export.wait()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_full_disk_is_told_and_leaves_nothing(model_path: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "save_file", fail)
    monkeypatch.setattr(hf_export, "STAGED_BYTES", 1000)
    monkeypatch.setattr(hf, "SHARD_BYTES", 1000)
    export = BackgroundExport()
    export.run(named_tensors(), tmp_path / "out", model_path, torch.float32)
    export.wait()
    (line,) = export.take_messages()
    assert "could not be saved, the run goes on" in line and "No space left" in line
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_gathering_is_the_callers(model_path: Path, tmp_path: Path) -> None:
    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.ones(128)
        raise RuntimeError("a peer is gone")

    export = BackgroundExport()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        export.run(breaking(), tmp_path / "out", model_path, torch.float32)
    export.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_cleared(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.writing-12345").mkdir()
    export = BackgroundExport()
    export.run(named_tensors(), tmp_path / "out", model_path, torch.float32)
    export.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
