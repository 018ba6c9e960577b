"""An export that was changed is refused: by `verify` after it was signed, by the coordinator before it signs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

import promptfed
from promptfed.cli.main import app
from promptfed.client_service.serving.prediction import Served
from promptfed.export.adapted_model import weights_of
from promptfed.export.export import ExportOptions
from promptfed.export.export import export as write_export
from promptfed.export.reading import open_export, read_export
from promptfed.export.verification import verify_export
from promptfed.sdk.operations import take
from promptfed.shared.canonical import export_statement, parse_json, statement
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.errors import PromptfedError
from promptfed.shared.service.reasons import Exit
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from tests.support import exports
from tests.support.coordinators import InThread

Card = dict[str, Any]
Forgery = Callable[[Path, Card], None]


@pytest.fixture
def loaded(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds the backbone loaded."""
    monkeypatch.setattr("promptfed.shared.clip.load_backbone", lambda *names, **how: backbone)


@pytest.fixture
def key(coordinator: InThread) -> str:
    return str(coordinator.http.get("/v1/signing-key").json()["public_key"])


@pytest.fixture
def exported(coordinator: InThread, loaded: None, tmp_path: Path) -> Path:
    """What `promptfed export` has written of `promptfl`."""
    folder, token = tmp_path / "out", str(coordinator.settings.data_dir / "operator.token")
    options = ["--out", str(folder), "--coordinator", coordinator.url, "--token-file", token]
    done = CliRunner().invoke(app, ["export", "promptfl", *options])
    assert done.exit_code == Exit.OK, done.output
    return folder


def verify(folder: Path, key: str, *more: str) -> Result:
    return CliRunner().invoke(app, ["verify", str(folder), "--key", key, *more])


def rotated_class_names(folder: Path, card: Card) -> None:
    card["class_names"] = card["class_names"][1:] + card["class_names"][:1]


def swapped_weights(folder: Path, card: Card) -> None:
    place = folder / "class_weights.safetensors"
    weights, _ = decode(place.read_bytes())
    place.write_bytes(encode({name: tensor.flip(0) for name, tensor in weights.items()}))


def another_template(folder: Path, card: Card) -> None:
    card["template"] = "not a photo of a {}."


def another_backbone(folder: Path, card: Card) -> None:
    card["backbone"] |= {"model": "ViT-B-16", "pretrained": "somebody"}


def another_federation_name(folder: Path, card: Card) -> None:
    card["federation"]["name"] = "another"


def another_participant(folder: Path, card: Card) -> None:
    card["participants"][0]["name"] = "A famous hospital"


def invented_privacy(folder: Path, card: Card) -> None:
    card["privacy"] = {
        "level": "sample", "unit": "record", "relation": "zero-out", "epsilon_max": 0.1, "epsilon_median": 0.1,
        "clients": 2, "delta": 1e-6, "clip": 1.0, "noise_multiplier": 9.0, "noise": "secret", "accountant": "pld",
        "rounds_counted": 1, "evaluation": "withheld",
    }  # fmt: skip


def another_text(folder: Path, card: Card) -> None:
    place = folder / "card.md"
    place.write_text(place.read_text().replace("## Privacy", "## Privacy\n\nApproved for clinical use."))


def an_added_pickle(folder: Path, card: Card) -> None:
    (folder / "weights.pkl").write_bytes(pickle.dumps({"loaded": "by whom?"}))


FORGERIES: tuple[Forgery, ...] = (
    rotated_class_names, swapped_weights, another_template, another_backbone, another_federation_name,
    another_participant, invented_privacy, another_text, an_added_pickle,
)  # fmt: skip


def forge(folder: Path, forgery: Forgery) -> None:
    """Change an export, and have its card name the files as they are now."""
    place = folder / "card.json"
    card = json.loads(place.read_text())
    forgery(folder, card)
    for name, about in card["files"].items():
        body = (folder / name).read_bytes()
        about |= {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    place.write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_a_forged_export_is_refused(exported: Path, key: str, forgery: Forgery) -> None:
    assert verify(exported, key).exit_code == Exit.OK
    forge(exported, forgery)
    refused = verify(exported, key)
    assert refused.exit_code == Exit.REFUSED, refused.output
    assert refused.stderr.count("\n") == 1


def zipped(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder), "zip", folder))


