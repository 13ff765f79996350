"""Tables over mapped files: exact rows, file errors, training outside the files, overlays."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from click.testing import CliRunner
from flax import nnx
from starlette.testclient import TestClient
from tensor_files import write_gguf, write_safetensors

from lutjax import optim
from lutjax.cli._main import cli
from lutjax.files.tensors import TensorFileError
from lutjax.layers.nnx import NgramMemory
from lutjax.models import GPT, GPTConfig
from lutjax.optim.host import HostTable, RowPrefetcher, provide_rows
from lutjax.serving import Limits, application
from lutjax.tables import _mapped_rows
from lutjax.tables._codecs import Codec
from lutjax.tables.overlays import OverlayError, facts, lines

RULES = (optim.SGD(), optim.RowAdagrad(), optim.RowAdam(b1=0.5, weight_decay=0.1))
WIDTH, N_ROWS = 64, 90
RNG = np.random.default_rng(1)
CODES = RNG.integers(0, 256, (N_ROWS, WIDTH)).astype(np.uint8)
CODES[CODES & 127 == 127] = 0  # no NaN
SCALES = RNG.integers(110, 140, (N_ROWS, WIDTH // 32)).astype(np.uint8)
HALVES = (RNG.normal(size=(N_ROWS, WIDTH)).astype(np.float32).view(np.uint32) >> 16).astype(
    np.uint16
)
SCALE = 0.0078125
IDS = RNG.integers(0, N_ROWS, (7, 1, 5)).astype(np.int32)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return float8_e4m3fn values as float64, by definition."""
    c = codes.astype(np.int64)
    e, m = c >> 3 & 15, c & 7
    value = np.where(e == 0, m / 512, np.ldexp(1 + m / 8, e - 7))
    return np.where(c & 127 == 127, np.nan, np.where(c > 127, -value, value))


def in_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    each = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int64) - 127))
    with np.errstate(over="ignore"):
        return (e4m3(codes) * np.repeat(each, 32, -1)).astype(np.float32)


WANTED = {
    "bfloat16": (HALVES.astype(np.uint32) << 16).view(np.float32),
    "e4m3": (e4m3(CODES) * SCALE).astype(np.float32),
    "e4m3_ue8m0": in_blocks(CODES, SCALES),
    "row264": in_blocks(CODES, SCALES),
}


def files(folder: Path, codec: str) -> dict[str, Any]:
    """Write a table in three parts with unequal sizes, in two files; return the `mapped` arguments."""
    cuts = [slice(0, 40), slice(40, 41), slice(41, N_ROWS)]
    if codec == "row264":
        path = write_gguf(
            folder / "table.gguf", "blk.1.engram", np.concatenate([CODES, SCALES], 1).view(np.int8)
        )
        return {"parts": [(path, "blk.1.engram")], "codec": codec, "width": WIDTH}
    dtype, rows = ("BF16", HALVES) if codec == "bfloat16" else ("F8_E4M3", CODES)
    one = {"other": ("F32", np.zeros(3, np.float32))} | {
        f"rows_{i}": (dtype, rows[cuts[i]]) for i in (0, 1)
    }
    two = {"rows_10": (dtype, rows[cuts[2]]), "scales": ("F8_E8M0", SCALES)}
    two["scale"] = ("BF16", (np.float32([SCALE]).view(np.uint32) >> 16).astype(np.uint16))
    a, b = (write_safetensors(folder / f"{i}.safetensors", x) for i, x in enumerate((one, two)))
    scales = {"e4m3": [(b, "scale")], "e4m3_ue8m0": [(b, "scales")]}.get(codec, [])
    return {
        "parts": [(a, "rows_0"), (a, "rows_1"), (b, "rows_10")],
        "codec": codec,
        "width": WIDTH,
        "scales": scales,
    }


def table_of(folder: Path, codec: str = "e4m3_ue8m0", **options: Any) -> Any:
    return HostTable.mapped(**files(folder, codec), **options)


def same_bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


def test_all_codes() -> None:
    code, scale = (a.reshape(-1).astype(np.uint8) for a in np.mgrid[:256, :256])
    records = np.concatenate([np.repeat(code[:, None], 32, 1), scale[:, None]], 1)
    wanted = in_blocks(records[:, :32], records[:, 32:])
    codec = Codec("row264", 32)
    for actual in (codec.decode(records), np.asarray(jax.jit(codec.decode)(records))):
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted))
        same_bits(actual[~np.isnan(actual)], wanted[~np.isnan(wanted)])


