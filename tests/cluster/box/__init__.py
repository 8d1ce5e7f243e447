"""A cluster in a box: several hosts on this machine, for tests. See tools/cluster-box --help."""
