"""From rows to prompts, with a tiny word tokenizer: `<u>` and `<a>` are its chat marks, `</s>` ends an answer."""

import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megarl.rollout.prompts import build_prompts
from megarl.rollout.show_row import inspect_row, run_inspect
from megarl.rollout.tokenizer import check_tokenizer_fits, count_token_ids, load_tokenizer, stop_token_ids

TEMPLATE = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<s> ' }}{{ m.content }}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
WORDS = ["<unk>", "</s>", "<bos>", "<u>", "<a>", "<s>", *"abcdefghij"]


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        eos_token="</s>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split())


def build(rows, tokenizer=None, **options):
    options = {"max_prompt_length": 100, "origin": "a.jsonl"} | options
    return build_prompts(rows, tokenizer or make_tokenizer(), **options)


def test_all_forms_of_a_prompt_give_the_same_ids():  # case G3
    forms = [
        "a b c",
        [{"role": "user", "content": "a b c"}],
        [{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]}],
    ]
    prompts, _ = build([{"prompt": form} for form in forms])
    assert {prompt.token_ids for prompt in prompts} == {ids_of("<u> a b c <a>")}


def test_no_chat_template_names_the_option():  # case G3
    with pytest.raises(ValueError, match=r"data\.chat_template"):
        build([{"prompt": "a"}], make_tokenizer(None))


@pytest.mark.parametrize("as_file", [False, True])
def test_chat_template_of_the_option_is_used(tmp_path, as_file):
    template = "{{ messages[0].content }} <a>"
    if as_file:
        (tmp_path / "t.jinja").write_text(template)
        template = str(tmp_path / "t.jinja")
    prompts, _ = build([{"prompt": "a"}], make_tokenizer(None), chat_template=template)
    assert prompts[0].token_ids == ids_of("a <a>")


def test_chat_template_that_is_no_file():
    with pytest.raises(ValueError, match=r"data.chat_template=no.jinja"):
        build([{"prompt": "a"}], chat_template="no.jinja")


def test_template_that_refuses_names_the_row():
    with pytest.raises(ValueError, match=r"a.jsonl: row 0: .*no system"):
        build([{"prompt": "a"}], chat_template="{{ raise_exception('no system') }}")


def test_raw_prompt_is_encoded_as_it_is():
    prompts, _ = build([{"prompt": "a b"}], make_tokenizer(None), raw_prompt=True)
    assert prompts[0].token_ids == ids_of("<bos> a b")


def test_raw_prompt_refuses_messages():
    with pytest.raises(ValueError, match=r"data\.raw_prompt"):
        build([{"prompt": [{"role": "user", "content": "a"}]}], raw_prompt=True)


ROWS_5_TO_7 = [{"prompt": " ".join("abcdefghij"[:n])} for n in (5, 6, 7)]  # 7, 8 and 9 tokens with the template


def test_overlong_error_names_row_length_and_ways_out():  # case G1
    with pytest.raises(ValueError, match=r"1 of 3 prompts .*max_prompt_length=8 .*row 2: 9.*filter, left or right"):
        build(ROWS_5_TO_7, max_prompt_length=8)


def test_overlong_filter_drops_and_counts():  # case G1
    prompts, counts = build(ROWS_5_TO_7, max_prompt_length=8, overlong="filter")
    assert [prompt.row for prompt in prompts] == [0, 1]
    assert (counts.rows, counts.kept, counts.dropped, counts.cut, counts.max_length) == (3, 2, 1, 0, 8)


@pytest.mark.parametrize(("side", "kept"), [("left", "a b c d e f g <a>"), ("right", "<u> a b c d e f g")])
def test_overlong_cut_keeps_the_other_end(side, kept):  # case G1
    prompts, counts = build(ROWS_5_TO_7, max_prompt_length=8, overlong=side)
    assert [len(prompt.token_ids) for prompt in prompts] == [7, 8, 8]
    assert prompts[2].token_ids == ids_of(kept) and prompts[2].text == kept
    assert (counts.kept, counts.cut, counts.dropped) == (3, 1, 0)


