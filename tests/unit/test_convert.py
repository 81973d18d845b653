"""`megarl convert`: what goes in comes out, bit for bit, for every family and grid, and bad input leaves nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.cli import main
from megarl.models.registry import read_model_spec
from megarl.weights import hf_stream
from megarl.weights.hf import save_hf_folder
from megarl.weights.megatron_folder import MegatronFolder
from megarl.weights.source import read_whole
from megarl.weights.torch_dist import read_chunk, read_tensors
from tests.tiny import build_hf_model, save_hf_model


def there(folder: Path | str, out: Path, *words: str) -> int:
    return main(["convert", "hf-to-megatron", "--hf", str(folder), "--out", str(out), *words])


def back(folder: Path, out: Path, *words: str) -> int:
    return main(["convert", "megatron-to-hf", "--ckpt", str(folder), "--out", str(out), *words])


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder of safetensors, as its index (or its one file) lists them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    files = json.loads(index.read_text())["weight_map"]
    loaded = {file: load_file(folder / file) for file in set(files.values())}
    assert sorted(files) == sorted(name for tensors in loaded.values() for name in tensors)
    return {name: loaded[file][name] for name, file in files.items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


CASES = [
    ("llama", True, (1, 1, 1)),
    ("llama", False, (2, 3, 1)),
    ("mistral", False, (2, 2, 1)),
    ("qwen2", True, (2, 2, 1)),
    ("qwen3", False, (1, 4, 1)),
    ("mixtral", False, (2, 2, 2)),
    ("qwen3_moe", False, (2, 3, 4)),
]


@pytest.mark.parametrize(("family", "is_tied", "grid"), CASES)
def test_there_and_back_is_bit_exact(tmp_path, family: str, is_tied: bool, grid) -> None:  # cases A1, A6, A9, A12
    model = build_hf_model(family, tie_word_embeddings=is_tied).bfloat16()
    model.save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in stored) != is_tied
    tp, pp, ep = (str(size) for size in grid)
    assert there(tmp_path / "model", tmp_path / "ckpt", "--tp", tp, "--pp", pp, "--ep", ep) == 0
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == int(tp) * int(pp) * int(ep)
    assert back(tmp_path / "ckpt", tmp_path / "back", "--shard-gib", "0.0005") == 0
    assert_same(read_folder(tmp_path / "back"), stored)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back")]
    assert configs[0] == configs[1]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_transformers_reads_what_comes_back(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = build_hf_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    assert there(tmp_path / "model", tmp_path / "ckpt", "--tp", "2", "--ep", "2") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back", "--shard-gib", "0.0005") == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    ids = torch.randint(3, 500, (1, 20))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_gate_up_and_experts_come_back_where_they_were(tmp_path) -> None:  # case A7
    path = Path(save_hf_model(tmp_path / "model", "mixtral"))
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            tensor.fill_(10 * expert + {"w1": 1, "w3": 2, "w2": 3}[name.split(".")[-2]])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert there(path, tmp_path / "ckpt", "--tp", "2", "--ep", "2") == 0
    family, spec = read_model_spec(path, is_computed=False)
    stored = read_tensors(tmp_path / "ckpt")["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert stored.shape == (4, 4, 512, 128)
    for chunk in stored.chunks:
        value = 10 * chunk.offset[1] + (1 if chunk.offset[2] < 256 else 2)
        assert bool((read_chunk(tmp_path / "ckpt", chunk) == value).all()), chunk
    source = MegatronFolder(tmp_path / "ckpt", family, spec)
    assert all(torch.equal(read_whole(source, name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("size", "parts"), [(500, [128, 128, 128, 116]), (50257, [12672, 12672, 12672, 12241])])
def test_a_padded_vocabulary_comes_back_without_its_padding(tmp_path, size: int, parts: list[int]) -> None:  # case A4
    changes = {"vocab_size": size, "hidden_size": 32, "head_dim": 8, "num_key_value_heads": 4}
    path = save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=False, **changes)
    assert there(path, tmp_path / "ckpt", "--tp", "4") == 0
    stored = read_tensors(tmp_path / "ckpt")
    assert stored["embedding.word_embeddings.weight"].shape == stored["output_layer.weight"].shape == (size, 32)
    assert [chunk.shape[0] for chunk in stored["output_layer.weight"].chunks] == parts
    assert back(tmp_path / "ckpt", tmp_path / "back") == 0
    assert read_folder(tmp_path / "back")["lm_head.weight"].shape == (size, 32)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back")]
    assert configs[0] == configs[1] and configs[1]["vocab_size"] == size


def test_an_unusual_prefix_comes_back_as_the_usual_one(tmp_path) -> None:  # case A1
    path = Path(save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=True))
    stored = load_file(path / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in stored.items()}, path / "model.safetensors")
    assert there(path, tmp_path / "ckpt", "--pp", "2") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back") == 0
    assert_same(read_folder(tmp_path / "back"), stored)


@pytest.mark.parametrize(
    ("word", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)]
)
def test_header_and_config_name_the_dtype_asked_for(tmp_path, word: str, dtype: torch.dtype) -> None:  # case A13
    path = save_hf_model(tmp_path / "model", "qwen2")
    assert there(path, tmp_path / "ckpt", "--dtype", "bf16") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back", "--dtype", word) == 0
    assert {tensor.dtype for tensor in read_folder(tmp_path / "back").values()} == {dtype}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_value_too_large_for_the_dtype_is_an_error(tmp_path, capsys) -> None:
    path = Path(save_hf_model(tmp_path / "model", "llama"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, path / "model.safetensors")
    assert there(path, tmp_path / "ckpt") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back", "--dtype", "fp16") == 2
    assert "model.norm.weight holds 1e+06" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "model"]


def test_a_critic_keeps_its_value_head(tmp_path) -> None:  # case A2
    path = Path(save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=True))
    critic = {**load_file(path / "model.safetensors"), "score.weight": torch.full((1, 128), 0.5)}
    save_hf_folder(critic.items(), tmp_path / "critic", path, torch.float32)
    assert there(tmp_path / "critic", tmp_path / "ckpt", "--tp", "2", "--pp", "2") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back") == 0
    assert_same(read_folder(tmp_path / "back"), critic)
    assert there(path, tmp_path / "fresh", "--head", "value") == 0
    assert back(tmp_path / "fresh", tmp_path / "fresh_back") == 0
    assert not read_folder(tmp_path / "fresh_back")["score.weight"].any()


def break_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def break_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")


def break_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "spiral"}))


def break_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def make_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def mix_dtypes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].bfloat16()}, folder / "model.safetensors")


def quantize(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (break_tensor, "missing tensor model.layers.1.mlp.up_proj.weight [256, 128]"),
        (break_shape, "model.norm.weight has shape [3], config.json says [128]"),
        (break_family, "model_type='spiral' is not supported"),
        (break_rope, "rope_type='dynamic' is not supported"),
        (cut_short, "model.safetensors cannot be read"),
        (make_pickle, "--allow-pickle"),
        (mix_dtypes, "use --dtype"),
        (quantize, "stored as I8"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not readable"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing(tmp_path, capsys, spoil, words: str) -> None:
    path = Path(save_hf_model(tmp_path / "model", "llama"))
    spoil(path)
    assert there(path, tmp_path / "ckpt") == 2
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "4"], "tp=4 is more than the model's 2 key-value heads"),
        (["--pp", "5"], "use 1 to 4"),
        (["--ep", "2"], "the model has no experts"),
        (["--tp", "0"], "--tp 0 must be 1 or more"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(tmp_path, capsys, words: list[str], message: str) -> None:
    path = save_hf_model(tmp_path / "model", "llama")
    assert there(path, tmp_path / "ckpt", *words) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, capsys) -> None:  # case A14
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = save_hf_model(tmp_path / "model", "llama")
    for extra, code in ((-3, 0), (3, 2)):
        words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 500 + extra)}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>"))).save_pretrained(path)
        assert there(path, tmp_path / "ckpt") == code
        if code == 0:  # a smaller tokenizer never shrinks the table
            assert read_tensors(tmp_path / "ckpt")["embedding.word_embeddings.weight"].shape == (500, 128)
            shutil.rmtree(tmp_path / "ckpt")
    assert "503 ids, 3 beyond the 500 rows" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


def test_pickled_weights_are_read_when_allowed_and_run_no_code(tmp_path, capsys) -> None:
    path = Path(save_hf_model(tmp_path / "model", "llama"))
    stored = load_file(path / "model.safetensors")
    make_pickle(path)
    assert there(path, tmp_path / "ckpt", "--allow-pickle", "--tp", "2") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back") == 0
    assert_same(read_folder(tmp_path / "back"), stored)
    shutil.rmtree(tmp_path / "ckpt")

    torch.save({"model.embed_tokens.weight": Evil(tmp_path / "ran")}, path / "pytorch_model.bin")
    assert there(path, tmp_path / "ckpt", "--allow-pickle") == 2
    assert "cannot be read as a file of tensors" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ckpt").exists()


class Evil:
    """Unpickled by an unrestricted reader, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_an_index_that_would_run_code_is_refused(tmp_path, capsys) -> None:
    path = save_hf_model(tmp_path / "model", "llama")
    assert there(path, tmp_path / "ckpt") == 0
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    assert back(tmp_path / "ckpt", tmp_path / "back") == 2
    assert "which no checkpoint needs" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and not (tmp_path / "back").exists()


