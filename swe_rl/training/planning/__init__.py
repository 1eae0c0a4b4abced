"""Arithmetic before a run: what a model, a recipe and a cluster need in memory and time. Imports without torch."""
