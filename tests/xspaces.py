"""Traces written by hand, event by event, as the profiler serialises them."""

from __future__ import annotations

from jax.profiler import ProfileData

STATS = (
    *("hlo_op", "program_id", "device_ordinal", "Hlo Proto", "tf_op", "hlo_module"),
)


def field(number: int, value: bytes | str) -> bytes:
    """A length-delimited field of a protocol buffer, of less than 16384 bytes."""
    data = value.encode() if isinstance(value, str) else value
    size = len(data)
    length = [size] if size < 128 else [size & 127 | 128, size >> 7]
    return bytes([number << 3 | 2, *length]) + data


def program(names: dict[str, str]) -> bytes:
    """An HloProto whose instructions have these operation names."""
    instructions = b"".join(
        field(2, field(1, name) + field(7, field(2, op_name)))
        for name, op_name in names.items()
    )
    return field(1, field(3, instructions))


def plane(
    name: str,
    lines: dict[str, list[tuple]],
    *,
    programs: dict[str, bytes] | None = None,
    tf_ops: dict[str, str] | None = None,
) -> str:
    """A plane as text: lines of (event, start µs, end µs, {stat: value})."""
    events = {event[0] for line in lines.values() for event in line} | set(
        programs or {}
    )
    ids = {event: number for number, event in enumerate(sorted(events), start=1)}
    text = ""
    for event, number in ids.items():
        stats = ""
        if event in (programs or {}):
            escaped = "".join(f"\\{byte:03o}" for byte in programs[event])
            stats += f'stats {{ metadata_id: 4 bytes_value: "{escaped}" }}'
        if event in (tf_ops or {}):
            stats += f'stats {{ metadata_id: 5 str_value: "{tf_ops[event]}" }}'
        text += (
            f"event_metadata {{ key: {number} value "
            f'{{ id: {number} name: "{event}" {stats} }} }}\n'
        )
    for number, stat in enumerate(STATS, start=1):
        text += (
            f"stat_metadata {{ key: {number} value "
            f'{{ id: {number} name: "{stat}" }} }}\n'
        )
    for line, timed in lines.items():
        text += f'lines {{ name: "{line}"\n'
        for event, start, end, stats in timed:
            fields = "".join(
                f"stats {{ metadata_id: {STATS.index(stat) + 1} "
                + (
                    f'str_value: "{value}" }}'
                    if isinstance(value, str)
                    else f"int64_value: {value} }}"
                )
                for stat, value in stats.items()
            )
            text += (
                f"events {{ metadata_id: {ids[event]} offset_ps: {start * 10**6} "
                f"duration_ps: {(end - start) * 10**6} {fields} }}\n"
            )
        text += "}\n"
    return f'planes {{ name: "{name}"\n{text}}}\n'


def serialised(*planes: str) -> bytes:
    """The planes as bytes of an .xplane.pb."""
    return ProfileData.text_proto_to_serialized_xspace("".join(planes))
