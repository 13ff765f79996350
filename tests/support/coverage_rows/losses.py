"""Section 7: losses, each the mean over samples."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coverage_rows._row import Section, bits, indices, normal

SECTION = Section("Loss Function Kernels", "Labels are class numbers (cross entropy), or 0 and 1.")

PAIRS = {"y": normal(3, 4, scale=2.0), "target": normal(3, 4)}
CLASSES = {"logits": normal(5, 4), "labels": indices(4, 5)}
BINARY = {"logits": normal(12), "labels": indices(2, 12)}
TRIPLES = {"anchor": normal(6, 3), "same": normal(6, 3), "other": normal(6, 3)}
MATCHES = {"x": normal(8, 2, scale=0.6), "other": normal(8, 2, scale=0.6), "match": bits(8)}


def probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def right_probabilities(logits, labels):
    return [
        probability(logit) if label else 1 - probability(logit)
        for logit, label in zip(logits, labels, strict=True)
    ]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def cross_entropy(logits, labels):
    return np.mean([-math.log(p[label]) for p, label in zip(softmax(logits), labels, strict=True)])


def binary_cross_entropy(logits, labels):
    return -np.mean([math.log(right) for right in right_probabilities(logits, labels)])


def smooth(difference: float) -> float:
    return difference**2 / 2 if abs(difference) < 1 else abs(difference) - 0.5


@SECTION.forward(lambda y, target: np.sum((y - target) ** 2) / y.size, **PAIRS)
def mse_loss(y, target):
    return optax.losses.squared_error(y, target).mean()


@SECTION.forward(cross_entropy, **CLASSES)
def cross_entropy_loss(logits, labels):
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@SECTION.forward(binary_cross_entropy, **BINARY)
def bce_loss(logits, labels):
    return optax.losses.sigmoid_binary_cross_entropy(logits, labels).mean()


@SECTION.forward(lambda y, target: np.mean([smooth(d) for d in np.ravel(y - target)]), **PAIRS)
def smooth_l1_loss(y, target):
    return optax.losses.huber_loss(y, target, delta=1.0).mean()


@SECTION.backward(mse_loss, "y", "target", formula=lambda y, target: both_signs(2 * (y - target) / y.size))
def mse_backward(y, target):
    return jax.grad(mse_loss, (0, 1))(y, target)


def both_signs(gradient):
    return gradient, -gradient


@SECTION.backward(
    cross_entropy_loss,
    "logits",
    formula=lambda logits, labels: (softmax(logits) - np.eye(4)[labels]) / len(labels),
)
def cross_entropy_backward(logits, labels):
    return jax.grad(cross_entropy_loss)(logits, labels)


@SECTION.backward(
    bce_loss, "logits", formula=lambda logits, labels: (1 / (1 + np.exp(-logits)) - labels) / len(labels)
)
def bce_backward(logits, labels):
    return jax.grad(bce_loss)(logits, labels)


@SECTION.backward(
    smooth_l1_loss,
    "y",
    "target",
    formula=lambda y, target: both_signs(np.clip(y - target, -1, 1) / y.size),
)
def smooth_l1_backward(y, target):
    return jax.grad(smooth_l1_loss, (0, 1))(y, target)


def focal(logits, labels):
    """Lin et al. 2017, with a weight of 0.25 for label 1, and a focus of 2."""
    found = zip(labels, right_probabilities(logits, labels), strict=True)
    return np.mean([-(0.25 if one else 0.75) * (1 - right) ** 2 * math.log(right) for one, right in found])


def focal_formula(logits, labels):
    sign = np.where(labels == 1, 1.0, -1.0)
    right = 1 / (1 + np.exp(-sign * logits))
    slope = 2 * (1 - right) * right * np.log(right) - (1 - right) ** 2
    return np.where(labels == 1, 0.25, 0.75) * sign * slope * (1 - right) / len(labels)


@SECTION.forward(focal, **BINARY)
def focal_loss(logits, labels):
    return optax.losses.sigmoid_focal_loss(logits, labels, alpha=0.25, gamma=2.0).mean()


@SECTION.backward(focal_loss, "logits", formula=focal_formula)
def focal_loss_backward(logits, labels):
    return jax.grad(focal_loss)(logits, labels)


def triplet(anchor, same, other):
    near, far = (
        np.array([math.sqrt(sum((a - x) ** 2) + 1e-6) for a, x in zip(anchor, others, strict=True)])
        for others in (same, other)
    )
    return np.mean([max(number, 0) for number in near - far + 1])


def triplet_formula(anchor, same, other):
    near = np.sqrt(np.sum((anchor - same) ** 2, -1, keepdims=True) + 1e-6)
    far = np.sqrt(np.sum((anchor - other) ** 2, -1, keepdims=True) + 1e-6)
    counts = (near - far + 1 > 0) / len(anchor)
    toward, away = counts * (anchor - same) / near, counts * (anchor - other) / far
    return toward - away, -toward, away


@SECTION.forward(triplet, **TRIPLES)
def triplet_loss(anchor, same, other):
    return optax.losses.triplet_margin_loss(anchor, same, other, margin=1.0).mean()


@SECTION.backward(triplet_loss, "anchor", "same", "other", formula=triplet_formula)
def triplet_loss_backward(anchor, same, other):
    return jax.grad(triplet_loss, (0, 1, 2))(anchor, same, other)


def contrastive(x, other, match):
    losses = []
    for a, b, equal in zip(x, other, match, strict=True):
        distance = math.sqrt(sum((a - b) ** 2))
        losses.append(distance**2 if equal else max(1 - distance, 0) ** 2)
    return np.mean(losses)


def contrastive_formula(x, other, match):
    distance = np.sqrt(np.sum((x - other) ** 2, -1, keepdims=True))
    apart = -2 * np.maximum(1 - distance, 0) / distance
    return both_signs(np.where(match[:, None], 2.0, apart) * (x - other) / len(x))


@SECTION.forward(contrastive, **MATCHES)
def contrastive_loss(x, other, match):
    """Hadsell et al. 2006."""
    d = jnp.linalg.norm(x - other, axis=-1)
    return jnp.where(match, d**2, jax.nn.relu(1 - d) ** 2).mean()


@SECTION.backward(contrastive_loss, "x", "other", formula=contrastive_formula)
def contrastive_loss_backward(x, other, match):
    return jax.grad(contrastive_loss, (0, 1))(x, other, match)
