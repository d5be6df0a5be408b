"""Pins: which key counts for which leaf, and the wording of every refusal."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import PinError
from alpa_lite.plan.pins import PinnedDims, parse_dims
from alpa_lite.trace.paths import argument_paths, leaf_paths
from alpa_lite.trace.pins import resolve_pins

MESH = DeviceMesh(shape=(2, 4), axis_names=("data", "model"))
PARAMS = {"dense": {"kernel": (8, 16), "bias": (16,)}, "out": {"kernel": (16, 10), "bias": (10,)}}
STATE = {"params": PARAMS, "opt": ({"mu": PARAMS, "nu": PARAMS, "count": (), "unused": (1,)}, {"trace": (3, 3)})}


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)


def resolve(pins, pin_like=None, *, mesh=MESH, annotations=None, args=(STATE, (8, 8))):
    inputs = argument_paths(args, {}, is_leaf=is_shape)
    outputs = leaf_paths((args[0], ()), "out", is_leaf=is_shape)
    return resolve_pins(
        pins,
        pin_like,
        [path for path, _ in inputs],
        [shape for _, shape in inputs],
        [path for path, _ in outputs],
        [shape for _, shape in outputs],
        mesh=mesh,
        source="train.py:7",
        annotations=annotations,
    )


def at(resolved, path):
    return str(next(p for p in resolved.inputs + resolved.outputs if p.path == path))


def refused(pins, pin_like=None, **kwargs) -> str:
    with pytest.raises(PinError) as caught:
        resolve(pins, pin_like, **kwargs)
    return str(caught.value)


class TestAssignment:
    def test_no_pins(self):
        resolved = resolve(None)
        assert all(p.is_free and p.origin == "" for p in resolved.inputs + resolved.outputs)
        assert resolved.axis_names == resolved.ties == resolved.notes == ()

    def test_exact_path_and_missing_dims(self):
        resolved = resolve({"0/params/dense/kernel": P("data"), "1": None})
        assert at(resolved, "0/params/dense/kernel") == "[data,_]"
        assert at(resolved, "0/params/dense/bias") == "[?]"
        assert at(resolved, "1") == "[?,?]"
        assert resolved.keys == (("0/params/dense/kernel", "P('data')"), ("1", "None"))

    def test_replicated_unconstrained_and_joined_axes(self):
        pins = {"0/params/dense/kernel": P(P.UNCONSTRAINED, ("model", "data")), "0/params/out/kernel": P()}
        resolved = resolve(pins)
        assert at(resolved, "0/params/dense/kernel") == "[?,model.data]"
        assert at(resolved, "0/params/out/kernel") == "[_,_]"

    def test_exact_beats_glob_in_any_order(self):
        glob, exact = {"0/params/**": P()}, {"0/params/dense/bias": P("model")}
        for pins in (glob | exact, exact | glob):
            resolved = resolve(pins)
            assert at(resolved, "0/params/dense/bias") == "[model]"
            assert at(resolved, "0/params/out/bias") == "[_]"

    def test_exact_none_frees_a_leaf_of_a_glob(self):
        assert at(resolve({"0/params/**": P(), "0/params/dense/bias": None}), "0/params/dense/bias") == "[?]"

    def test_globs_that_agree(self):
        resolved = resolve({"0/params/*/bias": P(), "0/params/out/*": P()})
        assert at(resolved, "0/params/out/bias") == "[_]"
        assert next(p for p in resolved.inputs if p.path == "0/params/out/bias").origin == "0/params/*/bias"

    def test_globs_match_results_too(self):
        resolved = resolve({"out/**/kernel": P("data")})
        assert at(resolved, "out/0/params/dense/kernel") == "[data,_]"
        assert at(resolved, "0/params/dense/kernel") == "[?,?]"

    def test_glob_skips_lower_rank_and_says_so(self):
        resolved = resolve({"0/params/**": P(None, "model")}, mesh=None)
        assert at(resolved, "0/params/dense/kernel") == "[_,model]"
        assert at(resolved, "0/params/dense/bias") == "[?]"
        assert resolved.notes == (
            "pin '0/params/**': P(None, 'model') has 2 dims, so leaves of lower rank stay free: 0/params/dense/bias"
            " (16,), 0/params/out/bias (10,)",
        )

    def test_axis_names_in_order_of_first_use(self):
        resolved = resolve({"0/params/dense/kernel": P("rows", ("cols", "x")), "1": P("cols")}, mesh=None)
        assert resolved.axis_names == ("rows", "cols", "x")

    def test_check_for_each_mesh_that_is_searched(self):
        resolved = resolve({"0/params/out/kernel": P(None, "model")}, mesh=None)
        resolved.check(DeviceMesh(shape=(4, 2), axis_names=("data", "model")))
        with pytest.raises(PinError, match="dim 1 of size 10 does not divide over axis 'model' of 4 devices"):
            resolved.check(MESH)

    def test_annotations_are_weaker_than_globs(self):
        found = {"0/params/dense/kernel": P("data"), "0/params/out/kernel": P("data")}
        resolved = resolve({"0/params/dense/*": P()}, annotations=found)
        assert at(resolved, "0/params/dense/kernel") == "[_,_]"
        assert at(resolved, "0/params/out/kernel") == "[data,_]"
        assert resolved.axis_names == ("data",)


class TestPytree:
    def test_prefixes(self):
        pins = ({"params": {"dense": P(), "out": {"kernel": P("data"), "bias": None}}, "opt": None}, P("data"))
        resolved = resolve(pins)
        assert at(resolved, "0/params/dense/kernel") == "[_,_]"
        assert at(resolved, "0/params/out/kernel") == "[data,_]"
        assert at(resolved, "0/params/out/bias") == "[?]"
        assert at(resolved, "1") == "[data,_]"
        assert at(resolved, "out/0/params/out/kernel") == "[?,?]"

    def test_prefix_skips_lower_rank(self):
        resolved = resolve(({"params": P(None, "model"), "opt": None}, None), mesh=None)
        assert at(resolved, "0/params/dense/bias") == "[?]"
        assert "pin '0/params'" in resolved.notes[0]

    def test_follows_pin_like(self):
        pins = ({"params": {"dense": P(), "out": None}, "opt": None}, None)
        assert at(resolve(pins, {"0/opt": "0/params"}), "0/opt/0/mu/dense/kernel") == "[_,_]"

    def test_wrong_tree(self):
        message = refused(({"params": {"dense": P(), "other": P()}, "opt": None}, None))
        assert "the pytree of pins does not fit the arguments" in message
        assert "it has a spec at '0/params/other', where the arguments have no leaf" in message
        assert "it has nothing for '0/params/out/bias', '0/params/out/kernel'" in message
        assert "Put None where you want no pin" in message and "At train.py:7." in message


class TestPinLike:
    def test_takes_pins_and_ties_what_is_free(self):
        resolved = resolve({"0/params/*/kernel": P(None, P.UNCONSTRAINED)}, {"0/opt": "0/params"})
        assert at(resolved, "0/opt/0/mu/dense/kernel") == "[_,?]"
        assert at(resolved, "0/opt/0/nu/dense/bias") == "[?]"
        paths = [p.path for p in resolved.inputs]
        ties = {(paths[a], paths[b]) for a, b in resolved.ties}
        names = [f"{layer}/{leaf}" for layer in ("dense", "out") for leaf in ("kernel", "bias")]
        assert ties == {(f"0/params/{name}", f"0/opt/0/{moment}/{name}") for moment in ("mu", "nu") for name in names}
        origins = {p.path: p.origin for p in resolved.inputs}
        assert origins["0/opt/0/mu/dense/kernel"] == "0/params/*/kernel by pin_like 0/opt"
        assert origins["0/opt/0/mu/dense/bias"] == ""

    def test_pinned_leaves_are_not_tied(self):
        assert resolve({"0/params/**": P()}, {"0/opt": "0/params"}).ties == ()

    def test_says_what_did_not_match_but_not_scalars(self):
        (note,) = resolve(None, {"0/opt": "0/params"}).notes
        assert note == "pin_like '0/opt' -> '0/params': no counterpart for 0/opt/1/trace (3, 3)"

    def test_the_longest_trailing_path_counts(self):
        args = ({"p": {"w": (4,), "a": {"w": (4,)}}, "m": {"a": {"w": (4,)}, "w": (4,)}}, ())
        pins = {"0/p/w": P("data"), "0/p/a/w": P("model")}
        resolved = resolve(pins, {"0/m": "0/p"}, args=args)
        assert at(resolved, "0/m/a/w") == "[model]"
        assert at(resolved, "0/m/w") == "[data]"

    def test_shapes_must_agree(self):
        args = ({"p": {"w": (4, 4)}, "m": {"w": (4,), "x": {"w": (4, 4)}}}, ())
        resolved = resolve({"0/p/w": P("data")}, {"0/m": "0/p"}, args=args)
        assert at(resolved, "0/m/w") == "[?]"
        assert at(resolved, "0/m/x/w") == "[data,_]"

    def test_a_single_leaf(self):
        args = ({"w": (4, 4), "m": (4, 4)}, ())
        assert at(resolve({"0/w": P("data")}, {"0/m": "0/w"}, args=args), "0/m") == "[data,_]"

    def test_an_exact_pin_beats_it_and_an_annotation_does_not(self):
        pins = {"0/params/dense/kernel": P("data"), "0/opt/0/mu/dense/kernel": P()}
        found = {"0/opt/0/nu/dense/kernel": P("model")}
        resolved = resolve(pins, {"0/opt": "0/params"}, annotations=found)
        assert at(resolved, "0/opt/0/mu/dense/kernel") == "[_,_]"
        assert at(resolved, "0/opt/0/nu/dense/kernel") == "[data,_]"

    def test_a_glob_on_the_follower_ties_a_free_leader(self):
        resolved = resolve({"0/opt/**/dense/kernel": P("data")}, {"0/opt/0/mu": "0/params"})
        paths = [p.path for p in resolved.inputs]
        assert (paths.index("0/params/dense/kernel"), paths.index("0/opt/0/mu/dense/kernel")) in resolved.ties


class TestWording:
    """Four parts: what was given, what is allowed, where, what to do."""

    def test_matches_nothing(self):
        message = refused({"0/params/dense/kernal": P()})
        assert message == (
            "the pin '0/params/dense/kernal' matches no argument or result leaf. A path starts with an argument's"
            " position or keyword, or with 'out'; * is one segment, ** any number. Close: '0/params/dense/kernel',"
            " 'out/0/params/dense/kernel', '0/params/dense/bias'. At train.py:7. Correct the key or remove it."
        )
        assert "the pin 'zz/*' matches no argument or result leaf. A glob starts" in refused({"zz/*": P()})
        assert "There are '0/opt/0/count'," in refused({"zz/*": P()})

    def test_globs_disagree(self):
        message = refused({"0/params/*/kernel": P("data"), "0/params/dense/*": P()})
        assert message == (
            "the pins '0/params/*/kernel' and '0/params/dense/*' disagree on '0/params/dense/kernel': [data,_] and"
            " [_,_] (? is free, _ whole). Globs that match one leaf must agree; an exact path beats both. At"
            " train.py:7. Add the pin '0/params/dense/kernel' with the spec you want, or narrow one of the globs."
        )
        assert "disagree" in refused({"0/params/*/kernel": P("data"), "0/params/dense/*": None})

    def test_unknown_axis(self):
        assert refused({"1": P("modle")}) == (
            "the pin '1' uses the axis 'modle'. The axes of the mesh (data=2, model=4) are 'data', 'model'. Close:"
            " 'model'. At train.py:7. Use one of them, or name the axes with PlanOptions(axis_names=...)."
        )

    @pytest.mark.parametrize("axis", ["_", "a,b", "a+b", "é", "2d"])
    def test_no_axis_name(self, axis):
        assert f"the pin '1' names the axis {axis!r} in P({axis!r}). Letters, digits and underscores are" in refused(
            {"1": P(axis)}
        )

    def test_pin_like_of_something_else(self):
        with pytest.raises(
            PinError, match=r"pin_like has '0': 3\. Both are paths of arguments, as text\. At train.py:7\."
        ):
            resolve(None, {"0": 3})

    def test_indivisible(self):
        assert refused({"0/params/*/kernel": P(None, "model")}) == (
            "the pin '0/params/*/kernel' cannot split '0/params/out/kernel' of shape (16, 10): dim 1 of size 10 does"
            " not divide over axis 'model' of 4 devices. Only even splits are possible without padding. At train.py:7."
            " Pad dim 1 to 12, pin another dim, use a mesh on which it divides, or let PlanOptions(padding='auto') pad it."
        )
        assert "over axes ('data', 'model') of 8 devices" in refused({"0/params/out/bias": P(("data", "model"))})

    def test_rank_too_high(self):
        assert refused({"0/params/dense/bias": P(None, "model")}) == (
            "the pin '0/params/dense/bias' has 2 dims, P(None, 'model'), but '0/params/dense/bias' has shape (16,). A"
            " spec has at most one entry per dim; missing ones mean replicated. At train.py:7. Shorten the spec."
        )
        message = refused({"0/params/*/bias": P(None, "model")})
        assert "matches only leaves of lower rank: 0/params/dense/bias (16,), 0/params/out/bias (10,)" in message
        assert "Shorten the spec, or match other leaves." in message

    def test_values(self):
        assert refused({"0/params/**": ["data"]}) == (
            "the pin '0/params/**' has the value ['data'] of type list. A pin is a jax.sharding.PartitionSpec, or None"
            " for free. At train.py:7. Write for example P(None, 'model')."
        )
        assert "has the value 3 of type int" in refused(({"params": 3, "opt": None}, None))
        twice = refused({"1": P("data", "data")})
        assert "uses the axis 'data' twice in P('data', 'data')" in twice and "Leave it on one dim." in twice
        unreduced = refused({"1": P("data", unreduced={"model"})})
        assert "for the planner to choose" in unreduced and "Leave `unreduced` and `reduced` out." in unreduced

    def test_pin_like(self):
        message = refused(None, {"0/optt": "0/params"})
        assert "pin_like {'0/optt': '0/params'}: there is no argument leaf at or under '0/optt'" in message
        assert "Close: '0/opt'" in message and "At train.py:7. Correct the path." in message
        message = refused(None, {"1": "0/params"})
        assert "no leaf under '1' has the trailing path and the shape of one under '0/params'" in message
        assert "1 (8, 8) against" in message
        message = refused({"0/params/**": P(), "0/opt/**/kernel": P("data")}, {"0/opt": "0/params"})
        assert re.search(
            r"'0/opt/\*\*/kernel' and pin_like .* disagree on '0/opt/0/mu/dense/kernel': \[data,_\]", message
        )
        assert "an exact path beats both" in message


class TestAllows:
    def pinned(self, text, shape=(8, 8)):
        return PinnedDims(path="w", shape=shape, dims=parse_dims(text), origin="w")

    @pytest.mark.parametrize(
        ("pin", "spec", "allowed"),
        [
            ("[data,_]", "[data,_]", True),
            ("[data,_]", "[_,_]", False),
            ("[data,_]", "[data,model]", False),
            ("[?,_]", "[data.model,_]", True),
            ("[?,_]", "[_,data]", False),
            ("[data.model,?]", "[model.data,_]", False),
            ("[?,?]", "[_,_]+{data}", False),
            ("[?,?]", "[_]", False),
        ],
    )
    def test_allows(self, pin, spec, allowed):
        assert self.pinned(pin).allows(ShardingSpec.parse(spec)) is allowed
        assert self.pinned(pin).allows(ShardingSpec.parse(spec), MESH) is allowed

    def test_axes_of_size_one_do_not_count(self):
        mesh = DeviceMesh(shape=(8, 1), axis_names=("data", "model"))
        pin = self.pinned("[_,model]")
        assert not pin.allows(ShardingSpec.parse("[_,_]"))
        assert pin.allows(ShardingSpec.parse("[_,_]"), mesh)
        assert pin.allows(ShardingSpec.parse("[_,model]"), mesh)
        assert not pin.allows(ShardingSpec.parse("[_,data]"), mesh)

    @given(st.lists(st.none() | st.lists(st.sampled_from("abc"), max_size=2).map(tuple), max_size=4).map(tuple))
    def test_text_round_trip(self, dims):
        pin = PinnedDims(path="w", shape=(1,) * len(dims), dims=dims)
        assert parse_dims(str(pin)) == dims

    def test_bad_text(self):
        with pytest.raises(ValueError, match=r"cannot read the pin 'x'; expected a form like '\[_,model,\?\]'"):
            parse_dims("x")


def test_pins_of_a_real_train_state():
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}
    inputs = [(path, leaf.shape) for path, leaf in argument_paths((state,), {"lr": jnp.float32(1.0)})]
    resolved = resolve_pins(
        {"0/params/w": P(None, "model"), "lr": P()},
        {"0/momentum": "0/params"},
        [path for path, _ in inputs],
        [shape for _, shape in inputs],
        [],
        [],
        mesh=MESH,
        source="here",
    )
    assert at(resolved, "0/momentum/w") == "[_,model]"
    assert at(resolved, "lr") == "[]"
