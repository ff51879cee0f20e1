"""Maps of a layer's experts on a plane: PCA and, on request, t-SNE and UMAP; how faithful they are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

SEED = 0  # of UMAP; the other methods draw nothing from it
PERPLEXITY = 30.0  # of t-SNE; a third of the points where they are few
NEIGHBOURS = 15  # of UMAP; all others where they are few
NEAREST = 5  # neighbours that are compared
FEWEST = 8  # points that t-SNE and UMAP need
DRAWN_FROM = 1.0  # expected tokens of a pair from which on its lift counts
TRUSTED_FROM = 30  # experts from which on neighbourhoods of t-SNE and UMAP are worth showing
UNUSED = "no token"  # in the place of a domain
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
        """(coordinates on the first two principal components, their shares of the variance).

        Eigenvectors of the doubly centred Gram matrix times the roots of their eigenvalues (Gower 1966).
        """
        means = self.gram.mean(axis=0)
        values, vectors = np.linalg.eigh(self.gram - means - means[:, None] + self.gram.mean())
        values = np.maximum(values[::-1], 0.0)
        share = values / values.sum() if values.sum() else np.zeros_like(values)
        coordinates = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
        largest = np.take_along_axis(coordinates, np.abs(coordinates).argmax(axis=0)[None], axis=0)
        return coordinates * np.where(largest < 0, -1, 1), share[:2]  # fixes the arbitrary sign

    @cached_property
    def distances(self) -> np.ndarray:
        sizes = np.diag(self.gram)
        squared = np.maximum(sizes[:, None] + sizes[None, :] - 2 * self.gram, 0.0)
        np.fill_diagonal(squared, 0.0)
        return np.asarray(np.sqrt(squared))


# --- methods


def initial_layout(cloud: Cloud, spread: float) -> np.ndarray:
    """The scaled principal plane, a start that preserves global structure (Kobak & Linderman 2021)."""
    at = cloud.plane[0]
    size = at[:, 0].std()
    return np.asarray(at / size * spread if size else at).astype(np.float32)


def tsne(cloud: Cloud) -> np.ndarray:
    """Exact t-SNE (van der Maaten & Hinton 2008) by scikit-learn; distances between groups mean little."""
    from sklearn.manifold import TSNE

    method = TSNE(
        perplexity=min(PERPLEXITY, (len(cloud.gram) - 1) / 3),
        metric="precomputed",
        init=initial_layout(cloud, 1e-4),
        method="exact",
        random_state=SEED,
    )
    return np.asarray(method.fit_transform(cloud.distances.copy()), float)  # it squares them in place


@contextmanager
def restore_torch_threads() -> Iterator[None]:
    """Restore torch's thread count, which numba (used by umap-learn) sets for the whole process.

    Without this a training after a trace would round differently from one before it.
    """
    torch: Any = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
        yield


def umap(cloud: Cloud) -> np.ndarray:
    """UMAP (McInnes, Healy & Melville 2018) by umap-learn; distances between groups mean little."""
    with warnings.catch_warnings(), restore_torch_threads():
        warnings.simplefilter("ignore")  # about TensorFlow, and about precomputed distances
        from umap import UMAP

        method = UMAP(
            n_neighbors=min(NEIGHBOURS, len(cloud.gram) - 1),
            metric="precomputed",
            init=initial_layout(cloud, 5.0),
            random_state=SEED,
            n_jobs=1,
        )
        return np.asarray(method.fit_transform(cloud.distances), float)


METHODS: dict[str, Callable[[Cloud], np.ndarray]] = {
    "pca": lambda cloud: cloud.plane[0],
    "tsne": tsne,
    "umap": umap,
}


def map_methods(slowest: str) -> tuple[str, ...]:
    """Return the methods up to the slowest one that is wanted; their packages must be installed."""
    methods = tuple(METHODS)[: tuple(METHODS).index(slowest) + 1]
    for method, package in (("tsne", "sklearn"), ("umap", "umap")):
        if method in methods and find_spec(package) is None:
            raise BadInput(f"--maps {slowest}: no package {package}; pip install 'moescope[maps]'")
    return methods


# --- faithfulness


def preserved_neighbours(cloud: Cloud, at: np.ndarray) -> tuple[float, float]:
    """(share of each point's nearest five that are among its nearest five on the map, the chance level)."""
    if (n := len(at)) < 3:
        return float("nan"), float("nan")
    m = min(NEAREST, (n - 1) // 2)
    there, here = nearest(cloud.distances, m), nearest(Cloud.of_rows(at).distances, m)
    return float((there[:, :, None] == here[:, None, :]).sum() / (n * m)), m / (n - 1)


def nearest(distances: np.ndarray, m: int) -> np.ndarray:
    others = distances.copy()
    np.fill_diagonal(others, np.inf)
    return np.argsort(others, axis=1, kind="stable")[:, :m]


@lru_cache
def plane_of_directions(n: int, width: int) -> float:
    """Share of variance on two axes of n random directions of that width: mean of 10 seeded draws."""
    draws = np.random.default_rng(0).standard_normal((10, n, width))
    units = draws / np.linalg.norm(draws, axis=2, keepdims=True)
    return float(np.mean([Cloud.of_rows(rows).plane[1].sum() for rows in units]))


@lru_cache
def plane_of_noise(n: int) -> float:
    """Share of variance on two axes of n profiles of noise: mean of 20 seeded symmetric normal matrices."""
    draws = np.random.default_rng(0).standard_normal((20, n, n))
    profiles = [fill_diagonal(noise + noise.T) for noise in draws]
    return float(np.mean([Cloud.of_rows(profile).plane[1].sum() for profile in profiles]))


# --- experts as points


def lift_over_chance(pairs: pd.DataFrame) -> pd.DataFrame:
    """Matrix of co-activation over chance of a layer's pairs; empty where less than one token is expected."""
    drawn = pairs.assign(over=pairs["over"].where(pairs["expected"] >= DRAWN_FROM))
    return drawn.pivot(index="expert_a", columns="expert_b", values="over").sort_index().sort_index(axis=1)


def coactivation_order(over_EE: np.ndarray) -> list[int]:
    """Experts ordered by average linkage of lifts over chance, so that co-activated ones are adjacent."""
    if len(over_EE) < 3:
        return list(range(len(over_EE)))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    lift = np.nan_to_num(np.clip(over_EE, 0, FOLD))
    near = (lift + lift.T) / 2
    distance = near.max() - near
    np.fill_diagonal(distance, 0)
    return [int(leaf) for leaf in leaves_list(linkage(squareform(distance, checks=False), "average"))]


def coactivation_profiles(over: np.ndarray) -> np.ndarray:
    """Each expert's log2 lift over chance with every other expert; pairs without a value count as chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        profile = np.clip(np.log2(over), -np.log2(FOLD), np.log2(FOLD))
    return fill_diagonal(np.nan_to_num(profile))


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


def expert_maps(tables: dict[str, pd.DataFrame], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of the maps table: of every layer's co-activation, router rows and mean outputs."""
    pairs, cosines = tables["coactivation"], tables["expert_cosines"]
    keys = ["step", "layer", "layer_name"]
    subjects = [((*key, "coactivation"), coactivation_points(rows)) for key, rows in pairs.groupby(keys)]
    subjects += [
        (key, direction_points(rows))
        for key, rows in cosines.groupby([*keys, "of"])
        if rows["cosine"].notna().any()
    ]
    columns = []
    for subject, (experts, cloud, level) in subjects:
        for method in methods:
            if len(experts) >= (FEWEST if method != methods[0] else 1):
                at = METHODS[method](cloud)
                preserved, chance = preserved_neighbours(cloud, at)
                columns.append(
                    {
                        **dict(zip((*keys, "of"), subject, strict=True)),
                        "method": method,
                        "expert": experts,
                        "x": at[:, 0],
                        "y": at[:, 1] if at.shape[1] > 1 else np.zeros(len(at)),
                        "variance": cloud.plane[1].sum(),
                        "variance_chance": level,
                        "neighbours": preserved,
                        "neighbours_chance": chance,
                    }
                )
    return columns


def map_facts(tables: dict[str, pd.DataFrame], phase: str) -> pd.DataFrame:
    """Return the maps with each expert's load and main domain, and which method is `best`.

    The main domain is that of highest affinity; the best method is the slowest there is, PCA under 30
    experts.
    """
    maps, load, domains = tables["maps"], tables["load_totals"], tables["domains"]
    if maps.empty:
        return maps
    key, group = ["layer", "expert"], ["layer", "of"]
    load = load[load["phase"] == phase].set_index(key)["times_even"].rename("load")
    known = domains[domains["affinity"].notna()]
    main = known.loc[known.groupby(key)["affinity"].idxmax()].set_index(key)["domain"].rename("domain")
    rows = maps.join(load, on=key).join(main, on=key)
    rank = rows["method"].map(list(METHODS).index)
    slowest = rank.where(rows.groupby(group)["expert"].transform("nunique") >= TRUSTED_FROM, 0)
    return maps.assign(
        times_even=rows["load"],
        main_domain=rows["domain"].fillna(UNUSED) if len(domains) else None,
        best=rank == slowest.groupby([rows[name] for name in group]).transform("max"),
    )
