"""Trains software-engineering agents by multi-turn reinforcement learning. Read types.py and train_loop.py first."""
