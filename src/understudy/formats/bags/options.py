"""Options of reading a bag, which are the same for MCAP files and ROS 2 bags.

observation/wrist=/wrist/image_raw/compressed    a topic becomes a field
observation/tcp=/tcp_pose:pose.position          a part of its messages, by a dotted path
action=/leader/joint_states:position             or action=next: the joints' position in the next row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from understudy.core import Source, times
from understudy.formats.format import FormatError
from understudy.formats.options import one_of
from understudy.formats.registry import check_options

NAMES = (
    *("fps", "tick", "stamp", "gap_s", "episode", "action", "observation/NAME", "extras/NAME"),
    *("floats", "task", "source", "samples"),
)
NEXT = "next"
TIME = f"extras/{times.TIME}"  # the times of the messages that each row is made of
SAMPLES, SAMPLES_TIME = f"extras/{times.SAMPLES}", f"extras/{times.SAMPLES_TIME}"  # all messages since the row before


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A topic, or a part of its messages."""

    topic: str
    field: str = ""  # dotted path; "" is the whole message

    def __str__(self) -> str:
        return f"{self.topic}:{self.field}" if self.field else self.topic


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    fields: Mapping[str, Reference] = field(default_factory=dict)  # by the path of the field, without the action
    actions: Mapping[str, Reference] = field(default_factory=dict)  # by the path of the field: "action", "action/arm"
    next_of: str | None = None  # the field whose next row is the action; "" is the position of the joints
    fps: Fraction | None = None  # rows per second; None: a row for each message of `tick`
    tick: str | None = None  # topic; None: the slowest camera
    stamp: str = "log"  # or header: which time of a message counts
    gap_ns: int | None = None  # a longer pause of all topics ends an episode
    episode: Reference | None = None  # each message, or each change of a field, begins an episode
    samples: tuple[str, ...] = ()  # topics of which all messages are kept, and not only those that rows need
    floats: str = "keep"  # or float32, which float64 numbers are rounded to
    task: str | None = None
    source: Source = Source.HUMAN

    @property
    def splits(self) -> bool:
        """Whether one bag may become several episodes."""
        return self.gap_ns is not None or self.episode is not None


def parse_options(name: str, options: Mapping[str, str]) -> ReadOptions:
    """The options of the format `name`, checked."""
    fields, actions, next_of, others = {}, {}, None, {}
    for option, value in options.items():
        path = _path(option)
        group = path.partition("/")[0]
        if path == "action" and (value == NEXT or value.startswith(f"{NEXT}:")):
            next_of = _path(value.removeprefix(NEXT).removeprefix(":"))
        elif group == "action":
            actions[path] = _reference(name, option, value)
        elif group in ("observation", "extras") and path != "extras":
            fields[path] = _reference(name, option, value)
        else:
            others[option] = value
    check_options(others, NAMES, name)
    _check_paths(name, [*fields, *actions, *(["action"] if next_of is not None else [])])
    if "fps" in others and "tick" in others:
        raise FormatError(f"{name}: expected fps= or tick=, got both; fps= gives rows at a rate, tick= per message")
    return ReadOptions(
        fields=fields,
        actions=actions,
        next_of=next_of,
        fps=_positive(name, "fps", others["fps"]) if "fps" in others else None,
        tick=others.get("tick"),
        stamp=one_of(name, "stamp", others.get("stamp", "log"), ("log", "header")),
        gap_ns=int(_positive(name, "gap_s", others["gap_s"]) * 10**9) if "gap_s" in others else None,
        episode=_reference(name, "episode", others["episode"]) if "episode" in others else None,
        samples=tuple(topic for topic in others.get("samples", "").split(",") if topic),
        floats=one_of(name, "floats", others.get("floats", "keep"), ("keep", "float32")),
        task=others.get("task"),
        source=Source[one_of(name, "source", others.get("source", "human"), _SOURCES).upper()],
    )


_SOURCES = tuple(source.name.lower() for source in Source)


def _path(option: str) -> str:
    """The path of a field; LeRobot's names with dots mean the same: observation.images.wrist is observation/wrist."""
    if "/" in option or option.partition(".")[0] not in ("observation", "action", "extras"):
        return option
    return option.replace("observation.images.", "observation.").replace(".", "/")


def _reference(name: str, option: str, value: str) -> Reference:
    topic, _, field = value.partition(":")
    if not topic:
        raise FormatError(f"{name}: expected {option}=/topic or /topic:field, got {value!r}")
    return Reference(topic=topic, field=field)


def _check_paths(name: str, paths: list[str]) -> None:
    for path in paths:
        if "" in path.split("/"):
            raise FormatError(f"{name}: expected {path.partition('/')[0]}/NAME, got {path!r}; give the field a name")
        for taken in (TIME, SAMPLES, SAMPLES_TIME):
            if path == taken or path.startswith(f"{taken}/"):
                raise FormatError(f"{name}: {path!r} is taken by the times of the messages; choose another name")
        if any(other.startswith(f"{path}/") for other in paths):
            raise FormatError(f"{name}: {path!r} is a field and has fields below; choose another name")


def _positive(name: str, option: str, value: str) -> Fraction:
    try:
        number = Fraction(value)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number < 10**9:
        raise FormatError(f"{name}: expected {option}= a number above 0, got {value!r}")
    return number
