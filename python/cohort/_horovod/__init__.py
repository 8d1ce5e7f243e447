"""Horovod's semantics for any framework: the world, process sets, names, elastic states. No framework is imported."""
