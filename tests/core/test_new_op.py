"""An external op gets the standard op features, and nothing in the package names it."""

import csv
import json

import jax
import jax.numpy as jnp
import pytest
import toy_op
from commands import command
from folders import ROOT

import lutjax
from lutjax import optim as tables, testing
from lutjax.benchmark import results, shapes


@pytest.fixture(autouse=True)
def op():
    with toy_op.registered() as name:
        yield name
    assert name not in lutjax.kernel_registry.ops()


def test_nothing_else_names_it(op):
    rooms = ("lutjax", "tests", "docs", "benchmarks")
    files = [
        path
        for room in rooms
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".md", ".json")
    ]
    files += ROOT.glob("*.md")
    result = {path for path in files if op in path.read_text(errors="replace")}
    assert result
    assert {path.parent.name for path in result} == {"toy_op"}


def split(op, **sizes):
    return testing.case(op, "split", **sizes)


@pytest.mark.parametrize(
    "transformation",
    ["jit", "vmap of grad", "shard_map, sharded table", "export"],
)
def test_parity(op, transformation):
    testing.check(split(op), transformation=transformation)


@pytest.mark.parametrize(
    "transformation",
    ["none", "vmap of grad", "shard_map, sharded table"],
)
def test_factored_gradients(op, transformation):
    testing.check_factored(split(op), transformation=transformation)


@pytest.mark.parametrize("shape", ["primes", "empty_batch"])
def test_other_sizes(op, shape):
    testing.check(testing.case(op, shape), "xla", transformation="jit")


@pytest.mark.parametrize("rule", [tables.SGD(), tables.RowMomentum(weight_decay=0.25)], ids=str)
def test_updates(op, rule):
    testing.check_update(testing.case(op, "primes"), "xla", rule)


def test_other_dtypes(op):
    testing.check(testing.case(op, "primes", "bfloat16"), transformation="jit")
    testing.check_update(testing.case(op, "primes", "bfloat16"))
    with pytest.raises(ValueError, match="dtype is float64; the dtypes are float32, bfloat16"):
        testing.case(op, "primes", "float64")


def test_lowers_for_other_platforms(op):
    testing.check_lowering(split(op), platform="tpu", device_kind="TPU v6e")


def test_a_wrong_kernel_shows(op, monkeypatch):
    from toy_op import kernels

    right = kernels.backward

    def wrong(call, cotangent, needs, *, device):
        result = right(call, cotangent, needs, device=device)
        return {**result, "gain": 1.001 * result["gain"]}

    monkeypatch.setattr(kernels, "backward", wrong)
    with pytest.raises(AssertionError, match="cotangent: gain"):
        testing.check(split(op, outputs=6))


def test_norms_of_its_gradient(op):
    case = split(op)
    params = {"weights": case.differentiable["weights"]}

    def loss(params):
        y = lutjax.kernel_registry.function(op)(
            params["weights"], case.fixed["index"], case.differentiable["gain"]
        )
        return jnp.sum(jnp.square(y))

    _, gradients = tables.value_and_grad(loss)(params)
    dense = jax.grad(loss)(params)["weights"]
    assert jnp.allclose(tables.global_norm(gradients), jnp.linalg.norm(dense), rtol=1e-6)


def test_it_is_explained(op):
    case = split(op)
    arrays = (case.differentiable["weights"], case.fixed["index"], case.differentiable["gain"])
    text = lutjax.explain(op, *arrays)
    assert text.count("xla/any (toy_op.kernels): chosen") == 3


class TestSlow:
    def test_it_is_measured(self, op, tmp_path, monkeypatch):
        monkeypatch.setattr(results, "copy_bandwidth", lambda: 1e9)
        assert "toy" in shapes.named_shapes()
        path = tmp_path / "rows.csv"
        words = (
            "--shape",
            f"{op}:8,2,4,3",
            "--row",
            "forward",
            "--row",
            "in-place",
            "--repeats",
            "3",
            "--csv",
            path,
        )
        out = command("bench", *words)
        assert out.exit_code == 0, out.output
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(r["shape"], r["row"], r["kernels"]) for r in rows] == [
            ("toy", "forward", f"{op}: xla"),
            ("toy", "in-place", f"{op}: xla, {op} update: xla"),
        ]
        assert all(float(r["p50_s"]) > 0 and int(r["table_bytes"]) == 2 * 4 * 3 * 4 for r in rows)

    def test_it_has_a_status(self, op):
        out = command("status", "--op", op, "--json")
        cells = {
            (c["column"], c["direction"], c["dtype"]): c for c in json.loads(out.stdout)["cells"]
        }
        for direction in ("forward", "backward", "update"):
            for dtype in ("float32", "bfloat16"):
                assert cells["xla/cpu", direction, dtype]["state"] == "runs here"
                assert cells["xla/tpu", direction, dtype]["state"] == "lowers"
                assert cells["triton/gpu", direction, dtype]["reason"] == "has no kernel yet"
