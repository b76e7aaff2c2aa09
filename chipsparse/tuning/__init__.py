"""A search for the schedule that meets a target of quality or time.

`calibration` watches dense generations; `jump_costs` says from their outputs what it costs to leave
steps out, and places full steps. `forms` are the schedules to choose from, and `search` chooses by
generating what `targets` asks for. Only the caller's lab generates.
"""
