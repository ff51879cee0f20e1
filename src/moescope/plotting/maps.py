"""Two-dimensional maps of vectors: PCA, and t-SNE and UMAP with the extra `maps`; how faithful they are."""

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
NEAREST = 5  # neighbours that are compared
FEWEST = 8  # points that t-SNE and UMAP need


@dataclass(frozen=True)
class Cloud:
    """Points given by their inner products, which is all that a table of cosines holds."""

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
    """(coordinates on the first two principal components, their shares of the variance).

    Eigenvectors of the doubly centred Gram matrix times the roots of their eigenvalues (Gower 1966).
    """
    centred = cloud.gram - cloud.gram.mean(axis=0) - cloud.gram.mean(axis=1)[:, None] + cloud.gram.mean()
    values, vectors = np.linalg.eigh(centred)
    values = np.maximum(values[::-1], 0.0)
    share = values / values.sum() if values.sum() else np.zeros_like(values)
    coordinates = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    for column in range(coordinates.shape[1]):  # fix the arbitrary sign: the largest is positive
        if coordinates[np.abs(coordinates[:, column]).argmax(), column] < 0:
            coordinates[:, column] *= -1
    return coordinates, share[:2]


def pca(cloud: Cloud) -> np.ndarray:
    return principal_plane(cloud)[0]


def initial_layout(cloud: Cloud, spread: float) -> np.ndarray:
    """The scaled principal plane, a start that preserves global structure (Kobak & Linderman 2021)."""
    at = pca(cloud)
    size = at[:, 0].std()
    return np.asarray(at / size * spread if size else at).astype(np.float32)


def tsne(cloud: Cloud) -> np.ndarray:
    """t-SNE (van der Maaten & Hinton 2008) by scikit-learn; distances between groups mean little."""
    from sklearn.manifold import TSNE

    method = TSNE(
        perplexity=perplexity(len(cloud.gram)),
        metric="precomputed",
        init=initial_layout(cloud, 1e-4),
        random_state=SEED,
    )
    return np.asarray(method.fit_transform(cloud.distances), float)


@contextmanager
def restore_torch_threads() -> Iterator[None]:
    """Restore torch's thread count, which numba (used by umap-learn) sets for the whole process.

    Without this a training after a report would round differently from one before it.
    """
    torch: Any = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


def umap(cloud: Cloud) -> np.ndarray:
    """UMAP (McInnes, Healy & Melville 2018) by umap-learn; distances between groups mean little."""
    with warnings.catch_warnings(), restore_torch_threads():
        warnings.simplefilter("ignore")  # about TensorFlow, and about precomputed distances
        from umap import UMAP

        method = UMAP(
            n_neighbors=neighbours(len(cloud.gram)),
            metric="precomputed",
            init=initial_layout(cloud, 5.0),
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
    """A mapping method: its function, its settings for n points in words, and the package it needs."""

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


def preserved_neighbours(cloud: Cloud, at: np.ndarray) -> tuple[float, float, int]:
    """(share of each point's m nearest that are among its m nearest on the map, the chance level, m)."""
    n = len(at)
    m = max(min(NEAREST, (n - 1) // 2), 1)
    if n < 3:
        return float("nan"), float("nan"), m
    there, here = nearest(cloud.distances, m), nearest(Cloud.of_rows(at).distances, m)
    share = np.mean([len(np.intersect1d(a, b)) / m for a, b in zip(there, here, strict=True)])
    return float(share), m / (n - 1), m


def nearest(distances: np.ndarray, m: int) -> np.ndarray:
    others = distances.copy()
    np.fill_diagonal(others, np.inf)
    return np.argsort(others, axis=1, kind="stable")[:, :m]


@lru_cache
def plane_of_directions(n: int, width: int) -> float:
    """Share of variance on two axes of n random directions of that width: mean of 10 seeded draws."""
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(10):
        rows = generator.standard_normal((n, width))
        rows /= np.linalg.norm(rows, axis=1)[:, None]
        shares.append(principal_plane(Cloud.of_rows(rows))[1].sum())
    return float(np.mean(shares))
