"""The card of an export, as JSON and as Markdown: the learned model, its contributors, its accuracy and its use.

The snippet in the Markdown is plain open_clip code and does not need promptfed. A test runs it unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from promptfed.shared.api import export_card
from promptfed.shared.cards.privacy_text import of_privacy
from promptfed.shared.methods import METHODS
from promptfed.shared.metrics.estimates import mean_interval
from promptfed.shared.plain_text import counted, markdown_cell, markdown_code, percent, scale_text, size, with_interval
from promptfed.shared.plain_text import markdown as plain_markdown

MOST_CLASSES = 12  # clients that are named individually
WHAT = {
    export_card.STATE_FILE: "the global state, as the coordinator holds it",
    export_card.FINAL_FILE: "the last round's state, which is not the best one",
    export_card.MERGED_FILE: "open_clip's model with the state's changes of weights in it",
    export_card.WEIGHTS_FILE: "what plain open_clip code classifies with",
    export_card.BACKBONE_CONFIG: "the backbone, which open_clip cannot load by name",
    export_card.BACKBONE_WEIGHTS: "its weights",
}
FURTHER = {"majority": "majority", "auroc": "AUROC", "macro_f1": "macro-F1", "ece": "ECE"}


def version() -> str:
    """The version of this promptfed."""
    return metadata.version("promptfed")


def described(body: bytes, tensors: Mapping[str, Any] | None) -> export_card.CardFile:
    """A file's entry in the card, with the shapes of its ``tensors``."""
    shapes = None
    if tensors is not None:
        shapes = {
            name: export_card.TensorShape(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in sorted(tensors.items())
        }
    return export_card.CardFile(bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), tensors=shapes)


def _origin(card: export_card.Card) -> dict[str, str]:
    """Where the federation started, and under what licence its result is."""
    facts = {} if card.licence is None else {"licence": markdown_cell(card.licence)}
    if (chosen := card.selection) is not None:
        mean = f"a mean {chosen.metric.replace('_', '-')} of {percent(chosen.value)} on held-out training images"
        facts["round"] = f"{chosen.round}, the best of {chosen.compared} by {mean}; tests came once, at the end"
    if (origin := card.origin) is not None:
        licence = f", licence {origin.licence}" if origin.licence is not None else ""
        facts["started from"] = markdown_cell(f"the export of {origin.federation} with card {origin.card}{licence}")
    return facts


def _sent(card: export_card.Card) -> str:
    sent = card.bytes
    if sent is None:
        return "withheld: it would tell how many took part; not one image"
    a_round = f" ({size((sent.up + sent.down) / card.round)} a round)" if card.round else ""
    return f"{size(sent.up)} up, {size(sent.down)} down{a_round}, and not one image"


def markdown(card: export_card.Card, snippet: str | None) -> str:
    """The card's text; ``snippet`` is example code for plain open_clip, if there is any."""
    backbone, name = card.backbone, card.method["name"]
    trained = sum(participant.role == "trainer" for participant in card.participants)
    facts = {
        "method": f"{name}: {card.paper}",
        "hyperparameters": _settings(card.method),
        "training": _settings(card.training.model_dump(mode="json")),
        "backbone": markdown_cell(f"{backbone.model}, {backbone.pretrained or 'random'}, {backbone.precision}"),
        "classes": _classes(card),
        "template": markdown_code(card.template).replace("|", "\\|"),
        "federation": f"{card.federation.state}{f' ({card.stopped})' if card.stopped else ''}, seed {card.seed}",
        "participants": f"{trained} trained, {len(card.participants) - trained} only evaluated",
        **_origin(card),
        "sent": _sent(card),
        **(
            {"not readable": f"{counted(card.unreadable, 'answer')} of clients: in no figure"}
            if card.unreadable
            else {}
        ),
        "state": f"`{card.hashes.state}`",
        "backbone's weights": f"`{card.hashes.backbone}`",
    }
    made = f"{card.made.promptfed}, {card.made.at}"
    files = [
        [f"`{name}`", WHAT[name], f"{file.bytes:,}", f"`{file.sha256}`"]
        for name, file in card.files.items()
        if name in WHAT  # all files except this text
    ]
    parts = [
        f"# {plain_markdown(card.federation.name)}: {name} after round {card.round} of {card.rounds}",
        card.summary,
        _table(["", ""], [[key, value] for key, value in facts.items()]),
        "## Accuracy",
        accuracies(card.accuracy),
        "## Participants",
        _participants(card.participants),
        *_greys(card.participants),
        "## Privacy",
        of_privacy(card.privacy),
        *_sums(card.secure_aggregation),
        "## Use",
        *_use(card, snippet),
        "## Files",
        _table(["file", "what", "bytes", "SHA-256"], files),
        f"`{export_card.JSON_FILE}` holds the same for programs. Made by promptfed {made}.",
    ]
    return "\n\n".join(parts) + "\n"


