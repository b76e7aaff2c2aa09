"""The sentences to users about what runs otherwise than asked, each with a stable code.

`reason` has the type. The other files make reasons of plain values: names, numbers, layers.
Messages about a field of a config stay at that field.
"""
