"""Vectors laid out on a plane: principal components, and t-SNE and UMAP where the extra `maps` is installed.

And how true the plane is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

SEED = 0
PERPLEXITY = 30.0  # of t-SNE; a third of the points where they are few
NEIGHBOURS = 15  # of UMAP; all others where they are few
NEAREST = 5  # neighbours by which a map is judged
FEWEST = 8  # points from which on neighbourhoods can be told apart


@dataclass(frozen=True)
class Cloud:
    """Points known by their inner products.

    Everything a layout needs, and all that a table of cosines holds.
    """

    gram: np.ndarray

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> Cloud:
        return cls(rows @ rows.T)

    @property
    def distances(self) -> np.ndarray:
        sizes = np.diag(self.gram)
        squared = np.maximum(sizes[:, None] + sizes[None, :] - 2 * self.gram, 0.0)
        np.fill_diagonal(squared, 0.0)
        return np.asarray(np.sqrt(squared))


def principal_plane(cloud: Cloud) -> tuple[np.ndarray, np.ndarray]:
    """(coordinates on the first two principal components, their shares of the variance), from inner products
    alone.

    Eigenvectors of the doubly centred Gram matrix times the roots of their eigenvalues (Gower 1966).
    """
    centred = cloud.gram - cloud.gram.mean(axis=0) - cloud.gram.mean(axis=1)[:, None] + cloud.gram.mean()
    values, vectors = np.linalg.eigh(centred)
    values = np.maximum(values[::-1], 0.0)
    share = values / values.sum() if values.sum() else np.zeros_like(values)
    coordinates = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    for column in range(coordinates.shape[1]):  # a component's sign is arbitrary: the largest is positive
        if coordinates[np.abs(coordinates[:, column]).argmax(), column] < 0:
            coordinates[:, column] *= -1
    return coordinates, share[:2]


def pca(cloud: Cloud) -> np.ndarray:
    return principal_plane(cloud)[0]


def started(cloud: Cloud, spread: float) -> np.ndarray:
    """The principal plane, scaled.

    A start that keeps what is far apart far apart, and the same each time (Kobak & Linderman 2021).
    """
    at = pca(cloud)
    size = at[:, 0].std()
    return np.asarray(at / size * spread if size else at).astype(np.float32)


def tsne(cloud: Cloud) -> np.ndarray:
    """t-SNE (van der Maaten & Hinton 2008) by scikit-learn, from the principal plane.

    Distances between groups mean little.
    """
    from sklearn.manifold import TSNE

    method = TSNE(
        perplexity=perplexity(len(cloud.gram)),
        metric="precomputed",
        init=started(cloud, 1e-4),
        random_state=SEED,
    )
    return np.asarray(method.fit_transform(cloud.distances), float)


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Puts torch's number of threads back: numba, by which umap-learn is compiled, sets it for the whole
    process when it starts its own,
    and a training after a report would round otherwise than one before it."""
    torch: Any = sys.modules.get("torch")  # where nobody has imported it, there is nothing to put back
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


def umap(cloud: Cloud) -> np.ndarray:
    """UMAP (McInnes, Healy & Melville 2018) by umap-learn, from the principal plane.

    Distances between groups mean little.
    """
    with warnings.catch_warnings(), threads_as_before():
        warnings.simplefilter(
            "ignore"
        )  # on its import about TensorFlow; on distances that it cannot map back
        from umap import UMAP

        method = UMAP(
            n_neighbors=neighbours(len(cloud.gram)),
            metric="precomputed",
            init=started(cloud, 5.0),
            random_state=SEED,
            n_jobs=1,
        )
        return np.asarray(method.fit_transform(cloud.distances), float)


def perplexity(n: int) -> float:
    return min(PERPLEXITY, (n - 1) / 3)


def neighbours(n: int) -> int:
    return min(NEIGHBOURS, n - 1)


@dataclass(frozen=True)
class Layout:
    """A way to lay points out: its name, how, its setting for n points in words, and the package it needs."""

    name: str
    title: str
    place: Callable[[Cloud], np.ndarray]
    setting: Callable[[int], str]
    package: str = ""

    @property
    def installed(self) -> bool:
        return not self.package or find_spec(self.package) is not None


LAYOUTS = [
    Layout("pca", "PCA", pca, lambda n: ""),
    Layout("umap", "UMAP", umap, lambda n: f" ({neighbours(n)} neighbours, seed {SEED})", "umap"),
    Layout("tsne", "t-SNE", tsne, lambda n: f" (perplexity {perplexity(n):.3g}, seed {SEED})", "sklearn"),
]


def kept_neighbours(cloud: Cloud, at: np.ndarray) -> tuple[float, float, int]:
    """(share of each point's nearest that are among its nearest on the plane, that share by chance.

    How many nearest are looked at).
    """
    n = len(at)
    m = max(min(NEAREST, (n - 1) // 2), 1)
    if n < 3:
        return float("nan"), float("nan"), m
    there, here = nearest(cloud.distances, m), nearest(Cloud.of_rows(at).distances, m)
    kept = np.mean([len(np.intersect1d(a, b)) / m for a, b in zip(there, here, strict=True)])
    return float(kept), m / (n - 1), m


def nearest(distances: np.ndarray, m: int) -> np.ndarray:
    others = distances.copy()
    np.fill_diagonal(others, np.inf)
    return np.argsort(others, axis=1, kind="stable")[:, :m]


@lru_cache
def plane_of_directions(n: int, width: int) -> float:
    """The share of variance that two axes hold of n random directions of that width.

    Mean of 10 seeded draws.
    """
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(10):
        rows = generator.standard_normal((n, width))
        rows /= np.linalg.norm(rows, axis=1)[:, None]
        shares.append(principal_plane(Cloud.of_rows(rows))[1].sum())
    return float(np.mean(shares))
