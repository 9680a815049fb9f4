"""The data of a run, as its arguments ask for it: opened on all ranks together."""
