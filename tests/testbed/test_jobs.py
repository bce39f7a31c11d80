"""Job records are read from what scontrol prints, whatever a user has typed into a name, a command or a comment."""

from __future__ import annotations
