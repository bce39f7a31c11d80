"""How the images are locked, built and described. Standard library only: an image is built before anything is installed."""
