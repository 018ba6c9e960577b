"""Settings of the coordinator, from options or ``PROMPTFED_COORDINATOR_*`` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from promptfed.shared.service.addresses import is_loopback
from promptfed.shared.service.environment import COORDINATOR, is_of_a_link, unread_variables
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.section import option

DEFAULT_PORT = 8080
POSTGRES = ("postgresql+psycopg://", "postgresql://", "postgres://")


def is_safe(url: str) -> bool:
    """Whether nobody on the way can change what comes from there: by TLS, or on this machine."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    )


def _check_store(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(
            "--store must be s3://BUCKET/PREFIX, and nothing more: credentials and endpoint come from the environment"
        )


class Settings(BaseSettings):
    """Where the coordinator keeps its data, where it listens, and how much it takes at once."""

    model_config = SettingsConfigDict(
        env_prefix=COORDINATOR, extra="forbid", hide_input_in_errors=True, env_ignore_empty=True
    )

    data_dir: Path = option(Path("coordinator-data"), "database, blobs, operator token")
    database_url: SecretStr | None = option(
        None, "postgresql+psycopg://USER:PASSWORD@HOST/NAME (default, or where empty: SQLite in the data folder)"
    )
    database_url_file: Path | None = option(None, "a file with this URL; other users of the machine can see options")
    database_wait_seconds: float = option(30.0, "how long to wait for the database at the start", ge=0)
    store: str | None = option(
        None,
        "s3://BUCKET/PREFIX: blobs over 256 KB are objects there; credentials and endpoint come "
        "from the environment, as for AWS's tools (default: they are files in the data folder)",
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(DEFAULT_PORT, "port to listen on, 0 for any free one", ge=0, le=65535)
    port_file: Path | None = option(None, "write the base URL here once the coordinator answers")
    advertise_url: str | None = option(
        None, "this coordinator's address, if several wait for each other on one PostgreSQL database"
    )
    operator_token_file: Path | None = option(
        None, "file with the first admin's token (default: created in the data folder at the first start)"
    )
    signing_key_file: Path | None = option(
        None, "PEM of the Ed25519 key that signs states (default: created in the data folder)"
    )
    allow_plain_http: bool = option(False, "listen without TLS on an address that others can reach")
    tls_cert: Path | None = option(None, "PEM certificate chain")
    tls_key: Path | None = option(None, "PEM private key")
    tls_client_ca: Path | None = option(
        None, "PEM of the authority that signs client certificates; each client must show one in its name"
    )
    forwarded_allow_ips: str | None = option(
        None, "comma-separated addresses of proxies whose X-Forwarded-For is believed"
    )
    max_uploads: int = option(8, "uploads received at once", ge=1, le=1000)
    upload_wait_seconds: float = option(20.0, "how long further uploads wait before they get 503", ge=0)
    upload_timeout_seconds: float = option(300.0, "how long a request's body may take", gt=0)
    auth_failures_per_minute: int = option(
        60, "wrong tokens that an address may send in a minute before it must wait", ge=1
    )
    token_hours: float = option(168.0, "how long an enrolment token is valid", gt=0)
    bootstrap: Path | None = option(None, "spec (YAML) of a federation to create if it is absent")
    enrolment_token_file: Path | None = option(None, "where --bootstrap writes an enrolment token")
    enrolment_token_uses: int | None = option(
        None, "how many clients enrol with it (default: the spec's min_clients)", ge=1, le=100_000
    )
    verify: bool = option(
        False, "check everything that is stored, list what is damaged, and end with 0, or 1 if anything is"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "debug, info, warning or error")
    log_format: Literal["auto", "text", "json"] = option(
        "auto", "text, json, or auto: text at a terminal, json elsewhere"
    )

    @field_validator("port", mode="before")
    @classmethod
    def _no_link(cls, value: object) -> object:
        """Kubernetes sets a variable of this name beside a service ``promptfed-coordinator``."""
        return DEFAULT_PORT if is_of_a_link(value) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca asks for certificates, and only TLS brings them: give --tls-cert too")
        if not (is_loopback(self.host) or self.tls_cert or self.allow_plain_http):
            raise ValueError(
                f"{self.host} can be reached from outside: give --tls-cert and --tls-key, or --allow-plain-http where "
                "the network is trusted"
            )
        if self.enrolment_token_file is not None and self.bootstrap is None:
            raise ValueError("--enrolment-token-file needs --bootstrap, which names the federation")
        self.url()
        if self.store is not None:
            _check_store(self.store)
        if self.advertise_url is not None:
            self._check_several()
        return self

    def _check_several(self) -> None:
        """Several coordinators need all that the data folder of one would hold."""
        parts = urlsplit(self.advertise_url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ValueError("--advertise-url must be an address such as https://coordinator-1.example:8080")
        if not (is_safe(self.advertise_url or "") or self.allow_plain_http):
            raise ValueError(
                "--advertise-url would have clients' secrets sent unencrypted: https, or --allow-plain-http"
            )
        needed = {
            "--database-url-file (PostgreSQL)": self.url(),
            "--store": self.store,
            "--operator-token-file": self.operator_token_file,
            "--signing-key-file": self.signing_key_file,
        }
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise ValueError(
                f"--advertise-url is for several coordinators, which share {', '.join(missing)}: give them"
            )

    def url(self) -> str | None:
        """The URL of a PostgreSQL database, password and all; None: SQLite in the data folder. Raises ValueError."""
        if self.database_url is not None and self.database_url_file is not None:
            raise ValueError("--database-url and --database-url-file say the same thing: give one of them")
        if self.database_url_file is not None:
            try:
                text = self.database_url_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--database-url-file {self.database_url_file} cannot be read: {why(error)}") from None
            if not text:
                raise ValueError(f"--database-url-file {self.database_url_file} is empty")
        else:
            text = self.database_url.get_secret_value() if self.database_url is not None else ""
        if text and not text.startswith(POSTGRES):
            raise ValueError(
                "the database URL must be postgresql+psycopg://USER:PASSWORD@HOST/NAME; without one, SQLite is used"
            )
        return text or None


def unread() -> list[str]:
    """A line for each variable that was probably meant to be a setting."""
    return unread_variables({COORDINATOR: Settings.model_fields})
