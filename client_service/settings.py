"""The settings of a client: command line, environment (``PROMPTFED_CLIENT_*``), defaults."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from promptfed.client_service.exits import ClientError, Exit
from promptfed.shared.messages import Role
from promptfed.shared.privacy.accounting import MOST_EPSILON
from promptfed.shared.service.addresses import addresses_of, check_addresses, is_loopback
from promptfed.shared.service.environment import CLIENT, is_of_a_link, not_structured, unread_variables
from promptfed.shared.service.reasons import offence, why
from promptfed.shared.spec.section import option
from promptfed.shared.spec.spec import NAME_PATTERN, Name

DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"


class Settings(BaseSettings):
    """Settings of one client; those without a default must be given. The coordinator learns no data URI and no path."""

    model_config = SettingsConfigDict(env_prefix=CLIENT, extra="forbid", cli_kebab_case=True, env_ignore_empty=True)

    coordinator: Annotated[
        str,
        Field(
            description="the coordinator's address, as in https://coordinator.example.org; of a group, any of its "
            "addresses, or several separated by commas"
        ),
    ]
    federation: Annotated[Name, Field(description="name or id of the federation")]
    name: Annotated[
        Name,
        Field(description="this client's name in the federation; default: that in the state folder, else the host's"),
    ]
    data: Annotated[str, Field(min_length=1, description="data URI, as in folder:/data/pets or symbols:sketch")]
    domain: str | None = option(
        None, "description of what the images look like, as in 'a sketch of a {}'; default: the data's own"
    )
    test: list[str] = option([], "a further test set, NAME=URI, measured in every evaluation; repeatable")
    state_dir: Annotated[
        Path,
        Field(
            description="folder for this client's secret and private state, one per client; default: "
            "~/.local/state/promptfed/COORDINATOR/FEDERATION/NAME"
        ),
    ]
    enrolment_token_file: Path | None = option(None, "file with the enrolment token; not needed once enrolled")
    reset_private: bool = option(False, "discard this client's private tensors and start them again")
    new_data: bool = option(False, "go on although the data have changed since this client last started")
    role: Role = option("trainer", "trainer, or evaluator (test data only)")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    allow_backbone: list[str] = option(
        [], "a model outside open_clip's registry that the federation may name; repeatable"
    )
    backbone_file: Path | None = option(
        None,
        "file of the backbone's weights, or a folder with one, instead of a download; weights "
        "other than the federation's are refused",
    )
    feature_cache: Path | None = option(
        None, "folder of image features, which clients may share; default: in the state folder"
    )
    policy: Path | None = option(None, "this site's policy; default: ~/.config/promptfed/policy.yaml, if it exists")
    dataset: Name = option("default", "name of this owner's data set, whose privacy budget all federations on it share")
    ledger: Path | None = option(
        None, "file of its privacy budget; default: ~/.local/state/promptfed/ledger/DATASET.jsonl"
    )
    max_epsilon: float = option(
        8.0, "privacy budget ε of the data set, over all federations together", gt=0, le=MOST_EPSILON
    )
    ca_file: Path | None = option(
        None,
        "PEM file of the only trusted authority: the coordinator's, or that of a proxy that inspects "
        "TLS; default: those that this machine's system trusts",
    )
    proxy: str | None = option(
        None,
        "proxy to the coordinator, as in http://USER:PASSWORD@proxy.example.org:3128, or none; "
        "default: that of HTTPS_PROXY, ALL_PROXY and NO_PROXY",
    )
    client_cert: Path | None = option(None, "PEM certificate in this client's name, if the coordinator asks for one")
    client_key: Path | None = option(None, "its key; default: in the certificate's file")
    allow_plain_http: bool = option(
        False, "permit http:// to another machine; the client's secret then travels unencrypted"
    )
    give_up_after: float = option(
        3600.0, "seconds without any answer of the coordinator after which the client ends", gt=0
    )
    api_host: str = option("127.0.0.1", "address of the client's own API")
    api_port: int = option(0, "its port; 0: any free one, written to api.url in the state folder", ge=0, le=65535)
    api_token_file: Path | None = option(
        None, "file with the API's bearer token; required if the address is not loopback"
    )
    yes: bool = option(False, "join without asking; without a terminal nobody is asked anyway")
    agree: str | None = option(
        None,
        "join without asking if the offer has this digest, even if it has changed; the last line of "
        "the text about what leaves this machine shows the digest",
    )
    withdraw: bool = option(
        False, "withdraw consent: this client ends, and takes no further part until you agree again"
    )
    delete_private: bool = option(
        False, "with --withdraw: delete private tensors, features and prompts from the state folder"
    )
    fingerprint: bool = option(
        False, "print the fingerprint of this client's identity key, for owners to compare, and end"
    )
    sent: bool = option(
        False, "print every message that has left this machine, from the state folder's record, and end"
    )
    check: bool = option(False, "only check everything, show what would leave this machine, and end without joining")
    serve: bool = option(False, "keep serving predictions after the federation has ended")
    log_format: Literal["text", "json"] = option("text", "one line of text or JSON per event")

    @model_validator(mode="before")
    @classmethod
    def _who_and_where(cls, options: Any) -> Any:
        """Fill in a name, a role and a state folder if they were not given; ``invited`` has those of an invitation."""
        if not isinstance(options, dict):
            return options
        empty = sorted(key for key, value in options.items() if value == "")
        if empty:
            raise ValueError(f"--{empty[0].replace('_', '-')} is empty: give a value, or leave it out")
        invited = options.get("invited") or {}
        options = {key: value for key, value in options.items() if key != "invited"}
        name = options.get("name") or _own_name(options.get("state_dir"), invited.get("name"))
        role = {"role": invited["role"]} if invited.get("role") and not options.get("role") else {}
        coordinator, federation = str(options.get("coordinator")), str(options.get("federation"))
        folder = options.get("state_dir") or _own_folder(coordinator, federation, str(name))
        unasked = options.get("withdraw") or options.get("fingerprint") or options.get("sent")
        unread = {"data": "none"} if unasked and not options.get("data") else {}
        if options.get("sent") and options.get("state_dir"):
            # The record lies in the state folder: nobody is asked.
            unread |= {"coordinator": options.get("coordinator") or "http://127.0.0.1"}
            unread |= {"federation": options.get("federation") or "none"}
        return {**options, "name": name, "state_dir": folder, **role, **unread}

    @field_validator("api_port", mode="before")
    @classmethod
    def _no_link(cls, value: object) -> object:
        """Kubernetes sets a variable of this name beside a service ``promptfed-client-api``."""
        return 0 if is_of_a_link(value) else value

    @field_validator("test")
    @classmethod
    def _tests_have_names(cls, tests: list[str]) -> list[str]:
        names = []
        for text in tests:
            name, _, uri = text.partition("=")
            if not re.fullmatch(NAME_PATTERN, name) or not uri:
                raise ValueError(f"{text!r} is not NAME=URI, as in novel=symbols:sketch?classes=novel")
            names.append(name)
        for name in ("train", "test"):
            if name in names:
                raise ValueError(f"{name!r} names the client's own data: give the further test set another name")
        if len(set(names)) < len(names):
            raise ValueError("two further test sets have the same name")
        return tests

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, text: str) -> str:
        if not re.fullmatch(DEVICE_PATTERN, text):
            raise ValueError(f"{text!r} is no device: give auto, cpu, cuda or cuda:N")
        return text

    @field_validator("coordinator")
    @classmethod
    def _are_addresses(cls, text: str) -> str:
        return check_addresses(text)

    @model_validator(mode="after")
    def _other_machines_need_consent(self) -> Settings:
        for address in addresses_of(self.coordinator):
            parts = urlsplit(address)
            if parts.scheme == "http" and not is_loopback(parts.hostname or "") and not self.allow_plain_http:
                raise ValueError(
                    f"{address} would carry the client's secret unencrypted: use https:// or --allow-plain-http"
                )
        if self.delete_private and not self.withdraw:
            raise ValueError("--delete-private goes with --withdraw")
        if self.client_key is not None and self.client_cert is None:
            raise ValueError("--client-key goes with --client-cert")
        modes = [f"--{name}" for name in ("check", "withdraw", "fingerprint", "sent") if getattr(self, name)]
        if len(modes) > 1:
            raise ValueError(f"{' and '.join(modes)} are different things: give one")
        if not is_loopback(self.api_host) and self.api_token_file is None:
            raise ValueError(f"an API on {self.api_host} needs --api-token-file: only loopback is open to all")
        return self

    @property
    def first_coordinator(self) -> str:
        """The first address of the coordinators, under which this client's state and ledger name them all."""
        return addresses_of(self.coordinator)[0]

    @property
    def tests(self) -> dict[str, str]:
        """URIs of the further test sets by name."""
        return {name: uri for name, _, uri in (text.partition("=") for text in self.test)}

    @property
    def ledger_file(self) -> Path:
        """Where the data set's privacy budget is kept: outside the state folder, so that a new one changes nothing."""
        return self.ledger or ledger_path(self.dataset)

    @property
    def policy_file(self) -> Path | None:
        """The policy that was named, or the account's own if there is one."""
        default = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "promptfed" / "policy.yaml"
        return self.policy or (default if default.exists() else None)

    @property
    def features_dir(self) -> Path:
        """Where image features are kept."""
        return self.feature_cache or self.state_dir / "features"


