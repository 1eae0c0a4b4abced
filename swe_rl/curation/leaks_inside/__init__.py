"""The script that looks for a gold patch inside a sandbox. Standard library only, Python >= 3.8."""
