"""Schedules of listed actions, a letter for each step."""

ACTIONS = {"D": "dense", "R": "refresh", "S": "sparse", "K": "skip"}


def listed(letters):
    """Changes of a config: its schedule has these actions, Dense, Refresh, Sparse or sKip."""
    return {"schedule": {"actions": [ACTIONS[letter] for letter in letters]}}
