"""The list of what a client sends is that of the messages' fields, and both helps show it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.__main__ import main
from promptfed.client_service.joining.sent import ENROLMENT, EVALUATION, FAILURE, SECURE_SUM, SENT, UPDATE, help_lines
from promptfed.shared.messages import EnrolRequest, EvaluationRequest, FailureRequest, UpdateMetadata
from promptfed.shared.secagg.messages import ConfirmAnswer, KeysAnswer, SharesAnswer, UnmaskAnswer


def test_the_list_has_every_field_of_every_message() -> None:
    assert ENROLMENT.keys() == EnrolRequest.model_fields.keys()
    assert UPDATE.keys() == UpdateMetadata.model_fields.keys() | {"tensors"}
    assert EVALUATION.keys() == EvaluationRequest.model_fields.keys()
    assert FAILURE.keys() == FailureRequest.model_fields.keys()
    answers = (KeysAnswer, SharesAnswer, ConfirmAnswer, UnmaskAnswer)
    assert SECURE_SUM.keys() == {name for answer in answers for name in answer.model_fields} | {"masked"}


def test_both_helps_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = CliRunner().invoke(app, ["client", "--help"]).output
    with pytest.raises(SystemExit):
        main(["--help"])
    for text in (command, capsys.readouterr().out):
        lines = [line.strip() for line in text.splitlines()]
        assert all(line.strip() in lines for line in help_lines())
        assert any("domain's name and description" in line for line in lines)
    assert len(help_lines()) > sum(map(len, SENT.values()))
