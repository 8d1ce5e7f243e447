"""Horovod's API, except the parts of a single framework: the world, process sets, names, elastic states."""
