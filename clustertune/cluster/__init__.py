"""Cluster files and ``ops/hardware.yaml``: the machines that training runs on."""
