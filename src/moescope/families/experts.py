"""How the experts of a layer may lie on disk.

One tensor each, fused over experts, or fused with gate and up in one.
"""

from __future__ import annotations

from collections.abc import Callable

from moescope.errors import BadInput
from moescope.families.layout import LayerTensors, Stacks, check_shape
from moescope.types import LazyTensor, SharedExpert


def per_expert(gate: str, up: str | None, down: str) -> Callable[[LayerTensors], Stacks]:
    """One [out, in] tensor an expert and projection; `up` is None for experts without a gate."""

    def read(tensors: LayerTensors) -> Stacks:
        gates = tensors.each(gate, "d_ff", tensors.d_model)
        d_ff = gates.shape[1]
        ups = tensors.each(up, d_ff, tensors.d_model) if up else None
        return gates, ups, tensors.each(down, tensors.d_model, d_ff)

    return read


def fused_gate_up(gate_up: str, down: str, interleaved: bool = False) -> Callable[[LayerTensors], Stacks]:
    """Gate and up of all experts in one tensor, down in another: [E, 2F, D] and [E, D, F], or both
    transposed.

    Which of the two is told by the shapes of both tensors together: with D known from the router they never
    look alike,
    except where F = D and the down tensor is square, and then gate_up is not. Gate is the first half of the
    2F axis, or its
    even places where `interleaved`.
    """

    def read(tensors: LayerTensors) -> Stacks:
        stored, lower = tensors.info(gate_up), tensors.info(down)
        width = tensors.d_model
        if len(stored.shape) != 3 or len(lower.shape) != 3:
            raise BadInput(
                f"{stored.file}: tensors {stored.name} and {lower.name} must have three axes; "
                "check how they were saved"
            )
        plain = stored.shape[2] == width and lower.shape[1] == width and stored.shape[1] == 2 * lower.shape[2]
        turned = (
            stored.shape[1] == width and lower.shape[2] == width and stored.shape[2] == 2 * lower.shape[1]
        )
        if plain == turned:
            raise BadInput(
                f"{stored.file}: tensors {stored.name} {list(stored.shape)} and {lower.name} "
                f"{list(lower.shape)} do not fit "
                f"d_model {width}; expected [E, 2F, {width}] and [E, {width}, F], or both "
                "transposed; check how they were saved"
            )
        d_ff = lower.shape[2] if plain else lower.shape[1]

        def half(which: int) -> slice:
            return slice(which, None, 2) if interleaved else slice(which * d_ff, (which + 1) * d_ff)

        def take(which: int):  # type: ignore[no-untyped-def]
            return (lambda part: part[half(which)]) if plain else (lambda part: part[:, half(which)].T)

        sides = (2 * d_ff, width) if plain else (width, 2 * d_ff)
        lower_sides = (width, d_ff) if plain else (d_ff, width)
        gates, ups = (tensors.slices(gate_up, take(which), sides, (d_ff, width)) for which in (0, 1))
        downs = tensors.slices(
            down, (lambda part: part) if plain else (lambda part: part.T), lower_sides, (width, d_ff)
        )
        return gates, ups, downs

    return read


# The names most layouts give their experts under `mlp.experts`, one by one and fused.
PROJECTIONS = ("{L}.mlp.experts.{e}.gate_proj.weight", "{L}.mlp.experts.gate_up_proj")


def projections() -> Callable[[LayerTensors], Stacks]:
    """gate_proj, up_proj and down_proj under `mlp.experts`, in either form."""
    each, fused = PROJECTIONS
    ups, downs = each.replace("gate_proj", "up_proj"), each.replace("gate_proj", "down_proj")
    return either(
        (each, per_expert(each, ups, downs)), (fused, fused_gate_up(fused, "{L}.mlp.experts.down_proj"))
    )


def either(*ways: tuple[str, Callable[[LayerTensors], Stacks]]) -> Callable[[LayerTensors], Stacks]:
    """The first way whose named tensor is there: one family may be saved in several forms."""

    def read(tensors: LayerTensors) -> Stacks:
        for template, way in ways:
            if tensors.has(template, 0):
                return way(tensors)
        first, *others = (tensors.name(template, 0) for template, _ in ways)
        instead = "".join(f", or {other} in its place," for other in others)
        raise BadInput(
            f"{tensors.checkpoint.shown}: tensor {first}{instead} is missing; download the shard "
            "that holds it"
        )

    return read


def shared_expert(pattern: str, gate: str | None = None) -> Callable[[LayerTensors], SharedExpert | None]:
    """The shared expert whose projections are named by {p} = gate, up, down.

    None where the layer has none.
    """

    def read(tensors: LayerTensors) -> SharedExpert | None:
        names = {part: pattern.replace("{p}", part) for part in ("gate", "up", "down")}
        if not tensors.has(names["gate"]):
            return None
        info = tensors.info(names["gate"])
        check_shape(info, ("d_ff", tensors.d_model))
        hidden = info.shape[0]
        parts: dict[str, LazyTensor] = {
            part: tensors.lazy(
                name, (tensors.d_model, hidden) if part == "down" else (hidden, tensors.d_model)
            )
            for part, name in names.items()
        }
        front = tensors.lazy(gate, (1, tensors.d_model)) if gate and tensors.has(gate) else None
        return SharedExpert(parts["gate"], parts["up"], parts["down"], front)

    return read


def shared_gate_up(gate_up: str, down: str) -> Callable[[LayerTensors], SharedExpert | None]:
    """The shared expert whose gate and up lie one below the other in one tensor [2F, D].

    None where the layer has none.
    """

    def read(tensors: LayerTensors) -> SharedExpert | None:
        if not tensors.has(gate_up):
            return None
        stored = tensors.info(gate_up)
        check_shape(stored, ("2 * d_ff", tensors.d_model))
        hidden = stored.shape[0] // 2
        lower = tensors.lazy(down, (tensors.d_model, hidden))

        def half(which: int) -> LazyTensor:
            rows = slice(which * hidden, (which + 1) * hidden)
            return LazyTensor(
                stored.name,
                (hidden, tensors.d_model),
                stored.dtype,
                stored.file,
                lambda: tensors.checkpoint.read(stored.name, rows),
            )

        return SharedExpert(half(0), half(1), lower)

    return read


def first_shared(
    *ways: Callable[[LayerTensors], SharedExpert | None],
) -> Callable[[LayerTensors], SharedExpert | None]:
    """The first of several ways that finds a shared expert."""

    def read(tensors: LayerTensors) -> SharedExpert | None:
        return next((found for way in ways if (found := way(tensors)) is not None), None)

    return read
