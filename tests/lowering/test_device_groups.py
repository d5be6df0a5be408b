"""Device groups: three notations, and which mesh axes they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.lowering.device_groups import mesh_axes_of, parse_groups, permute_axes_of

MESH = DeviceMesh(shape=(2, 4), axis_names=("x", "y"))
CUBE = DeviceMesh(shape=(2, 2, 2), axis_names=("x", "y", "z"))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}, use_global_device_ids=true", ((0, 2), (1, 3))),
        ("{{0,1,2,3}}", ((0, 1, 2, 3),)),
        ("{}, dimensions={0}", ()),
        ("[2,4]<=[8], dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=1,'y'=4] {'y'}", ((0, 1, 2, 3),)),
        ("mesh['x'=1,'y'=2] {'x'}", ((0,), (1,))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[a=2,b=2], device_ids=(0,2,1,3) {b}", ((0, 2), (1, 3))),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", ((0, 1), (2, 3))),
    ],
)
def test_notations(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text) == groups


def test_unknown_notation_is_refused_with_its_text() -> None:
    with pytest.raises(ValueError, match=r"cannot read the device groups '<weird>'.*known notations"):
        parse_groups("<weird>")


@pytest.mark.parametrize("mesh", [DeviceMesh(shape=(8,), axis_names=("x",)), MESH, CUBE])
def test_every_subset_of_axes_is_found(mesh: DeviceMesh) -> None:
    ids = np.arange(mesh.num_devices).reshape(mesh.shape)
    for count in range(1, len(mesh.shape) + 1):
        for axes in itertools.combinations(range(len(mesh.shape)), count):
            rest = [dim for dim in range(len(mesh.shape)) if dim not in axes]
            rows = ids.transpose(rest + list(axes)).reshape(-1, int(np.prod([mesh.shape[a] for a in axes])))
            shuffled = tuple(tuple(int(i) for i in reversed(row)) for row in reversed(rows))
            assert mesh_axes_of(shuffled, mesh) == tuple(mesh.axis_names[a] for a in axes)


def test_groups_of_no_axes_are_none() -> None:
    assert mesh_axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), MESH) is None  # half of y
    assert mesh_axes_of(((0, 4), (1, 5)), MESH) is None  # not all devices
    assert mesh_axes_of(((0, 3), (1, 2), (4, 7), (5, 6)), CUBE) is None  # no axis pairs these
    assert mesh_axes_of(tuple((i,) for i in range(8)), MESH) == ()


def test_own_device_ids_and_axes_of_size_one() -> None:
    assert mesh_axes_of(((7, 5), (3, 1)), DeviceMesh(shape=(2, 2), axis_names=("x", "y")), (7, 5, 3, 1)) == ("y",)
    flat = DeviceMesh(shape=(1, 4), axis_names=("x", "y"))
    assert mesh_axes_of(((0, 1, 2, 3),), flat) == ("y",)


def test_permutes() -> None:
    assert permute_axes_of(((0, 4), (4, 0)), MESH) == ("x",)
    assert permute_axes_of(((0, 1), (1, 2), (2, 3), (3, 0)), MESH) == ("y",)
    assert permute_axes_of(((0, 5), (5, 0)), MESH) == ("x", "y")
    assert permute_axes_of(((0, 0),), MESH) == ()
    assert permute_axes_of(((0, 9),), MESH) is None
