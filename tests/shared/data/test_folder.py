"""Parts of folders and tables: lines, labels, links, words, problems, and the sheet of pictures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared.data import DataError, folder
from promptfed.shared.data.folder import LabelColumns, contact_sheet, label_columns, read_lines, spread, true_paths
from promptfed.shared.data.options import CsvOptions, FolderOptions
from promptfed.shared.data.source import Split


def lines(tmp_path: Path, content: bytes) -> Any:
    (tmp_path / "t.csv").write_bytes(content)
    return read_lines(tmp_path / "t.csv", "the table")


@pytest.mark.parametrize(("content", "found"), [
    (b"a,b\n1,2\n\n \n,\n", (["a", "b"], [(2, {"a": "1", "b": "2"}), (5, {"a": "", "b": ""})])),
    (b'a\n"1\n2"\n3\n', (["a"], [(3, {"a": "1\n2"}), (4, {"a": "3"})])), (b"", ([], [])),
    (b"a,,\n1,2,3\n", (["a", "", ""], [(2, {"a": "1", "": "3"})])),
    (b"\xff\n", "the table is not a CSV file in UTF-8; save it as one"),
    (b"a\n" + b"x" * 140_000, "the table is not a CSV file in UTF-8"), (b"a\n\xc3", "is not a CSV file in UTF-8"),
    (b'"a\n', "the table, line 1: a quote is not closed"),
    (b'a\n"b"c\n', "the table, line 2: a quote is not closed, or text follows it"),
    (b"a;b\n", "the table separates its columns by semicolons"),
    (b"a\tb\n", "the table separates its columns by tabs"), (b"a|b\n", "the table separates its columns by bars"),
    (b"a;b,c\n", (["a;b", "c"], [])), (b"a,b,a\n", "the table has the column a twice"),
    (b"a,b\n1\n", "the table, line 2: b is missing: give every line 2 cells"),
    (b"a,\n1\n", "the table, line 2: a cell is missing"),
    (b"a,b\n1,2,3\n", "the table, line 2: 3 cells where the first line has 2"),
])  # fmt: skip
def test_a_tables_lines_are_read_or_refused(tmp_path: Path, content: bytes, found: Any) -> None:
    if isinstance(found, str):
        with pytest.raises(DataError) as caught:
            lines(tmp_path, content)
        assert found in str(caught.value)
    else:
        columns, rows = lines(tmp_path, content)
        assert (columns, list(rows)) == found


def test_a_table_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the table cannot be read: there is no such file"):
        read_lines(tmp_path / "none.csv", "the table")


@pytest.mark.parametrize(("columns", "given", "query", "found"), [
    (["path", "label", "x"], None, "", None), (["path", "labels", "x"], None, "", (("labels",), True)),
    (["path", "x", "y"], None, "", (("x", "y"), False)), (["path"], None, "", None),
    (["path", "label", "x"], "x", "", (("x",), True)), (["path", "label", "x"], None, "columns=x", (("x",), False)),
    (["path", "x"], "x", "columns=x", "give labels= or columns=, not both"),
    (["path", "x"], None, "columns=y", "has no column y; choose one of path, x"),
    (["path", "Label"], None, "", "calls its column|calls a column 'Label'; call it label"),
    (["path", "x", " "], None, "", "has a column without a name, or give columns="),
])  # fmt: skip
def test_columns_of_labels_are_found(columns: list[str], given: str | None, query: str, found: Any) -> None:
    options = CsvOptions.parse("csv:t", query)
    if isinstance(found, str):
        with pytest.raises(DataError, match=found):
            label_columns(Path("t"), columns, {"path"}, options, given)
        return
    several = label_columns(Path("t"), columns, {"path"}, options, given)
    assert (several and (several.columns, several.names)) == found


def test_cells_are_labels() -> None:
    by_column, by_name = LabelColumns(Path("t"), ("a_b", "c"), False), LabelColumns(Path("t"), ("l",), True)
    cells = ["", "0", "1", "0.0", "1.0", " 1 "]
    names, labels = by_column.read([(2, {"a_b": cell, "c": "0"}) for cell in cells])
    assert (names, labels[:, 0].tolist(), labels.dtype) == (("a b", "c"), [-1, 0, 1, 0, 1, 1], torch.int8)
    assert [len(list(by_column.problems(3, {"a_b": cell, "c": "2"}))) for cell in ("1", "yes")] == [1, 2]
    assert list(by_name.problems(3, {"l": "a| "})) != list(by_name.problems(3, {"l": "a|b"})) == []
    assert list(by_name.problems(3, {"l": " "})) == []
    names, labels = by_name.read([(2, {"l": " b |a"}), (3, {"l": ""}), (4, {"l": "b"})])
    assert (names, labels.tolist()) == (("a", "b"), [[1, 1], [0, 0], [0, 1]])


def test_the_same_file_is_known_whatever_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "g").symlink_to(tmp_path / "a" / "f")
    given = ["a/f", "link/f", "g", "a/b/../f", "a/./f", "a/g", "link/b/.."]
    found = list(true_paths(tmp_path / name for name in given))
    assert found == [str(tmp_path / "a" / "f")] * 5 + [str(tmp_path / "a" / "g"), str(tmp_path / "a")]


@pytest.mark.parametrize(("name", "beside", "domain"), [
    (None, [], None), ("ink", ["ink", "oil"], ("ink", "an ink of a {}")),
    ("Art work", [], ("Art-work", "an Art work of a {}")), ("oil_x", [], ("oil_x", "an oil x of a {}")),
    ("pen", [], ("pen", "a pen of a {}")),
    ("a b", ["a b", "a-b"], "the domains 'a b' and 'a-b' would become one, 'a-b'"),
    ("a b", ["a b", "c d", "c-d"], ("a-b", "an a b of a {}")),
])  # fmt: skip
def test_a_domain_is_named_by_its_folder(tmp_path: Path, name: str | None, beside: list[str], domain: Any) -> None:
    if isinstance(domain, str):
        with pytest.raises(DataError, match=domain):
            folder._domain(name, tmp_path / "domain.txt", beside)
    else:
        found = folder._domain(name, tmp_path / "domain.txt", beside)
        assert (found and (found.name, found.description)) == domain


def test_words_beside_images_are_text(tmp_path: Path) -> None:
    file = tmp_path / "domain.txt"
    file.write_text("\ufeffan icon of a {}")
    assert vars(folder._domain(None, file, [])) == {"name": "", "description": "an icon of a {}"}
    assert folder._domain(None, tmp_path, []) is None, "a class's folder may have any name"
    for content, says in ((b"\xff", "cannot be read: it is not text"), (b" ", f"{file}: words for a domain must not")):
        file.write_bytes(content)
        with pytest.raises(DataError, match=says):
            folder._domain("x", file, [])


@pytest.mark.parametrize(("body", "table", "says"), [
    ("", False, "names no folder; write folder:/path"), ("", True, "names no file; write file:/path"),
    ("none", False, "there is no folder"), ("none", True, "there is no file"), ("f", False, "there is no folder"),
    (".", True, "is not a readable file"),
])  # fmt: skip
def test_what_a_uri_names_is_there(tmp_path: Path, body: str, table: bool, says: str) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(DataError, match=says):
        folder._existing(body and f"{tmp_path}/{body}", FolderOptions(uri="x:"), not table)


SINGLE = "/d: the class b has one image; two are needed to split."


def item(label: str, split: str | None) -> folder._Item:
    return folder._Item(Path(f"/d/{label}"), label, split)


@pytest.mark.parametrize(
    ("items", "by_folders", "query", "problems"),
    [
        ([("a", None), ("a", None), ("b", None)], False, {}, [SINGLE]),
        ([("a", None), ("a", None), ("b", None)], False, {"role": "evaluator"}, []),
        ([("a", "train"), ("a", "test"), ("b", "train")], True, {}, ["/d/test has no folder for the class b."]),
        ([("a", "train"), ("a", "test"), ("b", "train")], False, {}, []),
        ([("a", "train"), ("a", "test"), ("b", "train")], True, {"role": "evaluator"}, []),
        ([("a", "test"), *((label, "train") for label in "gfedcb")], True, {}, [
            *(f"/d/test has no folder for the class {label}." for label in "bcdefg"),
            "/d/train has no folder for the class a."]),
        ([("b", None), ("a", None)], False, {}, [SINGLE.replace("class b", "class a"), SINGLE]),
        ([("b", None)], False, {}, [SINGLE]),
        ([], False, {}, []),
    ],
)  # fmt: skip
def test_classes_that_cannot_be_used_are_named(
    items: list[Any], by_folders: bool, query: dict[str, Any], problems: list[str]
) -> None:
    options, own = FolderOptions.model_validate({"uri": "x:"} | query), [item(*one) for one in items]
    listing = folder._Listing(own, Path("/d"), None, (Path("/d/e"),), by_folders)
    empty = "the class folder /d/e is empty; add images or remove it."
    assert folder._problems(listing, own, options) == [empty, *problems]
    for choice in ({"min_per_class": 1}, {"only": "a"}):
        chosen = FolderOptions.model_validate({"uri": "x:"} | choice | query)
        assert folder._problems(listing, own, chosen) == problems
    usable = folder._usable(listing, options)
    lacking = {text.split()[-1][:-1] for text in problems if "no folder" in text}
    assert {label for label, count in usable.items() if count == 0} == lacking


@pytest.mark.parametrize(("folders", "role", "says"), [
    ("train test", "trainer", None), ("test", "evaluator", None), ("cat dog .git", "trainer", None),
    ("train", "trainer", "/d has train but no test folder; give both train and test, or class folders alone.$"),
    ("test", "trainer", "has test but no train folder; .* Evaluators .--role evaluator. need no train folder.$"),
    ("train test cat", "evaluator", "has class folders beside train and test; give both train and test, or .* alone.$"),
    ("test cat", "evaluator", "has test but no train folder; give both train and test, or class folders alone.$"),
    ("train cat", "evaluator", "has train but no test folder"), ("", "evaluator", "has no class folder"),
])  # fmt: skip
def test_folders_are_classes_or_train_and_test(tmp_path: Path, folders: str, role: Any, says: str | None) -> None:
    for name in folders.split():
        (tmp_path / "d" / name / "x").mkdir(parents=True)
    (tmp_path / "d").mkdir(exist_ok=True)
    if says is None:
        found = folder._listing(tmp_path / "d", None, FolderOptions(uri="x:", role=role))
        parts = [name for name in folders.split() if name in ("train", "test")]
        assert (found.by_folders, list(found.empty)) == (bool(parts), [tmp_path / "d" / name / "x" for name in parts])
        nested = [name for name in ("cat", "dog") if name in folders]
        assert [text.split(" is a folder")[0] for text in found.wrong] == [f"{tmp_path}/d/{name}/x" for name in nested]
    else:
        with pytest.raises(DataError, match=says):
            folder._listing(tmp_path / "d", None, FolderOptions(uri="x:", role=role))


@pytest.mark.parametrize(("files", "classes", "advice", "told"), [
    (["f."], [], "Leave.", "f."), ([], ["c."], "Leave.", "c. Leave."), (["f."], ["c."], "Leave.", "c. Leave. f."),
    (["f."], ["c."], "", "c. f."), ([], [], "Leave.", ""),
])  # fmt: skip
def test_advice_for_classes_stands_behind_them(files: list[str], classes: list[str], advice: str, told: str) -> None:
    if not told:
        folder._refuse(files, classes, advice)
        return
    with pytest.raises(DataError) as caught:
        folder._refuse(files, classes, advice)
    assert (str(caught.value), list(caught.value.problems)) == (told, [*classes, *files])


def test_links_to_nothing_are_no_copies_of_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").symlink_to(tmp_path / "2.png")
    assert folder._listing(tmp_path, None, FolderOptions(uri="x:")).wrong == ()
    (tmp_path / "2.png").touch()
    both = tuple(tmp_path / name / "1.png" for name in ("b", "a"))
    same = f"{both[0]} is the same file as {both[1]}; keep one of them."
    assert folder._listing(tmp_path, None, FolderOptions(uri="x:")).wrong == (same,)


def test_rows_are_spread_over_classes() -> None:
    labels = torch.tensor([2, 2, 0, 2, 0, 1])
    assert [spread(labels, count) for count in (0, 3, 5, 9)] == [[], [2, 5, 0], [2, 5, 0, 4, 1], [2, 5, 0, 4, 1, 3]]


@pytest.mark.parametrize(("labels", "count", "notes", "copies", "shown", "size"), [
    ([0, 0, 1], 2, (), (), [0, 2], (152, 92)), ([0, 0, 1], 3, (), (1,), [1, 0, 2], (224, 104)),
    ([0, 0, 1], 2, (), (1, 2, 0), [1, 0], (152, 104)), ([0, 0, 1], 3, ("z", "y", "y"), (), [1, 2, 0], (224, 104)),
    ([0] * 6, 6, "fedcba", (), [5, 4, 3, 2, 1, 0], (440, 104)),
    ([0] * 14, 14, (), (), list(range(14)), (872, 176)), ([3], 1, (), (), [0], (80, 92)),
    ([2], 1, (), (), [0], (80, 104)),
])  # fmt: skip
def test_a_sheet_shows_so_many_pictures_of_each_class(
    labels: list[int], count: int, notes: Any, copies: Any, shown: list[int], size: tuple[int, int]
) -> None:
    """Each picture is of its own shade; a copy has a red frame; a name of several lines makes the rows higher."""
    split = Split(torch.tensor(labels), lambda row: Image.new("RGB", (9, 9), (10 + row, 0, 99)))
    sheet = np.asarray(contact_sheet(split, ("cat", "dog", "a longish name"), count, notes, copies)).astype(int)
    assert sheet.shape[1::-1] == size
    height = (size[1] - 8) // -(-len(shown) // 12)
    for place, row in enumerate(shown):
        left, top = 8 + place % 12 * 72, 8 + place // 12 * height
        assert sheet[top, left].tolist() == sheet[top + 63, left + 63].tolist() == [10 + row, 0, 99]
        framed = sheet[top - 2, left - 2].tolist() == sheet[top + 65, left + 65].tolist() == [255, 0, 0]
        assert framed == (row in copies)
        assert sheet[top - 3, left - 2].tolist() == sheet[top - 2, left - 3].tolist() == [255] * 3
        assert sheet[top + 66 : top + height - 1, left : left + 60].min() < 128, "its name"


def test_a_picture_without_a_class_is_called_so() -> None:
    def shown(label: int, *names: str) -> bytes:
        split = Split(torch.tensor([label]), lambda row: Image.new("RGB", (9, 9)))
        return contact_sheet(split, names, 1).tobytes()

    assert shown(1, "cat") == shown(0, "none") != shown(0, "cat") == shown(1, "dog", "cat")


def test_a_group_is_what_the_pattern_captures() -> None:
    listing = folder._Listing([item("p1_a", None), item("p2_b", None), item("x", None)], Path("/d"), None)

    def groups(pattern: str) -> Any:
        found = folder._grouped(listing, FolderOptions(uri="x:", group=pattern))
        return [one.group for one in found.items], found.wrong

    assert groups("^(p\\d)") == (["p1", "p2", None], ("/d/x: its name has no group (^(p\\d)).",))
    assert groups("()")[1] == tuple(f"/d/{name}: its name has no group (())." for name in ("p1_a", "p2_b", "x"))
    for pattern, says in (("(", "is not a regular expression"), ("p", "captures nothing; put the part")):
        with pytest.raises(DataError, match=says):
            groups(pattern)
    assert folder._grouped(listing, SimpleNamespace(group=None)) is listing


@pytest.mark.parametrize(("row", "group", "problem"), [
    ({"path": "a.png", "label": "x"}, None, None),
    ({"path": "", "label": "x"}, None, "path and label must not be empty"),
    ({"path": "a.png", "label": ""}, None, "path and label must not be empty"),
    ({"path": "b\\c.png", "label": "x"}, None, "there is no image b\\c.png; write / between folders"),
    ({"path": "d\\e.png", "label": "x"}, None, None), ({"path": "gone.png", "label": "x"}, None, None),
    ({"path": "a.png", "label": "x", "split": "dev"}, None, "the split is dev, not train or test"),
    ({"path": "a.png", "label": "x", "split": "test"}, None, None),
    ({"path": "a.png", "label": "x", "split": ""}, None, None),
    ({"path": "a.png", "label": "x", "g": ""}, "g", "the group (g) must not be empty"),
    ({"path": "a.png", "label": "x", "g": "1"}, "g", None),
])  # fmt: skip
def test_a_row_of_a_table_has_what_it_needs(
    tmp_path: Path, row: dict[str, str], group: str | None, problem: str | None
) -> None:
    for name in ("a.png", "d\\e.png"):
        (tmp_path / name).touch()
    assert folder._csv_item(tmp_path / "t", row, group, ()).split == (row.get("split") or None)
    found = list(folder._row_problems(tmp_path / "t", 4, row, group, None))
    assert found == ([] if problem is None else [f"{tmp_path}/t, line 4: {problem}."])


@pytest.mark.parametrize(("splits", "role", "says"), [
    (["train", "test"], "trainer", None), ([None, None], "trainer", None), (["test"], "evaluator", None),
    (["test"], "trainer", "has only the split test; give train and test, or no split. Evaluators need --role"),
    (["train"], "trainer", "has only the split train; give train and test, or no split.$"),
    ([None, "train"], "trainer", "leaves the split of some images empty"),
    ([], "trainer", "has no image of the domain"),
])  # fmt: skip
def test_splits_are_given_for_all_or_for_none(splits: list[str | None], role: Any, says: str | None) -> None:
    items, options = [item("a", split) for split in splits], FolderOptions(uri="x:", role=role)
    if says is None:
        folder._check_splits(Path("t"), items, "d", options)
    else:
        with pytest.raises(DataError, match=says):
            folder._check_splits(Path("t"), items, "d", options)
