"""Ways to damage a file: bytes at random, and fields of JSON, TOML, safetensors and parquet one at a time."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 99, 10**6, 2**31, 2**63, -(2**63), 10**30),
    *(0.0, 0.5, -1.5, 1e9, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "2", "x", "nan", "\x1b[31m\r\n", "../../../etc/hostname"),
    *("/dev/zero", "<script>", "\u202e", "a" * 5000),
    *([], {}, [1, 2], [-1], [[]], [None], {"a": 1}, {"": {}}, DEEP),
]  # fmt: skip


def damage_bytes(chance: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat, insert or overwrite some bytes."""
    if not content or chance.random() < 0.03:
        return chance.choice([b"", b"\0", b"\xff" * 64, b"{", b"[" * 100_000, chance.randbytes(200)])
    begin = chance.randrange(len(content))
    end = min(begin + chance.choice([1, 2, 8, 64, 1024]), len(content))
    kind = chance.randrange(7)
    if kind == 0:
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 3, 20])):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        return bytes(damaged)
    if kind == 1:
        return content[:begin]
    if kind == 2:
        return content[:begin] + content[end:]
    if kind == 3:
        return content[:end] + content[begin:]
    if kind == 4:
        return content[:begin] + chance.randbytes(end - begin) + content[begin:]
    if kind == 5:
        return content[:begin] + bytes([chance.choice([0, 255, 10, 44])]) * (end - begin) + content[end:]
    return b"\xef\xbb\xbf" + content if chance.random() < 0.2 else content[begin:]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of nested dicts and lists."""
    if isinstance(tree, dict):
        keys: Any = tree.keys()
    elif isinstance(tree, list):
        keys = range(len(tree))
    else:
        return []
    return [(tree, key) for key in keys] + [inner for key in keys for inner in places(tree[key])]


def damage_tree(chance: random.Random, tree: Any) -> Any:
    """Replace, remove, rename, repeat or exchange one or two values of nested dicts and lists."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice([1, 1, 1, 2])):
        where = places(tree)
        if not where:
            return chance.choice(VALUES)
        container, key = chance.choice(where)
        kind = chance.randrange(10)
        if kind < 5:
            container[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 5:
            del container[key]
        elif kind == 6 and isinstance(container, dict):
            container[chance.choice(["", "x", key + "_", "0"])] = container.pop(key)
        elif kind == 7 and isinstance(container, list):
            container += [container[key]] * chance.choice([1, 2, 50])
        elif kind == 8:
            other, its_key = chance.choice(where)
            container[key] = copy.deepcopy(other[its_key]) if its_key in keys_of(other) else None
        elif isinstance(container[key], int | float):
            container[key] = container[key] * chance.choice([-1, 2, 1000]) + chance.choice([-1, 0, 1])
        else:
            container[key] = [container[key]]
    return tree


def keys_of(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def damage_json(chance: random.Random, content: bytes) -> bytes:
    if chance.random() < 0.2:
        return damage_bytes(chance, content)
    return json.dumps(damage_tree(chance, json.loads(content))).encode()


def damage_lines(chance: random.Random, content: bytes) -> bytes:
    """Damage one line of a JSONL file."""
    lines = content.splitlines()
    if not lines or chance.random() < 0.2:
        return damage_bytes(chance, content)
    line = chance.randrange(len(lines))
    lines[line] = damage_json(chance, lines[line])
    return b"\n".join(lines)


def damage_csv(chance: random.Random, content: bytes) -> bytes:
    """Replace one field."""
    rows = [line.split(b",") for line in content.splitlines()]
    if chance.random() < 0.3:
        return damage_bytes(chance, content)
    row = chance.choice(rows)
    row[chance.randrange(len(row))] = str(chance.choice(VALUES)).encode()
    return b"\n".join(b",".join(row) for row in rows)


def damage_gzip(chance: random.Random, content: bytes) -> bytes:
    """Damage the compressed CSV, or the compressed bytes."""
    if chance.random() < 0.3:
        return damage_bytes(chance, content)
    return gzip.compress(damage_csv(chance, gzip.decompress(content)))


def damage_safetensors(chance: random.Random, content: bytes) -> bytes:
    """Damage the header's fields, its length, numbers of tensors, or any byte."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = chance.randrange(10)
    if kind < 4:
        text = json.dumps(damage_tree(chance, header)).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data
    if kind < 8:
        numbers = bytearray(data)
        for _ in range(chance.choice([1, 1, 40])):
            at = 4 * chance.randrange(max(len(numbers) // 4, 1))
            special = [b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\1\0\0\0"]
            special += [bytes(4), chance.randbytes(4)]
            numbers[at : at + 4] = chance.choice(special)
        return content[: 8 + length] + bytes(numbers)
    if kind == 8:
        wrong = chance.choice([0, 1, length - 1, length + 8, 10**9, 2**63 + 1, 2**64 - 1])
        return wrong.to_bytes(8, "little") + content[8:]
    return damage_bytes(chance, content)


def damage_parquet(chance: random.Random, content: bytes) -> bytes:
    """Drop, rename, retype, empty or overwrite a column, or damage any byte."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if chance.random() < 0.2:
        return damage_bytes(chance, content)
    table = pq.read_table(pa.BufferReader(content))
    column = chance.randrange(table.num_columns)
    name, kind = table.column_names[column], chance.randrange(7)
    if kind == 0:
        table = table.drop_columns([name])
    elif kind == 1:
        names = list(table.column_names)
        names[column] = chance.choice(["x", "", names[0], "../x"])
        table = table.rename_columns(names)
    elif kind == 2:
        table = table.slice(0, chance.choice([0, 0, 1, max(table.num_rows - 1, 0)]))
    elif kind == 3:
        table = pa.concat_tables([table, table])
    elif kind == 4 and chance.random() < 0.3:
        table = table.replace_schema_metadata({})
    else:
        rows = table.num_rows
        value = chance.choice(
            [None, "x", "<script>", -1, 0, 10**12, 2**62, 0.5, float("nan"), float("inf"), [1], [-1]]
        )
        cells = [value] * rows
        if chance.random() < 0.5 and rows:  # one cell
            cells = table.column(column).to_pylist()
            cells[chance.randrange(rows)] = value
        try:
            changed = pa.array(cells)
        except (pa.ArrowException, OverflowError):
            changed = pa.array([str(cell) for cell in cells])
        table = table.set_column(column, name, changed)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def damage_toml(chance: random.Random, content: bytes) -> bytes:
    import tomllib

    if chance.random() < 0.2:
        return damage_bytes(chance, content)
    tree = damage_tree(chance, tomllib.loads(content.decode()))
    lines = [f"{json.dumps(str(key))} = {toml_value(value)}" for key, value in tree.items()] if tree else []
    return "\n".join(lines).encode(errors="surrogatepass")


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        inside = (f"{json.dumps(str(key))} = {toml_value(inner)}" for key, inner in value.items())
        return f"{{{', '.join(inside)}}}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value if value is not None else "null")


def damage_torch(chance: random.Random, content: bytes) -> bytes:
    """Damage a value of what torch.load returns, or any byte."""
    import io

    import torch

    if chance.random() < 0.3:
        return damage_bytes(chance, content)
    tree = torch.load(io.BytesIO(content), weights_only=True)
    tree = damage_tree(chance, tree)
    for container, key in places(tree):
        if isinstance(container[key], torch.Tensor) and chance.random() < 0.3:
            value = container[key]
            changed = [value.float(), value.reshape(-1)[:1], -value, value * 1000, value.sum()]
            container[key] = chance.choice(changed)
    sink = io.BytesIO()
    torch.save(tree, sink)
    return sink.getvalue()


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": damage_json,
    ".jsonl": damage_lines,
    ".csv": damage_csv,
    ".gz": damage_gzip,
    ".safetensors": damage_safetensors,
    ".parquet": damage_parquet,
    ".toml": damage_toml,
    ".pt": damage_torch,
}


def damage_cells(chance: random.Random, file: Path) -> None:
    """Overwrite one cell or all of a parquet column with numbers or words of its own type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    column = chance.randrange(table.num_columns)
    kind = table.schema.field(column).type
    values: list[Any] = ["", "x", "<script>", "a" * 5000]
    if pa.types.is_integer(kind):
        values = [-1, 0, 1, 3, 99, 10**6, 2**31, 2**62, -(2**62)]
    elif pa.types.is_floating(kind):
        values = [0.0, -1.0, 1e300, float("nan"), float("inf")]
    elif pa.types.is_boolean(kind):
        values = [True, False]
    elif pa.types.is_list(kind):
        values = [[], [-1], [0, 0], [3] * 50, [2**31 - 1], [99, 1]]
        if pa.types.is_floating(kind.value_type):
            values = [[float(number) for number in numbers] for numbers in values]
    nothing = [None] if table.schema.field(column).nullable else []
    cells, value = table.column(column).to_pylist(), chance.choice([*nothing, *values])
    for row in [chance.randrange(len(cells))] if chance.random() < 0.5 else range(len(cells)):
        cells[row] = value
    damaged = table.set_column(column, table.schema.field(column), pa.array(cells, kind))
    pq.write_table(damaged, file)


def damage_file(chance: random.Random, file: Path) -> None:
    """Damage a file by what it holds; rarely remove it, or put something else in its place."""
    if chance.random() < 0.04:
        file.unlink()
        kind = chance.randrange(7)
        if kind == 0:
            file.mkdir()
        elif kind == 1:
            file.symlink_to(file.name)
        elif kind == 2:
            file.symlink_to("nowhere")
        elif kind == 3:
            os.mkfifo(file)
        elif kind == 4:
            file.symlink_to("/dev/zero")
        elif kind == 5:  # sparse: takes no disk space
            with file.open("wb") as large:
                large.truncate(10**9)
        return
    damaged = DAMAGE.get(file.suffix, damage_bytes)(chance, file.read_bytes())
    file.unlink()
    file.write_bytes(damaged)


def copy_folder(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target
