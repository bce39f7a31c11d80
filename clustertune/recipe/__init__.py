"""The files of a recipe: their schema, how they are read, and what is wrong with them."""
