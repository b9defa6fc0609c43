"""What the tables of docs/speed.md and docs/scale.md share."""

import math

# Stands for a figure that was not measured.
NOTHING = "–"
NOT_MEASURED = "It was not measured.\n"


def quotient(value, base):
    """Divides; a base of 0 gives infinity, and 0 ÷ 0 the number NaN, for which no condition holds."""
    return value / base if base else math.inf if value else math.nan


def machine(report):
    """Formats the place and time of a run."""
    text = "{cpu}, {cores} cores, Linux {kernel}, {date}; load before the run {load_before:.1f}"
    return text.format(**report["machine"])


def row(*cells):
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


def items(lines):
    """A list with an empty line behind it; nothing without lines."""
    return "".join(f"- {line}\n" for line in lines) + "\n" if lines else ""


def percent(value, base):
    """The difference from the base, in percent of it."""
    return quotient((value - base) * 100, base)
