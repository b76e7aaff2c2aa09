"""Hundreds of short generations with everything changing at random: ``--op soak``.

`choices` draws what happens, `player` makes it happen on a pipeline, `checks` looks at what is left
behind, and `runner` compares with a fresh pipeline and counts. Each generation follows from the
seed and its number alone.
"""
