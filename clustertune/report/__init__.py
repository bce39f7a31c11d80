"""What a run was and what came of it: its metrics, read once for all, and one page for a person."""
