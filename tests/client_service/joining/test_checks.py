"""Each check on both sides of its threshold, and what it tells a person."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import Refused
from promptfed.client_service.joining import checks
from promptfed.client_service.joining.checks import ACCEPT, Check, check_data, check_device, check_disk, check_recorded
from promptfed.client_service.joining.disclosure import Declared
from promptfed.client_service.joining.offer import (
    check_declaration,
    enrol_request,
    enrolment_token,
    explain,
    federation_method,
)
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import Identity
from promptfed.shared.clip import Backbone
from promptfed.shared.data import DataError, Source, Split
from promptfed.shared.data.identity import identity_of
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.secagg.keys import is_signed, new_identity, public_identity
from tests.client_service.test_training_terms import info_of
from tests.support.fake_coordinator import made_up_source


def rows(source: Source, train: list[int], test: list[int]) -> Source:
    chosen = [
        split.select(torch.tensor(some, dtype=torch.int64))
        for split, some in zip((source.train, source.test), (train, test), strict=True)
    ]
    return replace(source, train=chosen[0], test=chosen[1])


def test_a_check_is_a_line() -> None:
    assert Check("disk", "warn", "little room", "make some").line() == "warn  disk          little room: make some"
    assert Check("images", "pass", "all read").line() == "pass  images        all read"
    versions = checks.check_versions()
    assert (versions.name, versions.verdict) == ("versions", "pass")
    assert versions.text.endswith(
        f"torch {metadata.version('torch')}, open_clip_torch {metadata.version('open_clip_torch')}"
    )


def test_counts_of_images_on_both_sides(source: Source) -> None:
    """Of four classes in turn: 16 rows are four of each, 15 are three of the last."""
    all_, last = list(range(24)), source.class_names[3]
    named = ", ".join(source.class_names)
    for train, test, role, verdict, said in (
        (all_[:16], all_, "trainer", "pass", f"16 training and 24 test images of 4 classes, {named}"),
        (all_[:15], all_, "trainer", "warn", f"{named}; only 3 training images or fewer of {last}"),
        (all_[:16], [], "trainer", "warn", f"16 training and 0 test images of 4 classes, {named}"),
        ([], all_, "trainer", "fail", f"0 training and 24 test images of 4 classes, {named}"),
        ([], [1], "evaluator", "pass", "0 training and 1 test image of 4 classes"),
        (all_, [], "evaluator", "fail", "24 training and 0 test images of 4 classes"),
    ):
        check = check_data(rows(source, train, test), role)[0]
        assert (check.name, check.verdict, check.text.endswith(said)) == ("data", verdict, True), check.text
        assert (check.advice is None) is (verdict == "pass")
    assert [checks._shown(source.class_names[:1] * count) for count in (4, 5)] == [
        ", ".join(source.class_names[:1] * 4), ", ".join(source.class_names[:1] * 4) + " and 1 more",
    ]  # fmt: skip


def test_a_sample_of_the_images_is_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(train: list[int], test: list[int], number: int = -1) -> Check:
        return check_data(rows(source, train, test), "trainer")[number]

    assert [check.name for check in check_data(source, "trainer")] == ["data", "images"]
    assert said([0, 1], [2, 3, 4]).text == "5 of 5 were read"
    monkeypatch.setattr(checks, "SAMPLE_IMAGES", 3)
    assert said([0, 1, 2, 3], [4, 5, 6]).text == "6 of 7 were read, a sample"
    assert checks._some(rows(source, list(range(7)), []).train) == [0, 2, 4]
    copies = replace(source, test=source.train)
    assert check_data(copies, "trainer")[-1].text.endswith("; 3 are training and test images alike")
    lost = replace(source, left_out={"a.png": "cannot be read"})
    assert [(one.name, one.verdict) for one in check_data(lost, "trainer")][1] == ("files", "warn")
    assert check_data(lost, "trainer")[1].text == "1 file or line cannot be read, and left out"

    def fails(split: Split, row: int) -> str:
        raise DataError("a.png is no image")

    monkeypatch.setattr(Split, "digest", fails)
    assert said([0], [1]) == Check("images", "fail", "a.png is no image")


@pytest.mark.parametrize(("device", "count", "verdict", "text"), [
    ("auto", 0, "warn", "no GPU: the CPU computes"), ("cpu", 0, "warn", "no GPU: the CPU computes"),
    ("cpu", 2, "warn", "the CPU computes though a GPU is here"), ("auto", 2, "pass", "number 0, 80 GiB"),
    ("cuda", 2, "pass", "number 0, 80 GiB"), ("cuda:1", 2, "pass", "number 1, 80 GiB"),
    ("cuda:2", 2, "fail", "cuda:2 is not here (this machine has 2 GPUs)"),
    ("cuda:1", 1, "fail", "cuda:1 is not here (this machine has 1 GPU)"),
    ("cuda", 0, "fail", "cuda is not here (this machine has 0 GPUs)"),
])  # fmt: skip
def test_a_device_is_looked_for(
    device: str, count: int, verdict: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = lambda number: SimpleNamespace(name=f"number {number}", total_memory=80 << 30)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", about)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count or 3)
    found = check_device(device)
    assert (found.name, found.verdict, found.text, found.advice is None) == ("device", verdict, text, verdict == "pass")


def test_a_disk_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, verdict in (((1 << 30) - 1, "warn"), (1 << 30, "pass")):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        check = check_disk(tmp_path / "later")
        assert (check.verdict, check.text) == (verdict, f"1.0 GiB free for {tmp_path / 'later'}")
    (tmp_path / "file").write_text("")
    assert check_disk(tmp_path / "file").text == f"{tmp_path / 'file'} cannot be written", "no folder"
    assert check_disk(tmp_path / "file" / "below").verdict == "fail"
    monkeypatch.setattr(checks.tempfile, "TemporaryFile", lambda dir: (dir / "none" / "here").read_bytes())
    assert check_disk(tmp_path).text == f"{tmp_path} cannot be written"

    def gone(place: Path) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    assert check_disk(tmp_path) == Check("disk", "fail", f"{tmp_path}: Input/output error", "give another --state-dir")


def test_data_are_those_that_a_client_has_enrolled_with(tmp_path: Path) -> None:
    known, other = made_up_source(), made_up_source(3)
    assert check_recorded(tmp_path, other, {}, False) == [], "a new folder"
    (tmp_path / "data.json").write_text(identity_of(known, {}).model_dump_json())
    for identity, found in (
        ("{}", []),
        ('{"client_id": null}', []),
        ('{"client_id": "c"}', ["fail"]),
        ("[" * 9999, []),
    ):
        (tmp_path / "identity.json").write_text(identity)
        assert [one.verdict for one in check_recorded(tmp_path, other, {}, False)] == found
        assert check_recorded(tmp_path, known, {}, False) == []
    (tmp_path / "identity.json").write_text(json.dumps({"client_id": "c"}))
    [check] = check_recorded(tmp_path, other, {}, True)
    assert (check.name, check.verdict, check.advice) == ("recorded data", "warn", ACCEPT)
    assert check.text.startswith("the data have changed since this client last started: other train images")


@pytest.mark.parametrize(("status", "kind", "exit", "said"), [
    (409, "name-taken", Exit.NAME_TAKEN, "the name 'hospital-a' is taken in"),
    (403, "withdrawn", Exit.WITHDRAWN, "has withdrawn 'hospital-a' from"),
    (401, "x", Exit.NOT_ALLOWED, "does not accept this client: why"), (403, "x", Exit.NOT_ALLOWED, "does not accept"),
    (409, "other-backbone", Exit.BACKBONE, "refuses this backbone: why"),
    (400, "protocol-version", Exit.PROTOCOL, "refuses this version: why"),
    (404, "not-found", Exit.REFUSED, "answers: why, or ask the operator"),
    (402, "x", Exit.REFUSED, "federation pets at http://127.0.0.1:1 refuses: why (402 x)"),
    (404, "x", Exit.REFUSED, "refuses: why (404 x)"),
])  # fmt: skip
def test_a_refusal_says_what_to_do(status: int, kind: str, exit: Exit, said: str, settings: Settings) -> None:
    error = explain(Refused(status, kind, "why"), settings)
    assert (error.exit, said in str(error)) == (exit, True), str(error)


def test_one_or_several_labels_are_the_federation_s(source: Source) -> None:
    wide = torch.nn.functional.one_hot(source.test.labels, 4)
    several = replace(source, test=Split(wide, lambda rows: []))
    info, one, many = (
        info_of("promptfl"),
        make_method({"name": "promptfl"}),
        {"name": "promptfl", "task": "multi_label"},
    )
    info = info.model_copy(update={"class_names": list(source.class_names)})
    for method, right, wrong, said in (
        (one, source, several, "is for one label per image, and made-up has any number of labels per image"),
        (make_method(many), several, source, "is for any number of labels per image, and made-up has one label per"),
    ):
        check_declaration(method, info, "trainer", right)
        with pytest.raises(ClientError, match=said) as end:
            check_declaration(method, info, "trainer", wrong)
        assert end.value.exit is Exit.BAD_INPUT
    domains, nameless = make_method({"name": "fast_pt"}), replace(source, domain=None)
    check_declaration(domains, info, "evaluator", nameless)
    with pytest.raises(ClientError, match="needs words for what the images look like: give --domain"):
        check_declaration(domains, info, "trainer", nameless)


def test_an_enrolment_is_signed_where_a_key_is_there(backbone: Backbone) -> None:
    declared = Declared("a", "trainer", 4, ("sun", "moon"), None, "cpu", "sha256:" + "0" * 64)
    plain = enrol_request(declared, "ab" * 32, backbone)
    assert (plain.backbone_fingerprint, plain.identity_key, plain.secret) == (backbone.fingerprint, None, "ab" * 32)
    key = new_identity()
    signed = enrol_request(declared, "ab" * 32, backbone, key)
    assert signed.identity_key == public_identity(key).hex()
    assert is_signed(public_identity(key), bytes.fromhex(signed.identity_proof or ""), "identity", plain.proof_body())
    with pytest.raises(ClientError, match="the data cannot be declared: ") as end:
        enrol_request(replace(declared, class_names=("x" * 9999,)), "ab" * 32, backbone)
    assert end.value.exit is Exit.BAD_INPUT


@pytest.mark.parametrize(("here", "there", "said"), [
    (None, None, None), ("p==1", "p==2", None), ("p==1", None, "is promptfed's own at the coordinator and p==1 here"),
    (None, "p==1", "is p==1 at the coordinator and promptfed's own here"), ("q==1", "p==1", "is p==1 at the coord"),
])  # fmt: skip
def test_a_method_is_of_one_package_on_both_sides(
    here: str | None, there: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(METHODS), "package", lambda self, name: here)
    info = info_of("promptfl").model_copy(update={"method_package": there})
    if said is None:
        assert federation_method(info).name == "promptfl"
        return
    with pytest.raises(ClientError, match=said) as end:
        federation_method(info)
    assert end.value.exit is Exit.PROTOCOL


def test_a_method_that_is_not_here_says_where_it_comes_from() -> None:
    info = info_of("of-no-package")
    for package, said in ((None, "install the coordinator's version"), ("p==1", "it comes from the package p==1: ")):
        with pytest.raises(ClientError, match=said):
            federation_method(info.model_copy(update={"method_package": package}))


@pytest.mark.parametrize(("file", "number", "token"), [
    (None, None, "no enrolment token: give --enrolment-token-file"), (None, "c", None), ("none", "c", None),
    ("none", None, "enrolment token"), ("token", None, "t" * 40), ("token", "c", "t" * 40),
])  # fmt: skip
def test_who_has_enrolled_needs_no_token(
    file: str | None, number: str | None, token: str | None, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t" * 40)
    given = settings.model_copy(update={"enrolment_token_file": file and tmp_path / file})
    identity = Identity("a", "trainer", "secret", "fed-1", number)
    if token is None or file == "token":
        assert enrolment_token(given, identity) == token
    else:
        with pytest.raises(ClientError, match=token):
            enrolment_token(given, identity)
