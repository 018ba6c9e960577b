"""Patches of one line each, without which a coordinator has what it is after: under each a test must fail."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest

MEMBER, ROSTER = "promptfed.shared.secagg.member", "promptfed.shared.secagg.messages"
SECURE, LOOP = "promptfed.client_service.privacy.secure", "promptfed.client_service.task_loop"
SUMS = "promptfed.client_service.privacy.earlier_sums"


@dataclass(frozen=True)
class Mutant:
    """``line`` of a module's function (``name``, or ``Class.name``) becomes ``instead``; ``attack`` then succeeds."""

    attack: str
    module: str
    function: str
    line: str
    instead: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the function in, compiled from the changed source, in the place of the real one."""
        module = importlib.import_module(self.module)
        source = inspect.getsource(module)
        assert source.count(self.line) == 1, f"{self.module} has not just one {self.line!r}"
        changed: dict[str, Any] = {**vars(module)}
        exec(compile(source.replace(self.line, self.instead), f"<{self.attack}>", "exec"), changed)
        owner, _, name = self.function.rpartition(".")
        function = reduce(getattr, self.function.split(".")[1:], changed[self.function.split(".")[0]])
        patch.setattr(getattr(module, owner) if owner else module, name, function)


SIGNATURE = "    body = confirmed(roster, place, digest)\n", "    return True\n"
SIZE = "    if len(content) != 2 * SHARE_BYTES:\n"
NOTHING = "bytes(SHARE_BYTES)"
NO_SIZE = f"    if not content:\n        return {NOTHING}, {NOTHING}\n    if False:\n"
KEYS = "    if not limits.peers:\n        return\n    others", "    return\n    others"
MUTANTS = (
    Mutant("other_lists", MEMBER, "_has_signed", *SIGNATURE),
    Mutant("forged_signatures", MEMBER, "_has_signed", *SIGNATURE),
    Mutant("too_few_signatures", MEMBER, "reveal_shares", " or len(signers) < roster.threshold:", ":"),
    Mutant("one_signature_thrice", MEMBER, "reveal_shares", "len(set(signers)) < len(signers) or ", ""),
    Mutant("a_second_list", SECURE, "SecureWork.answer", "if task.kind in attempt.answers:", "if False:"),
    Mutant("a_second_mask", SECURE, "SecureWork.answer", "if task.kind in attempt.answers:", "if False:"),
    Mutant("another_attempt", SECURE, "SecureWork.expect", "if revealed is not None and (", "if False and ("),
    Mutant(
        "an_attempt_set_back", SECURE, "SecureWork._unmask", "(_name(task), mark) != mark:",
        "(_name(task), mark) is None:",
    ),
    Mutant("the_same_payload", SECURE, "SecureWork.expect", "if served is not None and served != where:", "if False:"),
    Mutant("nearly_the_same_payload", SUMS, "EarlierSums.expect_apart", "< distance * earlier.change", "< 0"),
    Mutant(
        "nearly_the_same_and_one_drops_out", SECURE, "SecureWork._confirm",
        "self._expect_apart(task, roster, job.alive, final=True)", "pass",
    ),
    Mutant(
        "nearly_the_same_and_one_comes_back", SECURE, "SecureWork._confirm",
        "self._expect_apart(task, roster, job.alive, final=True)", "pass",
    ), Mutant("an_earlier_round", SECURE, "SecureWork.expect", "if task.round < markers.round:", "if False:"),
    Mutant("another_payload", ROSTER, "_expect_entry", '"attempt", "payload_sha256", "terms")', '"attempt", "terms")'),
    Mutant("swapped_keys", ROSTER, "_expect_entry", "if not is_entry_signed(answer):", "if False:"),
    Mutant("one_identity_twice", ROSTER, "_expect_keys", "in expect_keys(entry)]", "in expect_keys(entry)[1:]]"),
    Mutant("swapped_boxes", MEMBER, "_open", SIZE, NO_SIZE),
    Mutant("too_few_share", MEMBER, "expect_set", "if len(chosen) < least:", "if False:"),
    Mutant("too_few_alive", MEMBER, "expect_set", "if len(chosen) < least:", "if False:"),
    Mutant(
        "forgotten_in_the_list", MEMBER, "confirm_list", "or {*job.alive, *job.dropped} != set(sharing):", "or False:"
    ),
    Mutant(
        "fewer_than_the_spec_promises", SECURE, "SecureWork._least", "minimum=max(spec.minimum, self._limits.minimum)",
        "minimum=self._limits.minimum",
    ), Mutant("heavy_weight", MEMBER, "expect_set", "if share > limits.max_own_share:", "if False:"),
    Mutant("light_weights", MEMBER, "expect_set", "if effective < limits.min_effective:", "if False:"),
    Mutant("strangers", MEMBER, "expect_set", "if listed < limits.verified:", "if False:"),
    Mutant("invented_members", MEMBER, "expect_roster", *KEYS),
    Mutant("split_lists", MEMBER, "expect_roster", "    if unlisted > safe:\n", "    if False:\n"),
)  # fmt: skip
"""Of the checks of secure sums; every attack of `tests.support` has at least one."""

PLAIN_PATH = Mutant("plain_path", LOOP, "TaskLoop._send_pending", " or self._secure is not None:", ":")
"""An update that waits is sent in the clear, as where there are no secure sums."""

UNPAID = Mutant("unpaid", LOOP, "TaskLoop._pay_masked", 'if protection is None or answer.kind != "mask":', "if True:")
"""A masked change leaves, and its spend is not noted."""
