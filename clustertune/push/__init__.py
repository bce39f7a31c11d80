"""A run's adapter onto the Hub: what goes, what its card says, and that nothing else goes."""
