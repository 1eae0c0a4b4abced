"""Hydra configuration files; the schemas are in swe_rl/config/."""
