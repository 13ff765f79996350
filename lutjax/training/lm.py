"""Configuration and training step of byte language models; `lutjax.training.loop` has the loop."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, UInt8

import lutjax
from lutjax import optim
from lutjax.extras import require_optional
from lutjax.layers import nnx as layers
from lutjax.models import GPT, GPTConfig, LUTTransformer, _attention
from lutjax.optim import host
from lutjax.tables.host import cpu, open_gradient
from lutjax.training import host_memory, hosts, meshes, optimizers
from lutjax.training.lm_config import SAME, ModelConfig, TrainingConfig as TrainingConfig
from lutjax.training.loop import compiler_options
from lutjax.training.models import ModelRun, State, Structure, arrays
from lutjax.training.text import Bytes
from lutjax.values import Array

with require_optional(__name__):
    import optax
    from flax import nnx


EVALUATION_BATCH = 64
"""Windows per evaluation batch, which bounds memory; results change by rounding only."""

DIVIDED_BYTES = 2**26
"""Minimum length for sharding a text over a mesh; steps then sum window bytes over devices.

Shorter texts are replicated.
"""

VALIDATION_WINDOWS = 256  # validation windows for model selection

LanguageModel = LUTTransformer | GPT


def structure_of(config: ModelConfig, *, quantized: bool = False) -> Structure[LanguageModel]:
    """Return the structure of a config's models; `quantized`: with integer tables, for a GPT."""
    if isinstance(config, GPTConfig):
        if quantized:
            return Structure(lambda rngs: layers.quantize(GPT(config, rngs=rngs)))
        # Only a single program reproduces the bits of host-resident memory rows.
        return Structure(lambda rngs: GPT(config, rngs=rngs), one_program=config.memory)
    assert not quantized
    return Structure(lambda rngs: LUTTransformer(config, rngs=rngs))


def memory_tables(config: ModelConfig) -> frozenset[str]:
    """Return the names of a model's device n-gram tables, which have unordered rows."""
    places = config.memory_places if isinstance(config, GPTConfig) else ()
    on_host = isinstance(config, GPTConfig) and config.memory_placement == "host"
    return frozenset(f"layers/{place}/memory/weights" for place in places if not on_host)


class Selected(NamedTuple):
    """Optimizer state, and the model with the lowest validation loss."""

    optimizer: Any
    # params, others: model arrays
    params: Any
    others: Any
    step: Array  # completed steps at selection
    loss: Array  # its validation loss, in nats per byte


