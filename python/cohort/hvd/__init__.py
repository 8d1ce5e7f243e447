"""Horovod's API, but for what belongs to a framework: the world, process sets, names, elastic states."""
