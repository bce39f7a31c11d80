"""Many runs of one recipe under varied settings: a grid, as one job array or one after the other here."""
