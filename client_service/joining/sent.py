"""What a client sends, in words: by the message, and by its fields. Its help shows the words."""

from __future__ import annotations

ENROLMENT = {
    "name": "its name (--name)",
    "role": "its role (--role)",
    "num_samples": "the number of training images; of an evaluator, of test images",
    "class_names": "the names of the classes",
    "domain": "the domain's name and description (--domain, or the data's own), if any",
    "device": "cpu, or cuda with the model of the GPU",
    "backbone_fingerprint": "the fingerprint of the backbone's weights",
    "backbone_shape": "the sizes of the backbone's towers",
    "protocol_version": "the version of the protocol",
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
    "receipt": "a public key and its signature of that digest",
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
SENT = {
    "once, when it enrols": ENROLMENT,
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
    return [*lines, "    requests also ask for tasks, payloads, receipts and spends, and tell of --withdraw"]
