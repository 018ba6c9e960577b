"""Trials before round 1: a client takes part in each as in a federation of its own, within what its owner agreed to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.privacy.agreement import differences, terms_of
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import TRIALS
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.messages import EnrolmentInfo, TrialOffer
from promptfed.shared.methods import make_method

log = logging.getLogger("promptfed.client")


def trial_settings(settings: Settings, info: EnrolmentInfo, offer: TrialOffer) -> Settings:
    """The settings of the client of a trial. Each trial that was agreed to has a folder and private tensors of its own.

    Raises:
        ClientError: PROTOCOL where no such trial was agreed to.
    """
    tuning = info.tuning
    if tuning is None or offer.candidate >= len(tuning.candidates) or offer.rung >= len(tuning.rungs):
        text = f"the coordinator asks for trial {offer.rung + 1}-{offer.candidate + 1}, and there is none"
        raise ClientError(Exit.PROTOCOL, f"{text}: nothing was sent")
    own: dict[str, Any] = {
        "federation": offer.federation,
        "state_dir": settings.state_dir / TRIALS / f"{offer.rung + 1}-{offer.candidate + 1}",
        "feature_cache": settings.features_dir,
        "enrolment_token_file": None,
        "reset_private": False,
        "serve": False,
        "test": [],
    }
    return settings.model_copy(update=own)


def trial_parts(parts: Parts, info: EnrolmentInfo, offer: TrialOffer, work: TaskWork) -> Parts:
    """The parts of the client of a trial: those of the client itself, which has ``work``, as far as they fit."""
    consent = partial(_as_agreed, info, offer)
    own = replace(parts, enrolment_token=offer.token, secret=None, record=None, consent=consent, within=info.name)
    return replace(own, backbone=work.backbone, tests={})


async def _as_agreed(info: EnrolmentInfo, offer: TrialOffer, checks: Sequence[Check], shown: Disclosure) -> bool:
    """Whether a trial is one that the owner agreed to when the client joined the federation of ``info``."""
    assert info.tuning is not None
    asked, rounds = shown.terms, info.tuning.rungs[offer.rung].rounds
    own = {"held_out": info.tuning.held_out, "rounds": rounds, "evaluate_every": rounds, "tuning": None}
    named = {"federation_id": asked.federation_id, "name": asked.federation}
    trial = info.with_candidate(offer.candidate).model_copy(update=own | named)
    agreed = terms_of(trial, make_method(trial.method), asked.coordinator, asked.role, [])
    differing = differences(agreed.offer, asked.offer)
    if differing:
        log.error("trial %s is not what was agreed to: %s", asked.federation, "; ".join(differing))
    return not differing and not shown.changes