def test_an_archive_is_read_as_a_folder_is(exported: Path, key: str, tmp_path: Path) -> None:
    archive = zipped(exported)
    assert verify(archive, key).stdout.replace(str(archive), "") == verify(exported, key).stdout.replace(
        str(exported), ""
    )
    exports.picture().save(tmp_path / "one.png")
    asked = CliRunner().invoke(app, ["predict", str(tmp_path / "one.png"), "--export", str(archive), "--json"])
    assert asked.exit_code == Exit.OK, asked.output
    forge(exported, an_added_pickle)
    assert verify(zipped(exported), key).exit_code == Exit.REFUSED
    with zipfile.ZipFile(archive, "a") as twice, pytest.warns(UserWarning, match="Duplicate"):
        twice.writestr("card.md", "another")
    for broken, says in ((archive, "a name twice"), (exported / "card.json", "no archive that can be read")):
        refused = verify(broken, key)
        assert refused.exit_code in (Exit.BAD_INPUT, Exit.REFUSED), refused.output
        assert says in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("lie", ["card", "packed", "lzma", "bzip2"])
def test_an_archive_that_asks_for_much_memory_is_one_line(exported: Path, tmp_path: Path, lie: str) -> None:
    """A card that claims 3.8 GB, a member that becomes as much, and packings that take memory as a member asks."""
    archive, kind = tmp_path / "lies.zip", {"lzma": zipfile.ZIP_LZMA, "bzip2": zipfile.ZIP_BZIP2}.get(lie, 8)
    card = json.loads((exported / "card.json").read_text())
    if lie == "card":
        card["files"] = {name: {**about, "bytes": 3_800_000_000} for name, about in card["files"].items()}
    with zipfile.ZipFile(archive, "w", kind, compresslevel=1) as made:
        for path in sorted(path for path in exported.rglob("*") if path.is_file()):
            name = str(path.relative_to(exported))
            zeros = lie == "card" and name.endswith(".safetensors")
            made.writestr(
                name, json.dumps(card) if name == "card.json" else bytes(90 << 20) if zeros else path.read_bytes()
            )
    content = bytearray(archive.read_bytes())
    if lie == "packed":  # in the directory at the end, of every member
        at = content.find(b"PK\x01\x02")
        while at >= 0:
            content[at + 24 : at + 28] = (3_800_000_000).to_bytes(4, "little")
            at = content.find(b"PK\x01\x02", at + 4)
    if lie == "lzma":  # the size of the dictionary, in what stands before the first member
        at = 30 + int.from_bytes(content[26:28], "little") + 4
        content[at + 1 : at + 5] = b"\xff" * 4
    archive.write_bytes(content)
    asked = CliRunner().invoke(app, ["score", str(archive), "symbols:photo", "--out", str(tmp_path / "out")])
    assert asked.exit_code == Exit.BAD_INPUT, asked.output
    assert asked.stderr.count("\n") == 1, asked.stderr
    assert ("packed by another method" if kind != 8 else "bytes of the archive become") in asked.stderr


def request_signature(
    coordinator: InThread, folder: Path, round: int = 0, federation: str = "promptfl"
) -> httpx.Response:
    """Ask the coordinator, as an operator, to sign the card in ``folder``; what it signs is put there."""
    headers = coordinator.operator | {"Content-Type": "application/json"}
    path = f"/v1/federations/{federation}/rounds/{round}/card/signature"
    answer = coordinator.http.post(path, content=(folder / "card.json").read_bytes(), headers=headers)
    if answer.status_code == 200:
        (folder / "card.json.sig").write_text(answer.json()["signature"])
    return answer


def test_verify_compares_the_cards_text_that_a_lying_exporter_had_signed(
    coordinator: InThread, exported: Path, key: str
) -> None:
    forge(exported, another_text)
    assert request_signature(coordinator, exported).status_code == 200
    refused = verify(exported, key)
    assert (refused.exit_code, "card.md does not match the card" in refused.stderr) == (Exit.REFUSED, True)


