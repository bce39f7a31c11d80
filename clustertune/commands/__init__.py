"""The commands that do not fit in one file: each module adds its own to the command line."""