@pytest.mark.parametrize("scale", [SCALE, 1.0, 1e-38, 1e38])
def test_all_codes_with_one_scale(scale: float) -> None:
    scale = float(jnp.bfloat16(scale))
    codes = np.arange(256, dtype=np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (e4m3(codes) * scale).astype(np.float32)
        wanted = np.asarray(product.astype(jnp.bfloat16), np.float32)
    actual = np.asarray(Codec("e4m3", 256, scale).decode(jnp.asarray(codes)))
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted))
    same_bits(actual[~np.isnan(actual)], wanted[~np.isnan(wanted)])


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("codec", WANTED)
def test_reads(tmp_path: Path, codec: str, trains: bool) -> None:
    table = table_of(tmp_path, codec, trains=trains)
    index = IDS.copy()
    index[0, 0, :2] = -3, N_ROWS + 5  # clamped
    wanted = WANTED[codec][np.clip(index, 0, N_ROWS - 1).reshape(-1)]
    same_bits(table.gather(index)[0], wanted)
    for read in (table.read, jax.jit(table.read)):
        same_bits(read(jnp.asarray(index))[0][0], wanted)
    out = np.empty((1, *wanted.shape), np.float32)
    assert table.gather(index, out) is out
    same_bits(out[0], wanted)


def test_rows_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, result = table_of(tmp_path), list[np.ndarray]()
    gather = _mapped_rows.MappedRows.gather

    def counted(self: Any, ids: np.ndarray, out: np.ndarray) -> None:
        result.append(ids)
        gather(self, ids, out)

    monkeypatch.setattr(_mapped_rows.MappedRows, "gather", counted)
    table.fetch(IDS)
    (ids,) = result
    np.testing.assert_array_equal(ids, np.unique(IDS))


def test_large_gathers(tmp_path: Path) -> None:
    """Threaded gathers return the same rows as single gathers."""
    n = 5000
    rows = np.random.default_rng(2).integers(0, 2**16, (n, 3)).astype(np.uint16)
    cuts = {f"{i}": ("BF16", rows[i * 1000 : (i + 1) * 1000]) for i in range(5)}
    path = write_safetensors(tmp_path / "x.safetensors", cuts)
    table = HostTable.mapped([(path, name) for name in cuts], codec="bfloat16", width=3)
    ids = np.random.default_rng(3).permutation(n)[:4000].reshape(-1, 1, 1)
    np.testing.assert_array_equal(table.fetch(ids)[0], rows[ids.reshape(-1)].view(np.uint8))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_copies(tmp_path: Path, copied: Any) -> None:
    table = table_of(tmp_path, trains=True)
    train(table, 1)
    same_bits(copied(table).gather(IDS), table.gather(IDS))


def test_damaged_files(tmp_path: Path) -> None:
    arguments = files(tmp_path, "e4m3_ue8m0")
    table = HostTable.mapped(**arguments)
    path = tmp_path / "1.safetensors"
    whole = path.read_bytes()

    def refused(data: bytes, text: str, **options: Any) -> None:
        path.unlink()
        path.write_bytes(data)
        with pytest.raises(TensorFileError, match=text):
            HostTable.mapped(**{**arguments, **options})

    base = {"base": table.description}
    refused(whole[:-100], "is truncated: it has .* bytes")
    refused(whole[:5], "is no safetensors or GGUF file")
    refused(b"", "is no safetensors or GGUF file")
    refused(b"GGUF" + whole, "is no safetensors or GGUF file")
    refused(whole + b"\0", r"other base files: size is", **base)
    refused(whole.replace(b'"scale"', b'"scalf"'), "other base files: header is", **base)
    changed = bytearray(whole)
    changed[-SCALES.size - 3] ^= 1
    refused(bytes(changed), "other base files: sample is", **base)
    refused(whole, "has no tensor 'x'; it has", parts=[(path, "x")])
    refused(whole, r"scale is BF16\[1\]; the codec", parts=[(path, "scale")])
    refused(whole, "rows_0 is .* of width 32", width=32)
    refused(whole, "there are 49 rows and scales for 90", parts=[(path, "rows_10")])
    refused(whole, "belongs to another table", base={**table.description, "scale": 2.0})
    with pytest.raises(TensorFileError, match="cannot be read: No such file"):
        HostTable.mapped([(tmp_path / "none", "x")], codec="bfloat16", width=4)
    HostTable.mapped(**arguments, **base)


