"""Reading data sets: every kind gives the same rows, and errors name the file and the place in it."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.rollout.rows import load_rows, write_rows

ROWS = [
    {"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"style": "rule", "ground_truth": str(i)}}
    for i in range(5)
]


def test_parquet_with_nested_columns_and_several_row_groups(tmp_path):  # case G5
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=2)
    assert pq.ParquetFile(file).num_row_groups == 3
    assert load_rows([str(file)]) == ROWS


def test_damaged_parquet_names_file_row_group_and_column(tmp_path):  # case G5
    file = tmp_path / "a.parquet"
    table = pa.table({"good": list(range(1000)), "bad": [f"text number {i}" for i in range(1000)]})
    pq.write_table(table, file, row_group_size=500, compression="gzip", use_dictionary=False)
    column = pq.ParquetFile(file).metadata.row_group(1).column(1)
    content = bytearray(file.read_bytes())
    start = column.data_page_offset + 40
    content[start : start + 60] = b"\xff" * 60
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file}: row group 1, column 'bad'"):
        load_rows([str(file)])


def test_not_a_parquet_file(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_text("hello")
    with pytest.raises(ValueError, match=str(file)):
        load_rows([str(file)])


def test_jsonl_json_and_saved_data_set_give_the_same_rows(tmp_path):
    jsonl, whole, folder = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "saved"
    jsonl.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    whole.write_text(json.dumps(ROWS))
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    for path in (jsonl, whole, folder):
        assert load_rows([str(path)]) == ROWS


def test_csv_keeps_commas_and_line_ends_inside_a_field(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('\ufeffquestion,answer\n"1, or\n2?",3\n', encoding="utf-8")
    assert load_rows([str(file)]) == [{"question": "1, or\n2?", "answer": "3"}]


def test_files_follow_each_other_in_the_order_given(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    rows = load_rows([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
    assert [row["prompt"] for row in rows] == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2"),
        ("a.jsonl", '{"a": 1}\n[2]\n', "line 2 holds list"),
        ("a.json", '{"a": 1}', "a list of objects"),
        ("a.json", '[{"a": 1}, 3]', "entry 1"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', "line 2"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3"),
        ("a.csv", "a,b\n1\n", "line 2"),
        ("a.xml", "<a/>", "unknown kind"),
    ],
)
def test_errors_name_file_and_place(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_rows([str(file)])
    assert str(caught.value).startswith(f"{file}: ") and words in str(caught.value)


def test_text_that_is_not_utf8(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=rf"{file}: not UTF-8"):
        load_rows([str(file)])


def test_missing_file_and_foreign_folder(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_rows([str(tmp_path / "x.jsonl")])
    with pytest.raises(ValueError, match="save_to_disk"):
        load_rows([str(tmp_path)])


def test_saved_splits_must_be_chosen(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match=r"d/train, .*d/test"):
        load_rows([str(tmp_path / "d")])
    assert load_rows([str(tmp_path / "d" / "train")]) == ROWS


def test_written_rows_read_back_and_leave_nothing_beside(tmp_path):
    file = tmp_path / "new" / "a.parquet"
    write_rows(file, ROWS)
    assert load_rows([str(file)]) == ROWS
    assert [path.name for path in file.parent.iterdir()] == ["a.parquet"]


def test_rows_with_different_columns_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="row 1"):
        write_rows(tmp_path / "a.parquet", [{"a": 1}, {"b": 1}])
