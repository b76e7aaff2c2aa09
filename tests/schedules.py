"""Schedules of listed actions, a letter for each step."""

ACTIONS = {"D": "dense", "R": "refresh", "S": "sparse", "K": "skip"}


def listed(letters):
    """Changes of a config: its schedule has these actions, Dense, Refresh, Sparse or sKip."""
    return {"schedule": {"actions": [ACTIONS[letter] for letter in letters]}}


def letters_of(actions):
    """The letters of actions that are given by name."""
    names = {action: letter for letter, action in ACTIONS.items()}
    return "".join(names[action] for action in actions)
