#!/usr/bin/env python3
"""Write the README's section on the disk format from ``hookstore/format.py``, or with ``--check`` see that it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from hookstore import dimensions, structure
from hookstore import format as spec
from hookstore.portion import token_of

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- disk format: written by tools/readme.py from hookstore/format.py -->", "<!-- end of disk format -->"


def layout() -> str:
    """Return the picture of a run's directory."""
    example = spec.ArraySpec("conv1", "activation", "train", "", "float32", "activation", (64, 32, 28, 28), (1, 41))
    return f"""    RUN/
      {spec.RUN_FILE}                       format version ({spec.FORMAT_VERSION}), what was recorded, environment
      {spec.LAYERS_DIR}/                        a Zarr v3 group
        {example.path.split("/")[0]}/                       a group for each layer; the name is escaped, the true one is in its attributes
          {example.name}/                an array (epoch, batch, sample, …); one chunk is one capture
            zarr.json
            {example.shard_key((0, 0))}          a sealed shard
            {spec.unsealed_name(example.shard_key((0, 1)))}   one that is being written
      {spec.MANIFEST_DIR}/
        {spec.part_name(0, 0, 0, 0x1B2C3D4E)}  manifest rows; rank, attempt, number, crc32c of the file
      {spec.JOURNAL_DIR}/                       only while recording, or after a kill
        {spec.segment_name(0, 0, 1)}   rows that are in no part yet
        {spec.LOCK_FILE}                    who writes: host, boot, process
      {spec.DAMAGED_DIR}/                       only after `hookstore recover` found something broken: it is put aside there"""


def rules() -> str:
    """Return the rules on names, chunks, shards and the journal."""
    names = ", ".join(f"`{name!r}` → `{spec.escape(name)}`" for name in ("layer1.0.conv1", "Mixed_5b", "", "..", "a/b"))
    arrays = ", ".join(
        f"`{name}`"
        for name in (
            spec.array_name("activation"),
            spec.array_name("activation", phase="eval"),
            spec.array_name("activation", portion=token_of("sample[:8]")),
            spec.array_name("parameter", leaf="weight"),
            spec.array_name("activation", leaf="0"),
            spec.array_name("activation", dtype="bfloat16"),
            spec.array_name("activation", chunk=(8, 64, 768)),
            spec.array_name("activation", calls=True),
            spec.array_name("activation", rank=3),
        )
    )
    part = spec.ArraySpec(
        "fc", "activation", "train", "", "float32", "activation", (8, 10), (1, 1), portion="sample[:8]", dims=("sample", "feature")
    )
    kept, feature = (dimension.wished for dimension in dimensions.dimensions_of(part))
    token = spec.array_name("activation", portion=token_of(part.portion))
    annotation = spec.ArraySpec("", "annotation", "train", "label", "int64", spec.array_name("annotation", leaf="label"), (8,), (1, 1)).path
    return f"""- **Names.** Up to {spec.COMPONENT_BYTES} bytes exact, beyond that cut and ended by a hash: {names}.
- **Arrays.** One per kind, leaf, phase, part of the tensor, dtype, size class, and for calls from 1 on: {arrays}.
  Bits of the dtypes that have no registered Zarr name are stored as unsigned integers; the torch dtype is in the attributes and in the manifest.
- **Parts.** Of a tensor of which `select` keeps `{part.portion}` the part is in `{token}`; `select` and `dims` are in the array's attributes. Dimensions
  are called `sample` or as `dims` says (`{feature}`) while that name has one size among the layer's arrays, else for themselves alone (`activation_{feature}`). One of
  which a part is kept has a name of its own (`{kept}`) and, where the positions do not depend on how many there were, a coordinate beside the arrays: an
  int64 array of that name with the positions in the whole tensor, negative ones counted from the end.
- **Batches.** What belongs to a batch and to no layer is in the root's group: annotations (`{annotation}`) and losses (`loss`).
- **Chunks** have the shape of the first capture. A later one with a smaller batch (at least half) or with other dimensions of the same power-of-two class
  is padded with the fill value (NaN for floats, else 0); a larger one gets a sibling array. The true shape is in the manifest.
- **Shards** have about {spec.SHARD_TARGET_BYTES >> 20} MiB when full and at most {spec.MAX_SHARD_ENTRIES:,} entries. Each chunk starts at a multiple of
  {spec.CHUNK_ALIGNMENT_BYTES} bytes, each write at a multiple of {spec.PAGE_BYTES:,}. Inner codecs: `bytes` (little-endian), the compressor if there is one, `crc32c`.
  The index stands at the end (`bytes`, `crc32c`), and before it a trailer of {spec.TRAILER_BYTES} bytes (`{spec.TRAILER_MAGIC.decode()}`, offset, length and crc32c as
  `{spec.TRAILER_FORMAT}`) that leads to the shard's own manifest rows, an Arrow IPC stream. Batches that were not recorded are missing chunks: no bytes, no row.
- **Journal.** Frames of `{spec.FRAME_FORMAT}` (payload length, kind, crc32c over both and the payload) and the payload: kind {spec.FRAME_SCHEMA} the Arrow schema,
  {spec.FRAME_ROWS} an Arrow record batch, {spec.FRAME_SYNC} a sync mark (`{spec.SYNC_FORMAT}`: rows of the segment that are durable). Reading ends at the first frame that is torn;
  a damaged one is left out with a warning.
  A segment of {spec.SEGMENT_ROWS:,} rows, or of {spec.SEGMENT_BYTES >> 20} MiB, becomes a part.
- **Going on.** A run that is taken up again writes segments and parts of the next attempt. Unsealed shards grow at the next multiple of {spec.PAGE_BYTES:,}; a sealed one is cloned, keeps all its offsets, gets
  rows and an index for everything behind them, and is renamed over. Of several chunks for one epoch, batch and call the index has the latest; the manifest has all."""


