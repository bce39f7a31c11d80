"""Cluster files and ``ops/hardware.yaml``: on what is trained."""
