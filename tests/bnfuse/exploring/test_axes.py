"""What varies: lists, ranges, names of [Iandola16], and points that are too many."""

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.exploring.axes import axes_of, check_number, described, full_settings, one_at_a_time, product, settings_of


def test_lists_have_the_types_of_the_defaults():
    found = axes_of("squeezenet", ["squeeze=0.125,1", "bypass=none,simple", "freq=2", "image=64,190x226", "batch=4"])
    assert found == {
        "squeeze": (0.125, 1.0),
        "bypass": ("none", "simple"),
        "freq": (2,),
        "image": (64, (190, 226)),
        "batch": (4,),
    }
    assert type(found["squeeze"][1]) is float
    assert axes_of("nin", ["pool3=true,false"]) == {"pool3": (True, False)}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("growth=12:48:12", (12, 24, 36, 48)),
        ("growth=12:47:12", (12, 24, 36)),
        ("growth=2:4", (2, 3, 4)),
        ("growth=5:5", (5,)),
        ("growth=1,4:6,40", (1, 4, 5, 6, 40)),
        ("growth=4,4,3:5", (4, 3, 5)),
    ],
)
def test_ranges_include_their_last_value(text, values):
    assert axes_of("densenet40", [text]) == {"growth": values}


def test_ranges_of_fractions_are_exact():
    (values,) = axes_of("squeezenet", ["squeeze=0.1:1:0.1"]).values()
    assert values == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def test_names_of_the_paper_are_understood():
    found = axes_of("squeezenet", ["SR=0.5", "pct3x3=0.25", "base_e=64", "incr_e=32"])
    assert found == {"squeeze": (0.5,), "large": (0.25,), "base": (64,), "step": (32,)}
    assert settings_of("squeezenet", {"SR": "0.5", "image": "64"}) == {"squeeze": 0.5, "image": 64}


@pytest.mark.parametrize(
    ("network", "texts", "match"),
    [
        ("squeezenet", ["squeeze"], "write it as KEY=VALUE"),
        ("squeezenet", ["=1"], "write it as KEY=VALUE"),
        ("squeezenet", ["squeeze="], "write it as KEY=VALUE"),
        ("squeezenet", ["growth=1"], "no metaparameter 'growth': what can vary is bypass, base"),
        ("squeezenet", ["freq=1.5"], "must be of type int"),
        ("squeezenet", ["SR=0.5", "squeeze=1"], "squeeze is varied already"),
        ("squeezenet", ["image=axb"], "is no size"),
        ("squeezenet", ["batch=x"], "must be of type int"),
        ("densenet40", ["growth=12:48:0"], "is no range"),
        ("densenet40", ["growth=a:b"], "is no range"),
        ("densenet40", ["growth=1:2:3:4"], "is no range"),
        ("densenet40", ["growth=48:12"], "has no value"),
        ("densenet40", ["growth=1:1e300"], "more than 10,000"),
        ("densenet40", ["growth=1:inf"], "is no range"),
        ("nonet", ["growth=1"], "no network named 'nonet'"),
    ],
)
def test_what_cannot_vary_is_refused(network, texts, match):
    with pytest.raises(BnfuseError, match=match):
        axes_of(network, texts)


def test_points_are_all_combinations_or_one_change_each():
    axes = {"squeeze": (0.125, 0.5), "bypass": ("none", "simple")}
    assert [described(p) for p in product(axes)] == [
        "squeeze=0.125 bypass=none",
        "squeeze=0.125 bypass=simple",
        "squeeze=0.5 bypass=none",
        "squeeze=0.5 bypass=simple",
    ]
    base = full_settings("squeezenet", {})
    assert [described(p) for p in one_at_a_time(axes, base)] == ["base", "squeeze=0.5", "bypass=simple"]


def test_too_many_points_are_refused_without_a_limit():
    axes = {"a": range(30), "b": range(30)}
    with pytest.raises(BnfuseError, match=r"900 points, and 200 are the limit.*--limit 900"):
        check_number(axes, separately=False, limit=None)
    check_number(axes, separately=False, limit=900)
    check_number(axes, separately=True, limit=None)
    with pytest.raises(BnfuseError, match="61 points, and 60"):
        check_number(axes, separately=True, limit=60)
