"""A recipe with everything that follows from it. :func:`clustertune.resolve.resolve.resolve` is the way in."""