def test_verl_row_and_short_row_carry_the_ground_truth():
    verl = {
        "data_source": "x", "prompt": "a", "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 3},
    }  # fmt: skip
    prompts, _ = build([verl, {"question": "a", "answer": "5"}, {"prompt": "a", "ground_truth": 5}])
    assert [prompt.ground_truth for prompt in prompts] == ["5", "5", 5]
    assert prompts[0].data_source == "x" and prompts[0].extra_info == {"index": 3}
    assert len({prompt.token_ids for prompt in prompts}) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a"}, "no column 'prompt'; its columns are text"),
        ({"prompt": 5}, "holds int"),
        ({"prompt": []}, "holds list"),
        ({"prompt": [{"content": "a"}]}, "message 0"),
        ({"prompt": [{"role": "user", "content": None}]}, "no text"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "only text parts"),
        ({"prompt": "a", "extra_info": "x"}, "'extra_info'"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row, words):
    with pytest.raises(ValueError) as caught:
        build([{"prompt": "a"}, row])
    assert str(caught.value).startswith("a.jsonl: row 1") and words in str(caught.value)


def test_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"row 0 gives a prompt without tokens"):
        build([{"prompt": "a"}], chat_template="{{ '' }}")


def test_tokenizer_comes_back_from_its_folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert build([{"prompt": "a b"}], loaded)[0][0].token_ids == ids_of("<u> a b <a>")


def test_folder_without_tokenizer_and_no_folder(tmp_path):
    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(ValueError, match=f"actor.tokenizer_path={path}"):
            load_tokenizer(str(path))


def test_tokenizer_beyond_the_table_names_both_sizes():  # case A14
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["x1", "x2", "x3"])
    size = count_token_ids(tokenizer)
    with pytest.raises(ValueError, match=r"19 ids, 3 beyond the 16 rows"):
        check_tokenizer_fits(size, 16)


def test_tokenizer_smaller_than_the_table_fits():  # case A14
    check_tokenizer_fits(count_token_ids(make_tokenizer()), 64)


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [([7, 9], None, (1, 7, 9)), (9, 8, (1, 8, 9)), (None, [7], (1, 7))]
)
def test_every_named_eos_id_ends_an_answer(tmp_path, generation, config, expected):  # case D7
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert stop_token_ids(str(tmp_path), make_tokenizer()) == expected


def test_no_eos_anywhere_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos"):
        stop_token_ids(str(tmp_path), tokenizer)


def render(renderable) -> str:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))
    console.print(renderable)
    return console.export_text()


def test_inspected_row_shows_text_ids_mask_and_reward_fields():
    prompts, _ = build([{"prompt": "a b", "answer": "42"}])
    text = render(inspect_row(prompts[0], make_tokenizer(), (1,)))
    assert "<u> a b <a>" in text and "42" in text and "1 '</s>'" in text
    ids = [line.split("│")[2].strip() for line in text.splitlines() if "False" in line]
    assert ids == [str(i) for i in ids_of("<u> a b <a>")]
    assert sum("True" in line for line in text.splitlines()) == 1


def test_inspected_long_prompt_leaves_out_the_middle():
    prompts, _ = build([{"prompt": "a b c d e f g h"}])
    text = render(inspect_row(prompts[0], make_tokenizer(), max_tokens=4))
    assert "6 more" in text and "'h'" in text and "'d'" not in text


def test_run_inspect_prints_the_asked_row(tmp_path, capsys):
    make_tokenizer().save_pretrained(tmp_path / "m")
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "i j", "answer": "77"}\n')
    run_inspect(str(file), 1, str(tmp_path / "m"))
    assert "<u> i j <a>" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it has 2 rows"):
        run_inspect(str(file), 2)
