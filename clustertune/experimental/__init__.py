"""Launchers that are not proved at full size: Ray Train and SkyPilot. The package imports none of it (docs/experimental.md)."""
