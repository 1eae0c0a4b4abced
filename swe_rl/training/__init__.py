"""Trainers, process groups, checkpoints and weight synchronisation. Import the submodule you need: they load torch."""
