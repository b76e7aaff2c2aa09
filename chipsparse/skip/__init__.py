"""The actions of denoising steps, and the outputs of skipped ones.

`timetable` gives each step its action. `outputs` builds the output of a skipped step, and
`correction` corrects skipped steps afterwards.
"""