def structures() -> str:
    """Return the grammar of the structure texts."""
    nodes = [f"| `{node}` | {meaning} |" for node, meaning in structure.NODES]
    parts = "; ".join(f"{kind}: {', '.join(f'`{part}`' for part in names)}" for kind, names in structure.PARTS.items())
    at = structure.encode_at("", "x", ("sparse_coo", {"coalesced": True}))
    return "\n".join(
        [
            "The column `structure` is empty for a plain tensor, and else JSON, one node for each part of the value:",
            "",
            "| node | stands for |",
            "|---|---|",
            *nodes,
            "",
            f"Tensors that are stored as several have these parts, under their leaf path and the part's name: {parts}. (`texts` are annotations",
            "that are text: all letters in UTF-8, and where each text begins and the last one ends.)",
            f"The rows of parts have `{at}`: the value's node (`null` where the tensor is all of it, or a parameter), the tensor's leaf path,",
            'its kind and what else there is to know; around these two stands `["dtensor", facts, …]` for the local tensor of a DTensor.',
        ]
    )


def dtype_table() -> str:
    """Return the table of dtypes."""
    lines = ["| torch | Zarr | NumPy |", "|---|---|---|"]
    for dtype in spec.DTYPES.values():
        stored = dtype.zarr if dtype.zarr == dtype.name else f"{dtype.zarr} (bits)"
        lines.append(f"| {dtype.name} | {stored} | {dtype.numpy or 'none: read it with `.tensor`'} |")
    return "\n".join(lines)


def manifest_table() -> str:
    """Return the table of the manifest's columns."""
    heading = ["| column | Arrow type | meaning |", "|---|---|---|"]
    rows = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in spec.MANIFEST_COLUMNS]
    more = [
        f"| `{name}` | {kind} | {meaning} |"
        for name, kind, meaning in (spec.PORTION_COLUMN, spec.WHOLE_SHAPE_COLUMN, *spec.STATISTICS_COLUMNS)
    ]
    optional = "Only in runs in which parts of tensors, or statistics, were asked for. Statistics are of the tensor as it is stored, divided by its loss scale:"
    return "\n".join([*heading, *rows, "", optional, "", *heading, *more])


def section() -> str:
    """Return the whole section."""
    return "\n\n".join([BEGIN, layout(), rules(), "Dtypes:", dtype_table(), "The manifest:", manifest_table(), structures(), END])


def main() -> None:
    """Write or check the section."""
    text = README.read_text()
    start, end = text.index(BEGIN), text.index(END) + len(END)
    current = text[:start] + section() + text[end:]
    if "--check" in sys.argv:
        if current != text:
            sys.exit("README.md: the section on the disk format is not current; run `.venv/bin/python tools/readme.py`")
    else:
        README.write_text(current)


if __name__ == "__main__":
    main()
