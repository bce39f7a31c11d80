"""How fast a recipe trains here, against the planner's prediction and against other programs on the same model and data."""
