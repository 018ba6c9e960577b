"""One backbone with random weights, a made-up source, a coordinator of one client and workers that talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.joining.parts import Parts, PrivacyParts
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, shape_of
from promptfed.shared.data import Source
from promptfed.shared.privacy import accounting
from tests.support.fake_coordinator import TOKEN, FakeCoordinator, made_up_source
from tests.support.waiting import PATIENCE

OF_PRIVACY = {field.name for field in fields(PrivacyParts)}
OF_PARTS = {field.name for field in fields(Parts)} - {"privacy"}


class Killed(BaseException):
    """Stands for kill -9: nothing that the client would still do happens."""


@pytest.fixture(scope="module", autouse=True)
def coarse_losses() -> Iterator[None]:
    """ε by the coarse grid, which takes a tenth of the time. What the fine one gives is tested in shared/privacy."""
    exact, kept = accounting._by_pld, (accounting._composed, accounting._replaced)

    def by_pld(events: Any, delta: float, relation: Any, interval: float) -> float:
        return exact(events, delta, relation, max(interval, accounting.COARSE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "_by_pld", by_pld)
        for cache in kept:
            cache.cache_clear()
        yield
    for cache in kept:
        cache.cache_clear()


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone("promptfed-tiny", None)


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="session")
def source() -> Source:
    return made_up_source()


@pytest.fixture(scope="session")
def usual() -> Settings:
    """Settings of no folder, made once: reading them from everywhere takes as long as a short test."""
    return make_settings(
        coordinator="http://127.0.0.1:1", federation="pets", name="hospital-a", data="made-up",
        state_dir=Path("unset"), device="cpu", give_up_after=PATIENCE,
    )  # fmt: skip


@pytest.fixture
def settings(usual: Settings, tmp_path: Path) -> Settings:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    return usual.model_copy(update={"state_dir": tmp_path / "state", "enrolment_token_file": token})


@dataclass(frozen=True)
class Make:
    """Coordinators of one client, and workers that talk to them.

    A second worker made with the same settings is the same client, started again.
    """

    settings: Settings
    given: dict[str, Any]

    def coordinator(self, **changes: Any) -> FakeCoordinator:
        return FakeCoordinator(shape_of(self.given["backbone"]), **changes)

    def worker(self, coordinator: FakeCoordinator, *, http: httpx.AsyncClient | None = None, **changes: Any) -> Worker:
        given = self.given | changes
        own = given.pop("settings", self.settings)
        chosen = {name: given.pop(name) for name in OF_PRIVACY & given.keys()}
        privacy = PrivacyParts(**{name: value for name, value in chosen.items() if value is not None})
        parts = Parts(privacy=privacy, **{name: given.pop(name) for name in OF_PARTS & given.keys()})
        return Worker(own, parts, http=http or coordinator.http(), **given)


@pytest.fixture
def make(settings: Settings, backbone: Backbone, source: Source, features: FeatureCache) -> Make:
    return Make(settings, {"backbone": backbone, "source": source, "features": features})
