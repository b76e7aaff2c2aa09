"""Attention of one layer in an open call, where it must not run as the model would compute it."""

import pytest


def attend(session, layer, query, key, value):
    return session.attention[layer](
        session.state, query, key, value, scale=None, unpatched=pytest.fail
    )
