"""Tasks that need code beside ``eval/NAME``: ``NAME.py`` has ``OwnRows``, of :class:`clustertune.evaluate.tasks.TaskRows`."""
