"""What a data owner sees when a client starts: checks, what will leave the machine, and a question if necessary."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Literal

from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.joining.parts import Consent
from promptfed.client_service.state.site_log import SiteLog, digest
from promptfed.shared.machine import line_of
from promptfed.shared.plain_text import plain

log = logging.getLogger("promptfed.client")

QUESTION = "Join? [y/N] "


class Terminal:
    """Writes to stderr. It asks only if stdin and stderr are terminals and ``--yes`` is not given."""

    def __init__(self, log_format: Literal["text", "json"], ask: bool, agree: str | None = None):
        self._json = log_format == "json"
        self._agree = agree
        self._ask = ask and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()

    async def consent(self, checks: Sequence[Check], disclosure: Disclosure) -> bool:
        """Whether to join.

        Without anybody to ask it is what the command line says: yes to a first offer, but to one that has changed only
        where ``--agree`` names it. Where that is given it decides alone.
        """
        self.tell(checks)
        self.show(disclosure)
        if self._agree is not None:
            return self._agree == disclosure.terms.digest
        if not self._ask:
            return not disclosure.changes
        sys.stderr.write(QUESTION)
        sys.stderr.flush()
        return (await line_of(sys.stdin)).strip().lower() in ("y", "yes")

    def tell(self, checks: Sequence[Check]) -> None:
        """The checks, a line each."""
        for check in checks:
            if self._json:
                facts = {"name": check.name, "verdict": check.verdict, "text": check.text, "advice": check.advice}
                log.info("check %s", check.name, extra={"event": "check", "facts": facts})
            else:
                self._say(check.line())

    def show(self, disclosure: Disclosure) -> None:
        """What will leave this machine."""
        if self._json:
            log.info("disclosure", extra={"event": "disclosure", "facts": disclosure.facts()})
        else:
            self._say("", *disclosure.lines(), "")

    @staticmethod
    def _say(*lines: str) -> None:
        sys.stderr.write("\n".join(map(plain, lines)) + "\n")
        sys.stderr.flush()


def noted(consent: Consent | None, site: SiteLog) -> Consent | None:
    """``consent``, with a note in the site's log of what was shown and what the answer was."""
    if consent is None:
        return None

    async def asked(checks: Sequence[Check], disclosure: Disclosure) -> bool:
        text = "\n".join(map(plain, disclosure.lines()))
        terms = {"terms": disclosure.terms.digest}
        site.note("shown", {**terms, "sha256": digest(text), "text": text})
        agreed = await consent(checks, disclosure)
        about = disclosure.terms.model_dump(mode="json", include={"federation", "role", "method", "rounds", "privacy"})
        site.note("agreed" if agreed else "declined", terms | about)
        return agreed

    return asked
