"""Names that a config had before: each of them is still read, with one warning."""

import dataclasses
import json
import types

import pytest

import chipsparse
from chipsparse import OldNameWarning, SparsityConfig, load_profile
from chipsparse.layout import LayerKind
from chipsparse.old_names import CLASSES, GONE, RENAMED, nested
from chipsparse.profiles.profile import default_profile

# For each row of the tables a value that is not the default.
VALUES = {
    "attention.keep_fraction": 0.25,
    "attention.group_rows": 64,
    "attention.local_groups": 1,
    "mlp.keep_fraction": 0.5,
    "mlp.group_rows": 64,
    "token_order.voxel": (1, 8, 16),
    "attention.selection": "random",
    "attention.delta_rule = kept_only": "kept_only",
    "attention.delta_rule = reuse": "reuse",
    "mlp.reselect_every": 2,
    "schedule.reselect": False,
    "schedule.front_load": 2.0,
    "guard": {"bound": 0.1, "groups": 3},
}
LAYOUT = "LayerKind.mlp_width"  # the only one that is of no config
ENTRIES = sorted({*RENAMED, *GONE} - {LAYOUT})


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


@pytest.mark.parametrize("entry", sorted(RENAMED.keys() - {LAYOUT}))
def test_fields_are_read_by_their_old_names(entry):
    config = SparsityConfig().override({RENAMED[entry]: VALUES[entry]})
    group, _, field = entry.partition(".")
    with pytest.warns(OldNameWarning, match=f"^{entry} is now {RENAMED[entry]}"):
        assert getattr(getattr(config, group), field) == VALUES[entry]
    with pytest.raises(AttributeError, match="no attribute 'keep'"):
        _ = getattr(config, group if hasattr(SparsityConfig, group) else "attention").keep


def test_a_layout_by_its_old_name():
    with pytest.warns(OldNameWarning, match="LayerKind.intermediate_size"):
        kind = LayerKind("block", 2, mlp_width=64)
    assert kind == LayerKind("block", 2, intermediate_size=64)
    with pytest.warns(OldNameWarning):
        assert kind.mlp_width == 64


def test_both_names_of_a_field_are_one_too_many():
    both = {"keep_fraction": 0.2, "density": 0.3}
    for make in (SparsityConfig.from_mapping, SparsityConfig().override):
        with pytest.raises(ValueError, match=r"is now attention.density: leave one of them out"):
            make({"attention": both})
    with pytest.raises(ValueError, match=r"is now attention.density: leave one of them out"):
        chipsparse.AttentionConfig(**both)


@pytest.mark.parametrize("name", CLASSES)
def test_old_classes_still_take_their_fields(name):
    with pytest.warns(OldNameWarning, match=name):
        kind = getattr(chipsparse, name)
    assert kind(some=3) == types.SimpleNamespace(some=3)


def test_an_old_class_in_a_config():
    with pytest.warns(OldNameWarning):
        order = chipsparse.TokenOrderConfig(voxel=(1, 2, 3))
    with pytest.warns(OldNameWarning):
        assert SparsityConfig(token_order=order) == SparsityConfig(tile=(1, 2, 3))


def test_old_names_of_a_profile_are_named_together(tmp_path):
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


def test_new_names_do_not_warn():
    config = SparsityConfig(seed=3)
    assert SparsityConfig.from_mapping(dataclasses.asdict(config)) == config  # warnings are errors
