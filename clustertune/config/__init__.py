"""Recipes: schema, loading and derivation. :func:`clustertune.config.resolve.resolve` is the way in."""
