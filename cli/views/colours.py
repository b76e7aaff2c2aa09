"""Colours of charts.

The page's style sheet has its own for each, on bright and on dark screens.
"""

FIRST = "#0072b2"
SECOND = "#c44e00"
THIRD = "#00805a"
FOURTH = "#a5578b"
SERIES = (FIRST, SECOND, THIRD, FOURTH)
INK = "#1b1f24"
SOFT = "#57606a"
RULE = "#d9dee3"
BACK = "#ffffff"
ACTIONS = {"dense": "#9aa2ab", "refresh": "#e69f00", "sparse": "#0072b3", "skip": "#fffffe"}
SHADES = tuple(f"#0842{shade:02x}" for shade in range(10))  # from the lowest share to the highest