def ledger_path(dataset: str) -> Path:
    """Where the privacy budget of a data set is kept for this account."""
    return account_folder() / "ledger" / f"{dataset}.jsonl"


def account_folder() -> Path:
    """Where this account's clients keep what outlives one of them."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "promptfed"


def _own_name(state_dir: Any, invited: str | None) -> str:
    """The client's name as the state folder knows it, so that a container with another host name is the same client.

    Else the name in the invitation, or the host's.
    """
    try:
        return str(json.loads((Path(state_dir) / "identity.json").read_text())["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return invited or _safe(socket.gethostname().partition(".")[0])


def _own_folder(coordinator: str, federation: str, name: str) -> Path:
    """The folder under one of the coordinator's addresses: the first that has one, else the first of all."""
    base = account_folder()
    hosts = [address.partition("://")[2] or address for address in addresses_of(coordinator) or [coordinator]]
    folders = [base / _safe(host) / _safe(federation) / _safe(name) for host in hosts]
    return next((folder for folder in folders if folder.exists()), folders[0])


def _safe(text: str) -> str:
    """``text`` as a name: what a name cannot hold becomes a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "client"


def make_settings(**options: Any) -> Settings:
    """Settings of ``options`` over the environment and the defaults.

    Raises:
        ClientError: USAGE, with every offence in one line.
    """
    try:
        return Settings(**options)
    except ValidationError as error:
        raise ClientError(Exit.USAGE, "; ".join([one_line(error), *unread()])) from None
    except SettingsError as error:
        raise ClientError(Exit.USAGE, not_structured(error, CLIENT)) from None


def unread() -> list[str]:
    """A line for each variable that was probably meant to be a setting."""
    return unread_variables({CLIENT: Settings.model_fields})


def one_line(error: ValidationError) -> str:
    """A validation error as ``--state-dir: is missing; ...``."""
    offences = []
    for item in error.errors(include_url=False, include_context=False):
        option = "--" + str(item["loc"][0]).replace("_", "-") + ": " if item["loc"] else ""
        offences.append(option + offence(item))
    return "; ".join(offences)


def read_token(path: Path, kind: str) -> str:
    """The text of a token file.

    Raises:
        ClientError: NOT_ALLOWED where it cannot be read or is empty.
    """
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        text = f"cannot read the {kind} in {path} ({why(error)}): put it there, or mount the volume that holds it"
        raise ClientError(Exit.NOT_ALLOWED, text) from None
    if not token or not token.isascii() or not token.isprintable():
        raise ClientError(Exit.NOT_ALLOWED, f"the file {path} holds no {kind}")
    return token