def test_an_incomplete_checkpoint_is_refused(tmp_path, capsys) -> None:
    path = save_hf_model(tmp_path / "model", "llama")
    assert there(path, tmp_path / "ckpt", "--tp", "2") == 0
    file = tmp_path / "ckpt" / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    assert back(tmp_path / "ckpt", tmp_path / "back") == 2
    assert "__1_0.distcp is cut short" in capsys.readouterr().err
    (tmp_path / "ckpt" / "metadata.json").unlink()
    assert back(tmp_path / "ckpt", tmp_path / "back") == 2
    assert "no complete Megatron checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "model"]


def test_an_existing_folder_is_not_touched(tmp_path, capsys) -> None:
    path = save_hf_model(tmp_path / "model", "llama")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "mine.txt").write_text("mine")
    assert there(path, tmp_path / "ckpt") == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert (tmp_path / "ckpt" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("direction", ["there", "back"])
def test_what_was_broken_off_is_taken_up_again(tmp_path, monkeypatch, capsys, direction: str) -> None:
    path = save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=False)
    stored = load_file(Path(path) / "model.safetensors")
    if direction == "back":
        assert there(path, tmp_path / "ckpt", "--tp", "2", "--pp", "4") == 0

    def run() -> int:
        if direction == "there":
            return there(path, tmp_path / "ckpt", "--tp", "2", "--pp", "4")
        return back(tmp_path / "ckpt", tmp_path / "back", "--shard-gib", "0.0005")

    name = "torch.save" if direction == "there" else "megarl.weights.hf_stream.cast"
    original = torch.save if direction == "there" else hf_stream.cast
    calls = 0

    def breaking(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(name, breaking)
    assert run() == 130
    assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    partial = tmp_path / (".ckpt.partial" if direction == "there" else ".back.partial")
    noted = [path.stem for path in (partial / ".journal").glob("*.json")]
    assert noted
    before = {name: (partial / name).stat().st_mtime_ns for name in noted}
    assert run() == 0
    out = tmp_path / ("ckpt" if direction == "there" else "back")
    assert {name: (out / name).stat().st_mtime_ns for name in noted} == before
    assert not partial.exists()
    if direction == "there":
        assert back(out, tmp_path / "back") == 0
    assert_same(read_folder(tmp_path / "back"), stored)


def test_another_source_is_not_mixed_with_what_was_broken_off(tmp_path, monkeypatch, capsys) -> None:
    first = save_hf_model(tmp_path / "model", "llama")
    second = Path(save_hf_model(tmp_path / "other", "llama"))
    tensors = {name: tensor + 1 for name, tensor in load_file(second / "model.safetensors").items()}
    save_file(tensors, second / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr("megarl.weights.megatron_write.write_index", lambda *args: (_ for _ in ()).throw(OSError("full")))
        assert there(first, tmp_path / "ckpt", "--tp", "2") == 1
    assert "full: files that are done are kept" in capsys.readouterr().err
    assert there(second, tmp_path / "ckpt", "--tp", "2") == 0
    assert back(tmp_path / "ckpt", tmp_path / "back") == 0
    assert_same(read_folder(tmp_path / "back"), tensors)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {}, "a model of experts does not run in megarl yet"),
        ("mistral", {"sliding_window": 64}, "sliding_window=64 is shorter than max_position_embeddings=512"),
    ],
)
def test_what_does_not_run_here_is_converted_and_refused_where_it_would_run(
    tmp_path, capsys, family: str, changes: dict[str, int], words: str
) -> None:
    path = save_hf_model(tmp_path / "model", family, **changes)
    assert there(path, tmp_path / "ckpt") == 0
    with pytest.raises(ValueError, match=words):
        read_model_spec(tmp_path / "ckpt")
    assert main(["convert", "check", path, str(tmp_path / "ckpt"), "--text", "a"]) == 2
    assert words in capsys.readouterr().err


def test_check_tells_equal_from_different(tmp_path, capsys) -> None:
    path = Path(save_hf_model(tmp_path / "model", "qwen2", tie_word_embeddings=True))
    assert there(path, tmp_path / "ckpt", "--tp", "2", "--pp", "2") == 0
    assert main(["convert", "check", str(path), str(tmp_path / "ckpt")]) == 0
    assert "50 of 50 tensors equal" in capsys.readouterr().out
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.bias"][7] += 0.25
    save_file(tensors, path / "model.safetensors")
    assert main(["convert", "check", str(path), str(tmp_path / "ckpt")]) == 1
    told = capsys.readouterr().out
    assert "model.layers.2.self_attn.v_proj.bias" in told and "0.25" in told and "49 of 50 tensors equal" in told
