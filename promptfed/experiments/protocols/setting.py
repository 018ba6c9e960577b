"""The setting of a bench: data URIs, their division over clients, and the test sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from promptfed.shared.data.registry import BY_ROLE, REDRAWN

UNSEEN_DOMAIN = "{target}"  # in data: the domain that is left out, for sources that are tested on its images


@dataclass(frozen=True)
class Setting:
    """A bench's data and their division over clients. Each of ``domains`` replaces ``{domain}`` in ``data``.

    ``target_images``: an unseen domain is tested on its ``test`` split or on ``all`` its images. ``test_images``: of
    sources that draw them, ``redrawn`` for every seed, so that a spread over seeds includes their sampling, or the
    ``same``. ``out_of_client``: each client's classifier is also tested on the other clients' test images.
    ``class_names``: domains have the ``same`` classes, or use the ``union`` or the ``intersection`` of theirs.
    ``domain_words``: a description of the images by domain. ``swap_prompts``: each client is also tested with the
    others' prompts and its own head.
    """

    data: tuple[str, ...]
    domains: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    clients: int = 10
    classes_per_client: int | None = None
    partition: str = "pathological"
    alpha: float = 0.1
    shots: int | None = None
    validation: float | None = None
    curve: tuple[int, ...] = (1, 2, 4, 8, 16)
    target_images: str = "test"
    test_images: str = "redrawn"
    out_of_client: bool = False
    swap_prompts: bool = False
    class_names: str = "same"
    domain_words: Mapping[str, str] = field(default_factory=dict)

    def uri(self, data: str, seed: int, **options: Any) -> str:
        """``data`` with the setting's options for this seed and ``options`` (None: left out)."""
        redrawn = self.test_images == "redrawn" and data.partition(":")[0] in REDRAWN and self.validation is None
        common = {
            "shots": self.shots,
            "validation": self.validation,
            "split_seed": seed,
            "test_seed": seed if redrawn and seed else None,  # 0 is what is drawn anyway
        }
        return with_options(data, {**common, **options})

    def unseen(self, data: str, seed: int) -> str:
        """``data`` of a domain without a trainer, tested on its test split or on all its images."""
        whole = self.target_images == "all" and self.validation is None
        # For evaluators, all images of a folder are test images by default.
        test_on = "all" if whole else "test" if data.partition(":")[0] in BY_ROLE and self.validation is None else None
        return self.uri(data, seed, shots=None, test_on=test_on)

    def domain_uris(self) -> dict[str, str]:
        """The data URI of each domain."""
        return {domain: self.data[0].replace("{domain}", domain) for domain in self.domains}


def without_options(uri: str, dropped: Callable[[str], bool]) -> str:
    """A data URI without the options ``name=value`` for which ``dropped`` is true."""
    address, _, query = uri.partition("?")
    parts = [part for part in query.split("&") if part and not dropped(part)]
    return f"{address}?{'&'.join(parts)}" if parts else address


def with_target(uri: str, target: str | None) -> str:
    """``uri`` with ``{target}`` replaced; if ``target`` is None, without the options that hold it."""
    if target is not None:
        return uri.replace(UNSEEN_DOMAIN, target)
    return without_options(uri, lambda option: UNSEEN_DOMAIN in option)


def with_options(uri: str, options: Mapping[str, Any]) -> str:
    """A data URI with further options. Options that it has already stay; options that are None are left out."""
    address, _, query = uri.partition("?")
    named = {part.partition("=")[0] for part in query.split("&") if part}
    added = [f"{key}={value}" for key, value in options.items() if value is not None and key not in named]
    parts = [part for part in (query, *added) if part]
    return f"{address}?{'&'.join(parts)}" if parts else address
