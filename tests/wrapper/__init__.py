"""The wrapper: API, command, renderings."""
