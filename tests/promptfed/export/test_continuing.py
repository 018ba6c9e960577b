"""A federation that starts from an export: the same state, recorded and shown, and refused where it does not fit."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.reading import read_export
from promptfed.export.verification import continued
from promptfed.runtime.processes import Site
from promptfed.shared.api.export_card import STATE_FILE
from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.clip.weights import load_into, weights_in
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.seeds import initial_draws
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import BackboneSpec, SpecError, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash
from promptfed.testing.clients import drive
from tests.support import exports
from tests.support.coordinators import InThread, in_thread
from tests.support.equality import assert_values
from tests.support.own_images import SHAPES, write_folder
from tests.support.textless import MODEL, textless_backbone
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

PRIVATE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}


def create(server: InThread, *arguments: str | Path) -> Result:
    token = server.settings.data_dir / "operator.token"
    command = ["federation", "create", *map(str, arguments), "--coordinator", server.url, "--token-file", str(token)]
    return CliRunner().invoke(app, command)


def test_it_starts_from_the_exports_state_and_says_so(exported: Path, tmp_path: Path) -> None:
    card = json.loads((exported / "card.json").read_text())
    (tmp_path / "more.yaml").write_text("{name: again, rounds: 2, participation: {min_clients: 2}}")
    with in_thread(tmp_path / "data") as server:
        created = create(server, tmp_path / "more.yaml", "--from", exported, "--json")
        assert created.exit_code == 0, created.output
        view = json.loads(created.stdout)
        spec = view["spec"]
        assert (spec["name"], spec["rounds"], spec["class_names"]) == ("again", 2, list(SHAPES))
        assert spec["method"] == card["method"]
        assert spec["continues"] == card["hashes"]["state"]
        shape = exports.backbone()
        about = {"backbone_fingerprint": shape.fingerprint, "class_names": list(SHAPES)}
        clients = server.enrol(view["id"], "a", "b", backbone_shape=spec["backbone"]["shape"], **about)
        server.post(f"{view['id']}/start")
        begun = server.get(f"{view['id']}/rounds/0")["state_hash"]
        assert begun == card["hashes"]["state"]
        drive(clients)
        server.until(view["id"], state="finished")
        replayed = server.post(f"{view['id']}/rounds/1/replay", {})
        assert replayed["states"]
        assert all(state["same"] for state in replayed["states"])


def test_no_rounds_evaluate_the_exports_state_once(exported: Path, tmp_path: Path) -> None:
    card = json.loads((exported / "card.json").read_text())
    (tmp_path / "none.yaml").write_text("{name: tested, rounds: 0, participation: {min_clients: 2}}")
    with in_thread(tmp_path / "data") as server:
        created = create(server, tmp_path / "none.yaml", "--from", exported, "--json")
        assert created.exit_code == 0, created.output
        view = json.loads(created.stdout)
        about = {"backbone_fingerprint": exports.backbone().fingerprint, "class_names": list(SHAPES)}
        shape = view["spec"]["backbone"]["shape"]
        first = server.enrol(view["id"], "a", backbone_shape=shape, **about)
        assert server.post(f"{view['id']}/start", status=409)["type"].endswith("/not-enough-clients")
        second = server.enrol(view["id"], "b", backbone_shape=shape, role="evaluator", **about)
        server.post(f"{view['id']}/start")
        drive([*first, *second])
        server.until(view["id"], state="finished")
        reports = server.get(f"{view['id']}/rounds")["rounds"]
        assert [report["round"] for report in reports] == [0]
        assert reports[0]["phases"] == []
        assert set(reports[0]["evaluation"]["clients"]) == {"a", "b"}
        assert reports[0]["state_hash"] == card["hashes"]["state"]


def test_no_rounds_measure_what_the_last_round_did(exported: Path, tmp_path: Path) -> None:
    card = json.loads((exported / "card.json").read_text())
    raw, state = continued(exported, {"rounds": 0})
    sites = [
        Site(name, f"folder:{write_folder(tmp_path / name, seed=seed, each=4)}") for seed, name in enumerate(("a", "b"))
    ]
    result = simulate(resolve_spec(raw), sites, backbone=exports.backbone(), initial=state)
    assert (result.round, result.state_hash) == (0, card["hashes"]["state"])
    measured = {row["client"]: row["adapted"] for row in card["accuracy"]["clients"] if row["split"] == "test"}
    assert {one.client: one.accuracy for one in result.accuracies() if one.split == "test"} == pytest.approx(measured)


@pytest.mark.parametrize(("given", "why"), [
    ({}, "0 rounds evaluate an export"),
    ({"continues": "sha256:" + "0" * 64, "privacy": PRIVATE}, "0 rounds train nobody: leave privacy out"),
])  # fmt: skip
def test_no_rounds_without_an_export_or_with_training_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        resolve_spec({"name": "none", "method": {"name": "promptfl"}, "rounds": 0, **given})


def test_what_does_not_fit_is_refused_and_nothing_is_created(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "longer.yaml").write_text("{name: longer, method: {name: promptfl, m: 4}}")
    (tmp_path / "other.yaml").write_text("{name: other, method: {name: fedclip}}")
    with in_thread(tmp_path / "data") as server:
        for given, text in (
            ((tmp_path / "longer.yaml", "--from", exported), "does not fit promptfl with these settings (context)"),
            ((tmp_path / "other.yaml", "--from", exported), "is of promptfl, the spec names fedclip"),
            (("--from", tmp_path), "is not a promptfed export"),
            (("--from", exported, "--key", "ab" * 32), "is not signed"),
            ((), "give the file of a spec, or --from EXPORT"),
        ):
            refused = create(server, *given)
            assert refused.exit_code in (Exit.BAD_INPUT, Exit.USAGE, Exit.REFUSED), refused.output
            assert text in refused.stderr
        assert server.get("/v1/federations")["federations"] == []


def test_protection_does_not_end_unsaid(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "protected"
    shutil.copytree(exported, folder)
    card = json.loads((folder / "card.json").read_text())
    summed = {"secure_aggregation": {"smallest_sum": 3, "threshold": 0.6}}
    (folder / "card.json").write_text(json.dumps(card | summed))
    with pytest.raises(PromptfedError, match="was trained with secure_aggregation, and the spec says nothing of it"):
        continued(folder, {})
    assert continued(folder, {"secure_aggregation": None})[0]["secure_aggregation"] is None
    spent = dict.fromkeys(("epsilon_max", "epsilon_median", "delta", "clip", "noise_multiplier"))
    private = {"level": "sample", "unit": "record", "clients": 2, "noise": "secret", "rounds_counted": 1}
    (folder / "card.json").write_text(json.dumps(card | {"privacy": spent | private | {"evaluation": "withheld"}}))
    with pytest.raises(PromptfedError, match=r"privacy: \{level: none\} to train without"):
        continued(folder, {})
    assert continued(folder, {"privacy": {"level": "none"}})[0]["privacy"] == {"level": "none"}


def test_what_an_earlier_version_counted_beside_the_state_is_left_out(exported: Path, tmp_path: Path) -> None:
    """Sums over the clients, as promptfed 0.3.0 kept them for losses and prediction sets."""
    folder = tmp_path / "counted"
    shutil.copytree(exported, folder)
    (folder / STATE_FILE).unlink()
    state, _ = decode((exported / STATE_FILE).read_bytes())
    card = json.loads((exported / "card.json").read_text())
    before, larger = card["hashes"]["state"], state | {"class_counts": torch.ones(1, len(SHAPES))}
    body = encode(larger)
    (folder / STATE_FILE).write_bytes(body)
    card["hashes"]["state"] = state_hash(larger)
    card["files"][STATE_FILE] |= {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    card["method"] |= {"statistics": {"classes": len(SHAPES), "counts": True}, "checkpoint": None}
    card["loss"] = {"kind": "gce", "counts": "federation"}
    (folder / "card.json").write_text(json.dumps(card))
    raw, kept = continued(folder, {})
    assert decode(kept)[0].keys() == state.keys()
    assert (raw["continues"], raw["method"], "loss" in raw) == (before, resolve_spec(raw).method, False)
    assert read_export(folder)[0].missing() is None


def test_the_coordinator_takes_no_other_state(exported: Path, tmp_path: Path) -> None:
    state, _ = decode((exported / STATE_FILE).read_bytes())
    other = encode({name: tensor + 1 for name, tensor in state.items()})
    card = json.loads((exported / "card.json").read_text())
    with in_thread(tmp_path / "data") as server:
        spec = {"name": "again", "method": card["method"], "continues": card["hashes"]["state"], "rounds": 1}
        federation = server.post("/v1/federations", spec, status=201)["id"]
        server.enrol(federation, "a", "b", backbone_shape=card["backbone"]["shape"])
        missing = server.post(f"{federation}/start", status=409)
        assert missing["type"].endswith("initial-state-missing")
        path = f"/v1/federations/{federation}/initial-state"
        answer = server.http.put(path, content=other, headers=server.operator)
        assert answer.status_code == 409
        assert answer.json()["type"].endswith("initial-state-mismatch")
        assert server.http.put(path, content=encode(state), headers=server.operator).status_code == 200
        server.post(f"{federation}/start")


# A merged checkpoint: open_clip's own loading code takes it, and its model answers as the federation's classifier.


TEXTS = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]


ROWS = torch.arange(6)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def adapted(backbone: Backbone, method: dict[str, Any], state: Tensors, model: str = "small-both") -> AdaptedModel:
    spec = BackboneSpec(model=model, pretrained=None, fingerprint=backbone.fingerprint, shape=shape_of(backbone))
    terms = TrainingTerms(
        method=method, training=TrainingSpec(), backbone=spec, class_names=None, template="a photo of a {}.", rounds=4,
        seed=3,
    )  # fmt: skip
    return AdaptedModel(terms, 4, (), state)


def moved(method: dict[str, Any], backbone: Backbone) -> Tensors:
    context = replace(server_context(backbone, "a"), class_names=tuple(NAMES))
    state = make_method(method).initial_state(context, initial_draws(3))
    draws = torch.Generator().manual_seed(8)
    return {name: tensor + torch.randn(tensor.shape, generator=draws) * 0.05 for name, tensor in state.items()}


@pytest.mark.parametrize("method", [
    {"name": "fedavg"},
    {"name": "fedprox", "trainable": "last_k", "k": 2},
    {"name": "fedavg", "trainable": "biases"},
    {"name": "fedlora"},
    {"name": "fedlora", "towers": "visual"},
    {"name": "fedlora", "towers": "text", "blocks": "last_k"},
])  # fmt: skip
def test_checkpoint_s_model_has_federation_s_logits(backbone: Backbone, method: dict[str, Any], tmp_path: Path) -> None:
    state = moved(method, backbone)
    checkpoint = adapted(backbone, method, state).merged(backbone, NAMES)
    save_file(checkpoint, tmp_path / "open_clip_model.safetensors")
    loaded = open_clip.create_model("small-both", pretrained=str(tmp_path / "open_clip_model.safetensors")).eval()
    context = client_context(backbone)
    wanted = make_method(method).classifier(context, state, {}).logits(context.train, ROWS)
    with torch.no_grad():
        images = F.normalize(loaded.encode_image(context.train.images(ROWS)), dim=-1)
        texts = F.normalize(loaded.encode_text(open_clip.get_tokenizer("small-both")(TEXTS)), dim=-1)
        found = loaded.logit_scale.exp() * images @ texts.T
    assert_values(found, wanted)
    plain = backbone.logit_scale * backbone.encode_images(context.train.images(ROWS)) @ backbone.encode_text(TEXTS).T
    assert float((plain - wanted).abs().max()) > 1e-3, "and not those of the frozen one"
    again = load_backbone("small-both", None)
    load_into(again.model, weights_in(tmp_path), "small-both")
    assert all(tensor.equal(checkpoint[name]) for name, tensor in again.model.state_dict().items())
    assert all(
        tensor.equal(backbone.model.state_dict()[name]) for name, tensor in checkpoint.items() if "token" in name
    )


def test_what_cannot_be_merged_is_refused(backbone: Backbone) -> None:
    with pytest.raises(PromptfedError, match="changes no weights of the towers"):
        adapted(backbone, {"name": "promptfl"}, {}).merged(backbone, NAMES)
    state = moved({"name": "fedavg"}, backbone)
    right = adapted(backbone, {"name": "fedavg"}, state)
    wrong = BackboneSpec(fingerprint="sha256:" + "0" * 64)
    other = replace(right, terms=right.terms.model_copy(update={"backbone": wrong}))
    with pytest.raises(PromptfedError, match="the backbone here is"):
        other.merged(backbone, NAMES)
    textless, linear = textless_backbone(), {"name": "fedavg", "head": "linear", "trainable": "biases"}
    with pytest.raises(PromptfedError, match="not an open_clip model"):
        adapted(textless, linear, moved(linear, textless), MODEL).merged(textless, NAMES)
