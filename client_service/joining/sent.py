"""What a client sends: in words, by message and field, for its help; and what it has sent, from its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.state.site_log import FILE, ChangedLog, Line, read, verify
from promptfed.shared.plain_text import counted

ENROLMENT = {
    "name": "its name (--name)",
    "role": "its role (--role)",
    "num_samples": "the number of training images; of an evaluator, of test images",
    "class_names": "the names of the classes",
    "domain": "the domain's name and description (--domain, or the data's own), if any",
    "device": "cpu, or cuda with the model of the GPU",
    "backbone_fingerprint": "the fingerprint of the backbone's weights",
    "backbone_shape": "the sizes of the backbone's towers",
    "release": "the version of promptfed",
    "system": "the operating system, the processor's kind and the version of Python",
    "secret": "a random secret, by which the coordinator knows this client again",
    "identity_key": "for secure sums: a public key",
    "identity_proof": "for secure sums: the key's signature of name and secret",
    "protection": "at privacy.level sample: number of records or groups, noise, planned ε, δ",
}
UPDATE = {
    "tensors": "the tensors that the method shares (`promptfed methods NAME`)",
    "metrics": "the method's metrics, such as the loss and seconds of training",
    "task_id": "the task that it answers",
    "payload_sha256": "the digest of the payload that it was given",
    "privacy": "at privacy.level sample: what it cost, and ε and δ of the ledger",
}
SECURE_SUM = {
    "entry": "federation, round, phase, attempt, public keys, digests of payload and task,\n"
    "and the number of training images, or 1",
    "signature": "signatures of its own messages",
    "roster_sha256": "the digest of the list of members",
    "boxes": "encrypted shares of its random seeds",
    "commitments": "commitments to these shares",
    "seed_sha256": "a commitment to the seed",
    "masked": "its change under masks, and what it cost where there is privacy",
    "alive_sha256": "the digest of the list of counted members",
    "seeds": "shares of the seeds of counted members",
    "keys": "shares of the mask keys of others",
}
EVALUATION = {
    "splits": "accuracy and number of images of each test set, by its name (--test);\n"
    "ECE and macro-F1 if the federation asks for them",
    "zero_shot": "the same figures for the template",
    "metrics": "the method's metrics, such as seconds of computing",
    "withheld": "or only that it was made, if accuracies are withheld",
    "privacy": "for noisy counts: what they cost, and ε and δ of the ledger",
}
FAILURE = {
    "type": "the kind of failure",
    "detail": "its reason, without paths, file names or images",
}
PROGRESS = {
    "progress": "the part of the task's steps that is done, every 10 seconds; not with privacy,\n"
    "secure sums or the policy's metrics.training: false",
}
SENT = {
    "once, when it enrols": ENROLMENT,
    "during a task that takes longer than some seconds": PROGRESS,
    "after training": UPDATE,
    "in the steps of a secure sum, instead of that": SECURE_SUM,
    "after an evaluation": EVALUATION,
    "instead of an answer to a task": FAILURE,
}


def help_lines() -> list[str]:
    """The words, a line for each fact."""
    lines = ["What leaves this machine, and nothing else (--check shows it for one federation):"]
    for when, facts in SENT.items():
        lines += [f"  {when}:", *(f"    {line}" for text in facts.values() for line in text.split("\n"))]
    lines += ["  with each request: the federation's name and the secret, or the enrolment token before;"]
    return [*lines, "    requests also ask for tasks, payloads and spends, and tell of --withdraw"]


def sent_lines(folder: Path, log_format: Literal["text", "json"]) -> list[str]:
    """What has left this machine, from the record in a state folder.

    Raises:
        ClientError: STATE where there is no record, or it was changed.
    """
    try:
        lines = [line for line in read(folder) if line["what"] in ("sent", "questions")]
        if not lines:
            text = f"{folder} records no message: give the --state-dir of a client that has joined"
            raise ClientError(Exit.STATE, text)
        verify(folder)
    except ChangedLog as changed:
        raise ClientError(Exit.STATE, f"the site log was changed: {changed}") from None
    if log_format == "json":
        return [json.dumps(line) for line in lines]
    messages = [line for line in lines if line["what"] == "sent"]
    total = sum(line.get("bytes", 0) for line in messages)
    sent = f"{counted(len(messages), 'message')} of {total:,} bytes"
    head = f"{folder / FILE}: {sent}; no line was changed or removed"
    kinds: dict[str, list[int]] = {}
    for line in messages:
        kinds.setdefault(line["message"], []).append(line.get("bytes", 0))
    totals = [
        f"  {kind}: {counted(len(sizes), 'message')}, {sum(sizes):,} bytes" for kind, sizes in sorted(kinds.items())
    ]
    return [head, *totals, *(text for line in lines for text in _described(line))]


def _described(line: Line) -> list[str]:
    """One message in words, or the questions of an hour."""
    at = line["at"][:19].replace("T", " ")
    if line["what"] == "questions":
        asked = ", ".join(f"{count} for {name}" for name, count in line["asked"].items()) or "none"
        text = f"{at}  requests without a body to {line['to']}, also later in this hour"
        return [f"{text}; since the last such line: {asked}"]
    begin = f"{at}  {line['message']}"
    where = f", round {line['round']}, {line['phase']}" if "round" in line else ""
    size = f", {line['bytes']:,} bytes, sha256 {line['sha256']}" if "bytes" in line else ""
    told = [f"{begin}{where} to {line['to']}{size}"]
    told += [f"    tensor {name}: {shape}" for name, shape in line.get("tensors", {}).items()]
    return told + ([f"    fields {', '.join(line['fields'])}"] if line.get("fields") else [])
