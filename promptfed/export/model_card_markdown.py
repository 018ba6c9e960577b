"""The card of an export as Markdown: for people, with the code that uses it."""

from __future__ import annotations

from typing import Any

from promptfed.export.model_card import BACKBONE_FOLDER, JSON_FILE, STATE_FILE, WEIGHTS_FILE, carries_backbone
from promptfed.sdk.output import percent, size
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.insights import GeneratesPrompts

MOST_CLASSES = 12  # named one by one
WHAT = {
    STATE_FILE: "the global state, as the coordinator holds it",
    WEIGHTS_FILE: "what plain open_clip code classifies with",
    f"{BACKBONE_FOLDER}/open_clip_config.json": "the backbone, which open_clip cannot load by name",
    f"{BACKBONE_FOLDER}/open_clip_model.safetensors": "its weights",
}
COUNTS = ("num_samples", "num_classes", "updates_counted")


def markdown(card: dict[str, Any], snippet: str | None) -> str:
    """The card's text; ``snippet`` is the code for plain open_clip, where there is some."""
    method, backbone = card["method"], card["backbone"]
    trained = sum(one["role"] == "trainer" for one in card["participants"])
    tested = len(card["participants"]) - trained
    made = card["made"]
    parts = [
        f"# {_plain(card['federation']['name'])}: {method['name']} after round {card['round']} of {card['rounds']}",
        card["summary"],
        _table(
            ["", ""],
            [
                ["method", f"{method['name']}: {card['paper']}"],
                ["hyperparameters", _settings(method)],
                ["training", _settings(card["training"])],
                ["backbone", f"{backbone['model']}, {backbone['pretrained'] or 'random'}, {backbone['precision']}"],
                ["classes", _classes(card)],
                ["template", f"`{card['template']}`"],
                ["federation", f"{card['federation']['state']}, seed {card['seed']}"],
                [
                    "participants",
                    f"{trained} trained, {tested} only evaluated",
                ],
                ["sent", f"{size(card['bytes']['up'])} up, {size(card['bytes']['down'])} down, and not one image"],
                ["state", f"`{card['hashes']['state']}`"],
                ["backbone's weights", f"`{card['hashes']['backbone']}`"],
            ],
        ),
        "## Accuracy",
        _accuracies(card["accuracy"]),
        "## Participants",
        _participants(card["participants"]),
        "## Use",
        *_use(card, snippet),
        "## Files",
        _table(
            ["file", "what", "bytes", "SHA-256"],
            [
                [f"`{name}`", WHAT[name], f"{about['bytes']:,}", f"`{about['sha256']}`"]
                for name, about in card["files"].items()
            ],
        ),
        f"`{JSON_FILE}` holds the same for programs. Made by promptfed {made['promptfed']}, {made['at']}.",
    ]
    return "\n\n".join(parts) + "\n"


def _use(card: dict[str, Any], snippet: str | None) -> list[str]:
    name, use = card["method"]["name"], card["use"]
    found = []
    if snippet is not None:
        found += [f"With open_clip alone, in this folder:\n\n```python\n{snippet}```"]
        if "k, C" in _weights_shape(card):
            found += ["An image takes the class weights of the domain that it looks most like."]
    elif use["why_not_open_clip"]:
        found += [f"There are no class weights for plain open_clip code: {use['why_not_open_clip']}."]
    if use["promptfed"]:
        found += ["With promptfed:\n\n```\npromptfed predict image.png --export .\n```"]
    if METHODS[name].personal and card["use"]["open_clip"]:
        text = "each client's own predictions add what it keeps to itself, and its own service answers with them"
        found += [f"These are the weights of what the clients share; {text} (`/v1/predict`)."]
    if issubclass(METHODS[name], GeneratesPrompts):
        text = "for others, `promptfed export --classes` again, or `promptfed prompts generate`"
        found += [f"{name} learns a generator: it made the context for exactly these class names; {text}."]
    if carries_backbone(card["backbone"]) and snippet is not None:
        found += [f"The backbone is in no registry of open_clip's, so it lies in `{BACKBONE_FOLDER}/`."]
    if card["round"] < card["rounds"]:
        found += [f"The federation had {card['rounds']} rounds to go through: this is a state on the way."]
    return found


def _weights_shape(card: dict[str, Any]) -> str:
    about = card["files"].get(WEIGHTS_FILE)
    return "k, C" if about and len(about["tensors"]["class_weights"]["shape"]) == 3 else "C"


def _classes(card: dict[str, Any]) -> str:
    names = card["class_names"]
    if not names:
        return "not named: each client used its own"
    shown = ", ".join(_plain(name) for name in names[:MOST_CLASSES])
    more = f" and {len(names) - MOST_CLASSES} more" if len(names) > MOST_CLASSES else ""
    return f"{len(names)} (from {card['class_names_from']}): {shown}{more}"


def _accuracies(found: dict[str, Any] | None) -> str:
    if found is None:
        return "Nobody has measured any yet."
    rows = [
        [_plain(one["client"]), one["role"], one["split"], *_percents(one), str(one["num_samples"])]
        for one in found["clients"]
    ]
    rows += [[f"mean of the {role}s", "", "test", *_percents(mean), ""] for role, mean in found["mean"].items() if mean]
    table = _table(["client", "role", "test set", "zero-shot", "adapted", "images"], rows)
    return f"Measured by the clients on their own test images after round {found['round']}.\n\n{table}"


def _percents(one: dict[str, Any]) -> list[str]:
    return [percent(one.get("zero_shot")), percent(one.get("adapted"))]


def _participants(found: list[dict[str, Any]]) -> str:
    rows = [
        [_plain(one["name"]), one["role"], _plain(one["domain"] or "-"), *(str(one[key]) for key in COUNTS)]
        for one in found
    ]
    return _table(["client", "role", "domain", "images", "classes", "updates counted"], rows)


def _settings(found: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(str(value))}" for key, value in found.items() if key != "name") or "none"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain(text: str) -> str:
    """What somebody else named, as text: nothing of it is read as Markdown or HTML."""
    one_line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#!&" else letter for letter in one_line)
