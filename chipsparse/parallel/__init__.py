"""One generation on several processes, each with a GPU of its own.

`degrees` is what a user asks for, `sequence_cut` who has which tokens and heads, `head_exchange`
moves them into the others' `windows`, `head_chunks` around attention. `peers` is what the processes
say to each other; `agreement` decides with it.
"""
