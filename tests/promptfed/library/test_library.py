"""The library: a federation in ten lines, in this process and at a coordinator; what it came to in one object."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import promptfed
from promptfed.client_service.joining.offer import Offer
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import open_source
from tests.support import exports
from tests.support.coordinators import in_thread
from tests.support.own_images import write_folder
from tests.support.waiting import PATIENCE

SMALL = "?topic=weather&per_class=2&test_per_class=2"


@pytest.fixture(scope="module")
def result(backbone: Backbone) -> promptfed.Result:
    source = open_source(f"symbols:sketch{SMALL}")
    return promptfed.run(
        {"name": "fedpgp", "m": 4}, {"neon": f"symbols:neon{SMALL}", "quickdraw": f"symbols:quickdraw{SMALL}"},
        unseen=[replace(source, uri="anything")], rounds=2, training={"epochs": 1, "learning_rate": 0.01},
        class_names=list(source.class_names), backbone=backbone, seed=3,
    )  # fmt: skip


def test_progress_is_shown_in_a_notebook_and_where_it_takes_long(
    backbone: Backbone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for notebook, soon in ((False, 1000.0), (False, 0.0), (True, 1000.0)):
        if notebook:
            monkeypatch.setitem(sys.modules, "ipykernel", sys)
        monkeypatch.setattr(import_module("promptfed.library.run"), "SOON_SECONDS", soon)
        promptfed.run("zero_shot", [f"symbols:sketch{SMALL}"], rounds=3, backbone=backbone)
        shown.append(capsys.readouterr().err)
    assert shown[0] == "", "what is over soon fills no log"
    assert all("| 3/3 [" in text for text in shown[1:])


def test_accuracies_by_client_round_and_role(result: promptfed.Result) -> None:
    final = result.accuracies()
    assert [(one.client, one.role, one.round) for one in final] == [
        ("neon", "trainer", 2),
        ("quickdraw", "trainer", 2),
        ("unseen-0", "evaluator", 2),
    ]
    trainers = [one.accuracy for one in final if one.role == "trainer"]
    assert result.mean() == pytest.approx(sum(trainers) / 2)
    assert result.mean("evaluator", "zero_shot") == final[2].zero_shot
    assert list(result.curve()) == [0, 1, 2]
    assert result.curve()[2] == result.mean()
    assert [one.round for one in result.accuracies(0)] == [0, 0, 0]
    for wrong in (
        lambda: result.mean(column="zeroshot"),
        lambda: result.mean("client"),
        lambda: result.curve("client"),
    ):
        with pytest.raises(promptfed.PromptfedError, match=r"give '.*' or '"):
            wrong()


def test_it_is_what_the_coordinator_told(result: promptfed.Result) -> None:
    assert result.round == 2
    assert result.state["global_context"].shape == (4, 112)
    assert result.reports[-1]["state_hash"] == result.state_hash
    assert result.spec["training"]["momentum"] == 0.9  # the method's default


def test_predictions_and_weights_agree(result: promptfed.Result, backbone: Backbone, tmp_path: Path) -> None:
    image = open_source(f"symbols:sketch{SMALL}").test.image(0)
    image.save(tmp_path / "image.png")
    found = result.predict(image)
    assert result.predict(tmp_path / "image.png") == found
    weights = result.class_weights()
    assert weights is not None
    feature = backbone.encode_images(backbone.preprocess(image).unsqueeze(0))
    expected = (backbone.logit_scale * feature @ weights["class_weights"].T).softmax(-1)[0]
    names = result.spec["class_names"]
    assert found.probabilities == pytest.approx(dict(zip(names, expected.tolist(), strict=True)), abs=1e-5)
    assert found.class_name == names[int(expected.argmax())]
    assert set(result.predict(image, ["sun", "anchor"]).probabilities) == {"sun", "anchor"}
    with pytest.raises(promptfed.PromptfedError, match="cannot be read as an image"):
        result.predict(b"no image")
    with pytest.raises(promptfed.PromptfedError, match=r"cannot read absent\.png: there is no such file"):
        result.predict("absent.png")


def test_a_text_is_no_list_of_class_names(result: promptfed.Result, tmp_path: Path) -> None:
    """ "sun" was the classes s, u and n, and the card of an export said so."""
    calls = (lambda names: result.predict(b"", names), result.class_weights, partial(result.export, tmp_path / "out"))
    for names, why in (
        ("sun", "is a text: give a list of names"),
        (["a", "a"], "lists a class twice"),
        ([], "is empty"),
    ):
        for call in calls:
            with pytest.raises(promptfed.PromptfedError, match=why):
                call(names)
    assert not (tmp_path / "out").exists()


def test_export_from_a_notebook(result: promptfed.Result, tmp_path: Path) -> None:
    folder = result.export(tmp_path / "out", ["sun", "anchor"], anonymous=True)
    assert load_file(folder / "class_weights.safetensors")["class_weights"].shape == (2, 96)
    assert "neon:" not in (folder / "card.md").read_text()


def test_a_notebook_shows_a_table_of_text(result: promptfed.Result) -> None:
    status = result.taken.status
    hostile = replace(result.taken, status=status | {"spec": status["spec"] | {"name": "<b>"}})
    shown = promptfed.Result(hostile)._repr_html_()
    assert shown.count("<tr>") == 4
    assert "<b>" not in shown
    assert "quickdraw" in str(result)
    assert repr(result) == "<Result fedpgp: fedpgp after round 2 of 2>"


def test_the_same_at_a_coordinator(backbone: Backbone, tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as server:
        token = server.settings.data_dir / "operator.token"
        with promptfed.connect(server.url, token_file=token) as coordinator:
            given = {"rounds": 1, "class_names": ["sun", "anchor"], "backbone": {"model": "promptfed-tiny"}}
            made = coordinator.create({"name": "promptfl", "m": 4}, "styles", **given)
            assert made.state == "enrolling"
            assert made.status()["backbone"]["fingerprint"] == backbone.fingerprint
            assert len(made.enrolment_token()) > 20
            assert [one.id for one in coordinator.federations()] == [made.id]
            assert "styles: enrolling" in repr(coordinator.federation("styles"))
            with pytest.raises(promptfed.PromptfedError, match="trainer"):
                made.start()
            known = {"backbone_fingerprint": backbone.fingerprint, "backbone_shape": shape_of(backbone).model_dump()}
            server.enrol(made.id, "a", class_names=["sun"], **known)
            assert [one["name"] for one in made.start().clients()] == ["a"]
            assert made.result().predict(exports.picture()).class_name in ("sun", "anchor")
            with pytest.raises(promptfed.PromptfedError, match=r"has not finished in 0\.1 s"):
                made.wait(0.1)
            made.cancel()
            with pytest.raises(promptfed.PromptfedError, match="cancelled"):
                made.wait(PATIENCE)
        with pytest.raises(promptfed.PromptfedError, match="operator token"):
            promptfed.connect(server.url)
        with pytest.raises(promptfed.PromptfedError, match="give one"):
            promptfed.connect(server.url, token="x", token_file=token)


def test_class_names_follow_from_the_data_where_the_method_needs_them() -> None:
    data = "symbols:neon?per_class=2&test_per_class=1&only=sun,moon"
    source = open_source("symbols:chalk?per_class=2&test_per_class=1&only=sun,moon")
    made = promptfed.run("fedtaskres", [data, source], backbone="promptfed-tiny", rounds=1)
    assert made.spec["class_names"] == list(source.class_names)
    with pytest.raises(promptfed.PromptfedError, match="list the federation's class_names"):
        promptfed.run("fedtaskres", [data, "symbols:neon?only=sun,cloud"], backbone="promptfed-tiny", rounds=1)


def test_what_is_wrong_is_said_in_one_line(backbone: Backbone) -> None:
    for settings, why in (
        ({"method": "promptfi"}, "did you mean 'promptfl'"),
        ({"round": 3}, "round: unknown key"),
        ({"data": ["symbols:nowhere"]}, "nowhere"),
        ({"data": []}, "train"),
        ({"data": ["digits?test_on=all"]}, "would test a trainer on its training images"),
    ):
        given = {"method": "promptfl", "data": [f"symbols:neon{SMALL}"]} | settings
        with pytest.raises(promptfed.PromptfedError, match=why) as refusal:
            promptfed.run(backbone=backbone, **given)
        assert "\n" not in str(refusal.value)


def test_importing_the_library_imports_no_torch() -> None:
    code = "import sys, promptfed; dir(promptfed); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0
    with pytest.raises(AttributeError):
        promptfed.nothing  # noqa: B018
    assert all(hasattr(promptfed, name) for name in promptfed.__all__)


def test_torch_is_left_as_it_was(result: promptfed.Result) -> None:
    assert torch.get_num_threads() == 1


def test_metrics_are_of_the_clients_own_answers(result: promptfed.Result) -> None:
    found = result.metrics()
    assert set(found) == {accuracy.client for accuracy in result.accuracies() if accuracy.split == "test"}
    for accuracy in result.accuracies():
        if accuracy.split == "test":
            row = found[accuracy.client]
            assert row["accuracy"] == pytest.approx(accuracy.accuracy)
            assert 0 <= row["ece"] <= 1
            assert row["worst_class"] <= row["accuracy"]
    template = result.metrics("test@zero-shot")
    assert {client: row["accuracy"] for client, row in template.items()} == pytest.approx(
        {accuracy.client: accuracy.zero_shot for accuracy in result.accuracies() if accuracy.split == "test"}
    )
    with pytest.raises(
        promptfed.PromptfedError, match="there are no answers on 'novel': there are test, test@zero-shot"
    ):
        result.metrics("novel")
    elsewhere = replace(result, taken=replace(result.taken, outcomes=()))
    with pytest.raises(promptfed.PromptfedError, match="only a federation in this process"):
        elsewhere.metrics()


def test_clients_declare_their_domains_in_words(
    tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, declared = {}, Offer.declared

    def noted(self: Offer, *given: Any) -> Any:
        one = declared(self, *given)
        told[one.name] = one.domain and (one.domain.name, one.domain.description)
        return one

    monkeypatch.setattr(Offer, "declared", noted)
    for seed, name in enumerate(("plain", "worded", "unseen")):
        write_folder(tmp_path / name, ("circle", "bar"), seed=seed, each=2)
    (tmp_path / "plain" / "domain.txt").write_text("filled shape")
    result = promptfed.run(
        {"name": "zero_shot"}, {name: f"folder:{tmp_path / name}" for name in ("plain", "worded")},
        unseen={"unseen": f"folder:{tmp_path / 'unseen'}"}, domains={"worded": "a drawing of a {}"}, rounds=1,
        class_names=["circle", "bar"], backbone=backbone,
    )  # fmt: skip
    expected = {"plain": ("plain", "a {}, filled shape"), "worded": ("worded", "a drawing of a {}"), "unseen": None}
    assert told == expected
    assert {one.client: one.num_samples for one in result.accuracies()} == {"plain": 2, "worded": 2, "unseen": 4}
    with pytest.raises(promptfed.PromptfedError, match="domains describe 'neon', which is no client"):
        promptfed.run("zero_shot", ["digits"], domains={"neon": "a neon sign of a {}"}, backbone=backbone)
