"""Maps of a layer's experts on a plane: PCA, exact t-SNE and, on request, UMAP; how faithful they are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

SEED = 0  # of UMAP; the other methods draw nothing
PERPLEXITY = 30.0  # of t-SNE; a third of the points where they are few
NEIGHBOURS = 15  # of UMAP; all others where they are few
NEAREST = 5  # neighbours that are compared
FEWEST = 8  # points that t-SNE and UMAP need
EXAGGERATION, EXAGGERATED_STEPS, STEPS = 12.0, 100, 350  # of t-SNE; 750 preserve at most 1 % more
TOGETHER = 2**18  # pairs of points that take a step of t-SNE together: what a processor's cache holds
DRAWN_FROM = 1.0  # expected tokens of a pair from which on its lift counts
FOLD = 8.0  # lifts count up to so many times above and below chance


@dataclass(frozen=True)
class Cloud:
    """Points given by their inner products, which is all that a table of cosines holds."""

    gram: np.ndarray

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> Cloud:
        return cls(rows @ rows.T)

    @cached_property
    def plane(self) -> tuple[np.ndarray, np.ndarray]:
        return principal_plane(self)

    @cached_property
    def distances(self) -> np.ndarray:
        sizes = np.diag(self.gram)
        squared = np.maximum(sizes[:, None] + sizes[None, :] - 2 * self.gram, 0.0)
        np.fill_diagonal(squared, 0.0)
        return np.asarray(np.sqrt(squared))


# --- methods


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


def pca(clouds: Sequence[Cloud]) -> list[np.ndarray]:
    return [cloud.plane[0] for cloud in clouds]


def initial_layout(cloud: Cloud, spread: float) -> np.ndarray:
    """The scaled principal plane, a start that preserves global structure (Kobak & Linderman 2021)."""
    at = cloud.plane[0]
    size = at[:, 0].std()
    return np.asarray(at / size * spread if size else at).astype(np.float32)


def tsne(clouds: Sequence[Cloud]) -> list[np.ndarray]:
    """Exact t-SNE: minimise KL(P || Q), Q[i, j] proportional to 1/(1 + ||y_i - y_j||^2).

    van der Maaten & Hinton 2008, with gains, momentum and early exaggeration; learning rate of Belkina et al.
    2019. It starts from the principal plane and draws nothing. Distances between groups mean little. Clouds
    of equal size take each step together, which does not change them.
    """
    by_size: dict[int, list[int]] = {}
    for index, cloud in enumerate(clouds):
        by_size.setdefault(len(cloud.gram), []).append(index)
    places: dict[int, np.ndarray] = {}
    for n, indices in by_size.items():
        together = max(TOGETHER // n**2, 1)
        for first in range(0, len(indices), together):
            part = indices[first : first + together]
            places.update(zip(part, tsne_of_equal_size([clouds[index] for index in part]), strict=True))
    return [places[index] for index in range(len(clouds))]


def tsne_of_equal_size(clouds: Sequence[Cloud]) -> np.ndarray:
    """Return coordinates [cloud, point, 2]."""
    n = len(clouds[0].gram)
    perplexity, diagonal = min(PERPLEXITY, (n - 1) / 3), np.arange(n)
    target = np.stack([neighbour_probabilities(cloud.distances**2, perplexity) for cloud in clouds])
    target = target.astype(np.float32)
    at, rate = np.stack([initial_layout(cloud, 1e-4) for cloud in clouds]), n / EXAGGERATION
    for exaggeration, momentum, steps in (
        (EXAGGERATION, 0.5, EXAGGERATED_STEPS),
        (1.0, 0.8, STEPS - EXAGGERATED_STEPS),
    ):
        wanted, velocity, gains = target * np.float32(exaggeration), np.zeros_like(at), np.ones_like(at)
        for _ in range(steps):
            sizes = (at * at).sum(axis=2)
            near = at @ at.transpose(0, 2, 1)  # becomes 1/(1 + squared distance), in place
            near *= -2
            near += sizes[:, :, None] + sizes[:, None, :]
            np.maximum(near, 0, out=near)
            near += 1
            np.divide(1, near, out=near)
            near[:, diagonal, diagonal] = 0
            force = near / near.reshape(len(at), -1).sum(axis=1)[:, None, None]
            np.subtract(wanted, force, out=force)
            force *= near
            gradient = 4 * (force.sum(axis=2)[:, :, None] * at - force @ at)
            gains = np.maximum(np.where(velocity * gradient < 0, gains + 0.2, gains * 0.8), 0.01)
            velocity = momentum * velocity - rate * gains * gradient
            at = at + velocity
    return np.asarray(at, float)


def neighbour_probabilities(squared: np.ndarray, perplexity: float) -> np.ndarray:
    """(P[j | i] + P[i | j])/2n of Gaussians whose widths give every point that perplexity, by bisection."""
    n = len(squared)
    others = ~np.eye(n, dtype=bool)
    squared = squared[others].reshape(n, n - 1)
    squared = squared - squared.min(axis=1, keepdims=True)
    low, high, precision = np.zeros((n, 1)), np.full((n, 1), np.inf), np.ones((n, 1))
    for _ in range(64):
        weight = np.exp(-precision * squared)
        total = weight.sum(axis=1, keepdims=True)
        entropy = np.log(total) + precision * (weight * squared).sum(axis=1, keepdims=True) / total
        wide = entropy > np.log(perplexity)
        low, high = np.where(wide, precision, low), np.where(wide, high, precision)
        precision = np.where(np.isinf(high), precision * 2, (low + high) / 2)
    conditional = np.zeros((n, n))
    conditional[others] = (weight / total).ravel()
    return (conditional + conditional.T) / (2 * n)


@contextmanager
def restore_torch_threads() -> Iterator[None]:
    """Restore torch's thread count, which numba (used by umap-learn) sets for the whole process.

    Without this a training after a trace would round differently from one before it.
    """
    torch: Any = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


def umap(clouds: Sequence[Cloud]) -> list[np.ndarray]:
    """UMAP (McInnes, Healy & Melville 2018) by umap-learn; distances between groups mean little."""
    with warnings.catch_warnings(), restore_torch_threads():
        warnings.simplefilter("ignore")  # about TensorFlow, and about precomputed distances
        from umap import UMAP

        places = []
        for cloud in clouds:
            method = UMAP(
                n_neighbors=min(NEIGHBOURS, len(cloud.gram) - 1),
                metric="precomputed",
                init=initial_layout(cloud, 5.0),
                random_state=SEED,
                n_jobs=1,
            )
            places.append(np.asarray(method.fit_transform(cloud.distances), float))
        return places


METHODS: dict[str, Callable[[Sequence[Cloud]], list[np.ndarray]]] = {"pca": pca, "tsne": tsne, "umap": umap}


def map_methods(slowest: str) -> tuple[str, ...]:
    """Return the methods up to the slowest one that is wanted; UMAP must be installed."""
    if slowest == "umap" and find_spec("umap") is None:
        raise BadInput("--maps umap: umap-learn is not installed; pip install 'moescope[maps]'")
    return tuple(METHODS)[: tuple(METHODS).index(slowest) + 1]


# --- faithfulness


def preserved_neighbours(cloud: Cloud, at: np.ndarray) -> tuple[float, float]:
    """(share of each point's nearest five that are among its nearest five on the map, the chance level)."""
    n = len(at)
    m = max(min(NEAREST, (n - 1) // 2), 1)
    if n < 3:
        return float("nan"), float("nan")
    there, here = nearest(cloud.distances, m), nearest(Cloud.of_rows(at).distances, m)
    return float((there[:, :, None] == here[:, None, :]).sum() / (n * m)), m / (n - 1)


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


@lru_cache
def plane_of_noise(n: int) -> float:
    """Share of variance on two axes of n profiles of noise: mean of 20 seeded symmetric normal matrices."""
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        noise = generator.standard_normal((n, n))
        shares.append(principal_plane(Cloud.of_rows(fill_diagonal(noise + noise.T)))[1].sum())
    return float(np.mean(shares))


# --- experts as points


def expected_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Rows of `coactivation` with `over` = lift/chance_lift, `expected` = c_a c_b/N chance_lift.

    `share_a` and `share_b` are the shares c/N of tokens that chose either expert.
    """
    tokens = pairs["layer_tokens"].clip(lower=1)
    share_a, share_b = pairs["tokens_a"] / tokens, pairs["tokens_b"] / tokens
    expected = share_a * share_b * tokens * pairs["chance_lift"]
    over = pairs["lift"] / pairs["chance_lift"]
    return pairs.assign(share_a=share_a, share_b=share_b, expected=expected, over=over)


def lift_over_chance(pairs: pd.DataFrame) -> pd.DataFrame:
    """Matrix lift/chance_lift of a layer's `expected_pairs`; empty where less than one token is expected."""
    drawn = pairs.assign(over=pairs["over"].where(pairs["expected"] >= DRAWN_FROM))
    return drawn.pivot(index="expert_a", columns="expert_b", values="over").sort_index().sort_index(axis=1)


def coactivation_profiles(over: np.ndarray) -> np.ndarray:
    """Each expert's log2 lift over chance with every other expert; pairs without a value count as chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        profile = np.clip(np.log2(over), -np.log2(FOLD), np.log2(FOLD))
    profile[np.isnan(profile)] = 0.0
    return fill_diagonal(profile)


def fill_diagonal(profile: np.ndarray) -> np.ndarray:
    """Set each expert's own entry to its largest, without which two identical experts would differ."""
    filled = profile.copy()
    np.fill_diagonal(filled, -np.inf)
    np.fill_diagonal(filled, filled.max(axis=1, initial=0.0))
    return filled


def coactivation_points(pairs: pd.DataFrame) -> tuple[np.ndarray, Cloud, float]:
    """Return experts, points and the share of variance that two axes of noise hold, of one layer's pairs.

    An expert of whose pairs none is expected once has no profile and no place; if fewer than three have one,
    the layer has no map.
    """
    matrix = lift_over_chance(pairs)
    known = matrix.notna().any(axis=1).to_numpy()
    known = known & (known.all() or known.sum() > 2)
    matrix = matrix.loc[known, known]
    cloud = Cloud.of_rows(coactivation_profiles(matrix.to_numpy(float)))
    return matrix.index.to_numpy(), cloud, plane_of_noise(len(matrix)) if len(matrix) else np.nan


def direction_points(cosines: pd.DataFrame) -> tuple[np.ndarray, Cloud, float]:
    """Return the same of unit vectors, by their cosines; an expert without a vector has no place."""
    gram = np.eye(int(cosines["expert_b"].max()) + 1)
    a, b = cosines["expert_a"].to_numpy(), cosines["expert_b"].to_numpy()
    gram[a, b] = gram[b, a] = cosines["cosine"].to_numpy(float)
    experts = np.flatnonzero(np.isfinite(gram).sum(axis=1) > 1)
    level = plane_of_directions(len(experts), int(cosines["dimensions"].iloc[0]))
    return experts, Cloud(gram[np.ix_(experts, experts)]), level


def expert_maps(tables: dict[str, pd.DataFrame], methods: Sequence[str]) -> pd.DataFrame:
    """Return the maps table: every layer's experts by co-activation, router rows and mean outputs."""
    import pandas as pd

    from moescope.routing.tables import TABLES

    pairs, cosines = expected_pairs(tables["coactivation"]), tables["expert_cosines"]
    keys = ["step", "layer", "layer_name"]
    subjects = [((*key, "coactivation"), coactivation_points(rows)) for key, rows in pairs.groupby(keys)]
    subjects += [
        (key, direction_points(rows))
        for key, rows in cosines.groupby([*keys, "of"])
        if rows["cosine"].notna().any()
    ]
    subjects = [subject for subject in subjects if len(subject[1][0])]
    places: dict[tuple[int, str], np.ndarray] = {}
    for method in methods:
        fewest = FEWEST if method != methods[0] else 0
        drawn = [at for at, (_, (experts, _, _)) in enumerate(subjects) if len(experts) >= fewest]
        found = METHODS[method]([subjects[at][1][1] for at in drawn])
        places.update({(at, method): place for at, place in zip(drawn, found, strict=True)})
    columns: dict[str, list[np.ndarray]] = {name: [] for name in TABLES["maps"].columns}
    for (subject, method), at in sorted(places.items(), key=lambda item: item[0][0]):
        (step, layer, layer_name, of), (experts, cloud, level) = subjects[subject]
        preserved, chance = preserved_neighbours(cloud, at)
        part = {
            "step": step,
            "layer": layer,
            "layer_name": layer_name,
            "of": of,
            "method": method,
            "expert": experts,
            "x": at[:, 0],
            "y": at[:, 1] if at.shape[1] > 1 else 0.0,
            "variance": cloud.plane[1].sum(),
            "variance_chance": level,
            "neighbours": preserved,
            "neighbours_chance": chance,
        }
        for name, value in part.items():
            columns[name].append(np.broadcast_to(value, len(experts)))
    if not places:
        return pd.DataFrame(columns=list(TABLES["maps"].columns))
    return pd.DataFrame({name: np.concatenate(parts) for name, parts in columns.items()})