class Run(ModelRun[LanguageModel]):
    """A model and its training procedure, without the trained arrays.

    Args:
      model: model sizes.
      training: all other run configuration.
      train: training bytes.
      validation: bytes for model selection, if enabled in the training config.

    Raises:
      ValueError: the vocabulary is not bytes, or selection lacks validation bytes.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        train: Bytes,
        validation: Bytes | None = None,
    ):
        if model.vocab_size != 256:
            raise ValueError(
                f"vocab_size is {model.vocab_size}; a language model of bytes needs 256."
            )
        self.config, self.training = model, training
        rate = training.rate()
        rest = optimizers.optimizer(training.optimizer, rate, weight_decay=training.weight_decay)
        structure = structure_of(model)
        memory = memory_tables(model)
        self._detector_tables = structure.tables - memory
        rule: optim.RowRule = optim.SGD()
        moved = structure.tables
        if training.table_optimizer == SAME:
            moved = memory
            if training.table_rate != 1:
                rates = dict.fromkeys(self._detector_tables, training.table_rate)
                rest = optax.chain(rest, optim.scaled(rates))
        else:
            of_name = optimizers.TABLE_OPTIMIZERS[training.table_optimizer]
            rule = of_name(weight_decay=training.table_weight_decay)
        of_memory = optimizers.TABLE_OPTIMIZERS[training.memory_optimizer]
        self._rule_of_memory = of_memory(weight_decay=training.memory_weight_decay)
        self._optimizer = optim.Optimizer(
            rule,
            rate,
            rest=rest,
            rules=dict.fromkeys(memory, self._rule_of_memory),
            rates=dict.fromkeys(moved - memory, training.table_rate)
            | dict.fromkeys(memory, training.memory_rate),
            tables=moved,
        )
        # Memory tables always have sparse gradients: a batch reads few of their many rows.
        self._factored = memory if training.table_gradient == "dense" else structure.tables
        samples = training.batch_size // training.microbatches
        super().__init__(structure, self._optimizer.init, training.seed, samples)
        if training.select_every and validation is None:
            raise ValueError(
                f"select_every is {training.select_every}; it requires validation bytes."
            )
        self._train, self._validation = train, validation
        self._on_mesh: host.ShardedHostTable | None = None
        self._on_host = {name: table for name, (table, _) in structure.host_tables.items()}
        if self._on_host and training.select_every:
            raise ValueError(
                f"select_every is {training.select_every}; "
                "it must be 0 with memory_placement 'host'."
            )
        if training.memory_depth and not self._on_host:
            raise ValueError(
                f"memory_depth is {training.memory_depth}; it requires memory_placement 'host'."
            )
        self._place_on_mesh(None)

    def _place_on_mesh(self, mesh: Mesh | None) -> None:
        self._evaluation = Evaluation(self.structure, self.config.context, mesh)
        text: Bytes | hosts.Padded = self._train
        where, self._padding = None if mesh is None else meshes.replicated_sharding(mesh), 0
        if mesh is not None and self._train.size > DIVIDED_BYTES:
            # Shards have equal sizes; `_run_step` samples no window that reaches the padding.
            self._padding = -self._train.size % mesh.size
            text = hosts.Padded(self._train, self._train.size + self._padding)
            where = NamedSharding(mesh, PartitionSpec(meshes.AXES))
        if self._on_host:
            self._on_mesh, options = None, dict[str, Any]()
            if mesh is not None:
                self._on_mesh = host.ShardedHostTable(mesh)
                host_memory.share(self.structure, mesh)
                options = {
                    "of_state": self._shardings(mesh),
                    "of_data": where,
                    "on_mesh": self._on_mesh,
                }
            depth = self.training.memory_depth
            put = jax.device_put if self._on_mesh is None else self._on_mesh
            lands = self._on_mesh is None  # the step is the last reader of its rows
            self.ahead = host.RowPrefetcher(
                self._on_host, self._ids, self._rate_of_memory, depth, put, lands
            )
            self.advance = host_memory.Steps(self._step_on_host, text, self.ahead, **options)
            return
        if not self.training.select_every:
            self.advance = self._repeat_step(self.step, text, where)
            return
        assert self._validation is not None
        windows = self._evaluation.windows(self._validation.size, VALIDATION_WINDOWS)
        self._n_validated = windows.n_counted
        data = (text, self._validation, windows.starts, windows.skipped)
        others = (None if mesh is None else meshes.replicated_sharding(mesh),) * 3
        self.advance = self._repeat_step(self._step_and_select, data, (where, *others))

    def _shardings(self, mesh: Mesh) -> State:
        where = super()._shardings(mesh)
        specs = self._optimizer.specs(
            self.structure.abstract()[0], mesh, tables=self.structure.tables
        )
        of_optimizer = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        if self.training.select_every:
            of_optimizer = where.optimizer._replace(optimizer=of_optimizer)
        return where._replace(optimizer=of_optimizer)

    def _first_state(self, params: Any, others: Any) -> State:
        state = super()._first_state(params, others)
        if not self.training.select_every:
            return state
        # Copy: the state's memory is donated, so no array may appear twice.
        params, others = jax.tree.map(jnp.copy, (state.params, state.others))
        selected = Selected(state.optimizer, params, others, jnp.int32(0), jnp.float32(jnp.inf))
        return state._replace(optimizer=selected)

    def selected(self, state: State) -> State:
        """Return the state with the selected model's arrays."""
        if not self.training.select_every:
            return state
        return state._replace(params=state.optimizer.params, others=state.optimizer.others)

    def _step_and_select(
        self, state: State, number: Array, data: tuple[Array, Array, Array, Array]
    ) -> tuple[State, Array]:
        train, *validation = data
        selected: Selected = state.optimizer
        state, loss = self.step(state._replace(optimizer=selected.optimizer), number, train)
        done = number + 1

        def select(state: State, selected: Selected) -> Selected:
            totals = self._evaluation.totals(state.params, state.others, *validation)
            loss = (totals.sum() / self._n_validated).astype(jnp.float32)
            candidate = Selected(selected.optimizer, state.params, state.others, done, loss)
            better: Selected = jax.tree.map(
                lambda a, b: jnp.where(candidate.loss < selected.loss, a, b), candidate, selected
            )
            return better

        due = (done % self.training.select_every == 0) | (done == self.training.steps)
        # The optimizer state stays outside: a branch must not copy it.
        selected = jax.lax.cond(
            due, select, lambda state, selected: selected, state, selected._replace(optimizer=None)
        )
        return state._replace(optimizer=selected._replace(optimizer=state.optimizer)), loss

    def init(self) -> State:
        state = super().init()
        if self._on_host:
            # Updates of an earlier use of this run must not write into the new rows.
            self.ahead.wait()
            for name, key in self.structure.host_keys(state.others).items():
                self._on_host[name].draw(jax.random.wrap_key_data(key))
                self._on_host[name].start(self._rule_of_memory)
            self.ahead.begin(0)
        return state

    def backend_notes(self) -> list[str]:
        config = self.config
        if not isinstance(config, GPTConfig) or jax.default_backend() == "cpu":
            return []
        reason = _attention.unsupported_reason(
            config.features // config.n_heads, config.dtype, length=config.context
        )
        return ["attention: cuDNN" if reason is None else f"attention: XLA ({reason})"]

    @property
    def host_bytes(self) -> int:
        rule, tables_there = self._rule_of_memory, self._on_host.values()
        return sum(table.nbytes + table.bytes_beside(rule) for table in tables_there)

    def write_beside(self, folder: Path) -> None:
        if self._on_host:
            host_memory.save(folder, self._on_host, self.ahead.queued())

    def read_beside(self, folder: Path, others: Any) -> None:
        if self._on_host:
            host_memory.load(folder, self.structure, others, self._rule_of_memory)
            rows = host_memory.load_queued_rows(
                folder, self.ahead.abstract(), self.training.memory_depth
            )
            self.ahead.begin(int(folder.name), rows)

    @functools.cached_property
    def _cpu_step(self) -> Callable[[Any], tuple[Array, Any]]:
        # Prefetching repeats the random choices of a step on the CPU, ahead of the device.
        def window_starts(number: Array) -> tuple[Array, Any]:
            with jax.numpy_dtype_promotion("standard"):
                rate = self.training.rate()(number) * self.training.memory_rate
            return self._starts(number, self._train.size)[0], rate

        return jax.jit(window_starts)

    def _step_inputs(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        with jax.default_device(cpu()):
            starts, rate = self._cpu_step(np.int32(number))
        return np.asarray(starts), np.asarray(rate)

    def _rate_of_memory(self, number: int) -> np.ndarray:
        return self._step_inputs(number)[1]

    def _ids(self, number: int) -> dict[str, np.ndarray]:
        return self._ids_of(self._train, self._step_inputs(number)[0])

    def _ids_of(self, text: Bytes, starts: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.asarray(text[starts[:, None] + np.arange(self.config.context)], np.int32)
        return {
            name: self._memories[name].row_ids(tokens).reshape(-1, table.shape[0], 1)
            for name, table in self._on_host.items()
        }

    @functools.cached_property
    def _memories(self) -> dict[str, Any]:
        assert isinstance(self.config, GPTConfig)
        model: Any = self.structure.empty()
        return {
            f"layers/{place}/memory/weights": model.layers[place].memory
            for place in self.config.memory_places
        }

    @property
    def _data_seed(self) -> int | Array:
        return self.training.seed

    def _starts(self, number: Array, n_bytes: int) -> tuple[Array, Array]:
        """Return a step's window starts in a text, and its dropout key."""
        data_key, dropout_key = jax.random.split(
            jax.random.fold_in(jax.random.key(self._data_seed), number)
        )
        starts = jax.random.randint(
            data_key, (self.training.batch_size,), 0, n_bytes - self.config.context
        )
        return starts, dropout_key

    def step(self, state: State, number: Array, text: UInt8[Array, "bytes"]) -> tuple[State, Array]:
        """Return the next state and the mean batch loss; see `lutjax.training.loop.Step`."""
        state, loss, _ = self._run_step(state, number, text, host.Batch({}, {}))
        return state, loss

    def _step_on_host(
        self, state: State, number: Array, text: UInt8[Array, "bytes"], batch: host.Batch
    ) -> tuple[State, Array, dict[str, optim.TableGradient]]:
        """Return the results of a step and the gradients for host-resident tables."""
        state, loss, gradients = self._run_step(state, number, text, batch)
        return state, loss, {name: open_gradient(g) for name, g in gradients.items()}

    def _run_step(
        self, state: State, number: Array, text: UInt8[Array, "bytes"], fetched: host.Batch
    ) -> tuple[State, Array, dict[str, optim.TableGradient]]:
        training, context = self.training, self.config.context
        starts, dropout_key = self._starts(number, text.size - self._padding)
        part = jnp.arange(training.batch_size) // (training.batch_size // training.microbatches)

        def loss_of(
            trained: Any, batch: tuple[Array, Array, Array]
        ) -> tuple[Array, tuple[Array, Any]]:
            params, rows = trained
            *text, part = batch
            inputs, labels = meshes.shard_samples(text, self.mesh)
            model = self.structure.model(params, state.others)
            rngs = nnx.Rngs(dropout=jax.random.fold_in(dropout_key, part[0]))
            with host.provide_rows({self._on_host[name]: a for name, a in rows.items()}, part[0]):
                logits = model(inputs, deterministic=False, rngs=rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            mean = losses.mean()
            # `optim.microbatched` averages the objectives, so a sum is scaled up.
            total = losses.sum() * training.microbatches
            objective = total if training.loss == "sum" else mean
            if training.total_variation:
                objective += training.total_variation * optim.cell_total_variation(
                    params, self._detector_tables
                )
            return objective, (mean, arrays(model)[1])

        # Names in the differentiated pair of parameters and rows.
        factored = {f"0/{name}" for name in self._factored} | {
            f"1/{name}" for name in self._on_host
        }
        if factored or training.table_gradient != "dense":
            value_and_grad = optim.value_and_grad(loss_of, tables=factored, has_aux=True)
        else:
            value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        if training.microbatches > 1:
            value_and_grad = optim.microbatched(value_and_grad, training.microbatches)
        windows = _windows(text, starts, context)
        if self.mesh is not None:  # each device looks up all bytes in its own shard of the text
            windows = jax.lax.with_sharding_constraint(
                windows, meshes.replicated_sharding(self.mesh)
            )
        batch = (*windows, part)
        rows = fetched.rows if self._on_mesh is None else self._on_mesh.gather_rows(fetched)
        rows = {name: self._on_host[name].decode(a) for name, a in rows.items()}
        (_, (losses, others)), gradients = value_and_grad((state.params, rows), batch)
        if training.microbatches > 1:  # statistics of the last microbatch, which saw the others'
            others = jax.tree.map(lambda a: a[-1], others)
        # Equal ids for equal rows, so that norms use their sum.
        of_rows = {name: _with_ids(g, fetched.ids[name]) for name, g in gradients[1].items()}
        gradients = (gradients[0], of_rows)
        if training.clip is not None:
            gradients = meshes.with_all_samples(gradients, self.mesh)
            gradients = optim.clip_by_global_norm(gradients, training.clip)
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes the number of steps implicitly
            params, optimizer = self._optimizer.apply(state.params, gradients[0], state.optimizer)
        return State(params, others, optimizer), jnp.mean(losses), gradients[1]

    def evaluate(self, state: State, part: Bytes, *, max_windows: int | None = None) -> float:
        """Return the mean loss on a text section, in nats per byte, without dropout.

        Every byte but the first is predicted exactly once, from the preceding bytes in its window
        of `context` inputs. Consecutive windows cover the whole section.

        Args:
          state: training state.
          part: text section.
          max_windows: evaluate at most this many windows, evenly spaced.
        """
        return self._evaluation(state.params, state.others, part, max_windows=max_windows)

    def usage(
        self, state: State, part: Bytes, *, max_windows: int | None = None
    ) -> dict[str, lutjax.Usage]:
        """Count the reads per table row by text windows, by the table's path in the model.

        Args:
          state: training state.
          part: text section.
          max_windows: see `evaluate`; the last batch may repeat windows to be complete.
        """
        structure, mesh = self.structure, self.mesh
        if isinstance(self.config, GPTConfig) and self.config.remat:
            # Reads inside a jax.checkpoint cannot be counted, and nothing is differentiated here.
            structure = structure_of(dataclasses.replace(self.config, remat=False))
        for name, (table, _) in structure.host_tables.items():
            table.borrow(self._on_host[name])
        where: dict[str, Any] = (
            {} if mesh is None else {"out_shardings": meshes.replicated_sharding(mesh)}
        )

        @functools.partial(jax.jit, **where)
        def count(params: Any, others: Any, text: Array, starts: Array) -> dict[str, lutjax.Usage]:
            inputs, _ = meshes.shard_samples(_windows(text, starts, self.config.context), mesh)
            return lutjax.usage(structure.model(params, others))(inputs, deterministic=True)

        total: dict[str, lutjax.Usage] = {}
        # Batches are added in NumPy: int32 counters of a device could overflow.
        for starts in self._evaluation.windows(part.size, max_windows).starts:
            for name, usage in count(state.params, state.others, part, starts).items():
                if self._on_host and name not in structure.tables:
                    continue  # gathered rows, each read once
                counts = lutjax.Usage(np.asarray(usage.counts, np.int64))
                total[name] = total[name] + counts if name in total else counts
            for name, ids in self._ids_of(part, starts.reshape(-1)).items():
                counts = _reads(np.moveaxis(ids, 1, 0), self._on_host[name].shape[1])
                total[name] = total[name] + counts if name in total else counts
        return total

    def memory_usage(
        self, part: Bytes, *, max_windows: int | None = None
    ) -> dict[str, lutjax.Usage]:
        """Count the reads per memory table row, without running a model; see `usage`.

        The bytes determine these reads.

        Args:
          part: text section.
          max_windows: see `evaluate`.
        """
        usage, config = dict[str, lutjax.Usage](), self.config
        starts = _evaluation_windows(part.size, config.context, max_windows, 1).starts
        tokens = part[starts + np.arange(config.context)[None, :]].astype(np.int32)
        model: Any = self.structure.empty()
        places = config.memory_places if isinstance(config, GPTConfig) else ()
        for place in places:
            memory = model.layers[place].memory
            by_table = np.moveaxis(memory.row_ids(tokens), -1, 0)
            usage[f"layers/{place}/memory/weights"] = _reads(by_table, memory.spec.rows)
        return usage


def _reads(ids: np.ndarray, n_rows: int) -> lutjax.Usage:
    return lutjax.Usage(
        np.stack([np.bincount(of_table.ravel(), minlength=n_rows) for of_table in ids])
    )


def _with_ids(gradient: optim.TableGradient, ids: Array) -> optim.TableGradient:
    look_up: Any = gradient.look_up
    return dataclasses.replace(
        gradient, look_up=look_up.replace(index=jnp.asarray(ids).reshape(look_up.index.shape))
    )


class Evaluation:
    """Mean loss of equally structured models on text sections, in windows of `context` inputs."""

    def __init__(self, structure: Structure[LanguageModel], context: int, mesh: Mesh | None = None):
        self._structure, self._context, self._mesh = structure, context, mesh
        where: dict[str, Any] = (
            {} if mesh is None else {"out_shardings": meshes.replicated_sharding(mesh)}
        )
        self._compiled = jax.jit(self.totals, compiler_options=compiler_options(), **where)

    def windows(self, size: int, max_windows: int | None) -> "Windows":
        """Return the evaluation windows for a text section; see `Run.evaluate`."""
        n_data = 1 if self._mesh is None else self._mesh.shape[meshes.DATA]
        return _evaluation_windows(
            size, self._context, max_windows, n_data * -(-EVALUATION_BATCH // n_data)
        )

    def __call__(
        self,
        params: Any,
        others: Any,
        part: Bytes,
        *,
        max_windows: int | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> float:
        """Return the mean loss in nats per byte; see `Run.evaluate`.

        `progress` is called with the completed share after every batch of windows; without it all
        batches run in one call.
        """
        starts, skipped, n_counted = self.windows(part.size, max_windows)
        size = len(starts) if progress is None else 1
        total = 0.0
        for first in range(0, len(starts), size):
            batches = slice(first, first + size)
            totals = self._compiled(params, others, part, starts[batches], skipped[batches])
            # In float64 on the host, so that the result does not depend on the number of batches.
            total += float(np.asarray(totals, np.float64).sum())
            if progress is not None:
                progress((first + size) / len(starts))
        return total / n_counted

    def totals(
        self,
        params: Any,
        others: Any,
        text: UInt8[Array, "bytes"],
        starts: Int[Array, "batches batch"],
        skipped: Int[Array, "batches batch"],
    ) -> Float[Array, "batches batch"]:
        """Return the summed counted losses per window."""

        def batch(windows: tuple[Array, Array]) -> Array:
            inputs, labels = meshes.shard_samples(
                _windows(text, windows[0], self._context), self._mesh
            )
            logits = self._structure.model(params, others)(inputs, deterministic=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            counted = jnp.arange(self._context)[None, :] >= windows[1][:, None]
            return jnp.sum(jnp.where(counted, losses, 0), -1)

        totals: Array = jax.lax.map(batch, (starts, skipped))
        return totals


class Windows(NamedTuple):
    """Batched evaluation windows for a text section."""

    starts: Int[np.ndarray, "batches batch"]  # first input per window
    skipped: Int[np.ndarray, "batches batch"]  # uncounted inputs at its start
    n_counted: int  # counted inputs in all windows


def _evaluation_windows(size: int, context: int, max_windows: int | None, batch: int) -> Windows:
    """Return consecutive windows through a part, or `max_windows` evenly spaced ones."""
    first = np.arange(0, size - 1, context)  # first input of every window
    starts = np.minimum(first, size - 1 - context)
    skipped = first - starts  # nonzero only in the last window, which overlaps the previous one
    if max_windows is not None and len(first) > max_windows:
        chosen = np.linspace(0, len(first) - 1, max_windows).astype(int)
        starts, skipped = starts[chosen], skipped[chosen]
    count = int((context - skipped).sum())
    # Complete batches share one program; padding windows skip all their inputs.
    padding = -len(starts) % batch
    starts = np.pad(starts, (0, padding)).reshape(-1, batch)
    skipped = np.pad(skipped, (0, padding), constant_values=context).reshape(-1, batch)
    return Windows(starts.astype(np.int32), skipped.astype(np.int32), count)


def _windows(text: Array, starts: Array, context: int) -> tuple[Array, Array]:
    windows = text[starts[:, None] + jnp.arange(context + 1)[None, :]].astype(jnp.int32)
    return windows[:, :-1], windows[:, 1:]