def _sums(given: export_card.SumsSummary | None) -> list[str]:
    """Who could see which data during training."""
    if given is None or given.smallest_sum is None:
        return []
    return [
        f"The coordinator received sums of at least {given.smallest_sum} clients' changes and none of their parts; "
        f"{given.threshold:g} of a round's clients together open a sum. A sum still tells of its parts."
    ]


def _use(card: export_card.Card, snippet: str | None) -> list[str]:
    name, use = card.method["name"], card.use
    parts = []
    if snippet is not None:
        parts += [f"With open_clip alone, in this folder:\n\n```python\n{snippet}```"]
        if _has_a_mixture(card):
            parts += ["An image takes the class weights of the domain that it looks most like."]
    elif use.why_not_open_clip:
        parts += [f"There are no class weights for plain open_clip code: {use.why_not_open_clip}."]
    if use.promptfed:
        parts += ["With promptfed:\n\n```\npromptfed predict image.png --export .\n```"]
    if METHODS[name].personal and use.open_clip:
        text = "each client's own predictions add what it keeps to itself, and its own service answers with them"
        parts += [f"These are the weights of what the clients share; {text} (`/v1/predict`)."]
    if METHODS[name].of_names:
        text = "for others, `promptfed export --classes` again"
        parts += [f"{name} learns a generator: it made the context for exactly these class names; {text}."]
    if export_card.BACKBONE_WEIGHTS in card.files:
        parts += [f"The backbone is in no registry of open_clip's, so it lies in `{export_card.BACKBONE_FOLDER}/`."]
    if card.round < card.rounds and card.selection is None and card.stopped is None:
        parts += [f"The federation had {card.rounds} rounds to go through: this is a state on the way."]
    return parts


def _has_a_mixture(card: export_card.Card) -> bool:
    """Whether each domain has class weights: ``(k, C, d_e)`` instead of ``(C, d_e)``."""
    file = card.files.get(export_card.WEIGHTS_FILE)
    return file is not None and file.tensors is not None and len(file.tensors["class_weights"].shape) == 3


def _classes(card: export_card.Card) -> str:
    names = card.class_names
    if not names:
        return "not named: each client used its own"
    shown = ", ".join(plain_markdown(name) for name in names[:MOST_CLASSES])
    more = f" and {len(names) - MOST_CLASSES} more" if len(names) > MOST_CLASSES else ""
    return f"{len(names)} (from {card.class_names_from}): {shown}{more}"


def accuracies(measured: export_card.Accuracies | None) -> str:
    """The clients' accuracies as a table, with macro-F1 and ECE if any client reported them."""
    if measured is None:
        return "Nobody has measured any yet."
    rows = [
        [
            plain_markdown(row.client),
            row.role,
            markdown_cell(row.split),
            percent(row.zero_shot),
            with_interval(row.adapted, row.interval),
            str(row.num_samples),
            *(percent(getattr(row, name)) for name in FURTHER),
        ]
        for row in measured.clients
    ]
    for role, mean in measured.mean.items():
        if mean:
            tested = [row for row in measured.clients if row.role == role and row.split == "test"]
            sites = [(row.adapted, row.num_samples) for row in tested if row.interval is not None]
            interval = mean_interval(sites) if tested and len(sites) == len(tested) else None
            columns = [percent(mean.get("zero_shot")), with_interval(mean.get("adapted"), interval)]
            further = [percent(mean.get(name)) for name in FURTHER]
            rows.append(
                [f"mean of the {role}s", "", "test", *columns, str(sum(row.num_samples for row in tested)), *further]
            )
    head = ["client", "role", "test set", "zero-shot", "adapted", "images", *FURTHER.values()]
    text = f"Measured by the clients on their own test images after round {measured.round}."
    if any(row.interval is not None for row in measured.clients):
        text += " Behind an accuracy is its 95 % interval."
    if any(row.ece is not None for row in measured.clients):
        text += (
            " Beside it the share of the most frequent class, AUROC and macro-F1 (means over the classes), and ECE: how"
        )
        text += " far confidence is from accuracy, over 15 bins. All but the first are of the adapted."
    else:
        head, rows = head[:6], [row[:6] for row in rows]
    return f"{text}\n\n{_table(head, rows)}"


def _participants(participants: list[export_card.Participant]) -> str:
    rows = [
        [
            plain_markdown(client.name),
            client.role,
            plain_markdown(client.domain or "-"),
            str(client.num_samples),
            str(client.num_classes),
            "withheld" if client.updates_counted is None else str(client.updates_counted),
        ]
        for client in participants
    ]
    return _table(["client", "role", "domain", "images", "classes", "updates counted"], rows)


def _greys(participants: list[export_card.Participant]) -> list[str]:
    """How each client reads grey pictures of more than 8 bits, in a line; nothing where nobody has any."""
    scales = [f"{plain_markdown(one.name)}: {scale_text(one.grey)}" for one in participants if one.grey is not None]
    return [f"Grey pictures of more than 8 bits were read as ({'; '.join(scales)})."] if scales else []


def _settings(settings: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{key} {plain_markdown(str(value))}" for key, value in settings.items() if key != "name") or "none"
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