def test_verify_computes_the_weights_again_that_a_lying_exporter_had_signed(
    coordinator: InThread, backbone: Backbone, loaded: None, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(served: Served) -> Tensors:
        return {name: tensor.flip(0) for name, tensor in (weights_of(served) or {}).items()}

    with monkeypatch.context() as lying, exports.api(coordinator) as api:
        lying.setattr("promptfed.export.export.weights_of", swapped)
        found = exports.finished_result(coordinator, "promptfl")
        write_export(found, tmp_path / "out", ExportOptions(), backbone, api)
    refused = verify(tmp_path / "out", key)
    why = "class_weights.safetensors: they are not what the state and the backbone give"
    assert (refused.exit_code, why in refused.stderr) == (Exit.REFUSED, True), refused.output


def test_verify_says_what_was_computed_again_and_what_could_not_be(
    exported: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "class_weights.safetensors computed again with the backbone: the same" in verify(exported, key).stdout
    assert (
        "class_weights.safetensors not computed again: not asked for" in verify(exported, key, "--no-recompute").stdout
    )

    def none(*names: object, **how: object) -> Backbone:
        raise BackboneError("there is no network here")

    monkeypatch.setattr("promptfed.shared.clip.load_backbone", none)
    told = verify(exported, key)
    assert told.exit_code == Exit.OK
    assert "class_weights.safetensors not computed again: there is no network here" in told.stdout


def test_a_card_of_another_round_or_federation_is_not_signed(coordinator: InThread, exported: Path) -> None:
    assert request_signature(coordinator, exported, federation="fedpgp").status_code == 409
    answer = request_signature(coordinator, exported, round=7)
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "no-state")
    (exported / "card.json").write_text("[" * 100_000)
    answer = request_signature(coordinator, exported)
    assert (answer.status_code, "nested too deeply" in answer.json()["detail"]) == (400, True)


def test_signature_of_something_else_refused(coordinator: InThread, exported: Path, key: str, tmp_path: Path) -> None:
    """Another export's, the state's of the same federation and round, and one of the card under another heading."""
    card = json.loads((exported / "card.json").read_text())
    signer = coordinator.app.state.signer
    with exports.api(coordinator) as api:
        found = exports.finished_result(coordinator, "fedpgp")
        write_export(found, tmp_path / "other", ExportOptions(), exports.backbone(), api)
    body = (exported / "card.json").read_bytes()
    own = (exported / "card.json.sig").read_text()
    for signature in (
        (tmp_path / "other" / "card.json.sig").read_text(),
        signer.sign(statement(card["federation"]["id"], 0, card["hashes"]["state"])),
        signer.sign(body),
        signer.sign(export_statement(body + b" ")),
        "",
        "ü" * 2000,
    ):
        (exported / "card.json.sig").write_text(signature)
        assert verify(exported, key).exit_code in (Exit.REFUSED, Exit.BAD_INPUT)
    (exported / "card.json.sig").write_text(own)
    assert verify(exported, key).exit_code == Exit.OK


def test_an_export_of_before_signs_only_the_state(coordinator: InThread, exported: Path, key: str) -> None:
    place = exported / "card.json"
    card = json.loads(place.read_text())
    del card["files"]["card.md"]
    said = statement(card["federation"]["id"], 0, card["hashes"]["state"])
    place.write_text(json.dumps(card | {"signature": coordinator.app.state.signer.sign(said)}))
    (exported / "card.json.sig").unlink()
    refused = verify(exported, key)
    assert refused.exit_code == Exit.REFUSED
    assert "covers only the state" in refused.stderr
    assert read_export(exported)[1] == tuple(exports.NAMES), "without a key it is read as before"
    open_export(exported, whole=True)


def a_link(folder: Path) -> None:
    (folder / "card.md").rename(folder.parent / "card.md")
    (folder / "card.md").symlink_to(folder.parent / "card.md")


def a_linked_folder(folder: Path) -> None:
    (folder / "backbone").rename(folder.parent / "backbone")
    (folder / "backbone").symlink_to(folder.parent / "backbone")


def a_folder_inside(folder: Path) -> None:
    (folder / "more").mkdir()


def a_file_beside_the_backbone(folder: Path) -> None:
    (folder / "backbone" / "open_clip_model.bin").write_bytes(b"")


def another_case(folder: Path) -> None:
    (folder / "Card.md").write_text("other")


def a_pipe(folder: Path) -> None:
    (folder / "card.md").unlink()
    os.mkfifo(folder / "card.md")


def a_longer_file(folder: Path) -> None:
    with (folder / "class_weights.safetensors").open("ab") as file:
        file.write(b"more")


def a_missing_file(folder: Path) -> None:
    (folder / "class_weights.safetensors").unlink()


@pytest.mark.parametrize("change", [
    a_link, a_linked_folder, a_folder_inside, a_file_beside_the_backbone, another_case, a_pipe, a_longer_file,
    a_missing_file,
], ids=lambda change: change.__name__)  # fmt: skip
def test_a_folder_that_holds_anything_else_is_refused(exported: Path, key: str, change: Callable[[Path], None]) -> None:
    """The card and its signature are as they were."""
    change(exported)
    refused = verify(exported, key)
    assert refused.exit_code in (Exit.REFUSED, Exit.BAD_INPUT), refused.output
    assert refused.stderr.count("\n") == 1
    with pytest.raises(PromptfedError):
        open_export(exported, whole=True)


def test_predict_and_score_verify_where_the_key_is_known(
    exported: Path, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, score = tmp_path / "image.png", tmp_path / "score"
    exports.picture().save(image)
    data = "symbols:sketch?only=anchor,sun&per_class=1&test_per_class=1"

    def results() -> list[Result]:
        shutil.rmtree(score, ignore_errors=True)
        commands = (
            ["predict", str(image), "--export", str(exported)],
            ["score", str(exported), data, "--out", str(score)],
        )
        return [CliRunner().invoke(app, [*command, "--key", key]) for command in commands]

    assert [done.exit_code for done in results()] == [0, 0]
    forge(exported, rotated_class_names)
    for done in results():
        assert (done.exit_code, "is not signed by the key" in done.stderr) == (Exit.REFUSED, True), done.output
    monkeypatch.setenv("PROMPTFED_SIGNING_KEY", key)
    known = CliRunner().invoke(app, ["predict", str(image), "--export", str(exported)])
    assert known.exit_code == Exit.REFUSED


@pytest.mark.parametrize(("change", "why"), [
    (lambda card: card["federation"].pop("id"), "federation.id"),
    (lambda card: card.pop("federation"), "federation"),
    (lambda card: card["hashes"].pop("state"), "hashes.state"),
    (lambda card: card.pop("files"), "files"),
    (lambda card: card["files"].pop("prompts.safetensors"), "names no prompts.safetensors"),
])  # fmt: skip
def test_a_card_that_lacks_something_is_one_line(exported: Path, tmp_path: Path, change: Any, why: str) -> None:
    place = exported / "card.json"
    card = json.loads(place.read_text())
    change(card)
    place.write_text(json.dumps(card))
    expect_one_line(exported, tmp_path, why)


@pytest.mark.parametrize(("text", "why"), [
    ("[" * 100_000, "nested too deeply"),
    ('{"a":' * 100_000, "nested too deeply"),
    ('{"format": 1, "format": 1}', "has the key 'format' twice"),
    ('{"format": NaN}', "holds NaN"),
    ("\udcff", "cannot be read"),
    ("[]", "damaged"),
    (" " * (9 << 20), "longer than"),
])  # fmt: skip
def test_json_that_readers_differ_about_is_one_line(exported: Path, tmp_path: Path, text: str, why: str) -> None:
    (exported / "card.json").write_bytes(text.encode(errors="surrogateescape"))
    expect_one_line(exported, tmp_path, why)


def expect_one_line(folder: Path, tmp_path: Path, why: str) -> None:
    """`predict` refuses the export in one line."""
    image = tmp_path / "image.png"
    exports.picture().save(image)
    done = CliRunner().invoke(app, ["predict", str(image), "--export", str(folder)])
    assert done.exit_code == Exit.BAD_INPUT, done.output
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_each_key_and_value_is_read_once() -> None:
    assert parse_json(b'{"a": [1, 2.5, "\xc3\xbc", null]}') == {"a": [1, 2.5, "\u00fc", None]}
    for text, why in (
        (b'{"a": 1, "a": 1}', "twice"),
        (b'[{"b": {"a": 1, "a": 2}}]', "twice"),
        (b"Infinity", "holds Infinity"),
        (b"\xff", "decode"),
        (b"{", "property name"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_json(text)


def test_text_of_an_export_moves_no_cursor(
    coordinator: InThread, backbone: Backbone, loaded: None, tmp_path: Path
) -> None:
    options = [ExportOptions(("sun", name)) for name in ("sun\x1b[2J", "=anchor\u202e")]
    for place, given in enumerate(options):
        with pytest.raises(ValueError, match="would control a display"):
            write_export(exports.finished_result(coordinator, "promptfl"), tmp_path / f"{place}", given, backbone)
    names = ("sun\u200b[2J", "=anchor\ufeff")
    write_export(exports.finished_result(coordinator, "promptfl"), tmp_path / "out", ExportOptions(names), backbone)
    (tmp_path / "in").mkdir()
    exports.picture().save(tmp_path / "in" / "image.png")
    for image in (tmp_path / "in" / "image.png", tmp_path / "in"):
        done = CliRunner().invoke(app, ["predict", str(image), "--export", str(tmp_path / "out")])
        assert done.exit_code == Exit.OK, done.output
        assert "\u200b" not in done.stdout
        assert "\ufeff" not in done.stdout
        assert "\\u200b[2J" in done.stdout or "\\ufeff" in done.stdout


def test_viewers_export_not_signed_and_says_so(coordinator: InThread, loaded: None, key: str, tmp_path: Path) -> None:
    minted = coordinator.post("/v1/operators", {"name": "reader", "role": "viewer"}, status=201)
    token = tmp_path / "viewer.token"
    token.write_text(minted["token"])
    options = ["--out", str(tmp_path / "out"), "--coordinator", coordinator.url, "--token-file", str(token)]
    done = CliRunner().invoke(app, ["export", "promptfl", *options])
    assert done.exit_code == Exit.OK, done.output
    assert "The export is not signed: this call takes the role operator" in done.stderr
    assert not (tmp_path / "out" / "card.json.sig").exists()
    refused = verify(tmp_path / "out", key)
    assert (refused.exit_code, "by a viewer" in refused.stderr) == (Exit.REFUSED, True)


def test_a_federation_that_goes_on_meanwhile_is_taken_again(
    coordinator: InThread, backbone: Backbone, key: str, tmp_path: Path
) -> None:
    federation = coordinator.create(name="growing", method={"name": "promptfl", "m": 4}, class_names=exports.NAMES)
    about = {"backbone_fingerprint": backbone.fingerprint, "backbone_shape": shape_of(backbone).model_dump()}
    coordinator.enrol(federation, "a", "b", class_names=exports.NAMES, **about)
    coordinator.post(f"{federation}/start")
    with exports.api(coordinator) as api:
        stale = api.run(take("growing"))
        coordinator.enrol(federation, "late", class_names=exports.NAMES, **about)
        card = write_export(stale, tmp_path / "out", ExportOptions(anonymous=True), backbone, api)
    assert [one.name for one in card.participants] == ["client 1", "client 2", "client 3"]
    verified = verify_export(tmp_path / "out", key, backbone=backbone)
    assert verified.card == card
    audited = coordinator.get("/v1/audit-log?limit=1000")["entries"]
    (entry,) = [one for one in audited if one["act"] == "export-signed" and one["federation"] == federation]
    digest = hashlib.sha256((tmp_path / "out" / "card.json").read_bytes()).hexdigest()
    assert entry["detail"] == {"round": 0, "card_sha256": digest}


@pytest.mark.parametrize("method", exports.SPECS)
def test_every_methods_export_is_signed_and_the_library_verifies_it(
    coordinator: InThread, backbone: Backbone, key: str, tmp_path: Path, method: str
) -> None:
    token = (coordinator.settings.data_dir / "operator.token").read_text().strip()
    with promptfed.connect(coordinator.url, token=token) as connection:
        result = connection.federation(method.replace("_", "-")).result()
        result.backbone = backbone
        result.export(tmp_path / "out", exports.NAMES)
    remarks = promptfed.verify_export(tmp_path / "out", key, backbone=backbone).remarks
    assert "the class names are the exporter's, not the federation's" in remarks
    assert any("computed again" in remark for remark in remarks) == (tmp_path / "out" / "backbone").exists()
    result.export(tmp_path / "later", exports.NAMES)  # the connection is closed
    assert not (tmp_path / "later" / "card.json.sig").exists()
