"""The actions of denoising steps, and the outputs of skipped ones.

`schedule` gives each step its action. `outputs` stand in for what was skipped, and
`correction` puts skipped steps right afterwards.
"""
