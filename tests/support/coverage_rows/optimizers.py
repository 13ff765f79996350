"""Section 8: optimizers. The check makes several steps and compares the parameters after each of them."""

import functools

import jax.numpy as jnp
import numpy as np
import optax

from coverage_rows._row import Row, Section, normal

SECTION = Section(
    "Optimizer Kernels",
    "A step is `updates, state = optimizer.update(gradients, state, params)` and "
    "`params = optax.apply_updates(params, updates)`. Five steps of two parameters are compared, after each step.",
)

STEPS = 5
# one parameter is far from its gradients' size, so that ratios and norms of each count
PARAMS = {"kernel": normal(3, 2, scale=3.0), "bias": normal(2)}
GRADIENTS = {"kernel": normal(STEPS, 3, 2), "bias": normal(STEPS, 2, scale=0.5)}


def optimizer(reference):
    """The reference makes one step: ``reference(memory, t, p, g)`` returns the new parameters, all as dictionaries.

    ``memory(name)`` is what it keeps between steps, of a parameter's shape and zero at first; ``t`` counts from 1.
    """

    def add(function) -> Row:
        def served(params, gradients):
            transformation = function()
            state, found = transformation.init(params), []
            for t in range(STEPS):
                now = {name: g[t] for name, g in gradients.items()}
                updates, state = transformation.update(now, state, params)
                params = optax.apply_updates(params, updates)
                found.append(params)
            return {name: jnp.stack([p[name] for p in found]) for name in params}

        arguments = {"params": PARAMS, "gradients": GRADIENTS}
        expected = functools.partial(stepped, reference)
        return SECTION.add(
            Row(function.__name__, served, function, arguments, expected, None, (), no_gradient="an update")
        )

    return add


def stepped(reference, params, gradients):
    memory, found = {}, []
    for t in range(STEPS):
        now = {name: g[t] for name, g in gradients.items()}
        params = reference(memory, t + 1, params, now)
        found.append(params)
    return {name: np.stack([p[name] for p in found]) for name in params}


def each(rule):
    """A rule for one array, which keeps what it needs in a dictionary of its own."""

    def step(memory, t, params, gradients):
        return {name: rule(memory.setdefault(name, {}), t, p, gradients[name]) for name, p in params.items()}

    return step


def averaged(memory, name, value, decay):
    memory[name] = decay * memory.get(name, 0.0) + (1 - decay) * value
    return memory[name]


def summed(memory, name, value, decay):
    memory[name] = decay * memory.get(name, 0.0) + value
    return memory[name]


def adam_direction(memory, t, g, epsilon):
    first = averaged(memory, "first", g, 0.9) / (1 - 0.9**t)
    second = averaged(memory, "second", g**2, 0.999) / (1 - 0.999**t)
    return first / (np.sqrt(second) + epsilon)


def norm(x) -> float:
    return np.sqrt(np.sum(x**2))


@optimizer(each(lambda memory, t, p, g: p - 0.1 * g))
def sgd_step():
    return optax.sgd(0.1)


@optimizer(each(lambda memory, t, p, g: p - 0.1 * summed(memory, "momentum", g, 0.9)))
def sgd_momentum_update():
    """The sum of gradients is not dampened, as in PyTorch."""
    return optax.sgd(0.1, momentum=0.9)


@optimizer(each(lambda memory, t, p, g: p - 0.1 * adam_direction(memory, t, g, 1e-8)))
def adam_step():
    """`eps` is outside of the root, as in the paper and in PyTorch; `eps_root` is one inside."""
    return optax.adam(0.1)


@optimizer(each(lambda memory, t, p, g: p - 0.1 * (adam_direction(memory, t, g, 1e-8) + 0.02 * p)))
def adamw_step():
    return optax.adamw(0.1, weight_decay=0.02)


@optimizer(each(lambda memory, t, p, g: p - 0.1 * g / np.sqrt(averaged(memory, "square", g**2, 0.9) + 1e-8)))
def rmsprop_step():
    """The mean of squares starts at 0, with a decay of 0.9 and `eps` inside of the root; PyTorch has 0.99 and `eps` outside: `decay=0.99, eps_in_sqrt=False`. So the first steps
    differ by a factor of about 3."""
    return optax.rmsprop(0.1)


@optimizer(
    each(lambda memory, t, p, g: p - 0.1 * g / np.sqrt(0.1 + summed(memory, "square", g**2, 1.0) + 1e-7))
)
def adagrad_step():
    """The sum of squares starts at 0.1, as in Keras, and at 0 in PyTorch: `initial_accumulator_value=0.0`. With small gradients the first steps differ by orders of magnitude."""
    return optax.adagrad(0.1)


@optimizer(each(lambda memory, t, p, g: p - 0.1 * (g + 0.9 * summed(memory, "momentum", g, 0.9))))
def nag_step():
    """Step of PyTorch, too: the gradient is taken at the parameters, not at the point ahead."""
    return optax.sgd(0.1, momentum=0.9, nesterov=True)


def lars(memory, t, p, g):
    g = g + 0.02 * p
    return p - summed(memory, "momentum", 0.1 * 0.001 * norm(p) / norm(g) * g, 0.9)


@optimizer(each(lars))
def lars_step():
    """The rate is inside of the momentum, and the trust coefficient 0.001."""
    return optax.lars(0.1, weight_decay=0.02)


def lamb(memory, t, p, g):
    direction = adam_direction(memory, t, g, 1e-6) + 0.02 * p
    return p - 0.1 * norm(p) / norm(direction) * direction


@optimizer(each(lamb))
def lamb_step():
    """Step with the bias correction of Adam, `eps=1e-6`, and no bounds of the ratio."""
    return optax.lamb(0.1, weight_decay=0.02)


def clipped_by_norm(memory, t, params, gradients):
    """The norm of all gradients together; some steps are below the bound."""
    whole = norm(np.concatenate([g.ravel() for g in gradients.values()]))
    return {name: p - 0.1 * gradients[name] * min(1, 2.5 / whole) for name, p in params.items()}


@optimizer(clipped_by_norm)
def gradient_clip_norm():
    return optax.chain(optax.clip_by_global_norm(2.5), optax.sgd(0.1))


@optimizer(each(lambda memory, t, p, g: p - 0.1 * np.minimum(np.maximum(g, -0.5), 0.5)))
def gradient_clip_value():
    return optax.chain(optax.clip(0.5), optax.sgd(0.1))