def test_arguments(tmp_path: Path) -> None:
    for options, text in (
        ({"codec": "int8"}, "codec is 'int8'; expected one of"),
        ({"codec": "bfloat16"}, "scales are given"),
        ({"codec": "e4m3", "scales": []}, "scales has 0 tensors"),
        ({"width": 33}, "width is 33; e4m3_ue8m0 needs a positive multiple of 32"),
        ({"parts": []}, "parts is empty"),
    ):
        with pytest.raises(ValueError, match=text):
            HostTable.mapped(**{**files(tmp_path, "e4m3_ue8m0"), **options})
    table = table_of(tmp_path)
    with pytest.raises(ValueError, match="is read-only: create it with trains=True"):
        table.start(optim.SGD())
    with pytest.raises(ValueError, match="2 processes cannot divide"):
        table.share(0, 2, jax.sharding.Mesh(jax.devices()[:1], ("data",)))


def gradients_of(table: Any, index: np.ndarray, target: float) -> Any:
    def loss(_: Any, index: Any) -> Any:
        y = table.weighted_lookup(index, jnp.ones(index.shape))
        return jnp.mean((y - target) ** 2)

    _, (_, result) = optim.value_and_grad(loss, host={"memory": table})({}, jnp.asarray(index))
    return result["memory"]


def indices(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, N_ROWS, (4, 1, 3)).astype(np.int32)


def train(table: Any, n_steps: int, rule: Any = RULES[2], first: int = 0) -> None:
    table.start(rule)
    for step in range(first, first + n_steps):
        table.update(gradients_of(table, indices(step), step), 0.1)


@pytest.mark.parametrize(
    "rule", slow_except(RULES, "RowAdam", ids=lambda rule: type(rule).__name__)
)
def test_training_equals_a_table_in_memory(tmp_path: Path, rule: Any) -> None:
    """Rows and state match an ordinary host table bit for bit, and the files do not change."""
    table = table_of(tmp_path, trains=True)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    dense = HostTable((1, N_ROWS, WIDTH), np.float32, jax.nn.initializers.zeros)
    dense.draw(jax.random.key(0))
    dense.weights[0] = WANTED["e4m3_ue8m0"]
    for each in (table, dense):
        train(each, 4, rule)
    every = np.arange(N_ROWS).reshape(-1, 1, 1)
    same_bits(table.gather(every), dense.gather(every))
    np.testing.assert_array_equal(table.updated, np.flatnonzero(dense.moved))
    table.save(tmp_path / "saved")
    dense.save(tmp_path / "dense")
    for path in (tmp_path / "dense").iterdir():
        np.testing.assert_array_equal(np.load(path), np.load(tmp_path / "saved" / path.name))
    assert before == {path: path.read_bytes() for path in before}


def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    one, two = (table_of(tmp_path, trains=True) for _ in range(2))
    train(one, 2)
    one.save(tmp_path / "saved")
    train(one, 2, first=2)
    two.start(RULES[2])
    two.load(tmp_path / "saved")
    train(two, 2, first=2)
    every = np.arange(N_ROWS).reshape(-1, 1, 1)
    same_bits(one.gather(every), two.gather(every))
    for name in one.state:
        same_bits(*(t.state[name][0, np.argsort(t._ids[: t._n_updated])] for t in (one, two)))
    two.draw()
    same_bits(two.gather(every), table_of(tmp_path).gather(every))


