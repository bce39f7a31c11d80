"""What the code must take of an image: it is mounted there and not installed, and the reference's stack is an older one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from clustertune.merge import streaming
from clustertune.training import build

WANTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}, "learning_rate": 1.0}
OLDER = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "learning_rate": 1.0}


@pytest.mark.parametrize(
    ("known", "given"),
    [
        ([*WANTED, *OLDER], WANTED),  # today's stack has both
        (list(OLDER), OLDER),  # the reference's
        (["learning_rate"], WANTED),  # neither: SFTConfig says so itself
    ],
)
def test_arguments_are_spelt_as_the_installed_stack_does(known: list[str], given: dict[str, object]) -> None:
    """Else the reference image trains nothing."""
    assert build.spelt(WANTED, known) == given


def test_a_mounted_checkout_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge fails at its very end where it asks for one."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(streaming, "version", version)
    assert streaming._own_version() == "a checkout"
