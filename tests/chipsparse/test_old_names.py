"""Names that a config had before: each of them is still read, with one warning."""

import dataclasses
import json
import types

import pytest

import chipsparse
from chipsparse import OldNameWarning, SparsityConfig, load_profile
from chipsparse.old_names import CLASSES, GONE, RENAMED, nested
from chipsparse.profiles.profile import default_profile

# For each row of the tables a value that is not the default.
VALUES = {
    "attention.selection": "random",
    "attention.delta_rule = kept_only": "kept_only",
    "attention.delta_rule = reuse": "reuse",
    "mlp.reselect_every": 2,
    "schedule.reselect": False,
    "guard": {"bound": 0.1, "groups": 3},
}
ENTRIES = sorted({**RENAMED, **GONE})


def old(entry):
    """A config as nested mappings, with one old name."""
    return nested(entry.partition(" = ")[0], VALUES[entry])


def by_mapping(entry, _folder):
    return SparsityConfig.from_mapping(old(entry))


def by_path(entry, _folder):
    return SparsityConfig().override({entry.partition(" = ")[0]: VALUES[entry]})


def by_group(entry, _folder):
    return SparsityConfig().override(old(entry))


def by_keyword(entry, _folder):
    ((group, fields),) = old(entry).items()
    kind = type(getattr(SparsityConfig(), group)) if hasattr(SparsityConfig, group) else dict
    return SparsityConfig(**{group: kind(**fields)})


def by_mappings_as_keywords(entry, _folder):
    return SparsityConfig(**old(entry))


def by_profile(entry, folder):
    path = folder / "profile.yaml"
    path.write_text(json.dumps({"sparsity": old(entry)}))  # JSON is YAML
    return load_profile(path).sparsity


def by_quality(entry, folder):
    path = folder / "profile.yaml"
    path.write_text(json.dumps({"qualities": {"published": old(entry)}}))
    return load_profile(path).of_quality("published").sparsity


WAYS = [
    by_mapping,
    by_path,
    by_group,
    by_keyword,
    by_mappings_as_keywords,
    by_profile,
    by_quality,
]


def test_every_row_is_tested():
    assert sorted(VALUES) == ENTRIES


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_old_name_is_read_with_one_warning(entry, way, tmp_path):
    base = SparsityConfig()
    if way is by_quality:
        base = default_profile().of_quality("published").sparsity
    with pytest.warns(OldNameWarning) as caught:
        found = way(entry, tmp_path)
    assert found == base.override({RENAMED[entry]: VALUES[entry]} if entry in RENAMED else {})
    assert (found == base) == (entry in GONE)
    now = f"now {RENAMED[entry]}" if entry in RENAMED else f"gone and ignored: {GONE[entry]}"
    (warning,) = caught
    source = f"{tmp_path / 'profile.yaml'}: " if way in (by_profile, by_quality) else ""
    assert str(warning.message) == (
        f"{source}{entry} is {now}. The next release refuses the old names"
    )
    assert warning.filename == __file__


@pytest.mark.parametrize("name", CLASSES)
def test_old_classes_still_take_their_fields(name):
    with pytest.warns(OldNameWarning, match=name):
        kind = getattr(chipsparse, name)
    assert kind(some=3) == types.SimpleNamespace(some=3)


def test_old_names_of_a_profile_are_told_together(tmp_path):
    path = tmp_path / "profile.yaml"
    sparsity = {}
    for entry in ENTRIES:
        group, fields = next(iter(old(entry).items()))
        sparsity.setdefault(group, {}).update(fields)  # of values that are gone, the last one
    path.write_text(json.dumps({"sparsity": sparsity, "qualities": {"published": sparsity}}))
    with pytest.warns(OldNameWarning) as caught:
        load_profile(path)
    assert len(caught) == 1
    counts = [str(caught[0].message).count(f"{entry} is ") for entry in ENTRIES]
    assert max(counts) == 1
    assert sum(counts) == len({entry.partition(" = ")[0] for entry in ENTRIES})


def test_new_names_are_told_nothing_of():
    config = SparsityConfig(seed=3)
    assert SparsityConfig.from_mapping(dataclasses.asdict(config)) == config  # warnings are errors
