"""A run while it runs: what every node measures, one status of it all, a live page, alerts, money and energy."""
