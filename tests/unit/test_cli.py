"""The command line: what ends in one message, and what is an error of ours."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

import pytest

from draftsmith import cli as module


def raising(code: int) -> OSError:
    return OSError(code, os.strerror(code), "/weights/model.safetensors")


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(**_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(module, "cli", command)
    module.main()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_what_the_machine_refuses_is_one_message(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may be one to read, as weights are, so it is not said that it cannot be written."""
    with pytest.raises(SystemExit) as caught:
        end_with(raising(code), monkeypatch)
    assert caught.value.code == 2
    told = f"draftsmith: error: cannot read or write /weights/model.safetensors: {os.strerror(code)}: expected a disk"
    assert capsys.readouterr().err.startswith(told)


def test_other_errors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        end_with(raising(errno.ENOENT), monkeypatch)
