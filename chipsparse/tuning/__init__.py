"""A search for the schedule that meets a target of quality or time.

`calibration` watches dense generations, from whose outputs `jump_costs` says what it costs to leave
steps out; `step_search` and `placed_steps` find the best lists of steps by that. `forms` and
`rivals` are what there is to choose from, and `search` chooses by generating, with `halving` and
`boundary`, what `targets` asks for. `results_file` keeps whatever was measured.
"""