def test_prefetched_rows(tmp_path: Path) -> None:
    """A queue transfers bytes, and returns the same rows as a loop without it."""
    tables = [table_of(tmp_path, trains=True) for _ in range(2)]
    train(tables[0], 3)
    table = tables[1]
    table.start(RULES[2])
    ahead = RowPrefetcher(
        {"memory": table}, lambda step: {"memory": indices(step)}, lambda step: 0.1
    )

    def loss(rows: Any, step: int) -> Any:
        with provide_rows({table: rows["memory"]}):
            y = table.weighted_lookup(indices(step), jnp.ones((4, 1, 3)))
        return jnp.mean((y - step) ** 2)

    for step in range(3):
        batch = ahead.batch(step)
        assert batch.rows["memory"].dtype == np.float32
        assert jax.tree.map(lambda a: (a.shape, a.dtype), batch) == jax.tree.map(
            lambda a: (a.shape, a.dtype), ahead.abstract()
        )
        rows = {"memory": table.decode(batch.rows["memory"])}
        ahead.update(step, optim.value_and_grad(loss)(rows, step)[1])
    ahead.wait()
    same_bits(*(t.gather(IDS) for t in tables))
    assert ahead.queued() == []


def test_a_checkpoint_has_the_rows_that_lack_updates(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    ahead = RowPrefetcher(
        {"memory": table}, lambda step: {"memory": indices(step)}, lambda step: 0.1, depth=2
    )
    ahead.begin(0)
    expected = [table.gather(indices(step)) for step in range(2)]
    for rows, of_step in zip(ahead.queued(), expected, strict=True):
        same_bits(np.unique(table.decode(rows["memory"])), np.unique(of_step))


def test_overlays(tmp_path: Path) -> None:
    """Overlays stack in order, and removing one restores every bit."""
    every = np.arange(N_ROWS).reshape(-1, 1, 1)
    one = table_of(tmp_path, trains=True)
    train(one, 1, optim.SGD())
    one.save(tmp_path / "one")
    two = table_of(tmp_path, trains=True, overlays=[tmp_path / "one"])
    same_bits(two.gather(every), one.gather(every))
    train(two, 1, optim.SGD(), first=1)
    two.save(tmp_path / "two")
    with pytest.raises(ValueError, match="updated rows, computed from the overlays"):
        two.remove_overlay(tmp_path / "one")
    table = table_of(tmp_path, overlays=[tmp_path / "one", tmp_path / "two"])
    assert table.record[0] == WIDTH
    same_bits(table.gather(every), two.gather(every))
    same_bits(jax.jit(table.read)(jnp.asarray(every))[0], two.gather(every))
    table.remove_overlay(tmp_path / "two")
    same_bits(table.gather(every), one.gather(every))
    table.remove_overlay(tmp_path / "one")
    same_bits(table.gather(every), table_of(tmp_path).gather(every))
    table.add_overlay(tmp_path / "two")
    table.add_overlay(tmp_path / "one")
    wanted = two.gather(every)
    wanted[0, one.updated] = one.gather(every)[0, one.updated]  # the last one wins
    wanted[0, [i for i in range(N_ROWS) if i not in {*one.updated, *two.updated}]] = table_of(
        tmp_path
    ).gather(every)[0, [i for i in range(N_ROWS) if i not in {*one.updated, *two.updated}]]
    same_bits(table.gather(every), wanted)
    with pytest.raises(ValueError, match="has no overlay"):
        table.remove_overlay(tmp_path / "three")
    with pytest.raises(ValueError, match="created without overlays"):
        table_of(tmp_path).add_overlay(tmp_path / "one")


def test_overlays_of_others(tmp_path: Path) -> None:
    class Layout:
        n_rows, width = N_ROWS, WIDTH

        def __init__(self, digest: str):
            self.digest = digest

    table = table_of(tmp_path, trains=True, layout=Layout("a"))
    train(table, 1)
    saved = tmp_path / "saved"
    table.save(saved)
    result = facts(saved)
    assert (result["updated"], result["layout"], result["base"]) == (
        len(table.updated),
        "a",
        table.description,
    )
    assert (
        f"rows: {len(table.updated)} of {N_ROWS}, with {WIDTH} elements each; rule: RowAdam("
        in "\n".join(lines(result))
    )
    done = CliRunner().invoke(cli, ["info", str(saved)], prog_name="lutjax")
    assert not done.exit_code
    assert done.output.splitlines() == lines(result)
    table_of(tmp_path, layout=Layout("a"), overlays=[saved])
    with pytest.raises(OverlayError, match="belongs to the layout a, not to b"):
        table_of(tmp_path, layout=Layout("b"), overlays=[saved])
    (tmp_path / "b").mkdir()
    with pytest.raises(TensorFileError, match="belongs to other base files"):
        table_of(tmp_path / "b", "row264", overlays=[saved])
    other = table_of(tmp_path, trains=True)
    other.start(optim.RowAdagrad())
    with pytest.raises(OverlayError, match="has no sum"):
        other.load(saved)
    with pytest.raises(OverlayError, match="continues from the overlays"):
        table_of(tmp_path, trains=True, overlays=[saved]).load(saved)
    layout: Any = Layout("a")
    layout.n_rows += 1
    with pytest.raises(ValueError, match="layout has 91 rows of width 64; the files have 90"):
        table_of(tmp_path, layout=layout)
    with pytest.raises(OverlayError, match="is no overlay"):
        table_of(tmp_path, overlays=[tmp_path])
    rows = saved / "rows.npy"
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(OverlayError, match=r"is damaged: rows\.npy is missing, or has changed"):
        table_of(tmp_path, overlays=[saved])
    (saved / "overlay.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(OverlayError, match="its format is 2"):
        table_of(tmp_path, overlays=[saved])


def wide_table(folder: Path, n_rows: int = 500, width: int = 8) -> HostTable:
    rows = (
        np.random.default_rng(4).normal(size=(n_rows, width)).astype(np.float32).view(np.uint32)
        >> 16
    ).astype(np.uint16)
    path = write_safetensors(folder / "x.safetensors", {"rows": ("BF16", rows)})
    return HostTable.mapped([(path, "rows")], codec="bfloat16", width=width, trains=True)


def copied_to_memory(table: HostTable) -> HostTable:
    result = HostTable(table.shape, np.float32, jax.nn.initializers.zeros)
    result.draw(jax.random.key(0))
    assert result.weights is not None
    result.weights[0] = table.gather(np.arange(table.shape[1]).reshape(-1, 1, 1))[0]
    return result


def test_layers_read_existing_tables(tmp_path: Path) -> None:
    """Also with a history: token by token."""
    table = wide_table(tmp_path)
    options: dict[str, Any] = {"orders": (3,), "heads": 1, "rows": 500, "width": 8}
    one, two = (
        NgramMemory(8, **options, placement=each, rngs=nnx.Rngs(0))
        for each in (table, copied_to_memory(table))
    )
    assert one.weights is table
    x, tokens = (
        jnp.asarray(RNG.normal(size=(2, 6, 8)), jnp.float32),
        jnp.asarray(RNG.integers(0, 9, (2, 6))),
    )
    call = nnx.jit(lambda layer, x, tokens: layer(x, tokens))
    wanted = call(two, x, tokens)
    same_bits(call(one, x, tokens), wanted)
    history, actual = one.history((2,)), []
    step = nnx.jit(lambda layer, x, tokens, history: layer(x, tokens, history=history))
    for i in range(6):
        y, history = step(one, x[:, i : i + 1], tokens[:, i : i + 1], history)
        actual.append(y)
    np.testing.assert_allclose(jnp.concatenate(actual, 1), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"placement is HostTable.mapped.*expected a table float32\[1, 501, 8\]"
    ):
        NgramMemory(8, **{**options, "rows": 501}, placement=table, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_language_models_generate_with_mapped_rows(tmp_path: Path) -> None:
    """A GPT gives the same answers as with its rows in memory, in one call and in server slots."""
    table = wide_table(tmp_path)
    memory: dict[str, Any] = {
        "orders": (3,),
        "heads": 1,
        "rows": 500,
        "width": 8,
        "placement": "host",
    }
    config = GPTConfig(
        features=16, context=16, n_layers=1, n_heads=2, feed_forward="dense", memory=True,
        **{f"memory_{name}": value for name, value in memory.items()},
    )  # fmt: skip
    answers = []
    for each in (table, copied_to_memory(table)):
        model: Any = GPT(config, rngs=nnx.Rngs(0))
        model.layers[0].memory.weights = each
        prompts = [
            np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"one two", b"three")
        ]
        answers.append(np.asarray(model.generate(prompts, 12, key=jax.random.key(1))).tolist())
        with TestClient(application(model, "mapped", Limits())) as client:
            for prompt in ("one two", "three"):
                asked = {"model": "mapped", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                answers[-1].append(
                    client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
                )
    assert answers[0] == answers[1]
