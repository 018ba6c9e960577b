"""Rows of tables are never mended, and names never merged: what is malformed or alike is refused or told by name."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel, ValidationError

from promptfed.cli.scoring import _expect_known
from promptfed.client_service.exits import ClientError
from promptfed.client_service.training.data import check_classes
from promptfed.console.output import class_names
from promptfed.coordinator.domain.federation import differing
from promptfed.coordinator.problems import UnknownClass
from promptfed.coordinator.resources.clients.operations import _check_class_names
from promptfed.shared.api.export_card import Card
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data import folder as folders
from promptfed.shared.data.registry import SharedSources, class_names_of, tell_look_alikes
from promptfed.shared.errors import PromptfedError
from promptfed.shared.messages import EnrolRequest
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from tests.shared.data.test_sources import hub_folder, picture

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "Müll") for form in ("NFC", "NFD"))
BOTH_SPELT = r"'Müll' \(spelt 'M\\xfcll'\)(.*)'Mu\u0308ll' \(spelt 'Mu\\u0308ll'\)"


def write(folder: Path, text: str, encoding: str = "utf-8") -> str:
    """The URI of a table for the images a0.png to a3.png and b0.png to b3.png."""
    for number in range(8):
        picture(folder / f"{'ab'[number // 4]}{number % 4}.png", 20 * number)
    (folder / "t.csv").write_text(text, encoding=encoding)
    return f"csv:{folder / 't.csv'}"


def refused(uri: str) -> str:
    """What a source is refused with, whether its images are read or its names alone."""
    with pytest.raises(DataError) as whole:
        open_source(uri)
    with pytest.raises(DataError) as names:
        class_names_of(uri)
    assert str(names.value) == str(whole.value)
    return "\n".join(whole.value.problems)


SOUND = "".join(f"{of}{k}.png,{of}\n" for of in "ab" for k in range(4))

MALFORMED = [
    ("path,label", "a0.png,fracture, healed", "line 3: 3 cells where the first line has 2; put a cell that"),
    ("path,label,patient", "a0.png,fracture, acute,p1", "line 3: 4 cells where the first line has 3"),
    ("path,label", "a0.png,fracture,", "line 3: 3 cells where the first line has 2"),
    ("path,mass,edema", "a0.png,1,0,1", "line 3: 4 cells where the first line has 3"),
    ("path,labels", "a0.png,mass,edema", "line 3: 3 cells where the first line has 2"),
    ("path,label,split", "a0.png,cat", "line 3: split is missing: give every line 3 cells"),
    ("path,label", "a0.png", "line 3: label is missing: give every line 2 cells"),
    ("path,label", "a0.png;cat", "line 3: label is missing: give every line 2 cells"),
    ("path,label", 'a0.png,"cat', "line 3: a quote is not closed, or text follows it; write a quote"),
    ("path,label", 'a0.png,"cat" grey', "line 3: a quote is not closed, or text follows it"),
    ("path,label", 'a0.png,"cat\na1.png,cat"', "line 4: label holds a line break; close its quote"),
    ("path,labels", 'a0.png,"cat\na1.png,dog"', "line 4: labels holds a line break"),
    ("path,label", 'a0.png,"cat\rx"', "line 4: label holds a line break; close its quote"),
    ("path,label,split", "a0.png,cat,train ", "line 3: split begins or ends with a space; remove it"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "line", "says"), MALFORMED)
def test_a_malformed_row_is_refused_with_its_lines_number(tmp_path: Path, header: str, line: str, says: str) -> None:
    sound = {"path,mass,edema": "b0.png,0,1", "path,labels": "b0.png,mass"}.get(header, "b0.png,dog,train")
    if header.endswith("label"):
        sound = "b0.png,dog"
    assert f"t.csv, {says}" in refused(write(tmp_path, f"{header}\n{sound}\n{line}\n"))


def test_all_malformed_rows_are_listed(tmp_path: Path) -> None:
    uri = write(tmp_path, "path,label\n" + "".join(f"a{k}.png,cat,old\n" for k in range(4)) + SOUND[-22:])
    assert refused(uri).count("3 cells where the first line has 2") == 4


@pytest.mark.parametrize("column", ["patient", "sex"])
def test_a_patient_or_a_subgroup_with_a_space_at_an_end_is_no_other_one(tmp_path: Path, column: str) -> None:
    rows = "".join(f"{of}{k}.png,{of},p{k // 2},f\n" for of in "ab" for k in range(4))
    uri = write(tmp_path, "path,label,patient,sex\n" + rows) + "?group=patient&groups=sex"
    assert set(open_source(uri).train.groups or ()) | set(open_source(uri).test.groups or ()) == {"p0", "p1"}
    damaged = rows.replace("b3.png,b,p1,f", "b3.png,b,p1 ,f" if column == "patient" else "b3.png,b,p1,f ")
    write(tmp_path, "path,label,patient,sex\n" + damaged)
    assert f"line 9: {column} begins or ends with a space; remove it" in refused(uri)


def test_a_row_of_a_domain_with_a_space_at_an_end_is_not_dropped(tmp_path: Path) -> None:
    uri = write(tmp_path, "path,label,domain\n" + SOUND.replace("\n", ",ink\n")) + "?domain=ink"
    assert len(open_source(uri).train) == 6
    write(tmp_path, "path,label,domain\n" + SOUND.replace("\n", ",ink\n").replace("a0.png,a,ink", "a0.png,a,ink "))
    assert "line 2: domain begins or ends with a space" in refused(uri)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_what_loses_nothing_is_read(tmp_path: Path, encoding: str) -> None:
    """Empty lines, a byte order mark, other line ends, quotes that are closed, line breaks of a column nobody reads."""
    text = 'path,label,report\n\n"a0.png","fracture, healed","one\ntwo"\n  \n' + SOUND[9:].replace("\n", ",\n") + "\n\n"
    source = open_source(write(tmp_path, text.replace("\n", "\r\n"), encoding) + "?min_per_class=1", "evaluator")
    assert source.class_names == ("a", "b", "fracture, healed")
    assert len(source.test) == 8


def test_malformed_rows_of_a_table_of_scans_are_refused_without_their_cells(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
    for text, says in (
        ("PatientID,label,split\nSECRET,x, y,train\n", "line 2: 4 cells where the first line has 3"),
        ("PatientID,label,split\nSECRET,x\n", "line 2: split is missing: give every line 3 cells"),
        ('PatientID,label\nSECRET,"x\n', "line 2: a quote is not closed"),
        ('PatientID,label\nSECRET,"x\nb,y"\n', "line 3: label holds a line break"),
        ("PatientID,label\nSECRET ,x\nSECRET,y\n", "line 2: PatientID begins or ends with a space"),
        ("PatientID,label,sex\nb,x,SECRET \n", "line 2: sex begins or ends with a space"),
        ("PatientID,SECRET_a,SECRET a\nb,1,0\n", "the columns 'SECRET_a' and 'SECRET a' would become one, 'SECRET a'"),
    ):
        (tmp_path / "labels.csv").write_text(text)
        told = refused(f"dicom:{tmp_path}{'?groups=sex' if 'sex' in text else ''}")
        assert f"the table of labels, {says}" in told or says in told
        assert "SECRET" not in told.replace("SECRET_a", "").replace("SECRET a", "")


# Names that are told


def told_of(caplog: pytest.LogCaptureFixture, uri: str) -> list[str]:
    """What is logged of a source, in whatever way it is opened: once, however often it is."""
    told = []
    for read in (open_source, class_names_of, SharedSources().open):
        caplog.clear()
        tell_look_alikes.cache_clear()
        folders._tell.cache_clear()
        for _ in range(2):
            read(uri, "evaluator")
        told.append(list(caplog.messages))
    assert told[0] == told[1] == told[2]
    return told[0]


def test_a_label_with_a_space_at_an_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    says = "these class names begin or end with a space: 'b '; remove it"
    uri = write(tmp_path, "path,label\n" + SOUND.replace(",b\n", ",b \n"))
    assert told_of(caplog, uri) == [f"{uri}: {says}"]
    (tmp_path / "d").mkdir()
    for name, images in (("a", "a?.png"), ("b ", "b?.png")):
        (tmp_path / "d" / name).mkdir()
        for path in tmp_path.glob(images):
            path.rename(tmp_path / "d" / name / path.name)
    assert told_of(caplog, f"folder:{tmp_path / 'd'}") == [f"folder:{tmp_path / 'd'}: {says}"]


@pytest.mark.parametrize(("cells", "told"), [
    (["mass, edema", "mass", "mass, edema"], " and 1 more"), (["mass;edema", "mass"], ""), (["mass|a, b", "a"], None),
])  # fmt: skip
def test_a_cell_of_names_with_other_separators_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cells: list[str], told: str | None
) -> None:
    rows = "".join(f'a{number}.png,"{cell}"\n' for number, cell in enumerate(cells))
    text = f"{tmp_path}/t.csv, line 2{told}: labels holds a comma or a semicolon and no |, which separates names"
    found = told_of(caplog, write(tmp_path, f"path,labels\n{rows}"))
    assert found == ([] if told is None else [f"{text}: it is one name"])


# Names that would become one


def class_folders(root: Path, *names: str) -> str:
    for number, name in enumerate(names):
        for k in range(3):
            picture(root / name / f"{k}.png", 60 * number + k)
    return f"folder:{root}"


def test_folders_that_would_become_one_class_are_refused_by_name(tmp_path: Path) -> None:
    one = "the class folders 'hot dog' and 'hot_dog' would become one, 'hot dog'; rename all but one"
    assert one in refused(class_folders(tmp_path / "plain", "hot_dog", "hot dog", "cat"))
    class_folders(tmp_path / "parted" / "train", "hot_dog", "cat")
    assert "'hot_dog' and 'hot dog' would become one" in refused(
        class_folders(tmp_path / "parted" / "test", "hot dog", "cat").removesuffix("/test")
    )
    assert open_source(class_folders(tmp_path / "sound", "hot_dog", "cat")).class_names == ("cat", "hot dog")


def test_columns_that_would_become_one_class_are_refused_by_name(tmp_path: Path) -> None:
    uri = write(tmp_path, "path,hot_dog,hot dog ,cat\na0.png,1,0,0\n")
    assert "the columns 'hot_dog' and 'hot dog ' would become one, 'hot dog'" in refused(uri)
    assert class_names_of(f"{uri}?columns=hot_dog,cat") == ("hot dog", "cat")
    assert "columns='hot_dog,,cat' has an empty name" in refused(f"{uri}?columns=hot_dog,,cat")
    assert "groups='cat,,' has an empty name" in refused(f"{uri}?groups=cat,,")
    with pytest.raises(PromptfedError, match="--classes 'a,,b' has an empty name"):
        class_names("a,,b")


def test_domains_that_would_have_one_name_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("Real World", "Real-World", "Art"):
        class_folders(tmp_path / name, "cat", "dog")
    told = refused(f"folder:{tmp_path}?domain=Real World")
    assert "the domains 'Real World' and 'Real-World' would become one, 'Real-World'" in told
    assert open_source(f"folder:{tmp_path}?domain=Art").domain is not None
    uri = write(tmp_path, "path,label,domain\na0.png,a,Real World\na1.png,a,Real-World\nb0.png,b,Art\nb1.png,b,Art\n")
    assert "the domains 'Real World' and 'Real-World' would become one" in refused(f"{uri}?domain=Real-World")
    assert len(open_source(f"{uri}?domain=Art", "evaluator").test) == 2


def test_a_librarys_names_that_would_become_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face data: pip install '.[hf]'")
    label = datasets.ClassLabel
    monkeypatch.setattr(datasets, "ClassLabel", lambda names: label(names=["red_fox", "red fox"]))
    with pytest.raises(DataError, match="the classes 'red_fox' and 'red fox' would become one, 'red fox'"):
        open_source(f"hf:{hub_folder(tmp_path, ('train',))}")
    root = tmp_path / "caltech101"
    for folder in ("101_ObjectCategories/BACKGROUND_Google", "Annotations/hot_dog", "Annotations/hot dog"):
        (root / folder).mkdir(parents=True)
    for name in ("hot_dog", "hot dog"):
        picture(root / "101_ObjectCategories" / name / "image_0001.jpg", 60)
    with pytest.raises(DataError, match="the classes 'hot dog' and 'hot_dog' would become one"):
        open_source(f"torchvision:Caltech101?root={tmp_path}")


# Names that stand side by side


def among_trainers() -> str:
    return str(differing({"a": ("dog", COMPOSED), "b": ("dog", DECOMPOSED)}))


def at_a_site(own: tuple[str, ...] = (COMPOSED, "dog"), known: tuple[str, ...] = (DECOMPOSED, "dog")) -> str:
    with pytest.raises(ClientError) as error:
        check_classes(own, known)
    return str(error.value)


def to_a_text_tower() -> str:
    with pytest.raises(MethodError) as error:
        make_method({"name": "promptfl"}).check_classes((COMPOSED, DECOMPOSED, "dog"))
    return str(error.value)


def at_the_coordinator(own: tuple[str, ...] = (DECOMPOSED, "dog"), known: tuple[str, ...] = (COMPOSED, "dog")) -> str:
    federation: Any = SimpleNamespace(name="f", spec=SimpleNamespace(class_names=list(known)))
    with pytest.raises(UnknownClass) as error:
        _check_class_names(federation, cast(EnrolRequest, SimpleNamespace(class_names=list(own))))
    return str(error.value)


def at_a_score(own: tuple[str, ...] = (DECOMPOSED, "dog"), known: tuple[str, ...] = (COMPOSED, "dog")) -> str:
    with pytest.raises(PromptfedError) as error:
        _expect_known(own, known, "folder:d")
    return str(error.value)


@pytest.mark.parametrize("refusal", [at_a_site, at_the_coordinator, at_a_score])
def test_wrong_class_names_are_told_beside_the_right_ones(refusal: Callable[..., str]) -> None:
    told = refusal(("Star", "cricle", "zzz"), ("circle", "square", "star"))
    assert "; nearest: 'star' to 'Star', 'circle' to 'cricle'; known: 'circle', 'square', 'star'" in told
    assert "(these look alike: 'Star' and 'star')" in told
    many = tuple(f"class {number:02}" for number in range(22))
    assert "'class 19', and 2 more" in refusal(("class 2O",), many)
    assert "'class 19'" in (told := refusal(("zzz",), many[:20]))
    assert "more" not in told
    assert "nearest" not in told


SIDE_BY_SIDE: dict[str, Callable[[], str]] = {
    "a federation and a site": at_the_coordinator, "an export and data": at_a_score, "trainers": among_trainers,
    "a site and its federation": at_a_site, "a text tower": to_a_text_tower,
}  # fmt: skip


@pytest.mark.parametrize("names", SIDE_BY_SIDE)
def test_differences_that_cannot_be_seen_are_spelt(names: str) -> None:
    told = SIDE_BY_SIDE[names]()
    for spelt in (f"'{COMPOSED}' (spelt 'M\\xfcll')", f"'{DECOMPOSED}' (spelt 'Mu\\u0308ll')"):
        assert spelt in told
    assert "dog' (spelt" not in told, "what is seen is not spelt"


def test_an_option_that_names_a_class_in_another_form_is_told_so(tmp_path: Path) -> None:
    uri = class_folders(tmp_path / "d", DECOMPOSED, "dog")
    told = refused(f"{uri}?only={COMPOSED},dog")
    assert f"not one of its classes (these look alike: '{DECOMPOSED}' (spelt 'Mu\\u0308ll') and" in told
    assert "look alike" not in refused(f"{uri}?only=cat")
    uri = write(tmp_path, f"path,{DECOMPOSED},cat\na0.png,1,0\n")
    assert "(these look alike: " in refused(f"{uri}?columns={COMPOSED}")


@pytest.mark.parametrize("letter", ["\u200b", "\ufeff", " "])
def test_a_column_with_an_unseen_letter_is_named(tmp_path: Path, letter: str) -> None:
    for column in ("path", "label"):
        header = "path,label".replace(column, f"{letter}{column}")
        told = refused(write(tmp_path, f"number,{header}\n1,a0.png,a\n"))
        assert repr(f"{letter}{column}") in told
        assert f"call it {column}" in told


OBEYED = ["\x1b[2J", "\x9b3J", "\r\n", "\u202e", "\u2067", "\u200f", "\u2028"]
NAMED: list[tuple[type[BaseModel], str, Any, Any]] = [
    (FederationSpec, "class_names", lambda text: ["a", text], "b"),
    (FederationSpec, "template", lambda text: f"{text} {{}}", "a"),
    (FederationSpec, "licence", str, "a"),
    (FederationSpec, "backbone", lambda text: {"model": text}, "a"),
    (TrainingTerms, "class_names", lambda text: ["a", text], "b"),
    (TrainingTerms, "template", str, "a"),
    (EnrolRequest, "class_names", lambda text: ["a", text], "b"),
    (EnrolRequest, "domain", lambda text: {"name": "x", "description": f"{text} {{}}"}, "a"),
    (Card, "class_names", lambda text: ["a", text], "b"),
]


@pytest.mark.parametrize(("model", "field", "value", "sound"), NAMED)
def test_no_name_or_wording_may_control_a_display(model: type[BaseModel], field: str, value: Any, sound: str) -> None:
    for name in [*OBEYED, sound, "zero\u200dwidth", "Müll"]:
        with pytest.raises(ValidationError) as error:
            model.model_validate({field: value(name)})
        told = [str(one["msg"]) for one in error.value.errors() if one["loc"][0] == field]
        assert ["would control a display" in one for one in told] == [True] * (name in OBEYED), told


@pytest.mark.parametrize("odd", OBEYED)
def test_no_source_or_command_takes_a_class_that_controls_a_display(tmp_path: Path, odd: str) -> None:
    assert "would control a display" in refused(class_folders(tmp_path / "d", "dog", f"cat{odd}"))
    if odd != "\r\n":  # a line break in a table is refused before
        assert "would control a display" in refused(
            write(tmp_path, f"path,label\n{SOUND}".replace(",b\n", f",a{odd}b\n"))
        )
    with pytest.raises(PromptfedError, match="would control a display"):
        class_names(f"dog,cat{odd}d")
