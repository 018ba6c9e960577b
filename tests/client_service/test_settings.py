"""A client's settings: what each refusal says, and what follows where nothing is given."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from promptfed.client_service import __main__ as command
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining import consent, doctor
from promptfed.client_service.settings import account_folder, make_settings, read_token

GIVEN = {"coordinator": "http://127.0.0.1:8080", "federation": "pets", "data": "digits", "name": "a"}


@pytest.mark.parametrize(("changes", "said"), [
    ({"data": ""}, "--data is empty: give a value"), ({"domain": "", "agree": ""}, "--agree is empty"),
    ({"data": None}, "--data: "), ({"test": ["novel"]}, "'novel' is not NAME=URI"),
    ({"test": ["a b=x"]}, "not NAME=URI"),
    ({"test": ["=digits"]}, "not NAME=URI"), ({"test": ["novel="]}, "not NAME=URI"),
    ({"coordinator": "http://c:8080"}, "--allow-plain-http"),
    ({"coordinator": ",", "state_dir": None}, "--coordinator: ',' is not an address"),
    ({"coordinator": "c:80", "state_dir": None}, "--coordinator: 'c:80' is not an address"),
    ({"test": ["train=x"]}, "'train' names the client's own data"),
    ({"test": ["b=x", "test=x"]}, "'test' names the client"),
    ({"test": ["b=x", "b=y"]}, "two further test sets have the same name"),
    ({"device": "cuda:x"}, "'cuda:x' is no device"), ({"device": "tpu"}, "no device"),
    ({"coordinator": "http://example.org"}, "http://example.org would carry the client's secret unencrypted"),
    ({"coordinator": "http://127.0.0.1,http://example.org"}, "http://example.org would carry"),
    ({"delete_private": True}, "--delete-private goes with --withdraw"),
    ({"client_key": "k"}, "--client-key goes with --client-cert"),
    ({"check": True, "sent": True}, "--check and --sent are different things: give one"),
    ({"api_host": "0.0.0.0"}, "an API on 0.0.0.0 needs --api-token-file"), ({"api_port": 65536}, "--api-port: "),
    ({"nothing": 1}, "--nothing: "),
])  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ClientError) as end:
        make_settings(
            **{key: value for key, value in (GIVEN | {"state_dir": tmp_path} | changes).items() if value is not None}
        )
    assert (end.value.exit, said in str(end.value)) == (Exit.USAGE, True), str(end.value)


@pytest.mark.parametrize("changes", [
    {"coordinator": "https://example.org/"}, {"coordinator": "http://localhost:1"},
    {"coordinator": "http://example.org", "allow_plain_http": True},
    {"coordinator": "http://[::1]:8080"}, {"withdraw": True, "delete_private": True}, {"device": "cuda:1"},
    {"client_key": "k", "client_cert": "c"}, {"client_cert": "c"}, {"api_host": "0.0.0.0", "api_token_file": "t"},
    {"api_host": "::1"}, {"check": True}, {"test": ["b=x", "c=y=z"]}, {"api_port": 65535}, {"api_port": "tcp://10.0.0.1:80"},
])  # fmt: skip
def test_what_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    found = make_settings(**GIVEN | {"state_dir": tmp_path} | changes)
    assert found.coordinator == changes.get("coordinator", GIVEN["coordinator"]).rstrip("/")
    assert found.tests == ({"b": "x", "c": "y=z"} if "test" in changes else {})
    assert found.api_port == (65535 if changes.get("api_port") == 65535 else 0)


def test_what_follows_from_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(socket, "gethostname", lambda: "--.example.org")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with monkeypatch.context() as patch:
        for unset in (lambda: patch.setenv("XDG_STATE_HOME", ""), lambda: patch.delenv("XDG_STATE_HOME")):
            unset()
            assert account_folder() == tmp_path / "home" / ".local" / "state" / "promptfed"
    base = account_folder()
    assert base == tmp_path / "state" / "promptfed"
    where = {key: value for key, value in GIVEN.items() if key != "name"}
    assert make_settings(**where).name == "client", "a host's name of which nothing is left"
    monkeypatch.setattr(socket, "gethostname", lambda: "y" * 65)
    assert make_settings(**where).name == "y" * 64
    monkeypatch.setattr(socket, "gethostname", lambda: "Anna's laptop.example.org")
    assert make_settings(**where).state_dir == base / "127.0.0.1-8080" / "pets" / "Anna-s-laptop"
    (tmp_path / "identity.json").write_text('{"name": "ward-3"}')  # a container gets another host name each time
    assert make_settings(**where, state_dir=tmp_path).name == "ward-3"
    (tmp_path / "identity.json").write_text("damaged")
    assert make_settings(**where, state_dir=tmp_path).name == "Anna-s-laptop"
    invited = {"name": "ward", "role": "evaluator"}
    assert [make_settings(**where, invited=invited, **more).role for more in ({}, {"role": "trainer"})] == [
        "evaluator", "trainer",
    ]  # fmt: skip
    assert make_settings(**where, invited=invited).name == "ward"
    assert make_settings(**where, invited={"name": "ward"}).role == "trainer"
    two = where | {"coordinator": "https://a.example,https://b.example", "name": "x" * 64}
    assert make_settings(**two).state_dir == base / "a.example" / "pets" / ("x" * 64)
    (base / "b.example" / "pets" / ("x" * 64)).mkdir(parents=True)
    assert make_settings(**two).state_dir == base / "b.example" / "pets" / ("x" * 64)
    found = make_settings(**GIVEN, dataset="d")
    assert (found.policy_file, found.ledger_file) == (None, base / "ledger" / "d.jsonl")
    assert (found.features_dir, found.first_coordinator) == (found.state_dir / "features", GIVEN["coordinator"])
    (tmp_path / "config" / "promptfed").mkdir(parents=True)
    (tmp_path / "config" / "promptfed" / "policy.yaml").touch()
    assert found.policy_file == tmp_path / "config" / "promptfed" / "policy.yaml"
    own = make_settings(**GIVEN, policy="p", ledger="l", feature_cache="f")
    assert [str(one) for one in (own.policy_file, own.ledger_file, own.features_dir)] == ["p", "l", "f"]
    nobody = {"state_dir": tmp_path, "sent": True}
    assert (make_settings(**nobody).data, make_settings(**nobody).federation) == ("none", "none")
    named = make_settings(**nobody, coordinator="https://a", federation="eyes", data="digits")
    assert (named.coordinator, named.federation, named.data) == ("https://a", "eyes", "digits")
    for lacking in ({"sent": True}, {"state_dir": tmp_path, "withdraw": True}):
        with pytest.raises(ClientError, match="--coordinator: "):
            make_settings(**lacking)
    assert make_settings(**{key: GIVEN[key] for key in ("coordinator", "federation")}, withdraw=True).data == "none"


def test_a_token_is_a_line_of_letters(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content, token in ((b" abc\n", "abc"), (b"", None), (b"\n", None), ("\u00e9".encode(), None), (b"\xff", None),
                           (b"a\x00b", None)):  # fmt: skip
        path.write_bytes(content)
        if token is not None:
            assert read_token(path, "token") == token
        else:
            with pytest.raises(ClientError, match=r"holds no token|cannot read the token") as end:
                read_token(path, "token")
            assert end.value.exit is Exit.NOT_ALLOWED


def test_each_mode_does_its_own_thing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from promptfed.client_service import worker

    monkeypatch.setattr(command, "set_up_logging", lambda log_format: None)
    monkeypatch.setattr(command, "unfit_server", lambda: None)
    monkeypatch.setattr(command, "check", lambda settings: 40)
    monkeypatch.setattr(consent, "withdraw", lambda settings: 41)
    course = list[str]()
    monkeypatch.setattr(command, "collect_seldom", lambda: course.append("seldom"))
    monkeypatch.setattr(command.gc, "freeze", lambda: course.append("freeze"))
    monkeypatch.setattr(worker, "run", lambda settings: 42 if course[-1] == "freeze" else 43)
    lines = [f"--{name.replace('_', '-')}={value}" for name, value in (GIVEN | {"state_dir": tmp_path / "s"}).items()]
    assert [command.main([*lines, *more]) for more in (["--check"], ["--withdraw"], [])] == [40, 41, 42]
    assert course == ["seldom"] * 3 + ["freeze"], "no collection goes through what imports have brought"
    assert command.main([*lines, "--sent"]) == Exit.STATE
    assert "records no message" in caplog.text
    monkeypatch.setattr(command, "unfit_server", lambda: "uvicorn is too old")
    assert (command.main([*lines, "--fingerprint"]), command.main(lines)) == (Exit.OK, Exit.USAGE)
    assert "uvicorn is too old" in caplog.text
    assert capsys.readouterr().out.startswith("ed25519:")
    assert command.main(["--data=digits"]) == Exit.USAGE
    assert "--coordinator: " in capsys.readouterr().err


@pytest.mark.parametrize(("healthy", "disclosure"), [(True, "offer"), (False, "offer"), (False, None)])
def test_a_check_tells_what_it_found_and_asks_nothing(
    healthy: bool, disclosure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[Any]()

    class Examination:
        def __init__(self, settings: Any) -> None:
            self.disclosure, self.healthy, self.checks = None, not healthy, ["none yet"]

        def run(self) -> None:
            self.disclosure, self.healthy, self.checks = disclosure, healthy, ["data"]

    class Terminal:
        def __init__(self, log_format: str, ask: bool) -> None:
            told.append((log_format, ask))

        tell = show = staticmethod(told.append)

    monkeypatch.setattr(doctor, "Examination", Examination)
    monkeypatch.setattr(consent, "Terminal", Terminal)
    code = command.check(make_settings(**GIVEN, log_format="json"))
    assert (code, told) == (
        Exit.OK if healthy else Exit.BAD_INPUT,
        [("json", False), ["data"], *([] if disclosure is None else [disclosure])],
    )
