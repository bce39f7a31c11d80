"""How fast a recipe trains here, against what the planner said and against other programs on the same model and data."""
