"""The command line: one module for each group of commands; :mod:`clustertune.cli.app` joins them."""
