"""What a generation did, and why not all that was asked.

`recorder` writes it down during a transformer call, `generation` holds it, and `summary` and
`as_json` tell it.
"""
