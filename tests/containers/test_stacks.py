"""What the code must take of an image: it is mounted there and not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from clustertune.merge import streaming


def test_a_mounted_checkout_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge fails at its very end where it asks for one."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(streaming, "version", version)
    assert streaming._own_version() == "a checkout"
