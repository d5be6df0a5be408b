"""Programs: paths, aliases, donation, source lines, golden text, error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite.errors import TraceError
from alpa_lite.trace.program import trace

HERE = Path(__file__).name


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"w1": struct(8, 16), "b1": struct(16), "w2": struct(16, 4)}
X = struct(32, 8)


def loss(params, x):
    hidden = jnp.sin(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"]) ** 2)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def aliases(fn: Any, *args: Any, **settings: Any) -> dict[str, str]:
    program = trace(fn, args, {}, **settings).program
    return {program.input_paths[i]: program.output_paths[o] for i, o in program.aliases}


def test_golden_text(golden):
    golden("program_step", str(trace(step, (PARAMS, X), {}, donate_argnums=(0,)).program))


def test_golden_text_of_control_flow(golden):
    def fn(c, xs, w):
        h, ys = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h.sum()), c, xs)
        return lax.cond(ys[0] > 0, lambda a: a * 2, lambda a: a, h)

    golden("program_control_flow", str(trace(fn, (struct(8, 16), struct(5, 8, 16), struct(16, 16)), {}).program))


def test_paths_follow_the_pytrees():
    program = trace(lambda p, *, batch: {"loss": (p["w1"] * 2, batch[0])}, (PARAMS,), {"batch": (X,)}).program
    assert program.input_paths == ("0/b1", "0/w1", "0/w2", "batch/0")
    assert program.output_paths == ("out/loss/0", "out/loss/1")


def test_static_arguments_are_no_inputs():
    program = trace(lambda n, x: x * n, (3, X), {}, static_argnums=(0,)).program
    assert program.input_paths == ("1",)
    assert trace(lambda x, *, n: x * n, (X,), {"n": 3}, static_argnames=("n",)).program.input_paths == ("0",)


def test_every_op_knows_the_users_line():
    program = trace(step, (PARAMS, X), {}).program
    assert all(HERE in op.source for _, _, op in program.walk()), [
        op.source for op in program.ops if HERE not in op.source
    ]
    (sin,) = [op for op in program.ops if op.primitive == "sin"]
    assert int(sin.source.split(":")[1].split()[0].split(":")[0]) == loss.__code__.co_firstlineno + 1
    assert "jvp" in sin.scope


def test_named_scopes_are_kept():
    def fn(x):
        with jax.named_scope("layer0"):
            return jnp.sin(x)

    assert trace(fn, (X,), {}).program.ops[0].scope == "layer0"


def test_equal_ops_share_a_key():
    program = trace(lambda x, y: (jnp.sin(x), jnp.sin(y), jnp.sin(x.T), x * 2, x * 3), (X, X), {}).program
    sins = [op.key for op in program.ops if op.primitive == "sin"]
    assert sins[0] == sins[1] != sins[2]
    assert len({op.key for op in program.ops if op.primitive == "mul"}) == 2


def test_flops_of_contractions():
    program = trace(lambda a, b: a @ b, (struct(8, 16), struct(16, 4)), {}).program
    assert program.ops[0].flops == 2 * 8 * 16 * 4
    conv = trace(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (struct(2, 3, 8, 8), struct(5, 3, 3, 3)), {}).program
    assert conv.ops[0].flops == 2 * (2 * 5 * 8 * 8) * 3 * 3 * 3


def test_keys_of_both_styles():
    program = trace(lambda k: jax.random.normal(k, (8,)), (jax.random.key(0),), {}).program
    assert program.values[program.inputs[0]].itemsize == 8 and program.values[program.inputs[0]].shape == ()
    old = trace(lambda k: jax.random.normal(k, (8,)), (jax.random.PRNGKey(0),), {}).program
    assert old.values[old.inputs[0]].shape == (2,)


# -- aliases -----------------------------------------------------------------------------------------------------------


class TrainState(NamedTuple):
    params: Any
    opt: Any
    step: Any


def test_a_state_that_is_returned_alone():
    state = TrainState(PARAMS, PARAMS, struct())
    found = aliases(lambda s: s._replace(step=s.step + 1), state)
    assert found == {p: f"out/{p.partition('/')[2]}" for p in found} and len(found) == 7


def test_a_state_beside_a_loss():
    found = aliases(step, PARAMS, X)
    assert found == {f"0/{k}": f"out/0/{k}" for k in PARAMS}


def test_params_and_optimizer_with_equal_shapes_are_not_mixed_up():
    def fn(params, opt, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        opt = jax.tree.map(lambda m, g: 0.9 * m + g, opt, grads)
        return jax.tree.map(lambda p, m: p - m, params, opt), opt, value

    expected = {f"{i}/{k}": f"out/{i}/{k}" for i in (0, 1) for k in PARAMS}
    assert aliases(fn, PARAMS, PARAMS, X) == expected


def test_a_swapped_result_order():
    def fn(params, x):
        new, value = step(params, x)
        return value, new

    assert aliases(fn, PARAMS, X) == {f"0/{k}": f"out/1/{k}" for k in PARAMS}


def test_a_tuple_state_in_one_argument():
    found = aliases(lambda s, x: ((s[0], s[1]), x.sum()), (struct(8, 4), struct(8, 4)), X)
    assert found == {"0/0": "out/0/0", "0/1": "out/0/1"}


def test_gradients_are_not_taken_for_the_parameters():
    def fn(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), grads

    found = aliases(fn, PARAMS, X)
    assert found == {f"0/{k}": f"out/0/{k}" for k in PARAMS}


def test_another_type_is_no_alias():
    assert aliases(lambda p: {k: v.astype(jnp.bfloat16) for k, v in p.items()}, PARAMS) == {}


def test_members_of_lists_are_no_next_values_of_one_another_by_number_alone():
    """What has their number among the results may be anything of their type."""
    h, x = struct(8, 4), struct(4)
    new = lambda hs, x: [h + x for h in hs]  # noqa: E731
    assert aliases(lambda hs, x: (jnp.tanh(jax.tree.leaves(hs)[0]), new(hs, x)), [h, h], x) == {
        "0/0": "out/1/0",
        "0/1": "out/1/1",
    }
    assert aliases(lambda hs, x: (jnp.tanh(jax.tree.leaves(hs)[0]), new(hs, x)), [h], x) == {"0/0": "out/1/0"}
    assert aliases(lambda hs, x: (new(hs, x), jnp.tanh(hs[0])), [h, h], x) == {"0/0": "out/0/0", "0/1": "out/0/1"}
    assert aliases(new, [h, h], x) == {"0/0": "out/0", "0/1": "out/1"}
    assert aliases(lambda hs, x: (hs[0] + x, hs[1] * x), [h, h, h], x) == {}
    nested = ([h], [h, h])
    assert aliases(lambda hs, x: (jnp.tanh(hs[0][0]), jax.tree.map(lambda h: h + x, hs)), nested, x) == {
        "0/0/0": "out/1/0/0",
        "0/1/0": "out/1/1/0",
        "0/1/1": "out/1/1/1",
    }


def test_donated_arguments_take_the_first_fitting_result():
    assert aliases(lambda x, y: {"a": y * 2, "b": x.sum()}, X, X) == {}
    assert aliases(lambda x, y: {"a": y * 2, "b": x.sum()}, X, X, donate_argnums=(1,)) == {"1": "out/a"}


def test_donation_is_recorded_per_leaf():
    program = trace(step, (PARAMS, X), {}, donate_argnums=(0,)).program
    assert program.donated == (True, True, True, False)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_traced_names_the_users_line():
    def branches(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(TraceError) as caught:
        trace(branches, (X,), {})
    text = str(caught.value)
    assert f"{HERE}:{branches.__code__.co_firstlineno + 1} (branches)" in text
    for part in ("cannot be traced", "allowed:", "where:", "next:"):
        assert part in text


def test_a_failing_function_keeps_its_own_message():
    with pytest.raises(TraceError, match=r"Incompatible shapes.*\n.*test_program.py"):
        trace(lambda x: x @ x + jnp.ones(3), (struct(8, 8),), {})


def test_what_jax_says_differs_is_shown_and_advice_stands_where_it_helps():
    def widens(carry, xs):
        return jax.lax.scan(lambda c, x: ((c[0].astype(jnp.float32), c[1]), x), (carry, carry), xs)

    with pytest.raises(TraceError) as caught:
        trace(widens, (struct(3, dtype=jnp.bfloat16), struct(4, 3)), {})
    text = str(caught.value)
    assert "but they differ:\n    The input carry component c[0] has type bfloat16[3] but" in text
    assert "static_argnums" not in text
    for fn in (lambda x, n: x + jnp.zeros(n), lambda x, n: {3: x}[n], lambda x, n: x if n else -x):
        with pytest.raises(TraceError, match=r"mark Python-valued arguments with static_argnums"):
            trace(fn, (struct(3), struct(dtype=jnp.int32)), {})

    def long():
        raise ValueError("first\n\nSee https://docs.jax.dev/x\n" + "\n".join(f"{n} {'x' * 150}" for n in range(9)))

    with pytest.raises(TraceError, match=r"ValueError: first\n    0 x") as caught:
        trace(long, (), {})
    assert "https" not in str(caught.value) and len(str(caught.value)) < 1200 and "..." in str(caught.value)


def test_keys_with_slashes_that_name_one_leaf_are_refused():
    tree = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(
        TraceError, match=r"two leaves of the arguments have the path '0/a/b'.*test_program\.py.*Rename"
    ):
        trace(lambda x: x["a/b"] + x["a"]["b"], (tree,), {})
    with pytest.raises(TraceError, match=r"two leaves of the results have the path 'out/a/b'"):
        trace(lambda x: {"a/b": x, "a": {"b": x * 2}}, (jnp.ones(2),), {})


def test_arguments_with_a_dim_of_size_zero_are_refused():
    with pytest.raises(TraceError, match=r"argument '1/x' has a dim of size 0 \(shape \(0, 8\)\).* At .*test_program"):
        trace(lambda a, b: a + b["x"].sum(), (X, {"x": struct(0, 8)}), {})


def test_empty_tensors_inside_are_allowed():
    program = trace(lambda x: jnp.concatenate([x[:0], x]), (X,), {}).program
    assert program.values[program.outputs[0]].shape == (32, 8)
